"""README's code, commands and file tree are true, and the notebooks run."""

import contextlib
import importlib.util
import io
import pathlib
import re
import subprocess

import nbformat
import pytest
from nbclient import NotebookClient

from experiments.configs.search import get_config

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
PROGRAMS = sorted(set(re.findall(r"python -m ((?:experiments|mpo_jax)[\w.]*)(.*)", README)))
CONFIG_FLAGS = sorted(set(re.findall(r"--config\.([\w.]+)=([\w.]+)", README)))


def tree() -> list[str]:
    """The paths that README's file tree names; two blanks of indentation are a folder, which ends in a slash."""
    (block,) = (b for b in re.findall(r"```\n(.*?)```", README, re.S) if b.startswith("mpo_jax/"))
    folders, paths = [], []
    for line in block.splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        folders[depth:] = [name] if name.endswith("/") else []
        paths.append("".join(folders[: depth + 1]) + ("" if name.endswith("/") else name))
    return paths


def test_the_kernel_snippet_prints_what_is_shown():
    ((snippet, shown),) = re.findall(r"```python\n(.*?)```.*?```text\n(.*?)```", README, re.S)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(snippet, {})
    assert printed.getvalue() == shown


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    named = re.findall(r"(?:^|`)make ([\w-]+)", README, re.M)
    assert {"train", "test"} <= set(named)
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.M), target


@pytest.mark.parametrize(("module", "arguments"), PROGRAMS, ids=lambda x: x.strip()[:40])
def test_programs_and_their_flags_exist(module, arguments):
    source = pathlib.Path(importlib.util.find_spec(module).origin).read_text()
    assert "__main__" in source
    defined = re.findall(r"""(?:DEFINE_\w+|add_argument)\(\s*["'](?:--)?(\w+)""", source)
    assert set(re.findall(r"--(\w+)", arguments)) <= set(defined)


@pytest.mark.parametrize(("key", "value"), CONFIG_FLAGS, ids="=".join)
def test_config_flags_exist_and_take_the_value(key, value):
    *sections, name = key.split(".")
    config = get_config()
    for section in sections:
        config = config[section]
    kind = config.get_type(name)
    assert kind is str or isinstance({"True": True, "False": False}.get(value) if kind is bool else kind(value), kind)


def test_algorithms_named_by_flags_exist():
    for name in re.findall(r"--config\.algorithm=(\w+)", README.replace("=NAME", "=mpo")):
        assert name in get_config(), name


def test_the_file_tree_is_whole():
    named = tree()
    missing = [path for path in named if not (ROOT / path).exists()]
    assert not missing
    listing = subprocess.run(
        ["git", "ls-files", "mpo_jax", "experiments"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    tracked = [p for p in listing.stdout.split() if p.endswith(".py") and (ROOT / p).exists()]
    assert tracked
    assert not [p for p in tracked if p not in named and (ROOT / p).stat().st_size]


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path):
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert outputs
    assert not [output for output in outputs if output.output_type == "error"]
