"""Composes the questions of the search environment from its documents, and keeps those that can be solved.

    python -m mpo_jax.environments.data.build_questions

Run it after `build_factbook`. The bytes are the same on every run.
"""

import collections
import dataclasses
import pathlib
import re
import zlib
from collections.abc import Iterable, Iterator

import msgspec

from mpo_jax.environments.corpus import Corpus, factbook
from mpo_jax.environments.data.build_factbook import write_lines
from mpo_jax.environments.graders import normalise_answer
from mpo_jax.environments.questions import QUANTITIES, RELATIONS, Hop, Question, country_split, quantity
from mpo_jax.environments.search import SearchEnvironment
from mpo_jax.environments.search_policy import ScriptedPolicy

DESTINATION = pathlib.Path(__file__).with_name("questions.jsonl.xz")
DIRECT = (
    ("highest point", "capital"),
    ("highest point", "internet code"),
    ("highest point", "nationality"),
    ("national anthem", "capital"),
    ("national anthem", "telephone code"),
    ("national anthem", "currency"),
    ("capital", "nationality"),
    ("capital", "independence year"),
    ("capital", "national symbol"),
    ("nationality", "capital"),
    ("nationality", "internet code"),
    ("nationality", "map region"),
    ("national symbol", "capital"),
    ("national symbol", "telephone code"),
)
NEIGHBOUR_ANSWERS = ("capital", "nationality", "internet code", "national symbol", "telephone code")
DIRECT_QUESTIONS = 100  # at most, a template, both splits together
COMPARISONS = 40
MARGIN = 1.5  # one country has so many times more of what is compared
ANSWER_WORDS, SUBJECT_WORDS, QUESTION_WORDS = 4, 6, 20
NO_VALUE = re.compile(r"unnamed|none\b|na\b|no official|national color|not |see |\+")

Values = dict[str, dict[str, str]]  # by relation, by country


def read_values(corpus: Corpus) -> Values:
    """Reads the relations of all countries.

    Args:
      corpus: the documents.

    Returns:
      relation -> country in lower case -> value; only values fit to be a subject or an answer.
    """
    values: Values = {name: {} for name in RELATIONS}
    fields = {(relation.section, relation.field): relation for relation in RELATIONS.values()}
    for document in corpus.documents:
        for name, text in document.fields:
            relation = fields.get((document.section.lower(), name))
            value = relation and relation.value(text + ";")
            if value and len(value.split()) <= SUBJECT_WORDS and not NO_VALUE.match(value):
                values[relation.name].setdefault(document.country.lower(), value)
    return values


def identifying(values: Values, relation: str) -> Iterator[tuple[str, str]]:
    """Lists the values that name one country only.

    Args:
      values: from `read_values`.
      relation: which values.

    Yields:
      (country, value) pairs.
    """
    counts = collections.Counter(map(normalise_answer, values[relation].values()))
    for country, value in values[relation].items():
        if counts[normalise_answer(value)] == 1 and normalise_answer(value) != normalise_answer(country):
            yield country, value


@dataclasses.dataclass(frozen=True)
class Draft:
    """A question before it is numbered, verified and put in a split."""

    template: str
    text: str
    answer: str
    hops: tuple[Hop, ...]
    entities: tuple[str, ...]
    countries: tuple[str, ...]


def direct(values: Values, known: str, asked: str) -> Iterator[Draft]:
    """Asks for a value of the country that another value identifies: two hops.

    Args:
      values: from `read_values`.
      known: the relation that identifies.
      asked: the relation asked for.

    Yields:
      Drafts.
    """
    for country, subject in identifying(values, known):
        if answer := values[asked].get(country):
            yield Draft(
                f"{known} > {asked}",
                f"what is the {asked} of the country whose {known} is {subject}?",
                answer,
                (Hop(known, subject, identifies=True), Hop(asked)),
                (subject, country, answer),
                (country,),
            )


def neighbours(values: Values, known: str, asked: str) -> Iterator[Draft]:
    """Asks for a value of the only land neighbour of an identified country: three hops.

    Args:
      values: from `read_values`.
      known: the relation that identifies.
      asked: the relation asked for.

    Yields:
      Drafts.
    """
    for country, subject in identifying(values, known):
        neighbour = values["neighbour"].get(country, "")
        if answer := values[asked].get(neighbour.removeprefix("the ")):
            yield Draft(
                f"{known} > neighbour > {asked}",
                f"what is the {asked} of the only land neighbour of the country whose {known} is {subject}?",
                answer,
                (Hop(known, subject, identifies=True), Hop("neighbour"), Hop(asked)),
                (subject, country, neighbour, answer),
                (country, neighbour.removeprefix("the ")),
            )


