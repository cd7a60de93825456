"""The embedded engine: continuous batching over slots, each with a KV cache that is kept over its turns."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from flax import nnx

from mpo_jax.models.transformer import Cache, TransformerConfig
from mpo_jax.models.transposed import transpose
from mpo_jax.rollout import sampling
from mpo_jax.rollout.decoding import EXACT, Decoding
from mpo_jax.rollout.protocol import Generation
from mpo_jax.rollout.sampling import Rows

READ_TOKENS = 512  # most that a slot reads at once: bounds the memory of a long prompt
READ_COST = 64  # tokens that one reading costs beside its own, for the weights are read as well
STOP_IDS = 8  # most that a slot may have
SHORTEST_CACHE = 128  # positions; it grows by doubling


class Sampler:
    """Slots with a context each. `generate` appends what the environment said and goes on sampling.

    A token's randomness depends on its episode's seed and its position only, never on which other slots are alive.
    The log-probability returned is the policy's own (temperature 1, nothing cut off), the one that training
    recomputes; whether the token was drawn from that distribution too, `exact` says.

    Attributes:
      num_slots: rows of the cache.
      context_length: C, most tokens that an episode may hold.
      max_turn_tokens: most tokens sampled in one turn.
      version: of the weights in use.
      exact: turns are drawn from the policy itself, unless a call asks for another decoding.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        num_slots: int,
        context_length: int,
        max_turn_tokens: int,
        stop_ids: Sequence[int],
        decoding: Decoding = EXACT,
        turns_per_call: int | None = None,
        steps_per_call: int | None = None,
        keep_experts: bool = False,
    ):
        """Makes room; nothing is compiled before the first call.

        Args:
          config: of the transformer.
          num_slots, context_length, max_turn_tokens: see above.
          stop_ids: the ids with which the policy ends a turn.
          decoding: how turns are sampled where a call does not say.
          turns_per_call: a call returns once so many of the turns under way have ended; by default all.
          steps_per_call: or after so many tokens, whatever has ended; by default after a whole turn.
          keep_experts: turns tell which experts have read each token.

        Raises:
          ValueError: the experts of a model without any.
        """
        if keep_experts and not config.num_experts:
            raise ValueError("keep_experts: the model has no experts")
        self._id_type = config.expert_id_type if keep_experts else None
        self.num_slots, self.context_length = num_slots, context_length
        self.max_turn_tokens, self.stop_ids = max_turn_tokens, tuple(stop_ids)
        self.decoding, self.exact, self.version = decoding, decoding.exact, -1
        self._turns_per_call = turns_per_call or num_slots
        self._contexts: list[list[int]] = [[] for _ in range(num_slots)]
        self._num_cached, self._num_routed = np.zeros((2, num_slots), np.int32)
        self._under_way: dict[int, _Turn] = {}
        self._few = num_slots // 8  # as many rows or fewer are sampled apart from the others
        self._cache = Cache.empty(config, num_slots, min(SHORTEST_CACHE, context_length))
        self._is_transposed = jax.default_backend() == "cpu"
        self._graph = sampling.graph_of(config, self._is_transposed)
        self._steps_per_call = min(steps_per_call or max_turn_tokens, max_turn_tokens)

    def load(self, params: nnx.State, version: int) -> None:
        """Takes new weights, between turns or within one; what older ones read is read anew at the next call."""
        self._params, self.version = transpose(params) if self._is_transposed else params, version
        self._num_cached[:] = 0

    def free(self, slot: int) -> None:
        """Forgets the context of a slot."""
        self._contexts[slot], self._num_cached[slot], self._num_routed[slot] = [], 0, 0
        self._under_way.pop(slot, None)

    def generate(
        self,
        new_tokens: Mapping[int, list[int]],
        seeds: Mapping[int, int],
        decoding: Mapping[int, Decoding] | None = None,
    ) -> dict[int, Generation]:
        """Begins a turn in each slot named, and samples until enough of all turns under way have ended.

        Args:
          new_tokens: slot -> at least one id that the environment contributed. None of these slots has a turn under
            way; those that have go on by themselves.
          seeds: slot -> seed of the slot's episode.
          decoding: slot -> how its turn is sampled, where not as the engine's others are.

        Returns:
          slot -> its turn, of those that have ended: the sampled ids (a stop id included where it was sampled), their
          log-probabilities, why it stopped, and with `keep_experts` who has read the tokens.

        Raises:
          ValueError: a turn under way, no id to append, a context that would not hold them and one more token, or
            too many stop ids.
        """
        turns = {}
        for slot, ids in new_tokens.items():
            chosen = self.decoding if decoding is None else decoding.get(slot, self.decoding)
            turns[slot] = self._begin(slot, ids, seeds[slot], chosen)
        for slot, turn in turns.items():
            self._contexts[slot] += new_tokens[slot]
            self._under_way[slot] = turn
        if not self._under_way:
            return {}
        self._fit_cache()
        self._read_unread()
        return self._sample(max(len(self._under_way) - self._turns_per_call, 0))

    def _fit_cache(self) -> None:
        """Makes the cache as long as the longest context may become: a step reads all of it, used or not."""
        ends = (turn.end for turn in self._under_way.values())
        longest = max(*map(len, self._contexts), *ends)
        length = min(max(SHORTEST_CACHE, 1 << (longest - 1).bit_length()), self.context_length)
        if length != self._cache.length:
            self._cache = self._cache.resized(length)

    def _sample(self, may_be_left: int) -> dict[int, Generation]:
        """The turns that end next. As soon as few are left, those alone go on, in a program of as few rows."""
        ended, steps = {}, self._steps_per_call
        while steps and len(self._under_way) > may_be_left:
            is_few = len(self._under_way) <= self._few
            slots = sorted(self._under_way) if is_few else range(self.num_slots)
            self._cache, *sampled = sampling.sample(
                self._graph,
                self._id_type,
                self.max_turn_tokens,
                self._params,
                self._cache,
                self._rows(slots, self._few if is_few else self.num_slots),
                steps,
                may_be_left if is_few else max(may_be_left, self._few),
            )
            sampled, logprobs, numbers, experts = jax.tree.map(np.asarray, sampled)
            steps -= int(numbers.max())
            ended |= self._take(slots, sampled, logprobs, numbers, experts)
        return ended

    def _begin(self, slot: int, ids: list[int], seed: int, decoding: Decoding) -> "_Turn":
        if slot in self._under_way:
            raise ValueError(f"slot {slot}: its turn is still under way")
        room = self.context_length - len(self._contexts[slot])
        if not 0 < len(ids) < room:
            raise ValueError(f"slot {slot}: {len(ids)} new tokens; expected 1 to {room - 1}, the room that is left")
        if len(stop_ids := self.stop_ids + decoding.stop_ids) > STOP_IDS:
            raise ValueError(f"slot {slot}: {len(stop_ids)} stop ids, expected at most {STOP_IDS}")
        start = len(self._contexts[slot]) + len(ids)
        limit = min(self.max_turn_tokens, decoding.max_tokens or self.max_turn_tokens)
        return _Turn(start, min(start + limit, self.context_length), seed, decoding, stop_ids)

    def _read_unread(self) -> None:
        """Brings all but the last id of every context with a turn under way into the cache.

        The longest are read first, an eighth of the slots at a time, or all at once where that costs less.
        """
        unread = {s: len(self._contexts[s]) - 1 - int(self._num_cached[s]) for s in self._under_way}
        few = max(self._few, 1)
        while slots := sorted((s for s, number in unread.items() if number), key=unread.get, reverse=True):
            widths = [_width(unread[slot]) for slot in slots[::few]]
            apart = sum(few * width + READ_COST for width in widths)
            size = few if apart < self.num_slots * widths[0] + READ_COST else self.num_slots
            slots, width = slots[:size], min(widths[0], self.context_length)
            tokens, rows = np.zeros((size, width), np.int32), np.full(size, self.num_slots, np.int32)
            starts, counts = np.zeros((2, size), np.int32)
            for place, slot in enumerate(slots) if size < self.num_slots else zip(slots, slots, strict=True):
                first, number = self._num_cached[slot], min(unread[slot], READ_TOKENS)
                tokens[place, :number] = self._contexts[slot][first : first + number]
                rows[place], starts[place], counts[place] = slot, first, number
                self._num_cached[slot] += number
                unread[slot] -= number
            news = rows, tokens, starts, counts
            self._cache, experts = sampling.read(self._graph, self._id_type, self._params, self._cache, *news)
            if experts is not None:
                for place, own in enumerate(np.asarray(experts)):
                    self._note(int(rows[place]), int(starts[place]), own[: counts[place]])

    def _note(self, slot: int, first: int, experts: np.ndarray) -> None:
        """Keeps the experts of a slot's positions from `first` on that are not known: those of their first reading."""
        if len(experts):
            self._under_way[slot].experts.append(experts[max(self._num_routed[slot] - first, 0) :])
            self._num_routed[slot] = max(self._num_routed[slot], first + len(experts))

    def _rows(self, slots: Sequence[int], size: int) -> Rows:
        """What `sampling.sample` needs to know of some slots, in `size` rows; those without a turn have no room."""
        zeros = np.zeros(size, np.int32)
        rows = Rows(
            slots=np.full(size, self.num_slots, np.int32),
            tokens=zeros,
            positions=zeros.copy(),
            room=zeros.copy(),
            seeds=zeros.astype(np.uint32),
            stop_ids=np.full((size, STOP_IDS), -1, np.int32),
            temperature=np.ones(size, np.float32),
            top_k=zeros.copy(),
            top_p=np.ones(size, np.float32),
        )
        rows.slots[: len(slots)] = slots
        for row, slot in enumerate(slots):
            if (turn := self._under_way.get(slot)) is None:
                continue
            context, chosen = self._contexts[slot], turn.decoding
            rows.tokens[row], rows.positions[row] = context[-1], len(context) - 1
            rows.room[row], rows.seeds[row] = turn.end - len(context), turn.seed & 0xFFFFFFFF
            rows.stop_ids[row, : len(turn.stop_ids)] = turn.stop_ids
            rows.temperature[row], rows.top_k[row], rows.top_p[row] = chosen.temperature, chosen.top_k, chosen.top_p
        return rows

    def _take(
        self,
        slots: Sequence[int],
        sampled: np.ndarray,
        logprobs: np.ndarray,
        numbers: np.ndarray,
        experts: np.ndarray | None,
    ) -> dict[int, Generation]:
        """Appends what was sampled, a row a slot, to the contexts; the turns that have ended with it."""
        ended = {}
        for row, slot in enumerate(slots):
            if (turn := self._under_way.get(slot)) is None:
                continue
            context, number = self._contexts[slot], int(numbers[row])
            if experts is not None:
                self._note(slot, len(context) - 1, experts[row, :number])
            context += sampled[row, :number].tolist()
            turn.logprobs += logprobs[row, :number].tolist()
            self._num_cached[slot] = len(context) - 1  # the last sampled token is not read yet
            stopped = context[-1] in turn.stop_ids
            if stopped or len(context) == turn.end:
                reason = "stop" if stopped else "length"
                told = b"".join(part.tobytes() for part in turn.experts)
                ended[slot] = Generation(context[turn.start :], turn.logprobs, reason, experts=told)
                del self._under_way[slot]
        return ended


def _width(number: int) -> int:
    """In how many columns so many unread tokens are read at once, so that few programs are compiled."""
    double = 1 << (max(min(number, READ_TOKENS), 16) - 1).bit_length()
    return double * 3 // 4 if double >= 128 and number <= double * 3 // 4 else double


@dataclasses.dataclass
class _Turn:
    """A turn under way: where in its context it starts and must end, and how it is sampled."""

    start: int
    end: int
    seed: int
    decoding: Decoding
    stop_ids: tuple[int, ...]
    logprobs: list[float] = dataclasses.field(default_factory=list)
    experts: list[np.ndarray] = dataclasses.field(default_factory=list)
