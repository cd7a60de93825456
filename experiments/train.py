r"""Trains an agent: rollout (a process, this one, or a Ray cluster) → store → learner → published weights.

    python -m experiments.train --workdir=runs/search
    python -m experiments.train --workdir=runs/gspo --config.algorithm=gspo --rollout=inline
    python -m experiments.train --workdir=runs/fleet --rollout=ray --ray_workers=64 --ray_address=auto
    python -m experiments.train --workdir=runs/mesh --config.mesh=fsdp=4,tensor=2
    python -m experiments.train --workdir=/shared/run --coordinator=HOST:PORT --num_processes=2 --process_id=0

A run that was stopped, in whatever way, goes on where its last checkpoint left it when the same command is given.
"""

from pathlib import Path

import ml_collections
from absl import flags, logging
from ml_collections import config_flags

from experiments import adapters, environments, meshes, parts, playing, processes, programs, watching, workdirs
from experiments.workers import Cluster as Fleet
from experiments.workers import InlineWorker, RayWorkers, WorkerProcess
from mpo_jax.models.pretrained import Pretrained
from mpo_jax.rollout.worker import stop_on_signals
from mpo_jax.store.sqlite import EpisodeStore
from mpo_jax.store.weights import PublishedWeights
from mpo_jax.training.checkpoints import Checkpoints
from mpo_jax.training.cluster import Cluster
from mpo_jax.training.learner import Learner, Settings
from mpo_jax.training.loop import Loop
from mpo_jax.training.metrics import MetricsLog
from mpo_jax.training.report import write_report
from mpo_jax.training.state import TrainState

CONFIG = config_flags.DEFINE_config_file("config", "experiments/configs/search.py", "What to train, and how.")
WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.", required=True)
ROLLOUT = flags.DEFINE_enum(
    "rollout",
    "process",
    ["process", "inline", "ray"],
    "Where episodes are played; inline repeats bit for bit from its seed.",
)
RAY_WORKERS = flags.DEFINE_integer("ray_workers", 2, "Workers of rollout=ray.", lower_bound=1)
RAY_ADDRESS = flags.DEFINE_string("ray_address", "", "Of a Ray cluster with this machine in it; by default, a new one.")
RAY_GPUS = flags.DEFINE_float("ray_gpus", 0.0, "GPUs of each worker of rollout=ray.", lower_bound=0.0)
PROFILE = flags.DEFINE_list("profile_steps", None, "First and last step to trace into the workdir's trace/.")

COORDINATOR = flags.DEFINE_string("coordinator", None, "host:port of process 0, or auto; none: one process.")
NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "How many processes train together, on a shared workdir.")
PROCESS_ID = flags.DEFINE_integer("process_id", None, "Which of them this is.")
PATIENCE = flags.DEFINE_float("patience", 60.0, "Seconds that processes with episodes wait for those without.")
TIMEOUT = flags.DEFINE_float("timeout", 100.0, "Seconds without a sign of life of another after which this one ends.")
SILENCE = flags.DEFINE_float("silence", 1800.0, "Seconds that a living one may take to come to where others wait.")


def main(_):
    logging.set_verbosity(logging.WARNING)
    parts.keep_freed_memory()
    processes.join(COORDINATOR.value, NUM_PROCESSES.value, PROCESS_ID.value, TIMEOUT.value)
    with processes.ended_at_once():
        train(CONFIG.value, Path(WORKDIR.value))


def train(config: ml_collections.ConfigDict, workdir: Path) -> None:
    """The part of a run that this process has, to its end."""
    parts.settle_groups(config, parts.make_algorithm(config))
    cluster = meshes.make_cluster(config, patience=PATIENCE.value, timeout=SILENCE.value)
    share = processes.Share(cluster.index, cluster.count)
    whole, config = config, share.part(config)
    settings = parts.make_settings(config)
    model = parts.load_model(config)
    setting = environments.build(config, model.tokenizer)
    fleet = make_fleet(cluster)
    learner, state = make_learner(config, settings, model, cluster)
    cluster.in_turn(lambda: workdirs.claim(workdir, whole))
    home = share.home(workdir)
    home.mkdir(exist_ok=True)
    checkpoints = Checkpoints(workdir / "checkpoints", agree=cluster.all)
    state = parts.restore_state(checkpoints, state)
    if int(state.step) > settings.num_steps:
        raise ValueError(f"num_steps={settings.num_steps}, but {workdir} has done {int(state.step)} steps already")
    store = EpisodeStore(home / "episodes.sqlite", vocab_size=model.config.vocab_size)
    published = PublishedWeights(workdir / "weights")
    evaluate = playing.make_evaluate(config, model, setting, learner)
    worker = {
        "process": lambda: WorkerProcess(workdir, share),
        "inline": lambda: InlineWorker(config, model, setting, store, published, share),
        "ray": lambda: RayWorkers(config, model, fleet, store, published),
    }[ROLLOUT.value]()
    log = make_log(home, config, model, state, quiet=cluster.index > 0)
    with checkpoints, worker, stop_on_signals() as should_stop:
        loop = Loop(learner, store, published, checkpoints, log, worker.wait, evaluate, should_stop)
        with cluster.connected():
            state = loop.run(state)
    log.close()
    if cluster.index == 0:
        adapters.save(workdir, config, model, state)
        print(write_report(workdir, finished=int(state.step) >= settings.num_steps))


def make_fleet(cluster: Cluster) -> Fleet | None:
    """Where Ray's workers run, if they are asked for.

    Raises:
      ValueError: for several processes that train.
    """
    if ROLLOUT.value != "ray":
        return None
    if cluster.count > 1:
        raise ValueError(f"rollout=ray with {cluster.count} processes that train, expected one")
    return Fleet(RAY_ADDRESS.value, RAY_WORKERS.value, RAY_GPUS.value)


def make_learner(
    config: ml_collections.ConfigDict, settings: Settings, model: Pretrained, cluster: Cluster
) -> tuple[Learner, TrainState]:
    """The learner, and the state before its first step."""
    algorithm, optimizers = parts.make_algorithm(config), parts.make_optimizers(config)
    learner = Learner(
        algorithm,
        parts.make_models(config, model),
        optimizers,
        settings,
        model.tokenizer.render_hint,
        parts.make_shaping(config, model),
        cluster,
    )
    return learner, cluster.place_state(parts.make_state(config, model, algorithm, optimizers))


def make_log(
    home: Path, config: ml_collections.ConfigDict, model: Pretrained, state: TrainState, *, quiet: bool
) -> MetricsLog:
    """Where the run's numbers go, and what is watched of it."""
    return MetricsLog(
        home,
        total_steps=config.num_steps,
        first_step=int(state.step),
        quiet=quiet,
        trace=watching.make_trace(home, PROFILE.value),
        utilisation=watching.make_utilisation(config, model, state),
    )


if __name__ == "__main__":
    programs.run(main)