def comparisons(values: Values, asked: str) -> Iterator[Draft]:
    """Asks which of two countries has more, named (two hops) or given by their capitals (four hops).

    Args:
      values: from `read_values`.
      asked: "area" or "population".

    Yields:
      Drafts.
    """
    capitals = dict(identifying(values, "capital"))
    for split in ("train", "held_out"):
        countries = in_order(country for country in values[asked] if country_split(country) == split)
        for pair in zip(countries[::2], countries[1::2], strict=False):
            small, large = sorted(quantity(values[asked][country]) for country in pair)
            if small * MARGIN > large:
                continue
            answer = max(pair, key=lambda country: quantity(values[asked][country]))
            text = f"which has the larger {asked}, {pair[0]} or {pair[1]}?"
            yield Draft(f"larger {asked}", text, answer, tuple(Hop(asked, country) for country in pair), pair, pair)
            if all(country in capitals for country in pair):
                known = tuple(capitals[country] for country in pair)
                text = f"which has the larger {asked}, the country with capital {known[0]} or with capital {known[1]}?"
                hops = tuple(hop for name in known for hop in (Hop("capital", name, identifies=True), Hop(asked)))
                yield Draft(f"capitals > larger {asked}", text, answer, hops, (*known, *pair), pair)


def in_order(texts: Iterable[str]) -> list[str]:
    """Shuffles texts by their hashes, alike on every run.

    Args:
      texts: any texts.

    Returns:
      The texts.
    """
    return sorted(texts, key=lambda text: (zlib.crc32(text.encode()), text))


def drafts(values: Values) -> Iterator[Draft]:
    """Composes every template.

    Args:
      values: from `read_values`.

    Yields:
      Drafts; the likes of them are next to each other.
    """
    for known, asked in DIRECT:
        yield from direct(values, known, asked)
    for known in dict.fromkeys(known for known, _ in DIRECT):
        for asked in NEIGHBOUR_ANSWERS:
            if asked != known:
                yield from neighbours(values, known, asked)
    for asked in sorted(QUANTITIES):
        yield from comparisons(values, asked)


def presentable(draft: Draft) -> bool:
    """Whether a draft is short, of one split, and does not give its answer away.

    Args:
      draft: a draft.

    Returns:
      True if so.
    """
    compares = "larger" in draft.template
    return (
        len(draft.text.split()) <= QUESTION_WORDS
        and len(draft.answer.split()) <= ANSWER_WORDS
        and len(set(map(country_split, draft.countries))) == 1
        and (compares or f" {normalise_answer(draft.answer)} " not in f" {normalise_answer(draft.text)} ")
    )


def solvable(question: Question, environment: SearchEnvironment, policy: ScriptedPolicy) -> bool:
    """Whether the policy answers a question right within the turn limit.

    Args:
      question: the question.
      environment: with the limits that count.
      policy: the policy without noise.

    Returns:
      True if it does.
    """
    observation, info = environment.reset(options={"question": question})
    policy.reset(question)
    over = False
    while not over:
        observation, _, terminated, truncated, info = environment.step(policy.act(observation))
        over = terminated or truncated
    return info["success"]


def build(corpus: Corpus) -> list[Question]:
    """Composes, verifies and numbers the questions.

    Args:
      corpus: the documents.

    Returns:
      Questions, those of a template together.
    """
    environment, policy = SearchEnvironment(questions=(), corpus=corpus), ScriptedPolicy()
    kept: dict[str, list[Question]] = collections.defaultdict(list)
    by_text = {draft.text: draft for draft in drafts(read_values(corpus)) if presentable(draft)}
    for text in in_order(by_text):
        draft = by_text[text]
        limit = COMPARISONS if "larger" in draft.template else DIRECT_QUESTIONS
        if len(kept[draft.template]) >= limit:
            continue
        task_id = f"factbook-{zlib.crc32(text.encode()):08x}"
        question = Question(task_id=task_id, split=country_split(draft.countries[0]), **vars(draft))
        if solvable(question, environment, policy):
            kept[draft.template].append(question)
    return [question for template in sorted(kept) for question in kept[template]]


def main() -> None:
    """Writes the file."""
    built = build(factbook())
    write_lines([msgspec.to_builtins(question) for question in built], DESTINATION)
    for (template, split), count in sorted(collections.Counter((q.template, q.split) for q in built).items()):
        print(f"{count:5} {split:8} {template}")
    print(f"{len(built)} questions, {DESTINATION.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
