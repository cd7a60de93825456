"""What a program says when its input is wrong: a line, where the line says it all."""

import subprocess
import sys

import pytest
from absl import app

from experiments import programs
from mpo_jax import evaluation
from mpo_jax.scoring import tables


def raised(function, *arguments):
    with pytest.raises(Exception) as caught:
        function(*arguments)
    return caught.value


def wrong_usage():
    raise app.UsageError("give one of both")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (raised(tables.check_ending, "x.txt"), True),  # a `raise` of ours
        (raised(open, "/no/such/file"), True),  # the system names the file
        (raised(evaluation.auroc, [0, 1], ["a", "b"]), False),  # numpy's words, met in our code
        (raised(int, "a"), False),  # Python's
        (raised(wrong_usage), False),  # absl prints it with the usage
    ],
)
def test_what_says_itself_what_is_wrong(error, says):
    assert programs.says_what_is_wrong(error) is says


@pytest.mark.slow
def test_a_program_says_it_in_one_line_and_where_it_was_if_asked(tmp_path):
    command = [sys.executable, "-m", "experiments.evaluate", f"--episodes={tmp_path / 'absent'}"]
    done, asked = (subprocess.run([*command, *more], capture_output=True, text=True) for more in ([], ["--traceback"]))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: {tmp_path / 'absent'}: no such file or folder\n"
    assert asked.returncode == 1 and "Traceback" in asked.stderr and "readers.py" in asked.stderr
