"""Token, step and episode scores of one episode, as rows of a table."""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import numpy as np

from mpo_jax import kernels
from mpo_jax.kernels.segments import Reduce
from mpo_jax.scoring import baselines
from mpo_jax.scoring.likelihoods import Likelihoods
from mpo_jax.scoring.tables import Row
from mpo_jax.scoring.transcripts import Transcript

GAMMA = 0.9  # of the discounted mean; not published, ours

REDUCTIONS: dict[str, Reduce] = {
    "mean": kernels.segment_mean,
    "sum": kernels.segment_sum,
    "last": kernels.segment_last,
    "min": kernels.segment_min,
    "max": kernels.segment_max,
    "linear": kernels.linear_mean(),
    "discounted": kernels.discounted_mean(GAMMA),
    "bottom10": kernels.bottom_mean(0.1),
}
LEVELS = ("token", "step", "episode")
COLUMNS = {
    "level": str,
    "episode": str,
    "task": str,
    "agent": str,
    "step": int,
    "token": int,
    "token_id": int,
    "num_tokens": int,
    "truncated": int,
    "reward": float,
    **dict.fromkeys(
        (
            "score",
            "logprob",
            "ref_logprob",
            "mean_logprob",
            "ref_mean_logprob",
            "sequence_logprob",
            "negative_perplexity",
            "negative_entropy",
            "self_certainty",
            "deepconf_mean",
            "deepconf_tail",
            "deepconf_bottom",
            "deepconf_lowest",
            "compat_self_certainty",
            "compat_deepconf_tail",
            "compat_deepconf_bottom",
            "message_score",
        ),
        float,
    ),
}


@dataclasses.dataclass(frozen=True)
class Aggregation:
    """How log-probs become scores.

    Attributes:
      tokens: a key of `REDUCTIONS`, over the tokens of a step.
      steps: a key of `REDUCTIONS`, over the steps of an episode.
      beta: scale of every score.
      subtract_first: subtract the models' log-probs before they are reduced, not after.
      top_k: compare means of the highest log-probs in place of the log-probs of the tokens.
    """

    tokens: str = "mean"
    steps: str = "mean"
    beta: float = 1.0
    subtract_first: bool = False
    top_k: bool = False

    def __post_init__(self):
        for name in ("tokens", "steps"):
            if (given := getattr(self, name)) not in REDUCTIONS:
                raise ValueError(f"{name} is {given!r}, expected one of {', '.join(REDUCTIONS)}")


@functools.partial(jax.jit, static_argnames=("aggregation", "num_steps"))
def _advantages(policy, reference, ids, mask, is_action, *, aggregation: Aggregation, num_steps: int):
    steps = kernels.progress_advantage(
        policy,
        reference,
        ids,
        mask,
        reduce=REDUCTIONS[aggregation.tokens],
        beta=aggregation.beta,
        num_segments=num_steps,
        subtract_first=aggregation.subtract_first,
    )
    ids = jax.numpy.zeros(num_steps, int)
    return steps, kernels.episode_advantage(steps, ids, is_action, reduce=REDUCTIONS[aggregation.steps])[0]


def advantages(
    policy: Likelihoods, reference: Likelihoods, owners: np.ndarray, num_steps: int, aggregation: Aggregation
) -> tuple[np.ndarray, float]:
    """Progress Advantage of the m action steps of an episode, and of the episode.

    Args:
      policy, reference: of its n action tokens.
      owners: int[n], which of its action steps each token belongs to.
      num_steps: m; a step without tokens was cut off, scores 0 and counts.
      aggregation: how.

    Returns:
      float[m], and the episode's score.
    """
    one, other = (x.top if aggregation.top_k else x.logprobs for x in (policy, reference))
    # Padded to few shapes, so that few programs are compiled.
    wide, steps = (max(16, 1 << (size - 1).bit_length()) for size in (max(len(owners), 1), max(num_steps, 1)))

    def pad(x: np.ndarray, value: int, dtype: type) -> np.ndarray:
        return np.pad(np.asarray(x, dtype), (0, wide - len(x)), constant_values=value)

    found, total = _advantages(
        pad(one, 0, np.float32),
        pad(other, 0, np.float32),
        pad(owners, -1, np.int32),
        np.arange(wide) < len(owners),
        np.arange(steps) < num_steps,
        aggregation=aggregation,
        num_steps=steps,
    )
    return np.asarray(found)[:num_steps], float(total)


