"""The methods once more: float64 loops written from the equations, sharing no code with the library."""

import itertools
import math

import numpy as np


def actions(mask, ids):
    """Indices of the action tokens of each segment, in order of appearance: {id: [t, ...]}."""
    found = {}
    for t in range(len(mask)):
        if mask[t]:
            found.setdefault(int(ids[t]), []).append(t)
    return found


def token_gae(rewards, values, mask, sequences, lambda_, discount=1.0, bootstrap=None):
    out = np.zeros(len(mask))
    for tokens in actions(mask, sequences).values():
        trace = 0.0
        for k in range(len(tokens) - 1, -1, -1):
            t = tokens[k]
            last = k == len(tokens) - 1
            after = (0.0 if bootstrap is None else float(bootstrap[t])) if last else float(values[tokens[k + 1]])
            decay = float(lambda_[t]) if np.ndim(lambda_) else lambda_
            trace = (
                float(rewards[t]) + discount * after - float(values[t]) + (0.0 if last else discount * decay * trace)
            )
            out[t] = trace
    return out


def returns(rewards, values, mask, sequences, lambda_=1.0, discount=1.0, bootstrap=None):
    found = token_gae(rewards, values, mask, sequences, lambda_, discount, bootstrap)
    for t in range(len(mask)):
        if mask[t]:
            found[t] += float(values[t])
    return found


def multiscale(rewards, values, mask, turns, sequences, lambda_turn, lambda_intra, beta, bootstrap=None):
    out = np.zeros(len(mask))
    for members in actions(mask, sequences).values():
        keep = np.zeros(len(mask), bool)
        keep[members] = True
        blocks = list(actions(keep, turns).values())
        ahead = 0.0
        for n in range(len(blocks) - 1, -1, -1):
            tokens, final = blocks[n], n == len(blocks) - 1
            boundary = float(values[blocks[n + 1][0]]) if not final else 0.0
            if final and bootstrap is not None:
                boundary = float(bootstrap[tokens[-1]])
            reward = sum(float(rewards[t]) for t in tokens)
            ahead = reward + boundary - float(values[tokens[0]]) + lambda_turn * ahead
            intra, trace = [0.0] * len(tokens), 0.0
            for i in range(len(tokens) - 1, -1, -1):
                after = boundary if i == len(tokens) - 1 else float(values[tokens[i + 1]])
                trace = float(rewards[tokens[i]]) + after - float(values[tokens[i]]) + lambda_intra * trace
                intra[i] = trace
            centre = math.fsum(intra) / len(intra)
            for i, t in enumerate(tokens):
                out[t] = ahead + beta * (intra[i] - centre)
    return out


def bilevel(rewards, values, mask, turns, sequences, lambda_turn, lambda_token, discount_turn):
    out = np.zeros(len(mask))
    for members in actions(mask, sequences).values():
        keep = np.zeros(len(mask), bool)
        keep[members] = True
        blocks = list(actions(keep, turns).values())
        ahead, value_ahead = 0.0, 0.0
        for tokens in reversed(blocks):
            end = tokens[-1]
            high = float(rewards[end]) + discount_turn * value_ahead - float(values[end])
            ahead = high + discount_turn * lambda_turn * ahead
            value_ahead = float(values[end])
            reward, after, trace = ahead + value_ahead, 0.0, 0.0
            for t in reversed(tokens):
                trace = (reward if t == end else 0.0) + after - float(values[t]) + lambda_token * trace
                after = float(values[t])
                out[t] = trace
    return out


def group_advantages(rewards, groups, normalise_std=True, valid=None, leave_one_out=False):
    out = np.zeros(len(rewards))
    for g in set(int(x) for x in groups if x >= 0):
        members = [i for i in range(len(rewards)) if groups[i] == g and np.isfinite(rewards[i])]
        members = [i for i in members if valid is None or valid[i]]
        if len(members) < 2:
            continue
        mean = math.fsum(float(rewards[i]) for i in members) / len(members)
        gap = max(rewards[i] for i in members) - min(rewards[i] for i in members)
        if gap <= 1e-6 * max(1.0, abs(mean)):
            continue
        std = math.sqrt(math.fsum((float(rewards[i]) - mean) ** 2 for i in members) / (len(members) - 1))
        for i in members:
            others = [float(rewards[j]) for j in members if j != i]
            if leave_one_out:
                out[i] = float(rewards[i]) - math.fsum(others) / len(others)
            else:
                out[i] = (float(rewards[i]) - mean) / ((std + 1e-6) if normalise_std else 1.0)
    return out


