"""Bounded staleness by admission: a group is begun only if it can be trained on before its weights are too old."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Admission:
    """How far the rollout may run ahead of the learner.

    A group's oldest token counts: one that is begun with weights of version v has a lag of s − v when step s trains on
    it, since step s updates version s.

    Attributes:
      max_staleness: K, the highest lag, in versions; 0 alternates rollout and training.
      groups_per_step: n, of the learner.
      version: v, of the weights that a group would be begun with.

    Raises:
      ValueError: a lag below 0, or no groups in a step.
    """

    max_staleness: int
    groups_per_step: int
    version: int = 0

    def __post_init__(self):
        if self.max_staleness < 0 or self.groups_per_step < 1:
            raise ValueError(
                f"max_staleness={self.max_staleness}, groups_per_step={self.groups_per_step}: expected at least 0 and 1"
            )

    def capacity(self, next_step: int, ahead: int) -> int:
        """How many groups may be begun now, of all producers together: (v + K + 1 − s) n − ahead.

        A group with `ahead` others before it is trained on at step s + ⌊ahead / n⌋ at the latest, whose lag must not
        exceed K. See *AReaL* (arXiv:2505.24298), Eq. 3, where K is η.

        Args:
          next_step: s, the first step that has taken no groups yet.
          ahead: groups that wait to be taken or are in the making.

        Returns:
          The number, 0 at least.
        """
        steps = self.version + self.max_staleness + 1 - next_step
        return max(steps * self.groups_per_step - ahead, 0)
