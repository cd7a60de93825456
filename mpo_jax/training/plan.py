"""Will it fit, and what will it move? The real train step, compiled ahead of time over shapes alone."""

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh

from mpo_jax.models import attention
from mpo_jax.models.transformer import TransformerConfig
from mpo_jax.training import hlo, sharding
from mpo_jax.training.batching import empty
from mpo_jax.training.state import TrainState
from mpo_jax.types import Targets, Trajectories


@dataclasses.dataclass(frozen=True)
class Chip:
    """What its maker says of one device: memory in bytes (GB = 1e9), peak bfloat16 FLOP/s without sparsity."""

    memory: float
    peak_flops: float


CHIPS: dict[str, Chip] = {  # by jax's device_kind; cloud.google.com/tpu/docs, NVIDIA's data sheets
    "TPU v4": Chip(32e9, 275e12),
    "TPU v5 lite": Chip(16e9, 197e12),
    "TPU v5": Chip(95e9, 459e12),
    "TPU v6 lite": Chip(32e9, 918e12),
    "NVIDIA H100 80GB HBM3": Chip(80e9, 989e12),
    "NVIDIA H200": Chip(141e9, 989e12),
}


def devices_of(topology: str) -> Sequence[Any]:
    """The devices of a TPU topology that need not be there ("v5:4x4x4"), or those that are ("local").

    Raises:
      ValueError: a topology that the compiler does not know, a device without entry in `CHIPS` (so a CPU too).
    """
    if topology == "local":
        devices = jax.devices()
    else:
        # Nothing below touches a TPU: no metadata server is to be asked, and no lock on the chips taken.
        here = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
        for name, value in (here | {"TPU_ACCELERATOR_TYPE": "v5p-8", "TPU_WORKER_ID": "0"}).items():
            os.environ.setdefault(name, value)
        try:
            devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
        except Exception as error:  # the plugin raises whatever it does
            raise ValueError(
                f"topology {topology!r} is unknown to this libtpu (or it is not installed): {error}"
            ) from None
    if devices[0].device_kind not in CHIPS:
        raise ValueError(f"no memory and peak known of {devices[0].device_kind!r}, of {', '.join(CHIPS)} they are")
    return devices


@dataclasses.dataclass(frozen=True)
class Program:
    """The train step of a run that need not exist.

    Attributes:
      config: shape of policy and critic.
      mesh: of devices that need not be there.
      state: shapes with their placement.
      train_step: as `make_train_step` made it.
    """

    config: TransformerConfig
    mesh: Mesh
    state: TrainState
    train_step: Any

    @property
    def chip(self) -> Chip:
        """What each device is."""
        return CHIPS[self.mesh.devices.flat[0].device_kind]


def placed(mesh: sharding.AnyMesh, state: Any) -> Any:
    """The shapes of a state, or of a part of one, with their placement."""
    place = sharding.of_state(mesh, state)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, place)


def batch_shapes(mesh: Mesh, rows: int, tokens: int, sequences: int = 8) -> tuple[Trajectories, Targets]:
    """Batch and targets of one gradient step as shapes with their placement.

    Raises:
      ValueError: rows that cannot be divided over the mesh.
    """
    if rows % sharding.row_shards(mesh):
        raise ValueError(f"rows={rows} cannot be divided among the {sharding.row_shards(mesh)} places for rows")

    batch = empty(rows, tokens, sequences)
    targets = Targets(**{field.name: batch.rewards for field in dataclasses.fields(Targets) if field.name != "experts"})
    place = sharding.rows(mesh)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), (batch, targets))


def compiled(program: Program, rows: int, tokens: int) -> dict[str, Any]:
    """What the compiler says of the step: bytes on each device, and what the devices send each other.

    Returns:
      arguments, temporaries, peak, hbm in bytes; hbm_spare and donated_share as fractions; collectives by kind, with
      trip counts; flops_per_token; fits.

    Raises:
      ValueError: rows that cannot be divided over the mesh.
    """
    data = batch_shapes(program.mesh, rows, tokens)
    with jax.set_mesh(program.mesh):
        lowered = program.train_step.lower(program.state, *data, jax.ShapeDtypeStruct((), jnp.bool_))
        try:
            step = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return _shared(program, rows, tokens) | {"fits": False, "error": str(error).splitlines()[0]}
    m = step.memory_analysis()
    made = m.output_size_in_bytes - m.alias_size_in_bytes
    peak = m.argument_size_in_bytes + made + m.temp_size_in_bytes + m.generated_code_size_in_bytes
    return _shared(program, rows, tokens) | {
        **_memory(m.argument_size_in_bytes, m.temp_size_in_bytes, peak, program.chip),
        "donated_share": m.alias_size_in_bytes / m.argument_size_in_bytes,
        "collectives": {kind: dataclasses.asdict(x) for kind, x in hlo.collectives(step.as_text()).items()},
    }


LANES = 128  # of a tile of a TPU: the last dimension of an array is filled up to them
TOLERANCE = 1.2  # compilers held .4 to 1.12 times the temporaries of `estimate`: docs/plans.md has what was compared


