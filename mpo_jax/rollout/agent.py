"""The agent loop: episodes run side by side in an engine's slots, turn by turn.

The engine is sent only what the environment adds; see `rollout.conversation` for what becomes of an episode. While an
environment is at work, in a thread, the engine samples the turns of the others.
"""

import concurrent.futures
import contextlib
from collections.abc import Callable, Iterable, Iterator

import gymnasium

from mpo_jax.rollout.conversation import Conversation, Job, Limits, whole_action
from mpo_jax.rollout.protocol import Engine, Generation, Tokenizer
from mpo_jax.store.episode import Episode

_PATIENCE = 1.0  # seconds without an answer of any environment before `should_stop` is asked again


def run_episodes(
    engine: Engine,
    tokenizer: Tokenizer,
    make_environment: Callable[[], gymnasium.Env],
    jobs: Iterable[Job | None],
    *,
    limits: Limits = Limits(),
    executable: Callable[[list[int]], list[bool]] = whole_action,
    threads: int = 0,
    resting: list[gymnasium.Env] | None = None,
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
      threads: in which environments reset and step, one call each at a time; 0: here, while the engine waits.
      resting: environments to begin with; all are left there at the end. Without it, all are closed.
      should_stop: asked before each call of the engine, and each second while all environments are at work; once true,
        running episodes are given up, and all ends when the environments have answered.

    Yields:
      Finished episodes.

    Raises:
      ValueError: the engine answers a slot that it was not asked for.
    """
    idle = [] if resting is None else resting

    def begin(job: Job | None) -> Conversation | None:
        if job is None:
            return None
        environment = idle.pop() if idle else make_environment()
        return Conversation(job, environment, tokenizer, engine.context_length, limits, executable)

    executor = concurrent.futures.ThreadPoolExecutor(threads) if threads else _Here()
    slots, waiting = _Slots(engine, idle, executor), map(begin, jobs)
    try:
        while True:
            yield from slots.fill(waiting)
            if not slots.running or should_stop():
                return
            yield from slots.play_turns()
    finally:
        slots.clear()
        if resting is None:
            for environment in idle:
                environment.close()


class _Here(concurrent.futures.Executor):
    """Runs what it is given at once."""

    def submit(self, function, /, *args, **kwargs):
        future = concurrent.futures.Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class _Slots:
    """The engine's slots with the episodes in them, and the environments that rest."""

    def __init__(self, engine: Engine, idle: list[gymnasium.Env], executor: concurrent.futures.Executor):
        self.engine, self.idle, self.executor = engine, idle, executor
        self.running: dict[int, Conversation] = {}
        self._asked: dict[int, int] = {}  # slot -> version when its turn began, of the turns under way

    def fill(self, waiting: Iterator[Conversation | None]) -> Iterator[Episode]:
        """Gives free slots the episodes that come next, and yields those that ended before their first turn."""
        for slot in range(self.engine.num_slots):
            while slot not in self.running and (conversation := next(waiting, None)) is not None:
                self.running[slot] = conversation
                conversation.start(self.executor)
                yield from self._settle(slot)
            if slot not in self.running:
                return  # no job for it: none for the others

    def play_turns(self) -> Iterator[Episode]:
        """Has the turns that end next acted upon, and yields the episodes that end with what is answered by then."""
        for slot, (generation, version) in self._sample_turns().items():
            self.running[slot].act(generation, version, self.executor)
        answers = [conversation.answer for conversation in self.running.values() if conversation.answer]
        if len(answers) == len(self.running):  # nobody's turn to sample
            concurrent.futures.wait(answers, _PATIENCE, concurrent.futures.FIRST_COMPLETED)
        for slot in list(self.running):
            yield from self._settle(slot)

    def _settle(self, slot: int) -> Iterator[Episode]:
        """Reads the slot's answer if it is there, and yields its episode if that has ended, by it or by the clock."""
        conversation = self.running[slot]
        if conversation.answer and conversation.answer.done():
            conversation.hear()
        conversation.watch_the_clock()
        if conversation.end_reason:
            self.engine.free(slot)
            self._asked.pop(slot, None)
            yield self._finish(self.running.pop(slot))

    def _sample_turns(self) -> dict[int, tuple[Generation, int]]:
        """The turns that end next, by slot, each with the oldest version that can have sampled any of it."""
        ready = {slot: conversation for slot, conversation in self.running.items() if not conversation.answer}
        if not ready:
            return {}
        new = {slot: conversation for slot, conversation in ready.items() if slot not in self._asked}
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

    def clear(self) -> None:
        """Gives up what still runs."""
        self.executor.shutdown(cancel_futures=True)
        for slot, conversation in self.running.items():
            self.engine.free(slot)
            self.idle.append(conversation.environment)
