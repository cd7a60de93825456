"""Episodes and their credit as one HTML page that needs nothing else: no server, no network, no library.

What environments and policies wrote is data, never markup: it travels as JSON in which no tag can begin or end, the
script puts it on the page as text nodes only, and the page's own policy (CSP) lets no other script or style run.
"""

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

import numpy as np

from mpo_jax.store.episode import Episode
from mpo_jax.types import Array

_POLICY = "default-src 'none'; script-src '{script}'; style-src '{style}'; base-uri 'none'; form-action 'none'"
_HEADING = 200  # characters
_CURVES = (
    "success_train", "success_held_out", "success", "return", "entropy", "explained_variance", "clip_fraction",
    "policy_loss", "value_loss", "turns", "version_lag", "tokens_per_second",
)  # fmt: skip


def render(
    episodes: Iterable[Episode],
    *,
    title: str,
    pieces: Callable[[list[int]], list[str]],
    credit: Mapping[str, Mapping[str, Array]] | None = None,
    metrics: Sequence[Mapping[str, int | float | None]] = (),
    steps: Mapping[int, int] | None = None,
    links: Mapping[str, str] | None = None,
) -> str:
    """The page as a string of HTML.

    Args:
      episodes: to show, in this order.
      title: of the page.
      pieces: ids to the text of each.
      credit: episode id to channel ("advantage", "ratio", "gap", "progress", "value", "entropy") to a number a token;
        zeros off the sampled ones. Channels and episodes may be absent.
      metrics: rows with a `step`, as in `metrics.jsonl`.
      steps: group index to the learner step that took the group.
      links: label to address of other pages.

    Returns:
      The document.

    Raises:
      ValueError: a channel has not one number a token.
    """
    rows = [_row(episode, pieces(episode.tokens), (credit or {}).get(episode.episode_id, {})) for episode in episodes]
    for row in rows:
        row["step"] = (steps or {}).get(row["group"])
    data = {"title": title, "episodes": rows, "curves": _curves(metrics), "links": dict(links or {})}
    script = _asset("curves.js") + _asset("viewer.js")
    style, shell = _asset("viewer.css"), _asset("viewer.html")
    policy = _POLICY.format(script=_digest(script), style=_digest(style))
    parts = {"policy": policy, "style": style, "script": script, "data": embed(data)}
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], shell)


def embed(data: Any) -> str:
    """JSON that may stand inside a script element: `<`, `>`, `&` and the line separators are escaped, NaN is null."""
    text = json.dumps(_finite(data), ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _row(episode: Episode, pieces: list[str], channels: Mapping[str, Array]) -> dict[str, Any]:
    """What the page knows of one episode."""
    known = {"logprob": np.array(episode.logprobs), **channels}
    for name, numbers in known.items():
        if len(numbers) != len(episode.tokens):
            raise ValueError(
                f"episode {episode.episode_id!r}: {name} has {len(numbers)} numbers, expected {len(episode.tokens)}"
            )
    if len(pieces) != len(episode.tokens):
        raise ValueError(
            f"episode {episode.episode_id!r}: {len(pieces)} pieces of text, expected {len(episode.tokens)}"
        )
    sampled = np.array(episode.action_mask, bool)
    return {
        "id": episode.episode_id,
        "group": episode.group_id,
        "task": episode.task_id,
        "rewards": episode.rewards,
        "reward": sum(episode.rewards),
        "versions": episode.versions,
        "end": episode.end_reason,
        "prompt": _prompt(episode),
        "turns": np.bincount(episode.turn_ids, minlength=len(episode.rewards)).tolist() if episode.tokens else [],
        "pieces": pieces,
        "sampled": "".join("01"[flag] for flag in episode.action_mask),
        # Only sampled tokens have credit: the rest would be zeros.
        "credit": {name: _short(np.asarray(x, np.float64)[sampled]) for name, x in known.items() if sampled.any()},
        "notes": {k: v for k, v in episode.metadata.items() if k not in ("observations", "actions")},
    }


def _prompt(episode: Episode) -> str:
    """What the environment asked, as far as a heading can show it."""
    observations = episode.metadata.get("observations")
    first = observations[0] if isinstance(observations, list) and observations else ""
    text = str(episode.metadata.get("question", first)).strip()
    return text if len(text) <= _HEADING else text[:_HEADING] + "…"


def _short(numbers: np.ndarray) -> list[float | None]:
    """Four digits are more than a shade can show."""
    return [float(f"{x:.4g}") if math.isfinite(x) else None for x in numbers.tolist()]


def _curves(metrics: Sequence[Mapping[str, int | float | None]]) -> list[dict[str, Any]]:
    """One entry a metric that has at least two points: its name, steps and values."""
    found = []
    for name in _CURVES:
        points = [(row["step"], row[name]) for row in metrics if row.get(name) is not None]
        if len(points) > 1:
            found.append({"name": name.replace("_", " "), "points": points})
    return found


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _asset(name: str) -> str:
    return resources.files("mpo_jax.viewer").joinpath("assets", name).read_text()


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
