"""Messages to token ids: which of them are the agent's own, and what is left when they do not fit."""

import tokenizers

from mpo_jax.models.tokenizer import ChatTokenizer
from mpo_jax.scoring.transcripts import InvalidTranscript, Tokens, Transcript

Tokenizer = ChatTokenizer | tokenizers.Tokenizer


def render(transcript: Transcript, tokenizer: Tokenizer) -> Tokens:
    """The ids of an episode: those of its file where it has them, else its messages in the tokenizer's frame.

    Our own tokenizer frames messages as the policy met them in training. A bare one gets a plain transcript,
    `[role]: text`, a line or more a message, as in the authors' code of *Progress Advantage* (arXiv:2606.26080); unlike
    there, only the text of an action counts as the agent's, not the role before it.

    Raises:
      InvalidTranscript: an id of the file is not one of the tokenizer's.
    """
    if transcript.tokens is not None:
        size = tokenizer.vocab_size if isinstance(tokenizer, ChatTokenizer) else tokenizer.get_vocab_size()
        if outside := [i for i in transcript.tokens.ids if not 0 <= i < size]:
            raise InvalidTranscript(f"tokens.ids has {outside[0]}, the tokenizer {size} ids: it is another model's")
        return transcript.tokens
    ids, owners, mask = [], [], []
    if not isinstance(tokenizer, ChatTokenizer):
        encoded = tokenizer.encode("a")  # for the tokens that begin a text; some tokenizers end it with others
        ids += encoded.ids[: encoded.special_tokens_mask.index(0)]
        owners, mask = [0] * len(ids), [False] * len(ids)
    for index, message in enumerate(transcript.messages):
        header, text = _frame(message.role, message.text, message.action, tokenizer)
        ids += header + text
        owners += [index] * (len(header) + len(text))
        mask += [False] * len(header) + [message.action] * len(text)
    return Tokens(ids, owners, mask)


def _frame(role: str, text: str, action: bool, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    if isinstance(tokenizer, ChatTokenizer):
        header = [tokenizer.assistant if action else tokenizer.user]
        return header, tokenizer.encode(text) + ([tokenizer.end_of_turn] if action else [])
    header, text = (tokenizer.encode(part, add_special_tokens=False).ids for part in (f"[{role}]:", f" {text}\n"))
    return header, text


def keep_last(tokens: Tokens, limit: int) -> Tokens:
    """The last `limit` tokens. What came before is cut off: an action without any token left scores 0."""
    if len(tokens.ids) <= limit:
        return tokens
    return Tokens(tokens.ids[-limit:], tokens.messages[-limit:], tokens.mask[-limit:])


def without_first(tokens: Tokens) -> Tokens:
    """The same, the first token never an action's: nothing predicts it."""
    return tokens if tokens.mask[:1] != [True] else Tokens(tokens.ids, tokens.messages, [False, *tokens.mask[1:]])
