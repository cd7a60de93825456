"""A file of episodes to a table of scores: one model at a time, in chunks whose results lie on disk until the end."""

import dataclasses
import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from mpo_jax.scoring import readers, tables
from mpo_jax.scoring.episode_scores import COLUMNS, LEVELS, Aggregation, Scored, rows
from mpo_jax.scoring.likelihoods import Likelihoods
from mpo_jax.scoring.rendering import Tokenizer, keep_last, render, without_first
from mpo_jax.scoring.transcripts import InvalidTranscript, Tokens, Transcript

CHUNK = 64  # episodes whose results are kept together: what an interruption can cost,
CHUNK_TOKENS = 16_384  # but no more tokens than that, unless one episode has more

log = logging.getLogger(__name__)

Source = Callable[[Sequence[Tokens]], list[Likelihoods]]
Prepared = tuple[Transcript, Tokens | None, dict[int, int]]


@dataclasses.dataclass(frozen=True)
class Job:
    """What is scored, and how; an interrupted run goes on if it is the same job.

    Attributes:
      episodes: the file.
      kind: its format, a key of `readers.FORMATS`.
      output: the table.
      policy: names the model that acted; None for the log-probs in the file.
      reference: names its reference; None for the log-probs in the file, "" for none (baselines only).
      base: names the model that adapters stand beside; "" for the one that their folder names.
      max_tokens: longer episodes keep their last ones.
      whole: longer episodes are passed over instead.
      top_k: k of the mean of the highest log-probs; 0 for none.
      aggregation: log-probs to scores.
      levels: rows that are written.
    """

    episodes: str
    kind: str
    output: str
    policy: str | None = None
    reference: str | None = ""
    base: str = ""
    max_tokens: int = 4096
    whole: bool = False
    top_k: int = 20
    aggregation: Aggregation = dataclasses.field(default_factory=Aggregation)
    levels: tuple[str, ...] = LEVELS

    def __post_init__(self):
        if self.aggregation.top_k and not (self.top_k and self.policy and self.reference):
            raise ValueError("the top-k form needs a model for policy and reference, and top_k of at least 1")


def score(job: Job, load: Callable[[str], Source], tokenizer: Callable[[], Tokenizer] | None) -> dict:
    """Scores a file of episodes.

    Where the format is read line by line, memory grows with the number of episodes by their ids only. Both models are
    loaded, one after the other, and each is let go before the next.

    Args:
      job: what and how.
      load: name of a model to what evaluates token ids under it.
      tokenizer: makes the tokenizer that both share; None where both log-probs are in the file.

    Returns:
      `episodes`, `rows` and `unreadable`, the lines about episodes that were passed over.

    Raises:
      ValueError: the file is something else, nothing in it can be scored, or the work begun for this output is another
        job's.
    """
    tables.check_ending(job.output)
    work = Path(f"{job.output}.work")
    _claim(work, job)
    shared = tokenizer() if tokenizer is not None else None
    errors: list[str] = []
    total = sum(1 for _ in _episodes(job, shared, errors))
    for error in errors:
        log.warning("passed over %s", error)
    if total == 0:
        raise ValueError(f"{job.episodes}: not one of {len(errors)} episodes can be scored")
    models = {"policy": job.policy, "reference": job.reference}
    for role, name in models.items():
        if name:
            _evaluate(job, shared, work, role, lambda name=name: load(name), total)
    scored = (row for one in _scored(job, shared, work) for row in rows(one, job.aggregation, job.levels))
    count = tables.write_table(job.output, COLUMNS, scored)
    shutil.rmtree(work)
    return {"episodes": total, "rows": count, "unreadable": errors}


def _claim(work: Path, job: Job) -> None:
    """Makes the folder of unfinished work this job's, unless it holds results of another one."""
    source = Path(job.episodes)
    size = source.stat().st_size if source.is_file() else None
    mine = json.loads(json.dumps(dataclasses.asdict(job) | {"bytes": size}))
    path = work / "job.json"
    if any(work.glob("*.npy")):
        try:
            theirs = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: no JSON: {error}; delete {work} or choose another output") from error
        if wrong := [key for key in mine if theirs.get(key) != mine[key]]:
            raise ValueError(
                f"{work} holds unfinished work of another job: its {wrong[0]} is {theirs.get(wrong[0])!r}, here "
                f"{mine[wrong[0]]!r}; delete it or choose another output"
            )
        return
    work.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".unfinished")
    beside.write_text(json.dumps(mine, indent=1))
    beside.replace(path)


def _episodes(job: Job, tokenizer: Tokenizer | None, errors: list[str]) -> Iterator[Prepared]:
    """Yields each episode that can be scored, its ids within the limit, and the action tokens lost by each message."""
    for transcript in readers.read(job.episodes, job.kind, errors):
        try:
            tokens = None if tokenizer is None else render(transcript, tokenizer)
            _check_recorded(job, transcript, tokens)
            if job.whole and tokens is not None and len(tokens.ids) > job.max_tokens:
                raise InvalidTranscript(f"{len(tokens.ids)} tokens, expected at most {job.max_tokens}")
        except InvalidTranscript as error:
            errors.append(f"{job.episodes}: episode {transcript.episode_id!r}: {error}")
            continue
        if tokens is None:
            yield transcript, None, {}
            continue
        kept = without_first(keep_last(tokens, job.max_tokens))
        lost = _counts(transcript, tokens) - _counts(transcript, kept)
        yield transcript, kept, {int(index): int(lost[index]) for index in np.flatnonzero(lost)}


