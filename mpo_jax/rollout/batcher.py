"""Requests of many clients to one engine: each waits for a free slot, and turns end one by one."""

import asyncio
import collections
import concurrent.futures
import logging
import threading
from collections.abc import Callable

from mpo_jax.rollout.decoding import Decoding
from mpo_jax.rollout.engine import Sampler
from mpo_jax.rollout.protocol import Generation

log = logging.getLogger(__name__)


class Batcher:
    """A thread that owns an engine; requests come from an event loop.

    A request whose prompt goes on from the context of an idle slot is given that slot, and only the rest is read: the
    turns of an agent that sends its whole conversation each time cost what they add.
    """

    def __init__(self, engine: Sampler):
        self.engine = engine
        self._wanted = threading.Condition()
        self._requests: collections.deque[tuple[list[int], int, Decoding, concurrent.futures.Future]] = (
            collections.deque()
        )
        self._orders: collections.deque[tuple[Callable[[], None], concurrent.futures.Future]] = collections.deque()
        self._contexts: dict[int, list[int]] = {}  # slot -> what it has read and said; the idle longest first
        self._running: dict[int, concurrent.futures.Future] = {}
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="batcher", daemon=True)
        self._thread.start()

    async def sample(self, prompt: list[int], seed: int, decoding: Decoding) -> Generation:
        """One turn after a prompt.

        Raises:
          ValueError: the engine refuses the prompt or the decoding.
        """
        return await self._queue(self._requests, prompt, seed, decoding)

    async def between_calls(self, order: Callable[[], None]) -> None:
        """Has something done while the engine rests, such as loading weights; turns under way go on after it."""
        await self._queue(self._orders, order)

    def close(self) -> None:
        """Ends the thread; what still waits is refused."""
        with self._wanted:
            self._stopped = True
            self._wanted.notify()
        self._thread.join()

    def _queue(self, queue: collections.deque, *item) -> asyncio.Future:
        future: concurrent.futures.Future = concurrent.futures.Future()
        with self._wanted:
            if self._stopped:
                raise ValueError("the server is stopping")
            queue.append((*item, future))
            self._wanted.notify()
        return asyncio.wrap_future(future)

    def _run(self) -> None:
        while True:
            with self._wanted:
                while not (self._requests or self._orders or self._running or self._stopped):
                    self._wanted.wait()
                if self._stopped:
                    break
                orders, self._orders = self._orders, collections.deque()
                begun = self._assign()
            for order, future in orders:
                _settle(future, order)
            self._step(begun)
        waiting = [item[-1] for item in (*self._requests, *self._orders)]
        for future in (*(f for f in waiting if f.set_running_or_notify_cancel()), *self._running.values()):
            future.set_exception(ValueError("the server is stopping"))

    def _assign(self) -> dict[int, tuple[list[int], int, Decoding]]:
        """Gives waiting requests to idle slots: slot -> ids yet to read, seed, decoding."""
        begun = {}
        while self._requests and len(self._running) < self.engine.num_slots:
            prompt, seed, decoding, future = self._requests.popleft()
            if not future.set_running_or_notify_cancel():  # its client has gone
                continue
            slot, known = self._slot_for(prompt)
            begun[slot] = prompt[known:], seed, decoding
            self._contexts.pop(slot, None)
            self._contexts[slot] = list(prompt)
            self._running[slot] = future
        return begun

    def _slot_for(self, prompt: list[int]) -> tuple[int, int]:
        """The idle slot that has read most of a prompt and nothing else, and how much; else the one idle longest."""
        idle = [slot for slot in range(self.engine.num_slots) if slot not in self._running]
        known = {slot: self._contexts[slot] for slot in idle if slot in self._contexts}
        fitting = {s: len(c) for s, c in known.items() if len(c) < len(prompt) and prompt[: len(c)] == c}
        if fitting:
            slot = max(fitting, key=fitting.get)
            return slot, fitting[slot]
        unused = [slot for slot in idle if slot not in known]
        slot = unused[0] if unused else next(slot for slot in self._contexts if slot in known)
        self.engine.free(slot)
        return slot, 0

    def _step(self, begun: dict[int, tuple[list[int], int, Decoding]]) -> None:
        try:
            ended = self.engine.generate(
                {slot: ids for slot, (ids, _, _) in begun.items()},
                {slot: seed for slot, (_, seed, _) in begun.items()},
                {slot: decoding for slot, (_, _, decoding) in begun.items()},
            )
        except Exception as error:  # the engine's state is unknown: all who wait on it are told, and it starts afresh
            log.exception("the engine failed")
            for slot, future in self._running.items():
                self.engine.free(slot)
                future.set_exception(error)
            self._running.clear()
            self._contexts.clear()
            return
        for slot, generation in ended.items():
            self._contexts[slot] += generation.tokens
            self._running.pop(slot).set_result(generation)


def _settle(future: concurrent.futures.Future, order: Callable[[], None]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(order())
    except Exception as error:
        future.set_exception(error)
