r"""Shows the episodes of a run as a page, every token shaded by its credit: served to this machine, or as one file.

    python -m experiments.view --workdir=runs/quickstart
    python -m experiments.view --workdir=runs/quickstart --groups=32 --output=episodes.html

The credit is what the run's algorithm makes of the shown groups under the newest checkpoint; Progress Advantage
compares its policy with the warm start. `--nocredit` shows the episodes alone.
"""

import asyncio
import contextlib
import functools
from pathlib import Path

from absl import flags, logging

from experiments import parts, programs, workdirs
from mpo_jax.models import pretrained
from mpo_jax.models.tokenizer import pieces
from mpo_jax.store.sqlite import EpisodeStore
from mpo_jax.training.checkpoints import Checkpoints
from mpo_jax.training.credit import token_credit
from mpo_jax.training.learner import Learner
from mpo_jax.training.metrics import read_metrics
from mpo_jax.viewer.page import render
from mpo_jax.viewer.server import serve

WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.", required=True)
GROUPS = flags.DEFINE_integer("groups", 64, "Groups on a page; the newest ones.", lower_bound=1)
CREDIT = flags.DEFINE_bool("credit", True, "Judge the episodes by the newest checkpoint.")
OUTPUT = flags.DEFINE_string("output", None, "Write the page there instead of serving it.")
PORT = flags.DEFINE_integer("port", 8000, "Where it is served, at 127.0.0.1 only.", 1, 65535)


def make_judge(config, model, workdir: Path):
    """A function from episodes to their credit, and the step of the checkpoint that judges."""
    algorithm, optimizers = parts.make_algorithm(config), parts.make_optimizers(config)
    settings, models = parts.make_settings(config), parts.make_models(config, model)
    learner = Learner(algorithm, models, optimizers, settings, model.tokenizer.render_hint)
    checkpoints = Checkpoints(workdir / "checkpoints")
    state = parts.restore_state(checkpoints, parts.make_state(config, model, algorithm, optimizers))
    checkpoints.close()
    return lambda episodes: token_credit(learner, state, model.params, episodes), int(state.step)


def main(_):
    logging.set_verbosity(logging.WARNING)
    workdir = Path(WORKDIR.value)
    config = workdirs.read_config(workdir)
    model = pretrained.load(config.model)
    judge, step = make_judge(config, model, workdir) if CREDIT.value else (lambda episodes: {}, None)

    def page(last: int | None) -> str:
        store = EpisodeStore(workdir / "episodes.sqlite", read_only=True)
        newest = store.last_group() or 0
        last = newest if last is None else min(last, newest)
        episodes = list(store.episodes(max(last - GROUPS.value + 1, 0), last))
        links = {"older": f"?last={last - GROUPS.value}"} if last >= GROUPS.value else {}
        links |= {"newest": "?"} if last < newest else {}
        found = render(
            episodes,
            title=f"{workdir.name}" + ("" if step is None else f", judged by step {step}"),
            pieces=functools.partial(pieces, model.tokenizer.tokenizer),
            credit=judge(episodes),
            metrics=read_metrics(workdir / "metrics.jsonl"),
            steps=store.steps(),
            links={} if OUTPUT.value else links,
        )
        store.close()
        return found

    if OUTPUT.value:
        Path(OUTPUT.value).write_text(page(None))
        print(f"wrote {OUTPUT.value}")
        return
    shown = f"http://127.0.0.1:{PORT.value}/ shows the newest {GROUPS.value} groups; Ctrl-C ends it"
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(page, PORT.value, lambda: print(shown, flush=True)))


if __name__ == "__main__":
    programs.run(main)
