"""The environments that a config can name: how each is made, and which of its tasks are asked when."""

import dataclasses
import json
import os
import random
import zlib
from collections.abc import Callable
from typing import Any

import gymnasium
import ml_collections

from mpo_jax.environments.document_search import ACTION_FORMATS, DocumentSearchEnvironment
from mpo_jax.environments.documents import DocumentIndex
from mpo_jax.environments.graders import GRADERS, Grader
from mpo_jax.environments.isolated import IsolatedEnvironment
from mpo_jax.environments.judge import Judge
from mpo_jax.environments.question_files import QUESTION_FORMATS, Task
from mpo_jax.environments.questions import SPLITS, Question, questions
from mpo_jax.environments.renaming import RenamedEnvironment, new_names
from mpo_jax.environments.search import SearchEnvironment
from mpo_jax.models.tokenizer import ChatTokenizer

HELD_OUT_PERCENT = 25  # of the queries, where one file has them all


@dataclasses.dataclass(frozen=True)
class Setting:
    """An environment with its tasks; a task is the options of the environment's reset.

    Attributes:
      make: a new environment.
      training_task: group index to task; deterministic, every task before any comes again.
      fixed_tasks: (split, number) to the same sample of a split's tasks for every evaluation of every run.
    """

    make: Callable[[], gymnasium.Env]
    training_task: Callable[[int], dict[str, Any]]
    fixed_tasks: Callable[[str, int], list[dict[str, Any]]]


def build(config: ml_collections.ConfigDict, tokenizer: ChatTokenizer) -> Setting:
    """The configured environment.

    Raises:
      ValueError: there is no such environment, or its section of the config does not hold together.
    """
    known = {"search": search, "documents": documents, "adapter": adapter}
    return _one_of("environment", config.environment, known)(config, tokenizer)


def search(config: ml_collections.ConfigDict, tokenizer: ChatTokenizer) -> Setting:
    """The packaged Factbook with its questions; a share of those to train on is over made-up names."""
    return Setting(
        make=lambda: RenamedEnvironment(SearchEnvironment(turn_limit=config.turn_limit)),
        training_task=training_questions(config),
        fixed_tasks=lambda split, number: [{"question": question} for question in fixed_questions(split, number)],
    )


def training_questions(config: ml_collections.ConfigDict) -> Callable[[int], dict[str, Any]]:
    """Group index to a training question, shuffled anew each time all have been asked; some over made-up names."""
    pool = questions("train")

    def task(group_id: int) -> dict[str, Any]:
        question = pool[shuffled(group_id, len(pool), config.seed)]
        rng = random.Random(f"{config.seed} names {group_id}")
        return {"question": question, "rename": new_names(question, rng) if rng.random() < config.renaming else {}}

    return task


def fixed_questions(split: str, number: int) -> list[Question]:
    """The same sample of a split's questions for every evaluation of every run."""
    pool = questions(split)
    return random.Random(split).sample(pool, min(number, len(pool)))


def documents(config: ml_collections.ConfigDict, tokenizer: ChatTokenizer) -> Setting:
    """A user's own documents and questions, from the files that `config.documents` names.

    Raises:
      ValueError: a file is missing or damaged, or a split is empty.
    """
    section = config.documents
    tasks = read_tasks(section)
    index = DocumentIndex.of_file(section.corpus, section.index or None)
    everything = [task for split in SPLITS for task in tasks[split]]
    first = {"train": 0, "held_out": len(tasks["train"])}
    cut = section.snippet_tokens
    settings = {
        "grader": make_grader(section),
        "actions": _one_of("documents.actions", section.actions, ACTION_FORMATS),
        "snippet": lambda text: tokenizer.decode(tokenizer.encode(text[: 64 * cut])[:cut]),
        "limit": section.hits,
        "turn_limit": config.turn_limit,
    }

    def fixed_tasks(split: str, number: int) -> list[dict[str, Any]]:
        places = range(first[split], first[split] + len(tasks[split]))
        return [{"task": place} for place in random.Random(split).sample(places, min(number, len(places)))]

    return Setting(
        make=lambda: DocumentSearchEnvironment(everything, index, **settings),
        training_task=lambda group_id: {"task": shuffled(group_id, len(tasks["train"]), config.seed)},
        fixed_tasks=fixed_tasks,
    )


def adapter(config: ml_collections.ConfigDict, tokenizer: ChatTokenizer) -> Setting:
    """Any gymnasium environment of text, each in a process of its own; a task is a number, the held-out ones come last.

    Raises:
      ValueError: the class or its arguments are not named as they must be, or there are no tasks.
    """
    section = config.adapter
    try:
        arguments = json.loads(section.arguments)
    except json.JSONDecodeError as error:
        raise ValueError(f"adapter.arguments is {section.arguments!r}, expected a JSON object: {error}") from error
    if not isinstance(arguments, dict):
        raise ValueError(f"adapter.arguments is {section.arguments!r}, expected a JSON object")
    sizes = {"train": section.train_tasks, "held_out": section.held_out_tasks}
    if min(sizes.values()) < 1:
        raise ValueError(f"adapter has {sizes} tasks, expected at least one of each")
    IsolatedEnvironment(section.target, arguments, seconds=section.seconds)  # bad input is told here
    first = {"train": 0, "held_out": section.train_tasks}

    def fixed_tasks(split: str, number: int) -> list[dict[str, Any]]:
        places = range(first[split], first[split] + sizes[split])
        return [{"task": place} for place in random.Random(split).sample(places, min(number, len(places)))]

    return Setting(
        make=lambda: IsolatedEnvironment(section.target, arguments, seconds=section.seconds),
        training_task=lambda group_id: {"task": shuffled(group_id, section.train_tasks, config.seed)},
        fixed_tasks=fixed_tasks,
    )


def read_tasks(section: ml_collections.ConfigDict) -> dict[str, tuple[Task, ...]]:
    """The questions of both splits: of a file each, or of one file, a quarter held out by a hash of their ids.

    Raises:
      ValueError: no file is named, one is damaged, or a split would be empty.
    """
    read = _one_of("documents.format", section.format, QUESTION_FORMATS)
    if not section.queries or not section.corpus:
        raise ValueError("documents: name the files: --config.documents.corpus=… --config.documents.queries=…")
    train = read(section.queries)
    if section.held_out:
        return {"train": train, "held_out": read(section.held_out)}
    held_out = tuple(t for t in train if zlib.crc32(t.task_id.encode()) % 100 < HELD_OUT_PERCENT)
    if not 0 < len(held_out) < len(train):
        raise ValueError(
            f"{section.queries}: {len(held_out)} of its {len(train)} queries would be held out, expected some but not "
            "all; name a second file: --config.documents.held_out=…"
        )
    return {"train": tuple(task for task in train if task not in held_out), "held_out": held_out}


def make_grader(section: ml_collections.ConfigDict) -> Grader:
    """The configured grader; "judge" asks the model behind a URL, with the key in the environment variable named."""
    if section.grader == "judge":
        return Judge(section.judge_url, section.judge_model, key=os.environ.get(section.judge_key_variable, ""))
    return _one_of("documents.grader", section.grader, GRADERS)


def shuffled(group_id: int, size: int, seed: int) -> int:
    """Group index to a place in 0..size-1: all of them in an order of their own in every round."""
    round_, place = divmod(group_id, size)
    return random.Random(f"{seed} {round_}").sample(range(size), size)[place]


def _one_of(key: str, name: str, known: dict[str, Any]) -> Any:
    if name not in known:
        raise ValueError(f"{key} is {name!r}, expected one of: {', '.join(known)}")
    return known[name]
