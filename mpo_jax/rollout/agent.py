"""The agent loop: episodes run side by side in an engine's slots, turn by turn.

The engine is sent only what the environment adds; see `rollout.conversation` for what becomes of an episode.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator

import gymnasium

from mpo_jax.rollout.conversation import Conversation, Job, Limits, whole_action
from mpo_jax.rollout.protocol import Engine, Generation, Tokenizer
from mpo_jax.store.episode import Episode


def run_episodes(
    engine: Engine,
    tokenizer: Tokenizer,
    make_environment: Callable[[], gymnasium.Env],
    jobs: Iterable[Job | None],
    *,
    limits: Limits = Limits(),
    executable: Callable[[list[int]], list[bool]] = whole_action,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[Episode]:
    """Runs the jobs, as many at a time as the engine has slots, and yields each episode as it ends.

    A slot takes the next job between two turns. What an episode samples depends on its job and the weights only.

    Args:
      engine: samples the turns.
      tokenizer: renders observations, reads actions.
      make_environment: a gymnasium environment of text; each is used for one episode after another. Its infos may
        hold `task_id`, `state_id` (default: a checksum of the observation), and printable values for the metadata.
      jobs: in the order in which they start. None says that there is none for now: it is asked again after the next
        turn, for as long as episodes run.
      limits: where episodes are cut.
      executable: marks the part of an action's ids that the environment executes.
      should_stop: asked before each call of the engine; once true, running episodes are given up and all ends.

    Yields:
      Finished episodes.

    Raises:
      ValueError: the engine answers a slot that it was not asked for.
    """
    idle: list[gymnasium.Env] = []

    def begin(job: Job | None) -> Conversation | None:
        if job is None:
            return None
        environment = idle.pop() if idle else make_environment()
        conversation = Conversation(job, environment, tokenizer, engine.context_length, limits, executable)
        conversation.start()
        return conversation

    slots, waiting = _Slots(engine, idle), map(begin, jobs)
    try:
        while True:
            yield from slots.fill(waiting)
            if not slots.running or should_stop():
                return
            yield from slots.play_turns()
    finally:
        slots.close()


class _Slots:
    """The engine's slots with the episodes in them, and the environments that rest."""

    def __init__(self, engine: Engine, idle: list[gymnasium.Env]):
        self.engine, self.idle = engine, idle
        self.running: dict[int, Conversation] = {}
        self._asked: dict[int, int] = {}  # slot -> version when its turn began, of the turns under way

    def fill(self, waiting: Iterator[Conversation | None]) -> Iterator[Episode]:
        """Gives free slots the episodes that come next, and yields those that ended before their first turn."""
        for slot in range(self.engine.num_slots):
            while slot not in self.running and (conversation := next(waiting, None)) is not None:
                if conversation.end_reason:
                    yield self._finish(conversation)
                else:
                    self.running[slot] = conversation
            if slot not in self.running:
                return  # no job for it: none for the others

    def play_turns(self) -> Iterator[Episode]:
        """Has the turns that end next acted upon, and yields the episodes that end with them or by the clock."""
        for slot, (generation, version) in self._sample_turns().items():
            self.running[slot].act(generation, version)
        for slot in list(self.running):
            self.running[slot].watch_the_clock()
            if self.running[slot].end_reason:
                self.engine.free(slot)
                self._asked.pop(slot, None)
                yield self._finish(self.running.pop(slot))

    def _sample_turns(self) -> dict[int, tuple[Generation, int]]:
        """The turns that end next, by slot, each with the oldest version that can have sampled any of it."""
        new = {slot: conversation for slot, conversation in self.running.items() if slot not in self._asked}
        self._asked |= dict.fromkeys(new, self.engine.version)
        generations = self.engine.generate(
            {slot: conversation.unread for slot, conversation in new.items()},
            {slot: conversation.next_seed() for slot, conversation in new.items()},
        )
        if generations.keys() - self._asked.keys():
            raise ValueError(f"the engine answered slots {sorted(generations)}, expected some of {sorted(self._asked)}")
        version = self.engine.version
        return {slot: (turn, min(self._asked.pop(slot), version)) for slot, turn in generations.items()}

    def _finish(self, conversation: Conversation) -> Episode:
        if conversation.error:  # its environment's state is unknown
            with contextlib.suppress(Exception):
                conversation.environment.close()
        else:
            self.idle.append(conversation.environment)
        return conversation.record()

    def close(self) -> None:
        """Gives up what still runs, and closes all environments."""
        for slot, conversation in self.running.items():
            self.engine.free(slot)
            self.idle.append(conversation.environment)
        for environment in self.idle:
            environment.close()
