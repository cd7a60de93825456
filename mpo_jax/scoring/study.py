"""Does Progress Advantage know which of an agent's own episodes succeeded? Our runs against their warm start."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from mpo_jax.models.pretrained import Pretrained
from mpo_jax.scoring import formats, outcomes
from mpo_jax.scoring.episode_scores import Aggregation, Scored, rows
from mpo_jax.scoring.likelihoods import Evaluator
from mpo_jax.scoring.outcomes import Outcome
from mpo_jax.scoring.rendering import without_first
from mpo_jax.scoring.tables import INDEX, TEXT
from mpo_jax.store.episode import Episode

# The default comes first and is the one that counts; the others were named before any was measured.
AGGREGATIONS = {
    "progress_advantage": Aggregation(),
    "progress_advantage, sums": Aggregation(tokens="sum", steps="sum"),
    "progress_advantage, lowest token": Aggregation(tokens="min"),
    "progress_advantage, lowest 10 % of steps": Aggregation(steps="bottom10"),
    "progress_advantage, last step": Aggregation(steps="last"),
    "progress_advantage, later steps count more": Aggregation(steps="linear"),
    "progress_advantage, top-k": Aggregation(top_k=True),
}
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}  # t of 97.5 % by number of seeds


def score_episodes(episodes: Sequence[Episode], policy: Pretrained, reference: Pretrained) -> list[Outcome]:
    """The outcome of each episode, with Progress Advantage in every form of `AGGREGATIONS` and every baseline."""
    transcripts = [formats.from_store(episode, episode.episode_id) for episode in episodes]
    tokens = [without_first(transcript.tokens) for transcript in transcripts]
    longest = max(len(one.ids) for one in tokens)
    found = [Evaluator(model.config, model.params, max_tokens=longest)(tokens) for model in (policy, reference)]
    results = []
    for transcript, ids, mine, theirs in zip(transcripts, tokens, *found, strict=True):
        mask = np.array(ids.mask, bool)
        owners, token_ids = np.array(ids.messages)[mask], np.array(ids.ids)[mask]
        scored = Scored(transcript, owners, token_ids, {}, mine, theirs)
        scores = {}
        for name, aggregation in AGGREGATIONS.items():
            (row,) = rows(scored, aggregation, ("episode",))
            scores[name] = row.pop("score")
        scores |= {key: value for key, value in row.items() if key not in (*TEXT, *INDEX) and value is not None}
        results.append(outcomes.outcome(transcript)._replace(scores=scores))
    return results


def measure(found: Sequence[Outcome], num_samples: int = 1000) -> dict:
    """What is kept of `outcomes.summarise`: rewards of choosing, and for each score AUROC and best-of-n."""
    summary = outcomes.summarise(found, num_samples=num_samples)
    kept = ("auroc", "auroc_interval", "best_of_n", "best_of_n_interval", "spearman")
    return {
        "tasks": summary["tasks"],
        "attempts": summary["attempts_per_task"],
        "choices": summary["best_of_n"],
        "scores": {name: {key: score[key] for key in kept} for name, score in summary["scores"].items()},
    }


def table(measured: Sequence[Mapping]) -> str:
    """A Markdown table: the mean over seeds with its 95 % interval by Student's t, a table for each algorithm and step.

    Args:
      measured: `{"algorithm": …, "seed": …, "step": …, **measure(…)}` of each policy.
    """
    parts = []
    for algorithm, step in sorted({(one["algorithm"], one["step"]) for one in measured}):
        same = [one for one in measured if (one["algorithm"], one["step"]) == (algorithm, step)]
        seeds, attempts = ", ".join(str(one["seed"]) for one in same), same[0]["attempts"][1]
        parts.append(
            f"{algorithm} after {step} steps, seeds {seeds}: {same[0]['tasks']} questions, {attempts} episodes each\n\n"
            f"| score | AUROC of success | best of {attempts} |\n|---|---|---|"
        )
        for name in same[0]["choices"]:
            parts[-1] += f"\n| {name} of {attempts} | | {_over_seeds([one['choices'][name] for one in same])} |"
        for name in same[0]["scores"]:
            cells = [_over_seeds([one["scores"][name][key] for one in same]) for key in ("auroc", "best_of_n")]
            parts[-1] += f"\n| {name} | {' | '.join(cells)} |"
    return "\n\n".join(parts) + "\n"


def _over_seeds(values: Sequence[float | None]) -> str:
    given = [value for value in values if value is not None]
    if not given:
        return "undefined"
    mean = float(np.mean(given))
    if len(given) == 1:
        return f"{mean:.3f}"
    half = STUDENT.get(len(given), 1.96) * float(np.std(given, ddof=1)) / math.sqrt(len(given))
    return f"{mean:.3f} ± {half:.3f}"


def with_params(model: Pretrained, params) -> Pretrained:
    """The same model with other parameters."""
    return dataclasses.replace(model, params=params)
