"""Imports go down only: every file of the package is parsed and its imports are held against the floors."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
FLOORS = {
    "mpo_jax.types": 0,
    "mpo_jax.kernels": 1,
    "mpo_jax.algorithms": 2,
    "mpo_jax.models": 2,
    "mpo_jax.evaluation": 2,
    "mpo_jax.store": 3,
    "mpo_jax.environments": 3,
    "mpo_jax.training": 4,
    "mpo_jax.rollout": 4,
    "mpo_jax.viewer": 4,
    "mpo_jax.scoring": 4,
    "experiments": 5,
}
KERNELS_MAY_IMPORT = {"jax", "numpy", "jaxtyping", "functools", "math", "dataclasses", "collections", "typing"}


def room_of(module: str) -> str | None:
    """The entry of `FLOORS` that a module belongs to."""
    return next((room for room in FLOORS if module == room or module.startswith(room + ".")), None)


def imported(path: pathlib.Path) -> list[str]:
    """Names of all modules that a file imports, `from a import b` as a.b too."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def violations(module: str, names: list[str]) -> list[str]:
    """The imports of a module that go up, or sideways into another room."""
    room = room_of(module)
    found = []
    for name in names:
        other = room_of(name)
        if other is not None and other != room and FLOORS[other] >= FLOORS[room]:
            found.append(f"{module} (floor {FLOORS[room]}) imports {name} (floor {FLOORS[other]})")
    return found


FILES = sorted((*ROOT.glob("mpo_jax/**/*.py"), *ROOT.glob("experiments/**/*.py")))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down_only(path):
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    assert module == "mpo_jax" or room_of(module), f"{module} is on no floor"
    names = imported(path)
    if module == "mpo_jax":
        assert not names
        return
    assert not violations(module, names)
    if room_of(module) == "mpo_jax.kernels":
        foreign = {n.split(".")[0] for n in names if room_of(n) not in ("mpo_jax.kernels", "mpo_jax.types")}
        assert foreign <= KERNELS_MAY_IMPORT


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("mpo_jax.kernels.losses", "mpo_jax.algorithms.mpo"),
        ("mpo_jax.rollout.worker", "mpo_jax.training.learner"),
        ("mpo_jax.training.step", "mpo_jax.rollout.engine"),
        ("mpo_jax.models.evaluation", "mpo_jax.algorithms"),
        ("mpo_jax.store.sqlite", "experiments.train"),
    ],
)
def test_the_check_sees_a_violation(module, name):
    assert violations(module, [name])


def test_no_drawers():
    assert not [p for p in FILES if p.stem in ("utils", "common", "helpers", "misc")]