@dataclasses.dataclass(frozen=True)
class Scored:
    """An episode with the likelihoods of its n action tokens.

    Attributes:
      transcript: the episode.
      owners: int[n], the message of each token.
      token_ids: int[n], None where the file has log-probs but no ids.
      cut: how many action tokens were cut off each message, by its index.
      policy: of the tokens.
      reference: of the tokens; None without one: there are no scores then, baselines only.
    """

    transcript: Transcript
    owners: np.ndarray
    token_ids: np.ndarray | None
    cut: dict[int, int]
    policy: Likelihoods
    reference: Likelihoods | None


def rows(scored: Scored, aggregation: Aggregation, levels: tuple[str, ...] = LEVELS) -> Iterator[Row]:
    """Rows of the asked levels, with the columns of `COLUMNS`; what is unknown is None."""
    transcript = scored.transcript
    actions = [index for index, message in enumerate(transcript.messages) if message.action]
    places = np.searchsorted(actions, scored.owners)  # every token belongs to an action
    score, total = np.full(len(actions), np.nan), float("nan")
    if scored.reference is not None:
        score, total = advantages(scored.policy, scored.reference, places, len(actions), aggregation)
    base = {"episode": transcript.episode_id, "task": transcript.task_id}
    if "token" in levels:
        yield from (base | row for row in _token_rows(scored, aggregation))
    if "step" in levels:
        for place, index in enumerate(actions):
            yield base | _step_row(scored, index, places == place, float(score[place]))
    if "episode" in levels:
        yield base | _episode_row(scored, places, len(actions), total)


def _token_rows(scored: Scored, aggregation: Aggregation) -> Iterator[Row]:
    policy, reference = scored.policy, scored.reference
    for token, step in enumerate(scored.owners):
        row = {
            "level": "token",
            "step": int(step),
            "agent": scored.transcript.messages[step].agent,
            "token": token,
            "token_id": None if scored.token_ids is None else int(scored.token_ids[token]),
            "logprob": policy.logprobs[token],
            "negative_entropy": -policy.entropy[token],
            "self_certainty": policy.certainty[token],
            "deepconf_mean": -policy.top[token],
        }
        if reference is not None:
            one, other = ((x.top if aggregation.top_k else x.logprobs)[token] for x in (policy, reference))
            row |= {"ref_logprob": reference.logprobs[token], "score": aggregation.beta * (one - other)}
        yield _known(row)


def _step_row(scored: Scored, index: int, mine: np.ndarray, score: float) -> Row:
    message, policy, reference = scored.transcript.messages[index], scored.policy, scored.reference
    return _known(
        {
            "level": "step",
            "step": index,
            "agent": message.agent,
            "num_tokens": int(mine.sum()),
            "truncated": int(scored.cut.get(index, 0) > 0),
            "score": score,
            "mean_logprob": _mean(policy.logprobs[mine]),
            "ref_mean_logprob": None if reference is None else _mean(reference.logprobs[mine]),
            "sequence_logprob": float(policy.logprobs[mine].sum()),
            "negative_entropy": -_mean(policy.entropy[mine]),
            "self_certainty": _mean(policy.certainty[mine]),
            "deepconf_mean": -_mean(policy.top[mine]),
            "message_score": message.score,
        }
    )


def _episode_row(scored: Scored, places: np.ndarray, num_steps: int, total: float) -> Row:
    transcript, policy, reference = scored.transcript, scored.policy, scored.reference
    given = [m.score for m in transcript.messages if m.action and m.score is not None]
    tops = np.array([_mean(policy.top[places == place]) for place in range(num_steps) if (places == place).any()])
    mean = _mean(policy.logprobs)
    return _known(
        {
            "level": "episode",
            "num_tokens": len(places),
            "truncated": int(any(scored.cut.values())),
            "reward": transcript.reward,
            "score": total,
            "mean_logprob": mean,
            "ref_mean_logprob": None if reference is None else _mean(reference.logprobs),
            "sequence_logprob": float(policy.logprobs.sum()) if len(places) else float("nan"),
            "negative_perplexity": -float(np.exp(min(-mean, 700.0))),
            "negative_entropy": -_mean(policy.entropy),
            "self_certainty": _mean(policy.certainty),
            **{f"deepconf_{name}": value for name, value in baselines.deepconf(-policy.top).items()},
            **{f"compat_{name}": value for name, value in baselines.compat(tops).items()},
            "message_score": float(np.mean(given)) if given else None,
        }
    )


def _mean(values: np.ndarray) -> float:
    return float(np.mean(values, dtype=np.float64)) if len(values) else float("nan")


def _known(row: Row) -> Row:
    """Plain numbers, NaN as None."""
    plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in row.items()}
    return {name: None if isinstance(value, float) and np.isnan(value) else value for name, value in plain.items()}
