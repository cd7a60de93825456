"""Environments of `verifiers`, either generation: 0.1.x (`load_environment(name)`) and 0.4 on (tasksets)."""

import asyncio
import os
from typing import Any

from mpo_jax.environments.adapting import require
from mpo_jax.environments.chat_harness import ChatHarness, Outcome

MODEL = "policy"  # the name that the environment asks for; the answer is always the policy's
_NO_KEY = "MPO_JAX_NO_KEY"  # the environment variable where it looks for a key, which our server needs none of


class Verifiers(ChatHarness):
    """One environment of `verifiers` (https://github.com/PrimeIntellect-ai/verifiers), played by the policy.

    The package runs its own loop, tools and rubric; its requests are the observations (see `chat_harness`). The reward
    is the rubric's, at the end.
    """

    def __init__(
        self,
        environment: str,
        arguments: dict[str, Any] | None = None,
        *,
        seconds: float = 300.0,
        turn_limit: int = 100,
        success: float = 1.0,
    ):
        """Loads the environment.

        Args:
          environment: the name of an installed environment (0.1.x) or taskset (0.4 on).
          arguments: of `load_environment` (0.1.x), or of its config beside `taskset.id` (0.4 on).
          seconds: that the package may take between two requests.
          turn_limit: turns after which an episode is truncated.
          success: the lowest reward that is a success.

        Raises:
          ImportError: the package is not installed.
          ValueError: a taskset without an end.
        """
        require("verifiers", "verifiers")
        import verifiers

        os.environ.setdefault(_NO_KEY, "none")
        modern = not hasattr(verifiers, "load_environment")
        play = _modern(environment, arguments or {}) if modern else _classic(environment, arguments or {})

        def run(url: str, task: int) -> Outcome:
            reward, metrics = asyncio.run(play(url, task))
            return f"reward {reward:g}", reward, {"success": reward >= success} | metrics

        super().__init__(run, name=environment, seconds=seconds, turn_limit=turn_limit)


def _classic(name: str, arguments: dict[str, Any]):
    """A rollout of generation 0.1.x."""
    import verifiers
    from verifiers.types import ClientConfig

    environment = verifiers.load_environment(name, **arguments)
    rows = environment.get_dataset() if environment.dataset is not None else environment.get_eval_dataset()

    async def play(url: str, task: int) -> tuple[float, dict[str, Any]]:
        client = ClientConfig(api_base_url=url, api_key_var=_NO_KEY, max_retries=0)
        row = dict(rows[task]) | {"example_id": task}
        results = await environment.generate([row], client=client, model=MODEL, max_concurrent=1)
        output = results["outputs"][0]
        metrics = output.get("metrics") or {}
        return float(output["reward"]), {f"metric_{key}": float(value) for key, value in metrics.items()}

    return play


def _modern(name: str, arguments: dict[str, Any]):
    """An episode of generation 0.4 on, its harness in a subprocess of this machine."""
    import verifiers.v1 as vf

    config = {"taskset": {"id": name}, "agent": {"runtime": {"type": "subprocess"}}} | arguments
    environment = vf.load_environment(vf.resolve_env_config(config))
    if not environment.taskset.bounded:
        raise ValueError(f"{name}: its tasks never end; bound them first")
    tasks = list(environment.taskset)

    async def play(url: str, task: int) -> tuple[float, dict[str, Any]]:
        client = vf.EvalClientConfig(base_url=url, api_key_var=_NO_KEY)
        async with environment.serving():
            episode = await environment.run_episode(tasks[task], vf.ModelContext(model=MODEL, client=client))
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if errors or not episode.traces:
            raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "no trace")
        (trace, *_) = episode.traces
        metrics = {f"metric_{key}": float(value) for key, value in trace.metrics.items() if value is not None}
        return float(trace.reward), metrics

    return play