def whiten(x, mask):
    kept = [float(a) for a, m in zip(np.ravel(x), np.ravel(mask), strict=True) if m]
    out = np.zeros(np.shape(x))
    if not kept:
        return out
    mean = math.fsum(kept) / len(kept)
    variance = math.fsum((a - mean) ** 2 for a in kept) / len(kept)
    scale = 1.0 / math.sqrt(variance + 1e-8) if len(kept) > 1 else 1.0
    for index in np.ndindex(*np.shape(x)):
        if mask[index]:
            out[index] = (float(x[index]) - mean) * scale
    return out


def ratio(logprobs, anchor, ids, mask, mean=False):
    out = np.ones(len(mask))
    for tokens in actions(mask, ids).values():
        total = math.fsum(float(logprobs[t]) - float(anchor[t]) for t in tokens)
        total = total / len(tokens) if mean else total
        for t in tokens:
            out[t] = math.exp(min(max(total, -20.0), 20.0))
    return out


def weights(mask, ids):
    """Mean over the segments of a batch [B,T] of each segment's mean; ids distinguish segments within a row."""
    sizes = {}
    for b, t in np.ndindex(*mask.shape):
        if mask[b, t]:
            sizes[b, int(ids[b, t])] = sizes.get((b, int(ids[b, t])), 0) + 1
    out = np.zeros(mask.shape)
    for b, t in np.ndindex(*mask.shape):
        if mask[b, t]:
            out[b, t] = 1.0 / (len(sizes) * sizes[b, int(ids[b, t])])
    return out


def hindsight(delta, advantages, mask, executable, turns, sequences, kappa, tau, epsilon_w, by_token=False):
    out = np.ones(len(mask))
    for members in actions(mask, sequences).values():
        keep = np.zeros(len(mask), bool)
        keep[members] = True
        d, size, blocks = {}, {}, actions(keep, turns)
        for turn, tokens in blocks.items():
            judged = [float(delta[t]) for t in tokens if executable[t]]
            if judged:
                d[turn] = math.fsum(x if abs(x) >= kappa else 0.0 for x in judged) / len(judged)
                size[turn] = len(tokens) if by_token else 1
        total = sum(size.values())
        if not total:
            continue
        sign = np.sign(float(advantages[members[0]]))
        centre = math.fsum(size[k] * d[k] for k in d) / total
        q = {k: math.tanh(sign * (d[k] - centre) / tau) for k in d}
        mean = math.fsum(size[k] * q[k] for k in d) / total
        for k in d:
            for t in blocks[k]:
                out[t] = 1.0 + 0.5 * epsilon_w * (q[k] - mean)
    return out


def logprob_and_entropy(logits, target):
    logits = [float(z) for z in logits]
    top = max(logits)
    log_z = top + math.log(math.fsum(math.exp(z - top) for z in logits))
    chosen = logits[target] - log_z if 0 <= target < len(logits) else 0.0
    return chosen, -math.fsum(math.exp(z - log_z) * (z - log_z) for z in logits if z > -math.inf)


def value_variance(values, mask, turns, sequences):
    """(between, within) of each sequence, by id."""
    out = {}
    for sequence, members in actions(mask, sequences).items():
        keep = np.zeros(len(mask), bool)
        keep[members] = True
        mean = math.fsum(float(values[t]) for t in members) / len(members)
        between = within = 0.0
        for tokens in actions(keep, turns).values():
            centre = math.fsum(float(values[t]) for t in tokens) / len(tokens)
            between += len(tokens) * (centre - mean) ** 2 / len(members)
            within += math.fsum((float(values[t]) - centre) ** 2 for t in tokens) / len(members)
        out[sequence] = between, within
    return out


def visibility(values, mask, turns, sequences):
    """Σxy and Σx² of one row."""
    xy = xx = 0.0
    for members in actions(mask, sequences).values():
        keep = np.zeros(len(mask), bool)
        keep[members] = True
        blocks = list(actions(keep, turns).values())
        for tokens, after in itertools.pairwise(blocks):
            x = float(values[after[0]]) - float(values[tokens[0]])
            for t in tokens[1:]:
                xy, xx = xy + x * (float(values[t]) - float(values[tokens[0]])), xx + x * x
    return xy, xx
