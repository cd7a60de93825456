r"""Makes the warm start: a tiny transformer that imitates a scripted policy, and in the end its mistakes.

    python -m experiments.pretrain --output=runs/a
    python -m experiments.pretrain --init=runs/a --output=runs/b --steps=1500 --learning_rate=2e-3
    python -m experiments.pretrain --init=runs/b --output=runs/c --noise=0.14 --steps=250 --learning_rate=1e-3

made the packaged `mpo_jax/models/data/search_tiny` (runs/c) in 60 minutes on two busy CPU cores. The first learns to
copy, then to imitate the policy without its noise, mostly over made-up names: to read out a value that it has never
seen is the hard part, which mistakes to imitate would hide. The second goes on with internet codes that are answered as
they are written, with their dot, which the policy left out when the first was made. The third learns mistakes, which
leave reinforcement learning its part.
"""

import dataclasses
import time
from pathlib import Path

from absl import flags
from flax import nnx
from tqdm import tqdm

from experiments import parts, programs
from mpo_jax.models.pretrained import Pretrained, load, save
from mpo_jax.models.tokenizer import ChatTokenizer, train_bpe
from mpo_jax.models.transformer import Transformer, TransformerConfig
from mpo_jax.training.imitation import Curriculum, Demonstrations, imitate, tokenizer_texts

OUTPUT = flags.DEFINE_string("output", None, "Folder to write config, tokenizer and weights to.", required=True)
STEPS = flags.DEFINE_integer("steps", 9000, "Gradient steps; the rate of the first is 0.", lower_bound=2)
ROWS = flags.DEFINE_integer("rows", 8, "Rows of a batch.", lower_bound=1)
ROW_TOKENS = flags.DEFINE_integer("row_tokens", 384, "Tokens of a row.", lower_bound=2)
LEARNING_RATE = flags.DEFINE_float("learning_rate", 3e-3, "The highest.")
VOCAB_SIZE = flags.DEFINE_integer("vocab_size", 3072, "Ids of the tokenizer.", lower_bound=260)
WIDTH = flags.DEFINE_integer("width", 96, "Of the residual stream.", lower_bound=1)
LAYERS = flags.DEFINE_integer("layers", 3, "Blocks.", lower_bound=1)
HEADS = flags.DEFINE_integer("heads", 4, "Query heads; half as many for keys.", lower_bound=2)
HEAD_DIM = flags.DEFINE_integer("head_dim", 32, "Of one head.", lower_bound=2)
NOISE = flags.DEFINE_float("noise", 0.0, "Probability of a mistake of the scripted policy.")
RENAMING = flags.DEFINE_float("renaming", 0.8, "Share of demonstrations over made-up names.")
INIT = flags.DEFINE_string("init", None, "Folder to go on from: its shape, tokenizer and weights; copying is learnt.")
SEED = flags.DEFINE_integer("seed", 0, "Of data and initialisation.")


def main(_):
    parts.keep_freed_memory()
    Path(OUTPUT.value).mkdir(parents=True, exist_ok=True)  # what cannot be written is told before an hour of work
    start = time.monotonic()
    model = load(INIT.value) if INIT.value else new_model()
    curriculum = Curriculum(noise=NOISE.value, renaming=RENAMING.value)
    data = Demonstrations(model.tokenizer, curriculum, rows=ROWS.value, row_tokens=ROW_TOKENS.value, seed=SEED.value)
    if INIT.value:
        data.difficulty = 1.0
    with tqdm(total=STEPS.value, unit="step") as bar:

        def report(step, loss):
            if step % 20 == 0:
                bar.set_postfix_str(f"loss={float(loss):.3f}")
            bar.update()

        params = imitate(model, data, num_steps=STEPS.value, learning_rate=LEARNING_RATE.value, report=report)
    save(Path(OUTPUT.value), dataclasses.replace(model, params=params))
    print(f"wrote {OUTPUT.value} after {time.monotonic() - start:.0f} s")


def new_model() -> Pretrained:
    """A tokenizer trained on the corpus, and a transformer that knows nothing."""
    tokenizer = ChatTokenizer(train_bpe(tokenizer_texts(), VOCAB_SIZE.value))
    config = TransformerConfig(
        vocab_size=tokenizer.vocab_size,
        width=WIDTH.value,
        num_layers=LAYERS.value,
        num_heads=HEADS.value,
        num_kv_heads=HEADS.value // 2,
        head_dim=HEAD_DIM.value,
        mlp_width=WIDTH.value * 5 // 2,
        rope_theta=100.0,  # contexts are short
        smeared_keys=True,
    )
    params = nnx.state(Transformer(config, rngs=nnx.Rngs(SEED.value)))
    return Pretrained(config=config, params=params, tokenizer=tokenizer)


if __name__ == "__main__":
    programs.run(main)