def _counts(transcript: Transcript, tokens: Tokens) -> np.ndarray:
    """Action tokens of each message."""
    return np.bincount(_owners(transcript, tokens), minlength=len(transcript.messages))


def _check_recorded(job: Job, transcript: Transcript, tokens: Tokens | None) -> None:
    """Log-probs that are taken from the file must be there for every action, and for the same tokens as a model's."""
    counts = None if tokens is None else _counts(transcript, tokens)
    for field, name in (("logprobs", job.policy), ("ref_logprobs", job.reference)):
        for index, message in enumerate(transcript.messages):
            if name is not None or not message.action:
                continue
            values = getattr(message, field)
            if values is None:
                raise InvalidTranscript(f"messages[{index}].{field} is missing, and no model was given in its place")
            if counts is not None and len(values) != counts[index]:
                raise InvalidTranscript(
                    f"messages[{index}].{field} has length {len(values)}, but the action {counts[index]} tokens: "
                    "log-probs of a file go together with a model where the file has the ids too"
                )


def _evaluate(job: Job, tokenizer: Tokenizer, work: Path, role: str, load: Callable[[], Source], total: int) -> None:
    """Evaluates all chunks that are not on disk yet under one model, which is loaded when the first is met."""
    source = None
    with tqdm(total=total, desc=role, unit="episode") as bar:
        for number, chunk in enumerate(_chunks(_episodes(job, tokenizer, []))):
            path = work / f"{role}-{number:06d}.npy"
            if not path.exists():
                source = source or load()
                found = source([tokens for _, tokens, _ in chunk])
                _save(path, np.concatenate([np.stack(one) for one in found], axis=1))
            bar.update(len(chunk))


def _scored(job: Job, tokenizer: Tokenizer | None, work: Path) -> Iterator[Scored]:
    """Yields each episode with its likelihoods, from disk or from its file."""
    for number, chunk in enumerate(_chunks(_episodes(job, tokenizer, []))):
        stored = {
            role: np.load(work / f"{role}-{number:06d}.npy")
            for role, name in (("policy", job.policy), ("reference", job.reference))
            if name
        }
        owners = [_owners(transcript, tokens) for transcript, tokens, _ in chunk]
        ends = np.cumsum([len(mine) for mine in owners])
        for role, values in stored.items():
            if values.shape[1] != ends[-1]:
                raise ValueError(
                    f"{work}: {role}-{number:06d}.npy is of other episodes than those in the file; delete it"
                )
        for (transcript, tokens, cut), mine, end in zip(chunk, owners, ends, strict=True):
            span = slice(end - len(mine), end)
            policy, reference = (
                Likelihoods(*stored[role][:, span]) if role in stored else _recorded(transcript, field, cut)
                for role, field in (("policy", "logprobs"), ("reference", "ref_logprobs"))
            )
            yield Scored(
                transcript=transcript,
                owners=mine,
                token_ids=None if tokens is None else np.array(tokens.ids)[np.array(tokens.mask, bool)],
                cut=cut,
                policy=policy,
                reference=None if job.reference == "" else reference,
            )


def _owners(transcript: Transcript, tokens: Tokens | None) -> np.ndarray:
    """The message of each action token that is left."""
    if tokens is not None:
        return np.array(tokens.messages, int)[np.array(tokens.mask, bool)]
    sizes = [len(message.logprobs or ()) if message.action else 0 for message in transcript.messages]
    return np.repeat(np.arange(len(sizes)), sizes)


def _recorded(transcript: Transcript, field: str, cut: dict[int, int]) -> Likelihoods:
    """The file's own log-probs, without those of tokens that were cut off the front."""
    parts = [
        (getattr(message, field) or [])[cut.get(index, 0) :]
        for index, message in enumerate(transcript.messages)
        if message.action
    ]
    logprobs = np.array([x for part in parts for x in part], np.float32)
    unknown = np.full(len(logprobs), np.nan, np.float32)
    return Likelihoods(logprobs, unknown, unknown, unknown)


def _chunks(episodes: Iterable[Prepared]) -> Iterator[list[Prepared]]:
    """Runs of at most `CHUNK` episodes and `CHUNK_TOKENS` tokens, the same in every pass over the file."""
    chunk, size = [], 0
    for one in episodes:
        _, tokens, _ = one
        length = 0 if tokens is None else len(tokens.ids)
        if chunk and (len(chunk) == CHUNK or size + length > CHUNK_TOKENS):
            yield chunk
            chunk, size = [], 0
        chunk.append(one)
        size += length
    if chunk:
        yield chunk


def _save(path: Path, array: np.ndarray) -> None:
    beside = path.with_suffix(".unfinished")
    with beside.open("wb") as file:
        np.save(file, array)
    beside.replace(path)
