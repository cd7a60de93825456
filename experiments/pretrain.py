r"""Makes the warm start: a tiny transformer that imitates a noisy scripted policy.

    python -m experiments.pretrain --output=runs/search_tiny

wrote the packaged `mpo_jax/models/data/search_tiny` in about 25 minutes on 2 CPU cores; the flags below are its own.
"""

import time
from pathlib import Path

from absl import app, flags
from tqdm import tqdm

from experiments import parts
from mpo_jax.models.pretrained import Pretrained, save
from mpo_jax.models.tokenizer import ChatTokenizer, train_bpe
from mpo_jax.models.transformer import TransformerConfig
from mpo_jax.training.imitation import Curriculum, Demonstrations, imitate, tokenizer_texts

OUTPUT = flags.DEFINE_string("output", None, "Folder to write config, tokenizer and weights to.", required=True)
STEPS = flags.DEFINE_integer("steps", 2500, "Gradient steps.")
ROWS = flags.DEFINE_integer("rows", 16, "Rows of a batch.")
ROW_TOKENS = flags.DEFINE_integer("row_tokens", 384, "Tokens of a row.")
LEARNING_RATE = flags.DEFINE_float("learning_rate", 4e-3, "The highest.")
VOCAB_SIZE = flags.DEFINE_integer("vocab_size", 2048, "Ids of the tokenizer.")
WIDTH = flags.DEFINE_integer("width", 96, "Of the residual stream.")
LAYERS = flags.DEFINE_integer("layers", 3, "Blocks.")
HEADS = flags.DEFINE_integer("heads", 4, "Query heads; half as many for keys.")
HEAD_DIM = flags.DEFINE_integer("head_dim", 32, "Of one head.")
NOISE = flags.DEFINE_float("noise", 0.3, "Probability of a mistake of the scripted policy.")
SEED = flags.DEFINE_integer("seed", 0, "Of data and initialisation.")


def main(_):
    parts.keep_freed_memory()
    start = time.monotonic()
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
    curriculum = Curriculum(noise=NOISE.value)
    data = Demonstrations(tokenizer, curriculum, rows=ROWS.value, row_tokens=ROW_TOKENS.value, seed=SEED.value)
    with tqdm(total=STEPS.value, unit="step") as bar:

        def report(step, loss):
            if step % 20 == 0:
                bar.set_postfix_str(f"loss={float(loss):.3f}")
            bar.update()

        params = imitate(
            config, data, num_steps=STEPS.value, learning_rate=LEARNING_RATE.value, seed=SEED.value, report=report
        )
    save(Path(OUTPUT.value), Pretrained(config=config, params=params, tokenizer=tokenizer))
    print(f"wrote {OUTPUT.value} after {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    app.run(main)
