"""Questions of two to four hops over the Factbook, each with the chain of look-ups that answers it."""

import functools
import lzma
import re
import zlib

import msgspec

from mpo_jax.environments.corpus import DATA

SPLITS = ("train", "held_out")
HELD_OUT_PERCENT = 25


class Relation(msgspec.Struct, frozen=True):
    """A field of the Factbook that ties a country to a value.

    Attributes:
      name: what questions call it; also what a search for it says.
      section: the section that holds it, in lower case.
      field: the field's name.
      pattern: finds the value (group 1) in the field's text; it needs the delimiter after the value, so that a
        text cut short gives no value rather than half of one.
      query: what a search for it says.
    """

    name: str
    section: str
    field: str
    pattern: str
    query: str

    def value(self, text: str) -> str | None:
        """Reads the value out of a field's text.

        Args:
          text: the text, or as much of it as was seen; ";" closes a text that is whole.

        Returns:
          The value in lower case, or None where the text does not hold all of it.
        """
        found = re.match(self.pattern, re.sub(r"\(s\)", "", text.lower()))
        return found.group(1).strip(" '\".") if found else None


FIRST_ITEM = r"(.+?)\s*(?:[;,(]| or )"

RELATIONS: dict[str, Relation] = {
    relation.name: relation
    for relation in (
        Relation("capital", "government", "capital name", FIRST_ITEM, "capital"),
        Relation("highest point", "geography", "elevation extremes highest point",
                 r"([^\d(,;]+?) (?:\([^)]*\) )?[\d,.]+ m\b", "highest point"),
        Relation("national anthem", "government", "national anthem name", r'"([^"]+)"', "national anthem"),
        Relation("nationality", "people and society", "nationality noun", FIRST_ITEM, "people nationality noun"),
        Relation("national symbol", "government", "national symbol", FIRST_ITEM, "national symbol"),
        Relation("independence year", "government", "independence", r"[^;]*?\b(\d{4})\b", "independence"),
        Relation("internet code", "communications", "internet country code",
                 r"\.([a-z]{2})\b", "internet country code"),
        Relation("telephone code", "communications", "telephone system international",
                 r"country code - ([\d-]+)", "telephone international"),
        Relation("currency", "economy", "exchange rates", r"([^\d;]+?) (?:\([^)]*\) )?per us", "exchange rates"),
        Relation("map region", "geography", "map references", FIRST_ITEM, "geography map references"),
        Relation("neighbour", "geography", "land boundaries border countries",
                 r"([^\d,;(]+?) [\d,.]+ km(?: \([^)]*\))?\s*;", "geography border countries"),
        Relation("area", "geography", "area total", r"([\d,.]+ (?:million )?sq km)", "geography area total"),
        Relation("population", "people and society", "population", r"([\d,]+)\b", "people population"),
    )
}  # fmt: skip
QUANTITIES = frozenset({"area", "population"})  # a chain that ends in one asks which country has more of it


def quantity(value: str) -> float:
    """Reads the number of a quantity's value.

    Args:
      value: "643,801 sq km", "9.98 million sq km", "66,553,766".

    Returns:
      The number, 0 where there is none.
    """
    found = re.match(r"[\d,]*\.?\d+", value)
    number = float(found.group().replace(",", "")) if found else 0.0
    return number * 1e6 if "million" in value else number


class Hop(msgspec.Struct, frozen=True):
    """One look-up of the chain.

    Attributes:
      relation: a key of `RELATIONS`.
      subject: what it starts from: a country, or a value where `identifies`; "" for the country found last.
      identifies: the look-up finds the country whose value is `subject`, rather than a country's value.
    """

    relation: str
    subject: str = ""
    identifies: bool = False


class Question(msgspec.Struct, frozen=True):
    """A question with one short answer.

    Attributes:
      task_id: unique and stable.
      template: the form of the question, such as "capital > neighbour > internet code".
      text: the question, in lower case.
      answer: the answer, in lower case.
      hops: the look-ups that lead to the answer.
      entities: the countries, identifying strings and values that occur on the way, the answer with them.
      countries: the countries involved; all of them are of the split.
      split: "train" or "held_out".
    """

    task_id: str
    template: str
    text: str
    answer: str
    hops: tuple[Hop, ...]
    entities: tuple[str, ...]
    countries: tuple[str, ...]
    split: str


def country_split(country: str) -> str:
    """Says to which split a country belongs.

    Args:
      country: its name.

    Returns:
      "held_out" for a quarter of all names, by their hash, else "train".
    """
    return "held_out" if zlib.crc32(country.lower().encode()) % 100 < HELD_OUT_PERCENT else "train"


@functools.cache
def questions(split: str) -> tuple[Question, ...]:
    """Loads the packaged questions; the scripted policy solves every one of them.

    Args:
      split: "train" or "held_out"; no country occurs in both.

    Returns:
      The questions of the split.

    Raises:
      ValueError: there is no such split.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {SPLITS}, not {split!r}")
    lines = lzma.decompress((DATA / "questions.jsonl.xz").read_bytes()).splitlines()
    return tuple(question for line in lines if (question := msgspec.json.decode(line, type=Question)).split == split)
