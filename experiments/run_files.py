"""What the episodes of an evaluation over one's own documents found, and their run files."""

import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from mpo_jax.environments.document_search import ACTION_FORMATS
from mpo_jax.environments.question_files import mean_recall
from mpo_jax.environments.run_files import run_record, write_run
from mpo_jax.store.episode import Episode


def retrieved(episodes: Iterable[Episode], qrels: Mapping[str, Collection[str]]) -> dict[str, list[float]]:
    """Mean recall, where one of the queries has been judged: query id to its relevant documents."""
    found: dict[str, list[list[str]]] = {}
    for episode in episodes:
        found.setdefault(episode.task_id, []).append(episode.metadata.get("retrieved_docids", []))
    recall = mean_recall(found, qrels)
    return {} if math.isnan(recall) else {"recall": [recall]}  # JSON has no NaN


def write(folder: Path, episodes: Iterable[Episode], actions: str, model: str) -> None:
    """One run file an episode, as BrowseComp-Plus's evaluator reads them."""
    for episode in episodes:
        texts = episode.metadata
        record = run_record(
            episode.task_id,
            texts["actions"],
            texts["observations"],
            texts.get("retrieved_docids", []),
            actions_as=ACTION_FORMATS[actions],
            model=model,
        )
        write_run(folder, record, episode.episode_id)
