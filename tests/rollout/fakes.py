"""A scripted engine, a tokenizer of letters and a counting environment, small enough to follow by hand."""

import gymnasium

from mpo_jax.rollout.protocol import Generation

END = 0


class Letters:
    """One id a letter; `<` and `>` stand for what a template adds around the environment's text."""

    end_of_turn = END

    def decode(self, ids):
        return "".join(map(chr, ids))

    def render_prompt(self, text, limit=None):
        return [ord(letter) for letter in f"<{text[:limit]}>"]

    def render_observation(self, text, limit=None):
        return [ord("\n"), *self.render_prompt(text, limit)]


class ScriptedEngine:
    """Answers with `script(context, seed) -> ids`; a turn without the end-of-turn id finishes by "length"."""

    exact = True

    def __init__(self, script, *, num_slots=2, context_length=1000):
        self.script, self.num_slots, self.context_length = script, num_slots, context_length
        self.version, self.contexts, self.calls, self.loaded = 0, {}, [], []

    def generate(self, new_tokens, seeds):
        self.calls.append(new_tokens)
        return {slot: self.answer(slot, ids, seeds[slot]) for slot, ids in new_tokens.items()}

    def answer(self, slot, ids, seed):
        context = self.contexts.setdefault(slot, [])
        assert ids and len(context) + len(ids) < self.context_length, "asked for 0 new tokens"
        context += ids
        tokens = self.script(list(context), seed)
        context += tokens
        logprobs = [-(1.0 + index) for index in range(len(tokens))]
        return Generation(tokens, logprobs, "stop" if tokens[-1] == END else "length")

    def free(self, slot):
        self.contexts.pop(slot, None)

    def load(self, params, version):
        self.version = version
        self.loaded.append(version)


def say(text):
    """A script that always says the same and ends its turn."""
    return lambda context, seed: [*map(ord, text), END]


class Counting(gymnasium.Env):
    """Says its options' `say`, answers each action with it doubled, and ends after `turns` actions with reward 1."""

    def reset(self, *, seed=None, options=None):
        self.options, self.left, self.seed = options, options.get("turns", 2), seed
        if options.get("fail") == "reset":
            raise OSError("no documents")
        return options.get("say", "hi"), {"task_id": options.get("task", "count"), "state_id": 7, "question": "why"}

    def step(self, action):
        if self.options.get("fail") == "step":
            raise RuntimeError("tool crashed")
        self.left -= 1
        over = self.left == 0
        truncated = over and self.options.get("truncated", False)
        info = {"state_id": 8, "success": over, "unprintable": object()}
        return action * 2, float(over), over and not truncated, truncated, info
