"""The measurements of the kernels run: every contestant, at small sizes."""

import numpy as np
import pytest

pytest.importorskip("torch")
from benchmarks import advantages, decode, linear_logprobs, measure, peers, train_step, turn_loss

if not peers.INSTALLED:
    pytest.skip("peers are absent: make .venv-peers/.installed", allow_module_level=True)

CASES = (
    lambda: advantages.case(2, 512, repeats=2),
    lambda: turn_loss.case(2, 512, repeats=2),
    lambda: linear_logprobs.case(4, 8, 2000, "float32", repeats=2),
    lambda: decode.turn("tiny", decode.tiny(), np.arange(10).reshape(2, 5), 4, repeats=2),
    lambda: decode.episodes("tiny", decode.tiny(), np.arange(12).reshape(2, 2, 3), 4, repeats=2),
    pytest.param(lambda: train_step.case(decode.tiny(), 2, 32, repeats=2), marks=pytest.mark.slow),
)


NAMES = ("advantages", "turn_loss", "linear_logprobs", "turn", "episodes", "train_step")


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_every_contestant_is_measured(case):
    case = case()
    rows = measure.run(case)
    assert [row.contestant for row in rows] == list(case.contestants)
    assert rows[0].times_ours == 1.0 and all(len(row.seconds) == case.repeats for row in rows)
    assert len(measure.table(rows).splitlines()) == 2 + len(rows)


def test_tiles_need_less_than_whole_logits():
    said = linear_logprobs.temporaries((64, 8, 50_000, "float32"))  # whole logits: 64 · 50,000 · 4 B = 12.8 MB and more
    *tiles, whole = (float(part.split()[-1].replace(",", "")) for part in said.split(" MB")[:-1])
    assert len(tiles) == 2 and max(tiles) < 0.1 * whole and whole > 12.8
