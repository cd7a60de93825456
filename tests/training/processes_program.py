"""A program: one of several processes that train together, each with its own episodes. Run by cluster_test.

Arguments: this process, how many there are, the coordinator ("auto": this and that are in the environment too), a file
for what the first ends with, and the mesh.
"""

import sys
import time

import jax
import numpy as np

from experiments import meshes, parts, processes
from mpo_jax.models import weights
from mpo_jax.training.learner import Learner
from training import runs

TIMEOUT = 20.0


def main():
    index, count, coordinator, path, mesh = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    jax.config.update("jax_disable_most_optimizations", True)
    if count > 1:
        processes.join(coordinator, *((None, None) if coordinator == "auto" else (count, index)), TIMEOUT)
    config = runs.config(
        row_tokens=64, row_sequences=4, context_length=64, minibatches=1, value_pretraining_steps=0, mesh=mesh
    )
    cluster = meshes.make_cluster(config, patience=3.0, timeout=TIMEOUT)
    algorithm, optimizers = parts.make_algorithm(config), parts.make_optimizers(config)
    models, settings = parts.make_models(config, runs.model()), parts.make_settings(config)
    learner = Learner(algorithm, models, optimizers, settings, cluster=cluster)
    state = cluster.place_state(parts.make_state(config, runs.model(), algorithm, optimizers))

    groups, numbers = runs.make_groups(4, seed=1), []
    late = time.monotonic() + (1.0 if index else 0.0)
    for step in range(2):

        def take(step=step):
            """In the first step all have groups; in the second, the first process alone."""
            mine = groups[index::count] if step == 0 else groups[:2] if index == 0 else None
            return mine if step == 1 or time.monotonic() > late else None

        part = cluster.take(take, lambda: time.sleep(0.05), lambda: False, step)
        state, metrics = learner.update(state, runs.flat(part))
        numbers.append([metrics[name] for name in ("policy_loss", "grad_norm", "episodes", "success", "tokens")])
    policy, critic = cluster.whole(state.policy), cluster.whole(state.critic)
    if index == 0:
        arrays = {f"policy.{k}": x for k, x in weights.flatten(policy).items()}
        arrays |= {f"critic.{k}": x for k, x in weights.flatten(critic).items()}
        np.savez(path, numbers=np.array(numbers), **arrays)


if __name__ == "__main__":
    main()