def estimate(program: Program, rows: int, tokens: int) -> dict[str, Any]:
    """`compiled` without a compiler: arguments exactly, temporaries from what a step must hold at its fullest.

    That is, with blocks computed again: the parameters once more in bfloat16 and their gradients; the stream at every
    block, twice; one block's hidden layers, those of experts with their inputs and outputs for as many as a token is
    sent to, and its experts whole with their gradient; attention scores where whole rows are held (float32: scores,
    probabilities, gradient); the output head whole with its gradient; `layout_copies`. Compilers do not hold all of it
    at the same time, or hold more: the peak allows for `TOLERANCE` times as much.

    Raises:
      ValueError: rows that cannot be divided over the mesh.
    """
    c, data = program.config, batch_shapes(program.mesh, rows, tokens)
    arguments, tensor = bytes_on_device((program.state, data)), program.mesh.shape["tensor"]
    mine = math.prod(data[0].tokens.sharding.shard_shape((rows, tokens)))
    parameters = bytes_on_device(program.state.policy)  # once more and as gradient, in half the bytes
    stream = 2 * 2 * (c.num_layers + 4) * mine * c.width
    scores = 0 if program.mesh.devices.flat[0].platform == "tpu" and attention.fits(tokens, c.head_dim) else tokens
    block = mine * (2 * 4 * _hidden(c) + 4 * 3 * scores * c.num_heads) // tensor
    experts = 2 * 2 * 3 * c.num_experts * c.width * c.expert_width // (tensor * program.mesh.shape["expert"])
    head = 2 * 2 * c.vocab_size * c.width
    temporaries = parameters + stream + block + experts + head + layout_copies(program.state.policy)
    peak = arguments + round(TOLERANCE * temporaries)
    return _shared(program, rows, tokens) | {
        **_memory(arguments, temporaries, peak, program.chip),
        "tolerance": f"peak allows for {TOLERANCE} times the temporaries",
    }


def layout_copies(policy: Any) -> int:
    """Bytes on each device of copies of parameters and moments that TPUs' compiler makes to have them in other layouts.

    As seen in compiled programs, in the branch that trains the policy: the projections to queries, keys and values with
    both moments, and two copies of whatever has a last dimension of less than a tile's 128 lanes, filled up to these.
    """
    copies = 0
    for path, x in jax.tree_util.tree_leaves_with_path(policy):
        name, shape = jax.tree_util.keystr(path, simple=True, separator="."), x.sharding.shard_shape(x.shape)
        size = math.prod(shape) * x.dtype.itemsize
        if len(shape) > 1 and shape[-1] < LANES:
            copies += 2 * size * LANES // shape[-1]
        elif any(part in name for part in ("query.kernel", "key.kernel", "value.kernel")):
            copies += 3 * size
    return copies


def _hidden(config: TransformerConfig) -> int:
    """Numbers a token that a block's hidden layer holds, the widest in or out of it."""
    c = config
    return c.experts_per_token * (c.expert_width + c.width) if c.num_experts else c.mlp_width


def sweep(program: Program, axis: str, rows: int, tokens: int, examine: Any, spare: float = 0.1) -> dict[str, Any]:
    """Doubles the rows or the tokens while the step fits with a share of the memory to spare.

    Returns:
      The last report that does, or the first if none does.
    """
    best = found = examine(program, rows, tokens)
    while found["fits"] and found["hbm_spare"] >= spare:
        best = found
        rows, tokens = (2 * rows, tokens) if axis == "rows" else (rows, 2 * tokens)
        found = examine(program, rows, tokens)
    return best


def bytes_on_device(tree: Any) -> int:
    """Bytes that each device holds of a tree of shapes with placement: exactly, without a compiler."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def active_parameters(config: TransformerConfig) -> int:
    """Parameters that a token is multiplied with: not the norms, and of the embedding only as the output head.

    Of the experts only as many as a token is sent to, and the router.
    """
    c = config
    attention = c.width * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    hidden = 3 * c.width * c.mlp_width
    experts = c.width * (c.num_experts + 3 * c.experts_per_token * c.expert_width)
    layers = sum(attention + (experts if c.has_experts(layer) else hidden) for layer in range(c.num_layers))
    return layers + c.vocab_size * c.width


def flops_per_token(program: Program, tokens: int | float) -> float:
    """Model FLOPs of a step by token: 6 N + 6 · layers · heads · head_dim · tokens, for policy and critic each.

    Two a multiplication, forward and twice that backward; attention is causal, so over half the row on average. The
    critic has no output head, and costs next to nothing on the policy's trunk. What is computed again is not counted.
    See *PaLM* (arXiv:2204.02311), appendix B.
    """
    c = program.config
    attention = 6.0 * c.num_layers * c.num_heads * c.head_dim * tokens
    policy = 6.0 * active_parameters(c) + attention
    critic = policy - 6.0 * c.vocab_size * c.width
    return policy + (critic if program.state.critic is not None and "trunk" in program.state.critic else 0.0)


def utilisation(program: Program, tokens: int | float, tokens_per_second: float) -> float:
    """MFU: the share of the devices' peak that a throughput of tokens means, all devices together."""
    peak = program.chip.peak_flops * program.mesh.devices.size
    return flops_per_token(program, tokens) * tokens_per_second / peak


def table(report: dict[str, Any]) -> str:
    """A report as lines of name and value."""
    return "\n".join(f"{name:20} {value}" for name, value in report.items())


def _shared(program: Program, rows: int, tokens: int) -> dict[str, Any]:
    return {
        "devices": program.mesh.devices.size,
        "device_kind": program.mesh.devices.flat[0].device_kind,
        "mesh": {axis: size for axis, size in program.mesh.shape.items() if size > 1},
        "rows": rows,
        "tokens": tokens,
        "parameters": sum(math.prod(x.shape) for x in jax.tree.leaves(program.state.policy)),
        "active_parameters": active_parameters(program.config),
        "flops_per_token": flops_per_token(program, tokens),
    }


def _memory(arguments: int, temporaries: int, peak: int, chip: Chip) -> dict[str, Any]:
    spare = 1.0 - peak / chip.memory
    return {
        "arguments": arguments,
        "temporaries": temporaries,
        "peak": peak,
        "hbm": chip.memory,
        "hbm_spare": spare,
        "fits": spare >= 0.0,
    }
