"""`experiments.train` with a language model's folder: its own chat template, all tokens as training sees them."""

import json
import subprocess
import sys

import numpy as np
import pytest
from models import chats, tiny

from experiments import parts, train, workdirs
from experiments.configs import search_smollm2
from mpo_jax.models import huggingface, weights
from mpo_jax.store.sqlite import EpisodeStore
from mpo_jax.store.weights import PublishedWeights
from mpo_jax.training.metrics import read_metrics

END = chats.tokenizer().token_to_id("<|im_end|>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random Llama in Hugging Face's format, whose turns end by chance."""
    path = tmp_path_factory.mktemp("model")
    config = tiny.config(vocab_size=chats.tokenizer().get_vocab_size(), qk_norm=False)
    huggingface.save(path, config, tiny.params(config), dtype=np.float32)
    chats.tokenizer().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": chats.PLAIN}))
    return path


def config_of(folder, **changes):
    config = search_smollm2.get_config()
    small = {"num_steps": 1, "episodes_per_step": 4, "group_size": 2, "evaluation_questions": 1, "num_slots": 4}
    small |= {"max_turn_tokens": 4, "max_observation_tokens": 8, "turn_limit": 2, "microbatches": 1, "row_tokens": 896}
    config.update({"model": str(folder), "context_length": 896, **small, **changes})
    return config


@pytest.mark.slow
def test_it_trains_on_episodes_in_the_models_own_chat(folder, tmp_path, set_flags):
    set_flags(train, CONFIG=config_of(folder), WORKDIR=str(tmp_path), ROLLOUT="inline")
    train.main(None)
    (row,) = read_metrics(tmp_path / "metrics.jsonl")[-1:]
    assert row["step"] == 1
    store = EpisodeStore(tmp_path / "episodes.sqlite")
    model = parts.load_model(config_of(folder))
    episodes = list(store.episodes())
    store.close()
    assert len(episodes) == 4
    for episode in episodes:
        text = chats.tokenizer().decode(episode.tokens, skip_special_tokens=False)
        assert text.startswith(f"<|im_start|>system\n{search_smollm2.SYSTEM}<|im_end|>\n<|im_start|>user\n")
        first = episode.action_mask.index(True)
        assert episode.tokens[:first] == model.tokenizer.render_prompt(episode.metadata["observations"][0], 8)
        assert END in episode.tokens[:first]


SHOWS_PROMPT = """
import sys
from absl import app
from experiments import monitor, playing

def show(rollout, number):
    print(rollout.tokenizer.decode(rollout.tokenizer.render_prompt("q")))
    sys.exit()

playing.play = show
app.run(monitor.main)
"""


def test_the_monitor_plays_with_the_system_message_too(folder, tmp_path):
    """In a process of its own, since two programs' flags do not go together in one."""
    config = config_of(folder)
    parts.settle_groups(config, parts.make_algorithm(config))
    workdirs.claim(tmp_path, config)
    PublishedWeights(tmp_path / "weights").publish(weights.flatten(parts.load_model(config).params), 0)
    command = [sys.executable, "-c", SHOWS_PROMPT, f"--workdir={tmp_path}", "--questions=1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.startswith(f"system\n{search_smollm2.SYSTEM}\nuser\nq"), done.stderr


def test_a_tiny_model_has_no_system_message():
    config = search_smollm2.get_config()
    config.model = "search_tiny"
    with pytest.raises(ValueError, match=r"the chat of search_tiny has no system message"):
        parts.load_model(config)


def test_the_tokenizer_of_the_run_begins_with_the_configured_system_message(folder):
    model = parts.load_model(config_of(folder, system="Be brief."))
    assert model.tokenizer.decode(model.tokenizer.render_prompt("q")).startswith("system\nBe brief.\nuser\nq")
    assert model.config.vocab_size == model.tokenizer.vocab_size
