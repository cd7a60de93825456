"""A policy that follows a question's chain of look-ups, as noisily as one likes: it warms up a model by imitation."""

import random
import re

import msgspec

from mpo_jax.environments.graders import normalise_answer
from mpo_jax.environments.questions import QUANTITIES, RELATIONS, Hop, Question, quantity
from mpo_jax.environments.search import CUT

SECTIONS = (
    "introduction|geography|people and society|government|economy|energy|communications|transportation|military"
    "|transnational issues"
)
SHOWN = re.compile(rf"(?:(?P<number>\d) )?(?P<country>.+?) (?P<section>{SECTIONS}): (?P<field>[^:]+): (?P<text>.*)")


class Shown(msgspec.Struct, frozen=True):
    """One field of one document, as an observation shows it.

    Attributes:
      number: of the hit, None in an opened document.
      country: in lower case.
      section: in lower case.
      field: the field's name.
      text: the text seen, closed by ";" where it is whole.
      cut: whether there is more of it.
    """

    number: str | None
    country: str
    section: str
    field: str
    text: str
    cut: bool


def read(observation: str) -> list[Shown]:
    """Parses what a search or an opening shows.

    Args:
      observation: the environment's text.

    Returns:
      The fields with their documents; none where it shows none.
    """
    shown = []
    for match in filter(None, map(SHOWN.fullmatch, observation.split("\n"))):
        text, *rest = match["text"].split(" ; ")
        cut = not rest and text.endswith(CUT)
        text += "" if cut else ";"
        shown.append(Shown(match["number"], match["country"], match["section"], match["field"], text, cut))
    return shown


class ScriptedPolicy:
    """Solves a question from what it observes: it knows which look-ups to make, not what they give."""

    def __init__(self, noise: float = 0.0, rng: random.Random | None = None):
        """Sets the noise.

        Args:
          noise: probability of a mistake. A turn can have two: in what it makes of the observation, in what it does.
          rng: what mistakes are drawn from; a fresh one, seeded by 0, by default.
        """
        self.noise = noise
        self._rng = rng or random.Random(0)

    def reset(self, question: Question) -> None:
        """Starts on a question.

        Args:
          question: its hops are read, its answer is not.
        """
        self._hops = list(question.hops)
        self._step = 0  # the hop under way
        self._searches = 0  # made for it
        self._country = ""
        self._found: list[tuple[str, str]] = []  # (country, value) of each hop done
        self._last = f"search {question.text}"

    def act(self, observation: str) -> str:
        """Chooses the next action.

        Args:
          observation: the environment's last text.

        Returns:
          `search …`, `open …` or `answer …`.
        """
        shown = read(observation)
        misread = shown and self._rng.random() < self.noise
        action = self._misread(shown) if misread else self._proceed(shown)
        if self._rng.random() < self.noise:
            action = self._misact(shown)
        self._last = action
        return action

    def _proceed(self, shown: list[Shown]) -> str:
        """Goes on where the value looked for is shown; else looks closer, or searches again, or gives up."""
        if self._searches and self._step < len(self._hops):
            if found := self._find(shown):
                self._finish(*found)
            elif closer := next((field.number for field in self._matches(shown) if field.number and field.cut), None):
                return f"open {closer}"
            elif self._searches == 2:
                return f"answer {shown[0].country if shown else 'unknown'}"
        return self._search() if self._step < len(self._hops) else f"answer {self._answer()}"

    @property
    def _hop(self) -> Hop:
        """The look-up under way."""
        return self._hops[self._step]

    def _finish(self, country: str, value: str) -> None:
        """Notes what a hop gave, and turns to the next."""
        self._found.append((country, value))
        self._country = value if self._hop.relation == "neighbour" else country
        self._step += 1
        self._searches = 0

    def _search(self) -> str:
        """Words the search of the hop under way; a second one names the field in full."""
        relation = RELATIONS[self._hop.relation]
        self._searches += 1
        words = relation.query if self._searches == 1 else f"{relation.section} {relation.field}"
        return f"search {words} {self._hop.subject or self._country}"

    def _matches(self, shown: list[Shown]) -> list[Shown]:
        """The fields shown that the hop under way is about."""
        relation = RELATIONS[self._hop.relation]
        country = "" if self._hop.identifies else normalise_answer(self._hop.subject or self._country)
        return [
            field
            for field in shown
            if (field.section, field.field) == (relation.section, relation.field)
            and country in ("", normalise_answer(field.country))
        ]

    def _find(self, shown: list[Shown]) -> tuple[str, str] | None:
        """The country and the value that the hop under way is after, if there is one and it is shown in full."""
        if self._step == len(self._hops):
            return None
        for field in self._matches(shown):
            value = RELATIONS[self._hop.relation].value(field.text)
            if value and (value == self._hop.subject or not self._hop.identifies):
                return field.country, value
        return None

    def _answer(self) -> str:
        """The last value, or the country that has more of what is compared."""
        relation, value = self._hops[-1].relation, self._found[-1][1]
        if relation not in QUANTITIES:
            return f".{value}" if relation == "internet code" else value  # as it is written there: easier to copy
        amounts = {c: quantity(v) for (c, v), hop in zip(self._found, self._hops, strict=True) if not hop.identifies}
        return max(amounts, key=amounts.get)

    def _misread(self, shown: list[Shown]) -> str:
        """Takes another of the countries shown for the one found, and goes on or answers too early."""
        right = self._find(shown)
        others = [field for field in shown if not right or field.country != right[0]]
        country = self._rng.choice(others or shown).country
        if self._step < len(self._hops):
            self._finish(country, country)
        too_early = self._rng.random() < 0.3
        return f"answer {country}" if too_early or self._step == len(self._hops) else self._search()

    def _misact(self, shown: list[Shown]) -> str:
        """Asks for another field, answers with a country shown, opens any hit, or repeats itself."""
        hits = [field.number for field in shown if field.number]
        kinds = {"field": 3 if self._step < len(self._hops) else 0, "hasty": 2, "hit": 1 if hits else 0, "repeat": 1}
        (kind,) = self._rng.choices(list(kinds), list(kinds.values()))
        if kind == "field":
            return self._wrong_field()
        if kind == "hasty":
            return f"answer {self._rng.choice(shown).country if shown else 'unknown'}"
        return f"open {self._rng.choice(hits)}" if kind == "hit" else self._last

    def _wrong_field(self) -> str:
        """Takes the hop for one of another relation, from here on."""
        names = [name for name in RELATIONS if name != self._hop.relation]
        self._hops[self._step] = msgspec.structs.replace(self._hop, relation=self._rng.choice(names))
        self._searches = 0
        return self._search()
