"""Transcripts of a policy in the search environment, over made-up names if wanted, to imitate."""

import random
import re

from mpo_jax.environments.questions import Question
from mpo_jax.environments.search import SearchEnvironment
from mpo_jax.environments.search_policy import ScriptedPolicy

ONSETS = (*"bcdfghjklmnprstvwz", "br", "ch", "dr", "fl", "gr", "kl", "pr", "sh", "sk", "st", "th", "tr")
VOWELS = (*"aeiou", "ai", "ea", "ia", "oo")
CODAS = ("", "", "", *"lmnrst", "nd", "rk", "st")


def made_up_name(rng: random.Random) -> str:
    """Makes up a pronounceable name.

    Args:
      rng: what it is drawn from.

    Returns:
      One to three words of one to three syllables each, in lower case.
    """
    lengths = [rng.randint(1, 3) for _ in range(rng.choices((1, 2, 3), (6, 3, 1))[0])]
    return " ".join(
        "".join(rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(length)) + rng.choice(CODAS)
        for length in lengths
    )


def renamed(text: str, rename: dict[str, str]) -> str:
    """Puts names in the place of others, all at once, so that no new name is renamed again.

    Args:
      text: any text.
      rename: old name -> new name. Whole words only, in any case; of names that overlap, the longest counts.

    Returns:
      The text with the new names.
    """
    new_names = {old.lower(): new for old, new in rename.items() if old}
    if not new_names:
        return text
    longest_first = "|".join(map(re.escape, sorted(new_names, key=len, reverse=True)))
    return re.sub(rf"(?<!\w)(?:{longest_first})(?!\w)", lambda old: new_names[old.group().lower()], text, flags=re.I)


def demonstrate(
    question: Question, policy: ScriptedPolicy, environment: SearchEnvironment, rename: dict[str, str] | None = None
) -> list[tuple[str, str]]:
    """Lets a policy play one episode.

    Args:
      question: the question.
      policy: who acts.
      environment: where.
      rename: old name -> new name, in every text of the transcript; `question.entities` are what can be renamed.

    Returns:
      (observation, action) pairs, in order.
    """
    observation, _ = environment.reset(options={"question": question})
    policy.reset(question)
    transcript, over = [], False
    while not over:
        action = policy.act(observation)
        transcript.append((renamed(observation, rename or {}), renamed(action, rename or {})))
        observation, _, terminated, truncated, _ = environment.step(action)
        over = terminated or truncated
    return transcript
