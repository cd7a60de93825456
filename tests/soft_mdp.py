"""Small MDPs with random transitions, max E Σ γ^t [r − β log(π/π_ref)], solved to rounding in float64."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class SoftMDP:
    """S states, A actions; an episode ends with what the rows of `transitions` lack to 1, if anything.

    Attributes:
      transitions: [S,A,S] probability of the next state.
      rewards: [S,A].
      reference: [S,A] π_ref.
      gamma: discount.
      beta: β.
    """

    transitions: np.ndarray
    rewards: np.ndarray
    reference: np.ndarray
    gamma: float
    beta: float

    def values(self, policy):
        """V(s) = E_π Σ γ^t [r − β log(π/π_ref)] from s, by a linear solve: [S]."""
        cost = self.beta * np.log(policy / self.reference)
        step = np.einsum("sa,sat->st", policy, self.transitions)
        return np.linalg.solve(np.eye(len(step)) - self.gamma * step, np.sum(policy * (self.rewards - cost), axis=1))

    def action_values(self, policy):
        """Q(s,a) = r + γ E V(s'): the action's own KL cost is not in it. [S,A]."""
        return self.rewards + self.gamma * self.transitions @ self.values(policy)

    def solve(self):
        """π*, by policy iteration: each step takes the maximiser of Σ_a π (Q − β log(π/π_ref)) at every state."""
        policy = self.reference
        for _ in range(100):
            q = self.action_values(policy)
            weights = self.reference * np.exp((q - q.max(axis=1, keepdims=True)) / self.beta)
            policy, before = weights / weights.sum(axis=1, keepdims=True), policy
            if np.abs(policy - before).max() < 1e-15:
                break
        return policy


def random_policy(rng, states, actions, scale=1.0):
    x = np.exp(scale * rng.normal(size=(states, actions)))
    return x / x.sum(axis=1, keepdims=True)


def random_mdp(rng, *, states, actions, gamma, beta, ends):
    """With `ends`, every step may end the episode (γ may then be 1); rewards are standard normal."""
    transitions = rng.dirichlet(np.full(states + ends, 0.7), size=(states, actions))
    if ends:
        transitions = 0.95 * transitions  # so that no action goes on for ever
    return SoftMDP(
        transitions=transitions[:, :, :states],
        rewards=rng.normal(size=(states, actions)),
        reference=random_policy(rng, states, actions),
        gamma=gamma,
        beta=beta,
    )
