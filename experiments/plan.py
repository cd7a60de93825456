r"""Will it fit, and what will it move? Compiles the real train step for TPUs that need not be there.

    python -m experiments.plan --model=qwen3_4b --topology=v5:4x4x4 --rows=64 --tokens=4096 --json
    python -m experiments.plan --model=qwen3_4b --topology=v5:4x4x4 --rows=64 --tokens=4096 --analytic
    python -m experiments.plan --model=qwen3_4b --topology=v5:2x2x2 --rows=8 --tokens=2048 --sweep=tokens

The compiler is libtpu's and runs on the CPU (`pip install libtpu==0.0.42.1`); `--topology=local` takes what is here.
"""

import dataclasses
import json

from absl import flags, logging

from experiments import meshes, programs
from experiments.configs import qwen3
from mpo_jax import algorithms
from mpo_jax.training import plan

MODEL = flags.DEFINE_enum("model", "qwen3_4b", sorted(qwen3.MODELS), "Shape of policy and critic.")
TOPOLOGY = flags.DEFINE_string("topology", "v5:4x4x4", "libtpu's name of a slice (v5 is v5p), or local.")
MESH = flags.DEFINE_string("mesh", "", "Sizes of axes, as in fsdp=32,tensor=2; by default all devices are on fsdp.")
ROWS = flags.DEFINE_integer("rows", 64, "Rows of a gradient step, on all devices together.", lower_bound=1)
TOKENS = flags.DEFINE_integer("tokens", 4096, "Tokens of a row.", lower_bound=2)
MICROBATCHES = flags.DEFINE_integer("microbatches", 1, "Parts whose gradients are added up.", lower_bound=1)
ALGORITHM = flags.DEFINE_string("algorithm", "mpo", "It decides whether there is a critic.")
REFERENCE = flags.DEFINE_bool("reference", False, "Hold a reference policy even if the algorithm needs none.")
REMAT = flags.DEFINE_string("remat", "none", "What the backward pass keeps of a block.")
SPEED = flags.DEFINE_float("tokens_per_second", None, "On all devices together, to be told the MFU that it means.")
ANALYTIC = flags.DEFINE_bool("analytic", False, "Estimate without a compiler.")
SWEEP = flags.DEFINE_enum("sweep", None, ["rows", "tokens"], "Double it while a tenth of the memory stays free.")
JSON = flags.DEFINE_bool("json", False, "Print one JSON object.")


def main(_):
    logging.set_verbosity(logging.WARNING)
    algorithm = algorithms.from_config(ALGORITHM.value)
    if REFERENCE.value:
        algorithm = dataclasses.replace(algorithm, needs=algorithm.needs | {"reference"})
    mesh = meshes.make_mesh(MESH.value, plan.devices_of(TOPOLOGY.value))
    config = qwen3.config(MODEL.value, remat=REMAT.value)
    program = meshes.make_program(config, algorithm, mesh, MICROBATCHES.value)
    examine = plan.estimate if ANALYTIC.value else plan.compiled
    if SWEEP.value:
        found = plan.sweep(program, SWEEP.value, ROWS.value, TOKENS.value, examine)
    else:
        found = examine(program, ROWS.value, TOKENS.value)
    if SPEED.value:
        found["mfu"] = plan.utilisation(program, TOKENS.value, SPEED.value)
    print(json.dumps(found) if JSON.value else plan.table(found))


if __name__ == "__main__":
    programs.run(main)
