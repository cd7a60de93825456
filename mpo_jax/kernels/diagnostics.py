"""What a batch says of its critic (which estimator suits it) and of its clipping, overall and by turn length."""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, Shaped

from mpo_jax.kernels import checks, segments
from mpo_jax.kernels.checks import Scalar
from mpo_jax.kernels.groups import informative_groups
from mpo_jax.kernels.losses import kl_k3
from mpo_jax.kernels.returns import next_values
from mpo_jax.kernels.segments import masked, segment_first, segment_last, segment_mean, segment_sum, spread
from mpo_jax.types import Array

TURN_LENGTH_EDGES = (4, 16, 64)  # bins 1–4, 5–16, 17–64, 65+


def masked_mean(x: Shaped[Array, "*n"], mask: Bool[Array, "*n"]) -> Float[Array, ""]:
    """Mean over the mask; 0 over nothing."""
    return jnp.sum(masked(x, mask)) / jnp.maximum(jnp.sum(mask), 1)


def value_variance(
    values: Float[Array, "T"], action_mask: Bool[Array, "T"], turn_ids: Int[Array, "T"], sequence_ids: Int[Array, "T"]
) -> tuple[Float[Array, "S"], Float[Array, "S"]]:
    """Variance of each sequence's values: Σ_t L_t (V̄_t − V̄)²/n between its turns, Σ (V − V̄_t)²/n within them.

    Returns:
      between [S=T], within [S=T]; 0 for absent sequences.
    """
    checks.check_turns(action_mask, turn_ids, sequence_ids)
    size = len(values)
    turn = spread(segment_mean(values, turn_ids, action_mask, size), turn_ids, action_mask)
    whole = spread(segment_mean(values, sequence_ids, action_mask, size), sequence_ids, action_mask)
    parts = ((turn - whole) ** 2, (masked(values, action_mask) - turn) ** 2)
    between, within = (segment_mean(x, sequence_ids, action_mask, size) for x in parts)
    return between, within


def variance_share(
    values: Float[Array, "B T"],
    action_mask: Bool[Array, "B T"],
    turn_ids: Int[Array, "B T"],
    sequence_ids: Int[Array, "B T"],
) -> dict[str, Float[Array, ""]]:
    """How much of the critic's variance inside a trajectory its turns' means explain (MPO's measurement).

    Returns:
      turn_variance_share: median over trajectories of between/(between + within); NaN if none varies.
      between_exceeds_within: share of those trajectories whose between-turn variance is the larger.
      value_variance_between, value_variance_within: their means over those trajectories.
    """
    _check(values, action_mask, turn_ids, sequence_ids)
    between, within = jax.vmap(value_variance)(values, action_mask, turn_ids, sequence_ids)
    total = between + within
    varies = total > 1e-12
    share = jnp.where(varies, between / jnp.where(varies, total, 1.0), jnp.nan)
    return {
        "turn_variance_share": jnp.nanmedian(share),
        "between_exceeds_within": masked_mean(between > within, varies),
        "value_variance_between": masked_mean(between, varies),
        "value_variance_within": masked_mean(within, varies),
    }


def in_turn_visibility(
    values: Float[Array, "B T"],
    action_mask: Bool[Array, "B T"],
    turn_ids: Int[Array, "B T"],
    sequence_ids: Int[Array, "B T"],
) -> Float[Array, ""]:
    """How early inside a turn the critic sees its end: slope Σxy/Σx² of y = V_i − V_start on x = V_end − V_start.

    V_end is V at the next turn's first token, so a sequence's last turn takes no part; nor does a turn's first token,
    where y = 0. A critic that is blind inside turns gives 0, one that moves linearly about ½. Needs no rewards.
    """
    _check(values, action_mask, turn_ids, sequence_ids)

    def row(values: Array, action_mask: Array, turn_ids: Array, sequence_ids: Array) -> tuple[Array, Array]:
        size = len(values)
        more, v_next = next_values(values, action_mask, sequence_ids)
        start = spread(segment_first(values, turn_ids, action_mask, size), turn_ids, action_mask)
        end = spread(segment_last(v_next, turn_ids, action_mask, size), turn_ids, action_mask)
        goes_on = spread(segment_last(more, turn_ids, action_mask, size), turn_ids, action_mask) > 0
        inside = action_mask & goes_on & ~segments.starts(turn_ids, action_mask)
        x = masked(end - start, inside)
        return jnp.sum(x * masked(values - start, inside)), jnp.sum(x**2)

    xy, xx = jax.vmap(row)(values, action_mask, turn_ids, sequence_ids)
    return jnp.sum(xy) / jnp.maximum(jnp.sum(xx), 1e-12)


