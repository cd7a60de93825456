"""Tokens a second of scoring, next to `transformers` computing the same log-probs with the same weights.

    python -m benchmarks.scoring
    python -m benchmarks.scoring --layers=30    # the shape of SmolLM2-135M

Weights are random: they change no time. Both sides have one core and are measured in turns, in float32. Two ways of
using `transformers`: an episode at a time, as in the code of *Progress Advantage* (the whole table of log-probs, then
those of the tokens), and padded batches of eight. A third of the tokens are actions; only these have log-probs here.
"""

import os
import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from absl import app, flags

from benchmarks import measure
from experiments import parts
from mpo_jax.models import huggingface
from mpo_jax.scoring.likelihoods import Evaluator
from mpo_jax.scoring.transcripts import Tokens

LAYERS = flags.DEFINE_integer("layers", 6, "Of a model of SmolLM2's widths and vocabulary.", lower_bound=1)
EPISODES = flags.DEFINE_integer("episodes", 16, "How many, of 64 to 1,024 tokens.", lower_bound=1)
REPEATS = flags.DEFINE_integer("repeats", 3, "How often each is measured.", lower_bound=1)
BATCH = 8


def make_episodes(number: int) -> list[Tokens]:
    """Lengths spread evenly over their logarithm; turns of 60 ids read and 30 sampled."""
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.uniform(np.log(64), np.log(1024), number)).astype(int)
    mask = [index % 90 >= 60 for index in range(1024)]
    return [Tokens(rng.integers(0, 49_152, n).tolist(), [0] * n, mask[:n]) for n in lengths]


def make_model() -> transformers.PreTrainedModel:
    config = transformers.LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        num_hidden_layers=LAYERS.value,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
    )
    return transformers.LlamaForCausalLM(config).float().eval()


@torch.no_grad()
def peer(model: transformers.PreTrainedModel, episodes: list[Tokens], batch: int) -> list[np.ndarray]:
    """Log-probs of the actions, `batch` episodes at a time."""
    found = []
    for start in range(0, len(episodes), batch):
        some = episodes[start : start + batch]
        width = max(len(one.ids) for one in some)
        ids, seen = (torch.zeros(len(some), width, dtype=torch.long) for _ in range(2))
        for row, one in enumerate(some):
            ids[row, : len(one.ids)], seen[row, : len(one.ids)] = torch.tensor(one.ids), 1
        log_p = torch.log_softmax(model(ids, attention_mask=seen).logits[:, :-1].float(), dim=-1)
        chosen = log_p.gather(2, ids[:, 1:, None])[..., 0].numpy()
        found += [chosen[row, : len(one.ids) - 1][np.array(one.mask)[1:]] for row, one in enumerate(some)]
    return found


def main(_):
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # before either library starts its threads
    torch.set_num_threads(1)
    parts.keep_freed_memory()
    episodes, model = make_episodes(EPISODES.value), make_model()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config, params = huggingface.load(Path(folder))
    evaluator = Evaluator(config, params, k=0, max_tokens=1024, batch_tokens=2048)
    ways = {
        "mpo_jax, packed": lambda: [one.logprobs for one in evaluator(episodes)],
        "transformers, one at a time": lambda: peer(model, episodes, 1),
        f"transformers, batches of {BATCH}": lambda: peer(model, episodes, BATCH),
    }
    results = {name: np.concatenate(way()) for name, way in ways.items()}  # compiles, and shows that they agree
    ours = results["mpo_jax, packed"]
    for name, values in results.items():
        print(f"{name:30} differs by {np.abs(values - ours).max():.1e} at most")
    number = sum(len(one.ids) for one in episodes)
    print(f"\nBefore: {measure.machine()}.\n")
    rows = measure.run(measure.Case(f"{number:,} tokens, {LAYERS.value} layers", ways, REPEATS.value))
    print(measure.table(rows))
    rates = (f"{row.contestant} {number / statistics.median(row.seconds):,.0f}" for row in rows)
    print(f"\nTokens a second of processor time: {'; '.join(rates)}.\n\nAfter: {measure.machine()}.")


if __name__ == "__main__":
    app.run(main)
