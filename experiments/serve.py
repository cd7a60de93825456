r"""Serves a model's sampler by the OpenAI protocol: completions with token ids, chat, models, log-probs, streaming.

    python -m experiments.serve --model=search_tiny
    python -m experiments.serve --model=search_tiny --weights=runs/quickstart/weights
    python -m experiments.serve --model=search_tiny --host=0.0.0.0 --key_file=KEY

It serves this machine unless told otherwise, and others with a key only. `POST /update_weights_from_disk` with the
path of a version in `--weights` loads that version; without the flag the weights stay as they are.
"""

import asyncio
import contextlib
import re
from pathlib import Path

from absl import flags, logging

from experiments import parts, programs
from mpo_jax.models import pretrained, weights
from mpo_jax.rollout.batcher import Batcher
from mpo_jax.rollout.engine import Sampler
from mpo_jax.rollout.openai_server import Service, serve
from mpo_jax.store.weights import PublishedWeights, WeightsError

MODEL = flags.DEFINE_string("model", "search_tiny", "A packaged model or a folder.")
WEIGHTS = flags.DEFINE_string("weights", None, "Folder of a run's published weights; the newest are loaded at first.")
HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to serve at.")
PORT = flags.DEFINE_integer("port", 8001, "Port to serve at.", 1, 65535)
KEY_FILE = flags.DEFINE_string("key_file", None, "File with the key that clients must send.")
SLOTS = flags.DEFINE_integer("num_slots", 32, "Requests side by side.", lower_bound=1)
CONTEXT = flags.DEFINE_integer("context_length", 384, "Most ids of a context.", lower_bound=2)
TURN = flags.DEFINE_integer("max_turn_tokens", 256, "Most ids of an answer.", lower_bound=1)
STEPS = flags.DEFINE_integer("steps_per_call", 8, "Ids after which waiting requests may join.", lower_bound=1)


def main(_):
    logging.set_verbosity(logging.WARNING)
    parts.keep_freed_memory()
    model = pretrained.load(MODEL.value)
    engine = Sampler(
        model.config,
        num_slots=SLOTS.value,
        context_length=CONTEXT.value,
        max_turn_tokens=min(TURN.value, CONTEXT.value),
        stop_ids=model.tokenizer.stop_ids,
        turns_per_call=1,
        steps_per_call=STEPS.value,
    )
    engine.load(model.params, 0)
    published = PublishedWeights(WEIGHTS.value) if WEIGHTS.value else None

    def load(path: str) -> None:
        match = re.fullmatch(r"weights-(\d+)\.safetensors", Path(path).name)
        if match is None or Path(path).resolve().parent != published.folder.resolve():
            raise ValueError(f"{path}: expected weights-VERSION.safetensors in {published.folder}")
        try:
            arrays, version = published.load(int(match[1]))
        except WeightsError as error:
            raise ValueError(str(error)) from error
        engine.load(weights.unflatten(model.params, arrays), version)

    if published is not None and (newest := published.latest_version()) is not None:
        load(str(published.path(newest)))
    key = Path(KEY_FILE.value).read_text().strip() if KEY_FILE.value else None
    service = Service(
        Batcher(engine),
        model.tokenizer,
        model.tokenizer.tokenizer,
        name=Path(MODEL.value).name,
        key=key,
        load=load if published else None,
    )
    served = f"http://{HOST.value}:{PORT.value}/v1 serves {service.name}, version {engine.version}"
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(service, HOST.value, PORT.value, lambda: print(served, flush=True)))


if __name__ == "__main__":
    programs.run(main)