def value_jitter(
    values: Float[Array, "B T"], action_mask: Bool[Array, "B T"], turn_ids: Int[Array, "B T"]
) -> Float[Array, ""]:
    """Standard deviation (population) of the differences of successive values inside turns; 0 without any."""
    same, v_next = jax.vmap(segments.following)(values, turn_ids, action_mask)
    pairs = action_mask & same
    steps = masked(v_next - masked(values, action_mask), pairs)
    return jnp.sqrt(masked_mean((steps - masked_mean(steps, pairs)) ** 2, pairs))


def explained_variance(
    values: Float[Array, "*n"], returns: Float[Array, "*n"], mask: Bool[Array, "*n"]
) -> Float[Array, ""]:
    """1 − Var(R − V)/Var(R) over the mask; 0 where R does not vary."""
    checks.check_same_shape(values=values, returns=returns, mask=mask)
    mean_square = [masked_mean((x - masked_mean(x, mask)) ** 2, mask) for x in (returns - values, returns)]
    return jnp.where(mean_square[1] > 1e-12, 1.0 - mean_square[0] / jnp.maximum(mean_square[1], 1e-12), 0.0)


def critic_diagnostics(
    values: Float[Array, "B T"],
    returns: Float[Array, "B T"],
    action_mask: Bool[Array, "B T"],
    turn_ids: Int[Array, "B T"],
    sequence_ids: Int[Array, "B T"],
) -> dict[str, Float[Array, ""]]:
    """All of the above, the explained variance over all action tokens, at turn starts and at turn ends."""
    starts, ends = (jax.vmap(f)(turn_ids, action_mask) for f in (segments.starts, segments.ends))
    return {
        **variance_share(values, action_mask, turn_ids, sequence_ids),
        "in_turn_visibility": in_turn_visibility(values, action_mask, turn_ids, sequence_ids),
        "value_jitter": value_jitter(values, action_mask, turn_ids),
        "explained_variance": explained_variance(values, returns, action_mask),
        "explained_variance_turn_starts": explained_variance(values, returns, starts),
        "explained_variance_turn_ends": explained_variance(values, returns, ends),
    }


def outside_clip(ratio: Float[Array, "*n"], *, epsilon_low: Scalar, epsilon_high: Scalar) -> Bool[Array, "*n"]:
    """Where the ratio is outside [1−ε_low, 1+ε_high]; its mean is the clip fraction."""
    return (ratio < 1.0 - epsilon_low) | (ratio > 1.0 + epsilon_high)


def gradient_removed(
    ratio: Float[Array, "*n"], advantages: Float[Array, "*n"], *, epsilon_low: Scalar, epsilon_high: Scalar
) -> Bool[Array, "*n"]:
    """Where clipping removes a token's gradient: ρ > 1+ε_high with A > 0, or ρ < 1−ε_low with A < 0."""
    return ((ratio > 1.0 + epsilon_high) & (advantages > 0)) | ((ratio < 1.0 - epsilon_low) & (advantages < 0))


def value_clip_fraction(
    values: Float[Array, "*n"], old_values: Float[Array, "*n"], mask: Bool[Array, "*n"], *, epsilon: Scalar
) -> Float[Array, ""]:
    """Share of tokens whose value moved by more than ε."""
    checks.check_same_shape(values=values, old_values=old_values, mask=mask)
    return masked_mean(jnp.abs(values - old_values) > epsilon, mask)


