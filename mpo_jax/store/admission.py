"""Which groups may be begun: back-pressure, bounded staleness, and help for the slow, in one object."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Admission:
    """On what terms a store gives out the indices of groups.

    A group's oldest token counts: one that is begun with weights of version v has a lag of s − v when step s trains on
    it, since step s updates version s.

    Attributes:
      max_pending: P, back-pressure: the most groups that wait to be taken or are in the making, of all producers
        together; at least as many as the learner takes at once. None for any number.
      max_staleness: K, the highest lag, in versions; 0 alternates rollout and training. None for any.
      groups_per_step: n, of the learner.
      version: v, of the weights that a group would be begun with.
      straggler_seconds: an index that other producers have held for longer, alive or not, is given out once more,
        whatever the bounds: the same episodes are played anew, and the group that is whole first counts, so the learner
        is held up by no slow producer, and no task is favoured for being quick. 0 for never.

    Raises:
      ValueError: no groups, a lag or a time below 0, or no groups in a step.
    """

    max_pending: int | None = None
    max_staleness: int | None = None
    groups_per_step: int = 1
    version: int = 0
    straggler_seconds: float = 0.0

    def __post_init__(self):
        least = {"max_pending": 1, "max_staleness": 0, "groups_per_step": 1, "straggler_seconds": 0}
        for field, bound in least.items():
            if (value := getattr(self, field)) is not None and not value >= bound:
                raise ValueError(f"{field}={value}, expected at least {bound}")

    def capacity(self, next_step: int, ahead: int) -> float:
        """How many groups may be begun now, of all producers together: min(P, (v + K + 1 − s) n) − ahead.

        A group with `ahead` others before it is trained on at step s + ⌊ahead / n⌋ at the latest, whose lag must not
        exceed K. See *AReaL* (arXiv:2505.24298), Eq. 3, where K is η.

        Args:
          next_step: s, the first step that has taken no groups yet.
          ahead: groups that wait to be taken or are in the making.

        Returns:
          The number, 0 at least; infinite without bounds.
        """
        most = math.inf if self.max_pending is None else self.max_pending
        if self.max_staleness is not None:
            most = min(most, (self.version + self.max_staleness + 1 - next_step) * self.groups_per_step)
        return float(max(most - ahead, 0))
