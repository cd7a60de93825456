"""A conversation with tools against the template's own rendering of it."""

from fakes import ScriptedEngine
from models import chats

from mpo_jax.environments.document_search import DocumentSearchEnvironment
from mpo_jax.environments.documents import Document, DocumentIndex
from mpo_jax.environments.question_files import Task
from mpo_jax.models.tool_calls import ToolCall, render, render_response
from mpo_jax.rollout.chat import Chat
from mpo_jax.rollout.protocol import Generation

TOKENIZER = chats.chat(chats.THINKING)
CALL = render(ToolCall("get_document", {"docid": "a"}))
INDEX = DocumentIndex([Document("a", "Paris is the capital.")])


class Speaking(ScriptedEngine):
    """Says the messages of a list, one a turn; every second call is interrupted before any turn ends."""

    def __init__(self, *messages):
        super().__init__(lambda context, seed: self.encoded.pop(0))
        self.encoded = [[*TOKENIZER.encode(message), TOKENIZER.end_of_turn] for message in messages]
        self.context, self.waiting = [], {}

    def generate(self, new_tokens, seeds):
        if new_tokens:
            ids = self.encoded.pop(0)
            self.context += [*new_tokens[0], *ids]
            reason = "stop" if ids[-1] == TOKENIZER.end_of_turn else "length"
            self.waiting = {0: Generation(ids, [-1.0] * len(ids), reason)}
            return {}
        answers, self.waiting = self.waiting, {}
        return answers


def chat_of(engine):
    return Chat(engine, TOKENIZER, lambda text: DocumentSearchEnvironment([Task("", text, "")], INDEX))


def test_a_call_is_carried_out_and_the_next_question_goes_on_in_the_same_context():
    engine = Speaking(f"<think>\nlook\n</think>\n\n{CALL}", "Paris.", "Sure.")
    chat = chat_of(engine)
    found = [*chat.ask("Capital?"), *chat.ask("Sure?")]
    document = "Paris is the capital."
    assert [speaker for speaker, _ in found] == ["assistant", "tool", "assistant", "assistant"]
    assert [said for _, said in found][1:] == [document, "Paris.", "Sure."]
    messages = [
        chats.say("user", "Capital?"),
        chats.say("assistant", CALL),
        chats.say("user", render_response(document)),
        chats.say("assistant", "Paris."),
        chats.say("user", "Sure?"),
    ]
    appended = TOKENIZER.decode(engine.context).replace("<think>\nlook\n</think>\n\n", "")
    assert appended == TOKENIZER.decode(chats.whole(TOKENIZER, messages)) + "Sure."


def test_a_turn_that_was_cut_is_ended_before_the_next_question():
    engine = Speaking("Paris is", "Sure.")
    engine.encoded[0].pop()
    chat = chat_of(engine)
    assert [*chat.ask("Capital?"), *chat.ask("Sure?")] == [("assistant", "Paris is"), ("assistant", "Sure.")]
    messages = [chats.say("user", "Capital?"), chats.say("assistant", "Paris is"), chats.say("user", "Sure?")]
    assert engine.context == [*chats.whole(TOKENIZER, messages), *TOKENIZER.encode("Sure."), TOKENIZER.end_of_turn]


def test_a_malformed_call_is_answered_with_what_is_wrong_with_it():
    said = list(chat_of(Speaking("<tool_call>{</tool_call>", "Then no.")).ask("Capital?"))
    assert [speaker for speaker, _ in said] == ["assistant", "tool", "assistant"]
    assert "tool call 1 is no JSON" in said[1][1]
