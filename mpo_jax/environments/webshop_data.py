"""WebShop's files as its authors publish them, and the reward of what was bought. See *WebShop* (arXiv:2207.01206).

Three things differ from the authors' code, which needs a parser of language and random numbers for them. A product's
type is compared by all words of the names, not by their nouns alone; colours are compared as they are written, not by
a table of basic ones; the price within a range, and the limit that a goal sets, are drawn from the product's id.
"""

import dataclasses
import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ALIKE = 85.0  # per cent from which two attributes or options count as the same
NO_LIMIT = 1_000_000.0


@dataclasses.dataclass(frozen=True)
class Product:
    """One item of the shop; `options` are the values to choose from, by the name of what is chosen."""

    asin: str
    title: str
    description: str
    features: tuple[str, ...]
    attributes: tuple[str, ...]
    query: str
    categories: frozenset[str]
    price: float
    options: Mapping[str, tuple[str, ...]]

    def text(self) -> str:
        """All that is said of it."""
        values = [value for values in self.options.values() for value in values]
        return "\n".join([self.title, self.description, *self.features, *values])

    def mentions(self, words: str) -> bool:
        """Whether title, description or features hold some words."""
        return any(words in text.lower() for text in (self.title, self.description, " ".join(self.features)))


@dataclasses.dataclass(frozen=True)
class Goal:
    """What a customer wants: a product like this one, with these attributes and options, for at most this price."""

    product: Product
    instruction: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]
    price_limit: float


def read_products(items: Path | str, attributes: Path | str, limit: int | None = None) -> dict[str, Product]:
    """Reads `items_shuffle.json` and `items_ins_v2.json`, or the authors' files of a thousand products.

    Args:
      items: the products.
      attributes: of each, by its id.
      limit: read so many only.

    Returns:
      Id to product, in the file's order; the authors too leave out ids of more than ten characters.

    Raises:
      ValueError: a file cannot be read, or a product lacks a field; the message names them.
    """
    known, products = _read(attributes, dict), {}
    for record in _read(items, list)[:limit]:
        try:
            asin = record["asin"]
            if asin == "nan" or len(asin) > 10 or asin in products:
                continue
            products[asin] = _product(record, known.get(asin, {}).get("attributes", ()))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{items}: product {str(record)[:80]!r} lacks what it must have: {error!r}") from error
    if not products:
        raise ValueError(f"{items}: no products, expected at least one")
    return products


def read_goals(path: Path | str, products: Mapping[str, Product]) -> list[Goal]:
    """Reads `items_human_ins.json`, the instructions that people wrote, in the authors' order.

    That is shuffled by 233: the first 500 are to test on, the next 1,000 to develop on, the rest to train on.

    Raises:
      ValueError: the file cannot be read, an instruction lacks a field, or none is about the products.
    """
    written, goals = _read(path, dict), []
    for asin in products:
        for record in written.get(asin, ()):
            try:
                if record["instruction_attributes"]:
                    goals.append(_goal(products[asin], record))
            except (KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{path}: an instruction of {asin} lacks what it must have: {error!r}") from error
    if not goals:
        raise ValueError(f"{path}: no instruction is about one of the {len(products)} products")
    random.Random(233).shuffle(goals)
    return goals


def reward(bought: Product, chosen: Mapping[str, str], goal: Goal) -> float:
    """r_type (|U_att ∩ Y_att| + |U_opt ∩ Y_opt| + 1[y_price ≤ u_price]) / (|U_att| + |U_opt| + 1), Eq. 1.

    Args:
      bought: Y.
      chosen: its options, by name.
      goal: U.
    """
    met = sum(
        any(alike(own, wanted) > ALIKE for own in bought.attributes) or bought.mentions(wanted)
        for wanted in goal.attributes
    )
    for name, value in chosen.items():
        same = value in goal.options if name == "size" else any(alike(value, o) > ALIKE for o in goal.options)
        met += same or bought.mentions(value)
    met += bought.price <= goal.price_limit
    return _type_factor(bought, goal.product) * met / (len(goal.attributes) + len(goal.options) + 1)


def alike(a: str, b: str) -> float:
    """How alike two texts are as sets of words, 0..100: what they share against each, by longest common subsequence."""
    first, second = _words(a), _words(b)
    shared = " ".join(sorted(first & second))
    one, two = (
        f"{shared} {' '.join(sorted(own - other))}".strip() for own, other in ((first, second), (second, first))
    )
    pairs = [(one, two), (shared, one), (shared, two)] if shared else [(one, two)]
    return max(_ratio(*pair) for pair in pairs)


def _type_factor(bought: Product, wanted: Product) -> float:
    words = _words(wanted.title)
    share = len(words & _words(bought.title)) / len(words) if words else 0.2
    if share < 0.1:
        return 0.1 if share else 0.0
    same = bought.query == wanted.query or len(bought.categories & wanted.categories) >= 2 or share > 0.2
    return 1.0 if same else 0.5


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


def _ratio(a: str, b: str) -> float:
    """Twice the longest common subsequence of two texts against their lengths, in per cent."""
    row = [0] * (len(b) + 1)
    for letter in a:
        before = row[:]
        for index, other in enumerate(b, start=1):
            row[index] = before[index - 1] + 1 if letter == other else max(before[index], row[index - 1])
    return 200.0 * row[-1] / (len(a) + len(b)) if a or b else 0.0


def _product(record: Mapping[str, Any], attributes: Sequence[str]) -> Product:
    features, options = record["small_description"], {}
    for name, values in (record["customization_options"] or {}).items():
        if values is not None:
            options[name.lower()] = tuple(value["value"].strip().replace("/", " | ").lower() for value in values)
    prices = [float(re.sub(r"[^\d.]", "", part)) for part in (record.get("pricing") or "$100.0").split("$")[1:]]
    return Product(
        asin=record["asin"],
        title=record["name"],
        description=record["full_description"] or "",
        features=tuple(features) if isinstance(features, list) else (features or "",),
        attributes=tuple(attributes),
        query=record["query"].lower().strip(),
        categories=frozenset(part.strip() for part in record["product_category"].split("›")),
        price=prices[0] if len(prices) == 1 else round(random.Random(record["asin"]).uniform(*prices[:2]), 2),
        options=options,
    )


def _goal(product: Product, record: Mapping[str, Any]) -> Goal:
    options, text = record["instruction_options"], record["instruction"].strip(".")
    limits, limit = [10.0 * step for step in range(1, 100) if 10.0 * step > product.price][:4], NO_LIMIT
    if len(limits) >= 2:
        limit = max(random.Random(f"{product.asin} {text}").sample(limits, 2))
        text += f", and price lower than {limit:.2f} dollars"
    values = options.values() if isinstance(options, dict) else options
    return Goal(product, text, tuple(record["instruction_attributes"]), tuple(values), limit)


def _read(path: Path | str, kind: type) -> Any:
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    if not isinstance(content, kind):
        raise ValueError(f"{path}: holds a {type(content).__name__}, expected a {kind.__name__}")
    return content
