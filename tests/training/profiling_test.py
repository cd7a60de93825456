"""Traces of the steps that were asked for, and seconds that add up."""

import gzip
import json
import time

import jax
import pytest

from experiments import watching
from mpo_jax.training import plan, profiling
from mpo_jax.training.metrics import MetricsLog, read_metrics
from mpo_jax.training.profiling import Stopwatch, Trace
from training import runs


def test_seconds_add_up_by_part():
    watch = Stopwatch()
    for _ in range(2):
        with watch("wait"):
            time.sleep(0.02)
    with watch("step"):
        pass
    assert watch.seconds["seconds_wait"] >= 0.04 > watch.seconds["seconds_step"] >= 0


@pytest.fixture
def calls(monkeypatch):
    """What is asked of the profiler, in place of it: it takes seconds to write."""
    found = []
    monkeypatch.setattr(profiling.jax.profiler, "start_trace", lambda *_, **__: found.append("start"))
    monkeypatch.setattr(profiling.jax.profiler, "stop_trace", lambda: found.append("stop"))
    return found


def trace_steps(trace, calls, steps):
    for step in steps:
        with trace.step(step):
            calls.append(step)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (range(6), [0, 1, "start", 2, 3, "stop", 4, 5]),
        (range(3, 6), ["start", 3, "stop", 4, 5]),  # resumed within
        (range(4, 6), [4, 5]),  # resumed behind
        (range(3), [0, 1, "start", 2]),
    ],
)
def test_a_trace_spans_its_steps(tmp_path, calls, steps, expected):
    trace = Trace(tmp_path, 2, 3)
    trace_steps(trace, calls, steps)
    assert calls == expected
    trace.close()
    trace.close()
    assert calls.count("stop") == calls.count("start"), "a run that ends earlier writes what it has"


def test_the_log_of_a_run_closes_its_trace(tmp_path, calls):
    log = MetricsLog(tmp_path, total_steps=3, quiet=True, trace=Trace(tmp_path / "trace", 1, 5))
    for step in range(2):
        with log.traced(step):
            calls.append(step)
    log.close()
    assert calls == [0, "start", 1, "stop"]


def test_a_trace_names_the_parts_of_its_steps(tmp_path):
    trace, watch = Trace(tmp_path, 7, 7), Stopwatch()
    with trace.step(7), watch("publish"):
        jax.block_until_ready(jax.numpy.zeros(3) + 1)
    (file,) = tmp_path.glob("**/perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    (step,) = [event for event in events if event.get("name") == "train"]
    (part,) = [event for event in events if event.get("name") == "publish"]
    assert step["args"]["step_num"] == "7"
    assert step["ts"] <= part["ts"] and part["ts"] + part["dur"] <= step["ts"] + step["dur"]
    assert list(tmp_path.glob("**/*.xplane.pb"))


def test_mfu_is_logged_where_the_peak_is_known(tmp_path, monkeypatch):
    config, model = runs.config(epochs=2), runs.model()
    state = runs.fresh_state("gspo")
    assert watching.make_utilisation(config, model, state) is None  # of a CPU nobody says it
    monkeypatch.setitem(plan.CHIPS, jax.devices()[0].device_kind, plan.Chip(memory=1e9, peak_flops=1e9))
    log = MetricsLog(tmp_path, total_steps=2, quiet=True, utilisation=watching.make_utilisation(config, model, state))
    log.write(0, {"tokens": 60.0, "episodes": 2.0, "tokens_per_second": 50.0})
    log.write(1, {"success": 0.5})
    log.close()
    # N = 1 layer · (16·8·(2·2 + 2·1) + 3·16·24) + 16 V; 6 N + 6 · 1 layer · 2 heads · 8 · 30 tokens, twice 50 a second.
    flops = 6 * (16 * 8 * 6 + 3 * 16 * 24 + 16 * model.config.vocab_size) + 6 * 2 * 8 * 30
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert first["mfu"] == pytest.approx(flops * 100 / 1e9) and "mfu" not in second


@pytest.mark.parametrize("steps", [["3", "2"], ["1", "2", "3"], ["a"], ["-1"]])
def test_steps_that_make_no_sense_are_refused(tmp_path, steps):
    with pytest.raises(ValueError, match=r"profile_steps.*expected"):
        watching.make_trace(tmp_path, steps)
    assert watching.make_trace(tmp_path, None) is None
    assert watching.make_trace(tmp_path, ["4"]).last == 4
