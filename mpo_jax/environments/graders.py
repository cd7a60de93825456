"""Whether an answer is right: exact match after normalisation, and GAIA's rules for numbers, lists and strings."""

import math
import re
import string
import unicodedata
from collections.abc import Callable

Grader = Callable[[str, str, str], bool]  # (question, response, right answer) -> whether the response is right

_LABEL = re.compile(r"(?:exact|final)\s+answer\W{0,4}[:：]", re.IGNORECASE)
_BRACES = re.compile(r"\\boxed\s*\{|[{}]")
_AS_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_SEPARATORS = re.compile("[,;]")


def normalise_answer(text: str) -> str:
    """Brings an answer to the form in which answers are compared.

    Args:
      text: any text.

    Returns:
      Its words in lower-case ASCII without punctuation and articles, one blank between them.
    """
    folded = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    words = re.sub(r"[^a-z0-9\s]", "", re.sub(r"[-/]", " ", folded)).split()
    return " ".join(word for word in words if word not in ("a", "an", "the"))


def final_answer(response: str) -> str:
    r"""Takes the short answer out of a response that labels it.

    Args:
      response: the policy's last message.

    Returns:
      Of what follows the last "Exact Answer:" or "Final answer:", else of all of it, what the last `\boxed{}` holds;
      without one the first line that says something after the label, or all where there is no label.
    """
    *before, said = _LABEL.split(response)
    if (boxed := _boxed(said)) is not None:
        return boxed
    return said.lstrip("* \t\r\n").partition("\n")[0].rstrip("* \t\r") if before else said.strip()


def _boxed(text: str) -> str | None:
    r"""What the last closed `\boxed{}` to open holds: braces inside it may nest, and `\text{…}` is what it holds."""
    begun, found = [], (0, 0)
    for brace in _BRACES.finditer(text):
        if brace.group() != "}":
            begun.append(brace)
        elif begun and (first := begun.pop()).group() != "{":
            found = max(found, (first.end(), brace.start()))
    return _AS_TEXT.sub(r"\1", text[slice(*found)]).strip() if found[1] else None


def exact_match(question: str, response: str, answer: str) -> bool:
    """Whether both answers are the same after `normalise_answer`.

    Answers of which nothing would be left (other scripts, mere punctuation) are compared in Unicode's compatible,
    case-folded form instead: two of them are not the same because both are emptied.
    """
    said, right = final_answer(response), answer
    if normalise_answer(right):
        return normalise_answer(said) == normalise_answer(right)
    return _folded(said) == _folded(right)


def gaia_match(question: str, response: str, answer: str) -> bool:
    """Whether an answer is right by the rules of *GAIA: a benchmark for General AI Assistants* (arXiv:2311.12983).

    The right answer says how: a number is compared as a number, without "$", "%" and thousands' commas; one with a
    comma or semicolon as a list, of the same length, element by element, numbers as numbers, the others with their
    punctuation; anything else in lower case without blanks and punctuation.

    One deviation from the published scorer: there an answer that is no number counts as infinite, so that it would
    match a right answer of "inf"; here "inf" and "nan" are words.
    """
    said = final_answer(response)
    if _number(answer) is not None:
        return _same_number(said, answer)
    if _SEPARATORS.search(answer):
        theirs, mine = _SEPARATORS.split(answer), _SEPARATORS.split(said)
        return len(theirs) == len(mine) and all(map(_same_element, mine, theirs))
    return _squeezed(said).translate(_NO_PUNCTUATION) == _squeezed(answer).translate(_NO_PUNCTUATION)


GRADERS: dict[str, Grader] = {"exact": exact_match, "gaia": gaia_match}

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def _folded(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _squeezed(text: str) -> str:
    return re.sub(r"\s", "", text).lower()


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _same_number(said: str, right: str) -> bool:
    number = _number(re.sub("[$%,]", "", said))
    return number is not None and number == _number(right)


def _same_element(said: str, right: str) -> bool:
    return _same_number(said, right) if _number(right) is not None else _squeezed(said) == _squeezed(right)
