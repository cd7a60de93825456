"""The arrays that cross module borders: facts (`Trajectories`), model outputs (`Evaluation`), constants (`Targets`).

Axes: B rows, T tokens a row, S sequences a row (1 when unpacked). Index t always concerns `tokens[t]`:
`logprobs[t] = log π(tokens[t] | tokens[<t])` and `values[t] = V(tokens[<t])`, the value *before* the token.
The shift happens once, where a model is evaluated (`mpo_jax.models.evaluation`).
"""

import chex
import jax
import numpy as np

Array = jax.Array | np.ndarray

PADDING = -1  # sequence_ids and turn_ids of padding, group_ids of an absent sequence


@chex.dataclass(frozen=True, mappable_dataclass=False)
class Trajectories:
    """What the rollout wrote: nothing derived, nothing optional but the experts.

    Attributes:
      tokens: int32[B,T], prompt, actions, observations, padding.
      positions: int32[B,T], restart at 0 with each sequence.
      sequence_ids: int32[B,T], sequence within the row, 0..S-1; -1 on padding.
      turn_ids: int32[B,T], 0,1,2,… along the row, never shared by two sequences. An observation belongs to the
        turn that it precedes, a trailing one to the turn before; -1 on padding.
      action_mask: bool[B,T], the token was sampled by the policy.
      executable_mask: bool[B,T], the part of the action that the environment executed (a subset of `action_mask`;
        the whole of it where the policy writes no reasoning).
      rewards: float32[B,T], non-zero only on a turn's last action token.
      behavior_logprobs: float32[B,T], from the engine that sampled; 0 off `action_mask`.
      state_ids: int32[B,T], constant in a turn: equal ids mean that the turns acted on the same environment state
        of the same task (GiGPO's anchors); -1 on padding.
      group_ids: int32[B,S], equal for the episodes of one prompt, dense in 0..B·S-1; -1 = no sequence.
      truncated: bool[B,S], stopped by a limit, not by the environment.
      policy_version: int32[B,S], the oldest weights that sampled any of it.
      experts: int16[B,T,L,k], those that read each token in the rollout, −1 where it does not say; None where they are
        of no interest.
    """

    tokens: Array
    positions: Array
    sequence_ids: Array
    turn_ids: Array
    action_mask: Array
    executable_mask: Array
    rewards: Array
    behavior_logprobs: Array
    state_ids: Array
    group_ids: Array
    truncated: Array
    policy_version: Array
    experts: Array | None = None


@chex.dataclass(frozen=True, mappable_dataclass=False)
class Evaluation:
    """What the models say of a batch, all float32[B,T] unless shown.

    Attributes:
      logprobs: log π of each token under the policy being updated.
      entropy: of the policy's distribution at each token, in nats.
      values: V before each token (zeros where the algorithm has no critic).
      final_values: float32[B,S], V of each sequence's whole prefix, for bootstrapping truncated ones.
      ref_logprobs: under the reference policy (equal to `logprobs` where the algorithm has none).
      privileged_logprobs: under the policy that also reads privileged hindsight (equal to `logprobs` where none).
      experts: int32[B,T,L,k], those that the policy's L layers with experts used, where they are to be used again.
    """

    logprobs: Array
    entropy: Array
    values: Array
    final_values: Array
    ref_logprobs: Array
    privileged_logprobs: Array
    experts: Array | None = None


@chex.dataclass(frozen=True, mappable_dataclass=False)
class Targets:
    """Constants of one update, all float32[B,T], zero off the action tokens.

    Attributes:
      advantages: credit of each action token.
      returns: the critic's regression targets.
      old_logprobs, old_values, ref_logprobs: frozen outputs of `Evaluation`.
      weights: aggregation of the policy loss over the global batch; the loss is Σ weights · loss.
      value_weights: the same for the value loss.
      experts: int32[B,T,L,k], those that the policy has to use; None leaves the choice to its routers.
    """

    advantages: Array
    returns: Array
    old_logprobs: Array
    old_values: Array
    ref_logprobs: Array
    weights: Array
    value_weights: Array
    experts: Array | None = None
