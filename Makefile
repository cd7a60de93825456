# Two commands do everything on a fresh machine: `make train` and `make test`.
PYTHON ?= python3
TRAIN_FLAGS ?= --workdir=runs/quickstart
BIN := .venv/bin

# glibc keeps freed memory, as the programs ask it to themselves (experiments/parts.py).
test test-fast: export MALLOC_ARENA_MAX = 1
test test-fast: export MALLOC_MMAP_MAX_ = 0
test test-fast: export MALLOC_TRIM_THRESHOLD_ = 100000000000

.PHONY: train test test-fast bench bench-async lint clean
.DELETE_ON_ERROR:

.venv/.installed: requirements.txt requirements-test.txt requirements-envs.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt -r requirements-test.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-envs.txt
	touch $@

.venv-peers/.installed: requirements-peers.txt | .venv/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --upgrade --target .venv-peers -r $<
	touch $@

.venv-verifiers/.installed: requirements-verifiers.txt | .venv/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --upgrade --target .venv-verifiers -r $<
	touch $@

train: .venv/.installed  ## trains the quick-start agent; writes to runs/quickstart
	$(BIN)/python -m experiments.train $(TRAIN_FLAGS)

test: .venv/.installed .venv-peers/.installed .venv-verifiers/.installed  ## the whole suite
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-fast: .venv/.installed .venv-peers/.installed .venv-verifiers/.installed  ## without the tests marked slow
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

lint: .venv/.installed
	$(BIN)/ruff check .

bench: .venv/.installed .venv-peers/.installed  ## kernels and models beside their peers; writes to benchmarks/results
	$(BIN)/python -m benchmarks.kernels $(BENCH_FLAGS)
	$(BIN)/python -m benchmarks.models

bench-async: .venv/.installed  ## asynchronous training beside the alternating loop; hours on a quiet machine
	$(BIN)/python -m benchmarks.asynchrony $(BENCH_FLAGS)

clean:
	rm -rf .venv .venv-peers .venv-verifiers runs
