"""SmolLM2-135M-Instruct takes a few steps on the search environment: a real language model through the same programs.

Command: `python -m experiments.train --config=experiments/configs/search_smollm2.py --workdir=runs/smollm2`. The model
is in requirements-envs.txt. A Hugging Face folder instead: `--config.model=path/to/folder`.
Paper: *Understanding R1-Zero-Like Training* (arXiv:2503.20783), Dr. GRPO: neither a critic nor a reference in memory.
Hardware, time and result to expect: low-rank adapters are trained beside float32 parameters (all of these with
`--config.lora.rank=0`). Seen: 2 steps of 2 episodes in rows of 384 tokens, evaluation and compilation included, took
140 seconds of processor time and 6 GB; a step of 2,048 tokens takes minutes on 2 CPU cores. No result: a model of this
size hardly ever answers, so that most groups are uniform and teach nothing.
"""

import ml_collections

from experiments.configs import search

SYSTEM = """You answer a question by searching. Every message of yours is one line, one of these three:
search <words>
open <number of a hit>
answer <the answer>
For example, "What is the capital of France?": you write "search france capital", then "open 1", then "answer Paris"."""


def get_config() -> ml_collections.ConfigDict:
    """The search experiment, smaller, for a language model."""
    config = search.get_config()
    config.algorithm, config.model, config.system = "dr_grpo", "smollm2", SYSTEM
    config.renaming = 0.0

    config.num_steps = 3
    config.episodes_per_step, config.group_size = 8, 4
    config.minibatches, config.microbatches = 1, 4
    config.row_tokens, config.row_sequences, config.row_multiple = 768, 2, 4
    config.lora.rank, config.learning_rate = 16, 1e-4

    config.num_slots = 8
    config.context_length = 768
    config.max_turn_tokens = 32
    config.max_observation_tokens = 128
    config.turn_limit = 4

    config.evaluate_every, config.evaluation_questions = 3, 4
    config.checkpoint_every = 3
    return config
