"""A small token-level MDP with all of its trajectories listed: every expectation is a finite sum in float64."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class TokenMDP:
    """M trajectories of up to K sampled tokens; a state is a whole history, observations included.

    Attributes:
      states: [M,K] state before each token, 0 on padding.
      tokens: [M,K] token sampled there, 0 on padding.
      turns: [M,K] turn of each token, -1 on padding.
      first: [M,T] column of each turn's first token; all trajectories have the same number T of turns.
      last: [M,T] column of each turn's last token.
      chance: [M] probability of the trajectory's observations.
      outcomes: [M] terminal reward.
      turn_of: [N] turn of each state.
      position_of: [N] its place in the turn, from 0.
      vocabulary: number of tokens; token 0 ends the turn, if any does.
    """

    states: np.ndarray
    tokens: np.ndarray
    turns: np.ndarray
    first: np.ndarray
    last: np.ndarray
    chance: np.ndarray
    outcomes: np.ndarray
    turn_of: np.ndarray
    position_of: np.ndarray
    vocabulary: int

    @property
    def mask(self):
        return self.turns >= 0

    @property
    def rewards(self):
        """[M,K], the outcome at the last token."""
        found = np.zeros(self.states.shape)
        np.put_along_axis(found, self.last[:, -1:], self.outcomes[:, None], axis=1)
        return found

    def policy(self, rng, scale=1.0):
        """A random softmax policy [N,V]."""
        return softmax(scale * rng.normal(size=(len(self.turn_of), self.vocabulary)))

    def chosen(self, x):
        """x [N,V] at the state and token of each step, 0 on padding: [M,K]."""
        return np.where(self.mask, x[self.states, self.tokens], 0.0)

    def probabilities(self, policy):
        return self.chance * np.prod(np.where(self.mask, policy[self.states, self.tokens], 1.0), axis=1)

    def objective(self, policy):
        return self.probabilities(policy) @ self.outcomes

    def by_state(self, x):
        """Sum of x [M,K] over all visits of each state: [N]."""
        return np.bincount(self.states[self.mask], x[self.mask], len(self.turn_of))

    def by_pair(self, x):
        """Sum of x [M,K] over all visits of each state and token: [N,V]."""
        pairs = (self.states * self.vocabulary + self.tokens)[self.mask]
        return np.bincount(pairs, x[self.mask], len(self.turn_of) * self.vocabulary).reshape(-1, self.vocabulary)

    def values(self, policy):
        """V(s) = E[outcome | s]: [N]."""
        p = np.repeat(self.probabilities(policy)[:, None], self.states.shape[1], axis=1)
        return self.by_state(p * self.outcomes[:, None]) / self.by_state(p)

    def token_advantages(self, policy):
        """Q(s,a) − V(s): [N,V]."""
        p = np.repeat(self.probabilities(policy)[:, None], self.states.shape[1], axis=1)
        q = self.by_pair(p * self.outcomes[:, None]) / self.by_pair(p)
        return q - self.values(policy)[:, None]

    def turn_advantages(self, policy):
        """Q(h_t, y_t) − V(h_t) of the complete turns y_t: [M,T]."""
        values = self.values(policy)
        q = self.chosen(self.token_advantages(policy) + values[:, None])
        starts = np.take_along_axis(values[self.states], self.first, axis=1)
        return np.take_along_axis(q, self.last, axis=1) - starts

    def log_ratios(self, new, old):
        """log π_new − log π_old of each token [M,K], of the turn's tokens before it [M,K], of each turn [M,T]."""
        token = self.chosen(np.log(new) - np.log(old))
        after = np.cumsum(token, axis=1)
        before = after - token
        start = np.take_along_axis(before, self.first, axis=1)
        turn = np.take_along_axis(after, self.last, axis=1) - start
        prefix = before - np.take_along_axis(start, np.maximum(self.turns, 0), axis=1)
        return token, np.where(self.mask, prefix, 0.0), turn

    def score_gradient(self, policy, weights):
        """E Σ_k w_k ∇log π(a_k|s_k) in the logits of a softmax policy, weights [M,K]: [N,V]."""
        x = self.probabilities(policy)[:, None] * weights
        return self.by_pair(x) - policy * self.by_state(x)[:, None]


def softmax(logits):
    x = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return x / x.sum(axis=-1, keepdims=True)


def random_mdp(rng, *, turns=2, longest=3, vocabulary=2, observations=2, end_of_turn=True):
    """Turns of 1..longest tokens (all of `longest` without an end-of-turn token), random observations and outcomes."""
    turn_of, position_of, found = [], [], []

    def state(turn, position):
        turn_of.append(turn)
        position_of.append(position)
        return len(turn_of) - 1

    def walk(path, chance, here):
        for token in range(vocabulary):
            longer = [*path, (here, token)]
            if position_of[here] + 1 < longest and not (end_of_turn and token == 0):
                walk(longer, chance, state(turn_of[here], position_of[here] + 1))
            elif turn_of[here] + 1 == turns:
                found.append((longer, chance))
            else:
                for p in rng.dirichlet(np.ones(observations)):
                    walk(longer, chance * p, state(turn_of[here] + 1, 0))

    walk([], 1.0, state(0, 0))
    shape = len(found), turns * longest
    states, tokens, turn = np.zeros(shape, int), np.zeros(shape, int), np.full(shape, -1)
    for row, (path, _) in enumerate(found):
        states[row, : len(path)], tokens[row, : len(path)] = np.transpose(path)
        turn[row, : len(path)] = [turn_of[s] for s, _ in path]
    per_turn = turn[:, None, :] == np.arange(turns)[:, None]
    return TokenMDP(
        states=states,
        tokens=tokens,
        turns=turn,
        first=per_turn.argmax(axis=2),
        last=shape[1] - 1 - per_turn[:, :, ::-1].argmax(axis=2),
        chance=np.array([chance for _, chance in found]),
        outcomes=rng.normal(size=len(found)),
        turn_of=np.array(turn_of),
        position_of=np.array(position_of),
        vocabulary=vocabulary,
    )
