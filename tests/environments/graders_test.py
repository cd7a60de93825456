"""Exact match and GAIA's rules, by hand."""

import pytest

from mpo_jax.environments.graders import GRADERS, exact_match, final_answer, gaia_match


@pytest.mark.parametrize(
    ("response", "short"),
    [
        ("Paris", "Paris"),
        ("Explanation: it is [12].\nExact Answer: Paris\nConfidence: 90%", "Paris"),
        ("**Exact Answer:** Paris", "Paris"),
        ("Final answer: no.\nWait.\nFINAL ANSWER: 17, 18", "17, 18"),
        (r"so \boxed{3} or rather \boxed{4}", "4"),
        (r"so \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"no \boxed{3}, \boxed{\text{New York}}", "New York"),
        (r"\boxed{4} is what I mean, not \boxed{5", "4"),
        (r"Final Answer: $\boxed{42}$.", "42"),
        ("### Final Answer:\n\n\\[\n\\boxed{42}\n\\]", "42"),
        ("**Final Answer:**\n\n**Paris**\nConfidence: 90%", "Paris"),
        ("Exact Answer:", ""),
        ("the final answer is Paris", "the final answer is Paris"),
        ("", ""),
    ],
)
def test_final_answer(response, short):
    assert final_answer(response) == short


@pytest.mark.parametrize(
    ("said", "right", "same"),
    [
        ("The São Tomé!", "sao tome", True),
        ("Exact Answer: port au prince", "Port-au-Prince", True),
        ("paris or london", "paris", False),
        ("", "paris", False),
        # Nothing of these is left in ASCII: they are compared as they are.
        ("東京", "東京", True),
        ("京都", "東京", False),
        ("", "東京", False),
        ("-", "+", False),
        ("the", "a", False),
    ],
)
def test_exact_match(said, right, same):
    assert exact_match("q", said, right) is same


@pytest.mark.parametrize(
    ("said", "right", "same"),
    [
        # A number: without $, % and commas.
        ("$1,234.50", "1234.5", True),
        ("17%", "17", True),
        ("17 apples", "17", False),
        ("1e3", "1000", True),
        ("", "0", False),
        ("nan", "nan", True),
        ("no number", "inf", False),
        # A list: in order, of the same length; punctuation counts in its words, numbers are numbers.
        ("a, b", "a,b", True),
        ("b, a", "a, b", False),
        ("a; b", "a, b", True),
        ("a, b, c", "a, b", False),
        ("3, $4.0", "3,4", True),
        ("3, four", "3,4", False),
        ("St. Louis, x", "St Louis, x", False),
        ("ST.LOUIS ,x", "St. Louis, x", True),
        # A string: without blanks, punctuation and capitals.
        ("sea gull", "Seagull", True),
        ("St. Louis", "St Louis", True),
        ("FINAL ANSWER: Rock-n-Roll.", "rock n roll", True),
        ("gulls", "gull", False),
    ],
)
def test_gaia_match(said, right, same):
    assert gaia_match("q", said, right) is same


def test_graders_are_named():
    assert {"exact": exact_match, "gaia": gaia_match} == GRADERS
