"""The loop of a run: takes a batch, trains on it, publishes, and remembers."""

import dataclasses
import functools
import time
from collections.abc import Callable

from mpo_jax.models import weights
from mpo_jax.store.sqlite import EpisodeStore
from mpo_jax.store.weights import PublishedWeights
from mpo_jax.training.checkpoints import Checkpoints
from mpo_jax.training.learner import Learner
from mpo_jax.training.metrics import MetricsLog
from mpo_jax.training.profiling import Stopwatch, throughput
from mpo_jax.training.state import TrainState, judge_critic


@dataclasses.dataclass(frozen=True)
class Loop:
    """A learner, and what it takes from and gives to.

    Attributes:
      learner: what a batch does.
      store: where episodes come from.
      published: the policy's weights for the rollout, adapters merged, of the first process; version = steps trained.
      checkpoints: where the state is kept, less the base of adapters.
      metrics_log: where numbers go.
      wait: called while the store has no batch yet; makes episodes, or sleeps and raises if nobody will.
      evaluate: metrics of a state on fixed questions.
      should_stop: asked between steps; the run ends with a checkpoint.
    """

    learner: Learner
    store: EpisodeStore
    published: PublishedWeights
    checkpoints: Checkpoints
    metrics_log: MetricsLog
    wait: Callable[[], None]
    evaluate: Callable[[TrainState], dict[str, float]]
    should_stop: Callable[[], bool]

    def run(self, state: TrainState) -> TrainState:
        """Trains until `num_steps`, from a state that is new or restored, and returns the last one.

        What the steps after the state's took from the store is given back first, so a resumed run trains on exactly
        what the interrupted one would have.
        """
        s, step = self.learner.settings, int(state.step)
        self.store.rewind(step - 1)
        self._publish(state, step)
        while step < s.num_steps and not self.learner.cluster.any(self.should_stop()):
            trained = self._step(state, step)
            if trained is None:
                break
            state, step = trained, step + 1
            if step % s.checkpoint_every == 0 or step == s.num_steps:
                self._save(state, step)
        if step == s.num_steps:
            self.metrics_log.write(step, self.evaluate(state))
        elif step % s.checkpoint_every:
            self._save(state, step)
        self.checkpoints.wait()
        return state

    def _step(self, state: TrainState, step: int) -> TrainState | None:
        """The state after one more batch; None where the run was told to stop before there was one."""
        start, watch = time.monotonic(), Stopwatch()
        with watch("evaluation"):
            extra = self.evaluate(state) if step % self.learner.settings.evaluate_every == 0 else {}
            if "explained_variance_held_out" in extra:
                state = judge_critic(state, extra["explained_variance_held_out"])
        with self.metrics_log.traced(step):
            with watch("wait"):
                take = functools.partial(self.learner.take, self.store, step)
                groups = self.learner.cluster.take(take, self.wait, self.should_stop, step)
            if groups is None:
                return None
            state, metrics = self.learner.update(state, [episode for group in groups for episode in group])
            with watch("publish"):
                self._publish(state, step + 1)
        metrics |= extra | watch.seconds
        metrics |= {"seconds": time.monotonic() - start, "pending_groups": self.store.pending()}
        self.metrics_log.write(step, metrics | throughput(metrics))
        return state

    def _publish(self, state: TrainState, version: int) -> None:
        policy = self.learner.policy(state)
        if self.learner.cluster.index == 0:
            self.published.publish(weights.flatten(policy), version)

    def _save(self, state: TrainState, step: int) -> None:
        self.checkpoints.save(step, state.replace(base=None))