def effective_sample_size(weights: Float[Array, "*n"], mask: Bool[Array, "*n"]) -> Float[Array, ""]:
    """(Σw)²/(n Σw²) in (0,1]: 1 where all weights are equal, 1/n where one has it all; 0 over nothing."""
    checks.check_same_shape(weights=weights, mask=mask)
    kept = masked(weights, mask)
    return jnp.sum(kept) ** 2 / jnp.maximum(jnp.sum(mask) * jnp.sum(kept**2), 1e-30)


def turn_length_bins(action_mask: Bool[Array, "T"], turn_ids: Int[Array, "T"]) -> Int[Array, "T"]:
    """Bin of each action token by its turn's number of action tokens: 1–4, 5–16, 17–64, 65+ are 0..3; -1 elsewhere."""
    length = spread(segment_sum(action_mask, turn_ids, action_mask, len(turn_ids)), turn_ids, action_mask)
    bins = sum((length > edge).astype(jnp.int32) for edge in TURN_LENGTH_EDGES)
    return jnp.where(action_mask, bins, -1)


def ratio_diagnostics(
    ratio: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    behavior_logprobs: Float[Array, "B T"],
    action_mask: Bool[Array, "B T"],
    turn_ids: Int[Array, "B T"],
    *,
    epsilon_low: Scalar,
    epsilon_high: Scalar,
) -> dict[str, Float[Array, ""]]:
    """Clip fraction, removed gradients, effective sample size and KL(behaviour‖old), of all and by turn length.

    Returns:
      clip_fraction, gradient_removed, effective_sample_size, behavior_kl (k3, unbiased, never negative), and each with
      the suffix of a bin: _1_4, _5_16, _17_64, _65_up; 0 in a bin without tokens.
    """
    bins = jax.vmap(turn_length_bins)(action_mask, turn_ids)
    per_token = {
        "clip_fraction": outside_clip(ratio, epsilon_low=epsilon_low, epsilon_high=epsilon_high),
        "gradient_removed": gradient_removed(ratio, advantages, epsilon_low=epsilon_low, epsilon_high=epsilon_high),
        "behavior_kl": kl_k3(masked(behavior_logprobs, action_mask), masked(old_logprobs, action_mask)),
    }
    lows, highs = (1, *(edge + 1 for edge in TURN_LENGTH_EDGES)), (*TURN_LENGTH_EDGES, "up")
    masks = {"": action_mask} | {
        f"_{low}_{high}": bins == i for i, (low, high) in enumerate(zip(lows, highs, strict=True))
    }
    found = {name + suffix: masked_mean(x, mask) for suffix, mask in masks.items() for name, x in per_token.items()}
    return found | {"effective_sample_size" + s: effective_sample_size(ratio, mask) for s, mask in masks.items()}


def constant_group_share(
    returns: Float[Array, "N"], group_ids: Int[Array, "N"], *, valid: Bool[Array, "N"] | None = None
) -> Float[Array, ""]:
    """Share of groups with a valid episode whose returns do not differ, so that they teach nothing.

    With success rate p and size G it is p^G + (1−p)^G in expectation.
    """
    counted = jnp.isfinite(returns) & (jnp.asarray(group_ids) >= 0) & (True if valid is None else valid)
    differ = informative_groups(returns, group_ids, valid=valid)
    present, informative = (segment_sum(x, group_ids, counted, len(returns)) > 0 for x in (counted, differ))
    return masked_mean(~informative, present)


def _check(values: Array, action_mask: Array, turn_ids: Array, sequence_ids: Array) -> None:
    """Checks a batch once, since within a vmap nothing is known of its rows."""
    checks.check_aligned("B T", values=values, action_mask=action_mask, turn_ids=turn_ids, sequence_ids=sequence_ids)
    for name, ids in (("turn_ids", turn_ids), ("sequence_ids", sequence_ids)):
        checks.check_segments(ids, action_mask, action_mask.shape[1], name=name)
