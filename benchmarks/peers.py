"""Single functions of verl, TRL and tunix, compiled from their installed files: to import is to import a framework.

The functions are theirs, unchanged. Stood in for is only what they ask of a framework: a config, or a model, which here
is the array of log-probs that it would compute.
"""

import __future__

import ast
import contextlib
import functools
import math
import pathlib
import sys
import types
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

ROOT = pathlib.Path(__file__).parents[1] / ".venv-peers"
INSTALLED = (ROOT / ".installed").exists()  # `make .venv-peers/.installed`
TRL_CHUNK = 32768  # _CHUNKED_LOGPROB_CHUNK_SIZE of trl/trainer/utils.py


def definitions(file: str, *names: str, **scope: Any) -> SimpleNamespace:
    """Functions, classes and constants of an installed file by name, without decorators, over the rest of their scope.

    Raises:
      ImportError: naming what the file lacks.
    """
    found = {}
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        name = node.targets[0] if isinstance(node, ast.Assign) else node
        found.setdefault(getattr(name, "id", getattr(name, "name", None)), node)
    if missing := [name for name in names if name not in found]:
        raise ImportError(f"{file} has no {', '.join(missing)}")
    nodes = [found[name] for name in names]
    for node in nodes:
        if not isinstance(node, ast.Assign):
            node.decorator_list = []
    code = compile(ast.Module(nodes, []), file, "exec", flags=__future__.annotations.compiler_flag)
    exec(code, scope)
    return SimpleNamespace(**{name: scope[name] for name in names})


class ActorConfig(SimpleNamespace):
    """What verl's losses read of theirs."""

    global_batch_info = types.MappingProxyType({})

    def get(self, name: str, default: Any) -> Any:
        return getattr(self, name, default)


@functools.cache
def verl() -> SimpleNamespace:
    """Advantages, losses and KL estimators of verl; `config` is an `ActorConfig`."""
    masked = definitions(
        "verl/utils/torch_functional.py",
        *("masked_sum", "masked_mean", "masked_var", "masked_whiten", "clip_by_value"),
        torch=torch,
    )
    return definitions(
        "verl/trainer/ppo/core_algos.py",
        *("compute_gae_advantage_return", "compute_grpo_outcome_advantage", "agg_loss", "compute_value_loss"),
        *("compute_policy_loss_vanilla", "compute_policy_loss_gspo", "kl_penalty_forward"),
        torch=torch,
        defaultdict=defaultdict,
        verl_F=masked,
        ActorConfig=ActorConfig,
        AlgoConfig=type("AlgoConfig", (), {}),
    )


@functools.cache
def tunix() -> SimpleNamespace:
    """Advantages and losses of tunix; the model of a loss is the array [B,T] that its forward pass would give."""
    common = definitions(
        "tunix/rl/common.py",
        *("aggregate_loss", "_check_get_norm", "compute_kl_divergence", "selective_log_softmax"),
        jax=jax,
        jnp=jnp,
        np=np,
    )
    common.compute_per_token_logps = lambda graphdef, logprobs, **_: (logprobs, jnp.zeros((*logprobs.shape, 1)))
    common.compute_score = lambda values, *_, **__: jnp.pad(values, ((0, 0), (0, 1)))
    core = definitions(
        "tunix/rl/algo_core.py",
        *("masked_mean", "masked_var", "masked_whiten", "compute_entropy_from_logits", "compute_gae_advantages"),
        *("ppo_policy_loss_fn", "ppo_value_loss_fn", "grpo_loss_fn", "compute_advantages"),
        jax=jax,
        jnp=jnp,
        np=np,
        common=common,
        nnx=SimpleNamespace(split=lambda model: (None, model)),
    )
    return SimpleNamespace(**vars(core), **vars(common))


@functools.cache
def trl() -> SimpleNamespace:
    """TRL's chunked log-prob, and the loss of its GRPO trainer as a function of (self, model, inputs)."""
    utils = types.ModuleType("trl.trainer.utils")
    utils.maybe_gather_lm_head_ctx = lambda *parameters: contextlib.nullcontext()  # what it is without DeepSpeed
    sys.modules.setdefault(utils.__name__, utils)  # the backward pass imports it
    chunked = definitions(
        "trl/kernels/chunked_logprob.py",
        *("TOKEN_CHUNK_SIZE", "OPTIONAL_OUTPUTS", "_BLOCK_SIZE", "_use_triton", "_addmm_fp32", "_torch_transform"),
        *("_forward_tile", "_backward_tile", "ChunkedLogProbFunction"),
        __package__="trl.kernels",
        torch=torch,
        math=math,
        _MM_OUT_DTYPE=True,
        _TRITON_AVAILABLE=False,
    )
    nan = definitions("trl/trainer/utils.py", "nanmin", "nanmax", torch=torch)
    trainer = definitions("trl/trainer/grpo_trainer.py", "_compute_loss", torch=torch, **vars(nan))
    return SimpleNamespace(chunked_logprobs=chunked.ChunkedLogProbFunction.apply, compute_loss=trainer._compute_loss)


def trl_grpo_loss(logprobs: torch.Tensor, inputs: dict[str, torch.Tensor], **settings: Any) -> torch.Tensor:
    """TRL's `_compute_loss` of given log-probs [B,T], under settings of its trainer that differ from its plainest."""
    plainest = {
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "max_completion_length": logprobs.shape[1],
    }
    off = ("aux_loss_enabled", "use_vllm", "use_adaptive_entropy", "_entropy_bonus_enabled")
    trainer = SimpleNamespace(
        **plainest | settings,
        **dict.fromkeys(off, False),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        current_gradient_accumulation_steps=1,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
    )
    ids = torch.zeros(logprobs.shape, dtype=torch.long)
    prompt = {"prompt_ids": ids[:, :0], "prompt_mask": ids[:, :0], "completion_ids": ids}
    return trl().compute_loss(trainer, None, prompt | inputs)
