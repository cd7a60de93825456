"""Text to ids and back, and the few ids that frame a turn."""

from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

PAD, USER, ASSISTANT, END = "<pad>", "<user>", "<assistant>", "<end>"
SPECIALS = (PAD, USER, ASSISTANT, END)


def train_bpe(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """A lower-casing byte-level BPE with `SPECIALS` as its first ids."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIALS), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def pieces(tokenizer: tokenizers.Tokenizer, ids: list[int]) -> list[str]:
    """The text of each id by itself, for display: special tokens by their names, cut characters as �."""
    added, names = tokenizer.get_added_tokens_decoder(), [tokenizer.id_to_token(i) for i in ids]
    return [
        f"⟨{i}⟩" if name is None else name if i in added else tokenizer.decoder.decode([name])
        for i, name in zip(ids, names, strict=True)
    ]


class ChatTokenizer:
    """A tokenizer with an append-only chat frame: `<user> text <assistant> sampled… <end> <user> text <assistant> …`.

    What the environment says is rendered here, with the header that opens the next action; the action itself, its
    `<end>` included, is sampled and never re-tokenised.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        ids = {name: tokenizer.token_to_id(name) for name in SPECIALS}
        if None in ids.values():
            raise ValueError(f"the tokenizer lacks {[name for name, i in ids.items() if i is None]}")
        self.tokenizer = tokenizer
        self.vocab_size: int = tokenizer.get_vocab_size()
        self.pad, self.user, self.assistant, self.end_of_turn = (ids[name] for name in SPECIALS)
        self.stop_ids = (self.end_of_turn,)

    @classmethod
    def load(cls, path: Path | str) -> "ChatTokenizer":
        """Reads a `tokenizer.json`.

        Raises:
          ValueError: it is missing, is none, or lacks the special tokens.
        """
        try:
            return cls(tokenizers.Tokenizer.from_str(Path(path).read_text()))
        except Exception as error:  # `tokenizers` raises no narrower one
            raise ValueError(f"{path}: no readable tokenizer.json: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; a special token spelt out in it stays text."""
        return self.tokenizer.encode(text.replace("<", "< "), add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        """Text of ids, special tokens left out."""
        return self.tokenizer.decode(ids, skip_special_tokens=True).strip()

    def render_observation(self, text: str, limit: int | None = None) -> list[int]:
        """What the environment contributes before an action: the text, cut to `limit` ids, in its frame."""
        return [self.user, *self.encode(text)[:limit], self.assistant]

    def render_hint(self, text: str) -> list[int]:
        """A privileged hint, to be read before an observation; no rollout ever contains one."""
        return [self.user, *self.encode(f"hint: {text}")]

    def render_prompt(self, text: str, limit: int | None = None) -> list[int]:
        """The first observation; this frame has no preamble, so it is rendered like any other."""
        return self.render_observation(text, limit)
