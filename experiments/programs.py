"""How a program runs: what is wrong with its input is told in one line, whatever else goes wrong with its traceback."""

import dis
import sys
from collections.abc import Callable
from pathlib import Path

from absl import app, flags

import mpo_jax

OURS = Path(__file__).parent, Path(mpo_jax.__file__).parent
TRACEBACK = flags.DEFINE_bool("traceback", False, "Show where an error was raised, even one that says what is wrong.")


def run(main: Callable[[list[str]], None]) -> None:
    """Runs the program with its flags, and ends the process."""

    def told(arguments: list[str]) -> None:
        try:
            main(arguments)
        except Exception as error:
            if TRACEBACK.value or not says_what_is_wrong(error):
                raise
            sys.exit(f"error: {error}")

    app.run(told)


def says_what_is_wrong(error: Exception) -> bool:
    """Whether a `raise` of ours wrote the message, or the system, with a file's name; wrong usage is left to absl."""
    if isinstance(error, app.UsageError):
        return False
    if isinstance(error, OSError) and error.filename is not None:
        return True
    last = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    code = last.tb_frame.f_code
    written = dis.opname[code.co_code[last.tb_lasti]] == "RAISE_VARARGS"  # and not by Python, as in int("a")
    return written and any(Path(code.co_filename).is_relative_to(folder) for folder in OURS)
