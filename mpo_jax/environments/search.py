"""Multi-hop questions over a search engine: search, open a hit, answer."""

import re
import string
import zlib
from collections.abc import Sequence

import gymnasium

from mpo_jax.environments.corpus import Corpus, Document, Hit, factbook
from mpo_jax.environments.graders import normalise_answer
from mpo_jax.environments.questions import Question
from mpo_jax.environments.questions import questions as packaged_questions

CUT = ".."  # ends a text of which the rest is not shown
UNKNOWN_ACTION = "unknown action"
NO_HITS = "no hits"
MAXIMAL_TEXT = 4096
CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " \n"


class SearchEnvironment(gymnasium.Env):
    """Answers a question by `search <words>`, `open <n>` and `answer <text>`; any other action wastes a turn.

    The reward is 1 for the right answer, 0 otherwise. All observations are short and in lower case:
    first the question; after `search` one line a hit, "<n> <country> <section>: <field>: <start of its text>"; after
    `open` the document from that field on, "<country> <section>: <field>: <text> ; <next field>: <text>". Two dots
    end what is cut.
    """

    metadata = {"render_modes": []}  # noqa: RUF012  gymnasium's own convention

    def __init__(
        self,
        split: str = "train",
        questions: Sequence[Question] | None = None,
        corpus: Corpus | None = None,
        turn_limit: int = 6,
        limit: int = 3,
        snippet_words: int = 8,
        open_words: int = 32,
    ):
        """Sets the limits.

        Args:
          split: "train" or "held_out", whose questions `reset` draws.
          questions: what `reset` draws from, in place of the split's.
          corpus: what is searched; the Factbook by default.
          turn_limit: turns after which an episode without an answer is truncated.
          limit: hits shown by a search.
          snippet_words: words shown of a hit, after its title.
          open_words: words shown of an opened document, after its title.
        """
        self._questions = packaged_questions(split) if questions is None else questions
        self._corpus = corpus or factbook()
        self._turn_limit = turn_limit
        self._limit = limit
        self._snippet_words = snippet_words
        self._open_words = open_words
        self.observation_space = gymnasium.spaces.Text(MAXIMAL_TEXT, charset=CHARACTERS)
        self.action_space = gymnasium.spaces.Text(MAXIMAL_TEXT, min_length=0, charset=CHARACTERS)
        self._question: Question | None = None
        self._hits: list[Hit] = []
        self._turns = 0
        self._over = True

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        """Starts an episode.

        Args:
          seed: of the draw of questions; None goes on with the draws so far.
          options: {"question": a Question} asks that one, else one is drawn.

        Returns:
          The question's text, and info: task_id, state_id, success.
        """
        super().reset(seed=seed)
        self._question = (options or {}).get("question")
        if self._question is None:
            self._question = self._questions[self.np_random.integers(len(self._questions))]
        self._hits, self._turns, self._over = [], 0, False
        return self._question.text, self._info(self._question.text)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Takes one turn.

        Args:
          action: the policy's text.

        Returns:
          Observation, reward, terminated, truncated, and info: task_id, state_id, success and, when the episode is
          over, end_reason ("answer" or "turn_limit").

        Raises:
          RuntimeError: no episode is under way.
        """
        if self._over or self._question is None:
            raise RuntimeError("no episode is under way: call reset first")
        self._turns += 1
        verb, _, argument = action.strip().partition(" ")
        terminated = verb.lower() == "answer"
        success = terminated and normalise_answer(argument) == normalise_answer(self._question.answer)
        truncated = not terminated and self._turns >= self._turn_limit
        self._over = terminated or truncated
        observation = ("correct" if success else "wrong") if terminated else self._observe(verb.lower(), argument)
        info = self._info(observation, success)
        if self._over:
            info["end_reason"] = "answer" if terminated else "turn_limit"
        return observation, float(success), terminated, truncated, info

    def _info(self, observation: str, success: bool = False) -> dict:
        """Describes the state; equal observations of one task have equal ids in every process."""
        state_id = zlib.crc32(f"{self._question.task_id}\n{observation}".encode()) & 0x7FFFFFFF
        return {"task_id": self._question.task_id, "state_id": state_id, "success": success}

    def _observe(self, verb: str, argument: str) -> str:
        """Carries out a search or an opening."""
        if verb == "search":
            self._hits = self._corpus.search(argument, self._limit)
            lines = [
                f"{number} {_show(hit.document, hit.field, hit.field + 1, self._snippet_words)}"
                for number, hit in enumerate(self._hits, start=1)
            ]
            return "\n".join(lines) or NO_HITS
        if verb == "open" and (number := re.fullmatch(r"\s*([1-9])\s*", argument)):
            if int(number.group(1)) > len(self._hits):
                return NO_HITS
            hit = self._hits[int(number.group(1)) - 1]
            return _show(hit.document, hit.field, len(hit.document.fields), self._open_words)
        return UNKNOWN_ACTION


def _show(document: Document, first: int, last: int, limit: int) -> str:
    """Writes the title and the fields first..last-1, these cut to `limit` words, in lower case."""
    # A field has two words at least, so that these are more than enough of them.
    shown = document.fields[first : min(last, first + limit + 1)]
    words = " ; ".join(f"{name}: {text}" for name, text in shown).lower().split()
    if len(words) > limit:
        words[limit:] = [CUT]
    return f"{document.title.lower()}: {' '.join(words)}"
