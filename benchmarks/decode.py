"""Decoding beside `transformers.generate`: the same tiny weights, greedy, as many tokens, one pinned core.

python -m benchmarks.decode
"""

import functools
import os
import pathlib
import statistics
import tempfile
import time

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before the libraries count cores
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

from mpo_jax.models import huggingface  # noqa: E402
from mpo_jax.rollout.decoding import GREEDY  # noqa: E402
from mpo_jax.rollout.engine import Sampler  # noqa: E402

PROMPT, TOKENS, TURNS, OBSERVATION = 32, 64, 6, 32
SHAPE = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 384,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "eos_token_id": None,
    "bos_token_id": None,
}


def build():
    """A random Llama of `transformers`, and ours of its weights."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).float().eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        config, params = huggingface.load(pathlib.Path(folder))
    return theirs, config, params


def sampler(config, params, num_slots: int, length: int) -> Sampler:
    """Slots whose turns all go on to their limit: no id ends one."""
    engine = Sampler(
        config, num_slots=num_slots, context_length=length, max_turn_tokens=TOKENS, stop_ids=[], decoding=GREEDY
    )
    engine.load(params, 0)
    return engine


def one_turn(engine: Sampler, prompts: np.ndarray) -> np.ndarray:
    """The tokens [B,TOKENS] of one turn of every slot."""
    answers = engine.generate(dict(enumerate(prompts.tolist())), dict.fromkeys(range(len(prompts)), 0))
    for slot in answers:
        engine.free(slot)
    return np.array([answers[slot].tokens for slot in range(len(prompts))])


def their_turn(model, prompts: np.ndarray) -> np.ndarray:
    """The same by `transformers`."""
    with torch.inference_mode():
        ids = torch.tensor(prompts)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False)
    return out[:, prompts.shape[1] :].numpy()


def episodes(engine: Sampler, news: np.ndarray, *, keep_cache: bool) -> None:
    """Episodes of several turns [T,B,N]; without the kept cache every turn reads its whole context again."""
    for said in news:
        engine.generate(dict(enumerate(said.tolist())), dict.fromkeys(range(len(said)), 0))
        if not keep_cache:
            engine.load(engine._params, 0)
    for slot in range(news.shape[1]):
        engine.free(slot)


def race(contestants: dict, repeats: int) -> dict[str, float]:
    """Median seconds of each, run in turns after one run to warm up."""
    seconds = {name: [] for name in contestants}
    for repeat in range(repeats + 1):
        for name, contestant in contestants.items():
            start = time.process_time()
            contestant()
            seconds[name] += [time.process_time() - start] if repeat else []
    return {name: statistics.median(found) for name, found in seconds.items()}


def main() -> None:
    theirs, config, params = build()
    rng = np.random.default_rng(0)
    print("| batch | ours, tokens/s | transformers.generate, tokens/s | ratio |\n|---|---|---|---|")
    for batch in (1, 16, 64):
        prompts = rng.integers(0, SHAPE["vocab_size"], (batch, PROMPT))
        engine = sampler(config, params, batch, PROMPT + TOKENS)
        np.testing.assert_array_equal(one_turn(engine, prompts), their_turn(theirs, prompts))
        ways = {"ours": functools.partial(one_turn, engine), "theirs": functools.partial(their_turn, theirs)}
        seconds = race({name: functools.partial(way, prompts) for name, way in ways.items()}, 5)
        ours, other = (batch * TOKENS / seconds[name] for name in ways)
        print(f"| {batch} | {ours:,.0f} | {other:,.0f} | {ours / other:.1f} |")
    news = rng.integers(0, SHAPE["vocab_size"], (TURNS, 16, OBSERVATION))
    engine = sampler(config, params, 16, TURNS * (OBSERVATION + TOKENS))
    ways = {keep: lambda keep=keep: episodes(engine, news, keep_cache=keep) for keep in (True, False)}
    kept, anew = race(ways, 3).values()
    print(f"\n{TURNS} turns, 16 episodes: {kept:.2f} s with the cache kept over turns, {anew:.2f} s without")


if __name__ == "__main__":
    main()
