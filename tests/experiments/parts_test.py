"""Bad input of the programs: one clear error each, before anything is written or trained."""

import dataclasses
import json

import ml_collections
import numpy as np
import pytest
from training import runs

from experiments import environments, parts, playing, workdirs
from mpo_jax import algorithms
from mpo_jax.models import pretrained
from mpo_jax.rollout.monitor import MonitoredEngine
from mpo_jax.store.sqlite import EpisodeStore, StoreError
from mpo_jax.store.weights import PublishedWeights, WeightsError
from mpo_jax.training.learner import Settings
from mpo_jax.types import Trajectories


def test_an_unknown_algorithm_names_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown algorithm 'mpoo', expected one of: mpo, turn_ppo, ppo, .*taspo"):
        parts.make_algorithm(runs.config(algorithm="mpoo"))


def test_an_unknown_hyperparameter_names_the_known_ones():
    config = runs.config()
    with config.unlocked():
        config.mpo.lambda_trun = 0.5
    with pytest.raises(ValueError, match=r"unknown hyperparameter of mpo 'lambda_trun', expected .*lambda_turn"):
        parts.make_algorithm(config)


@pytest.mark.parametrize("dual_clip", [0.9, 1.0])
def test_a_dual_clip_below_the_clip_is_refused(dual_clip):
    """BUG-079: c must be above 1 + ε_high."""
    config = runs.config()
    config.mpo.dual_clip = dual_clip
    with pytest.raises(ValueError, match="dual"):
        parts.make_algorithm(config)


@pytest.mark.parametrize("name", algorithms.ALGORITHMS)
def test_every_section_builds_its_algorithm(name):
    """The config holds the algorithms' own defaults, so the section changes nothing but what it says it does."""
    config = runs.config(algorithm=name)
    assert parts.make_algorithm(config).name == name
    section = {k: v for k, v in config[name].to_dict().items()}
    own = algorithms.defaults(name) | {"group_size": None}
    differs = {k for k, v in section.items() if v != own[k]}
    assert differs == {"vapo": {"alpha"}, "gspo": {"epsilon_low", "epsilon_high"}}.get(
        name, {"epsilon_low", "epsilon_high"} if name == "gspo_token" else set()
    )


def test_back_pressure_below_a_batch_is_refused():
    """BUG-141: the worker would wait for the learner and the learner for the worker."""
    with pytest.raises(ValueError, match=r"max_pending_groups=1 is less than groups_per_step=2"):
        parts.make_settings(runs.config(max_pending_groups=1))


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="row_multiple=4 is not a multiple of minibatches·microbatches=6"):
        parts.make_settings(runs.config(minibatches=2, microbatches=3))


def test_an_episode_that_might_be_longer_than_a_row_is_refused_before_any_is_made():
    with pytest.raises(ValueError, match=r"row_tokens=383 is less than context_length=384: an episode could be longer"):
        parts.make_settings(runs.config(row_tokens=383))


def test_a_config_without_a_setting_is_refused():
    """Such as one of an older run: no default is put in its place in silence."""
    config = ml_collections.ConfigDict({k: v for k, v in runs.config().items() if k not in ("epochs", "minibatches")})
    with pytest.raises(ValueError, match="the config lacks epochs, minibatches"):
        parts.make_settings(config)


def test_settings_are_the_configs():
    config = runs.config()
    settings = parts.make_settings(config)
    assert isinstance(settings, Settings) and settings.num_steps == 3 and settings.row_tokens == 384


def test_a_folder_of_another_run_names_the_key(tmp_path):
    workdirs.claim(tmp_path / "run", runs.config())
    workdirs.claim(tmp_path / "run", runs.config())
    workdirs.claim(tmp_path / "run", runs.config(num_steps=99))  # a run may be made longer
    with pytest.raises(ValueError, match=r"run belongs to another run: its seed is 0, here 1"):
        workdirs.claim(tmp_path / "run", runs.config(seed=1))
    other = runs.config()
    other.mpo.beta = 0.0
    with pytest.raises(ValueError, match=r"its mpo is .*'beta': 1.0.* here .*'beta': 0.0"):
        workdirs.claim(tmp_path / "run", other)
    with pytest.raises(ValueError, match="its algorithm is 'mpo', here 'gspo'"):
        workdirs.claim(tmp_path / "run", runs.config(algorithm="gspo"))


def test_the_config_comes_back_from_the_folder(tmp_path):
    config = runs.config(algorithm="gspo")
    workdirs.claim(tmp_path, config)
    found = workdirs.read_config(tmp_path)
    assert json.loads(found.to_json()) == json.loads(config.to_json())
    assert parts.make_algorithm(found).name == "gspo"


@pytest.mark.parametrize("text", [None, "{", ""])
def test_a_folder_of_no_run_is_named(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=f"{tmp_path}: not the workdir of a run"):
        workdirs.read_config(tmp_path)


@pytest.mark.parametrize("text", ["", '{"seed": '])
def test_a_half_written_config_is_one_clear_error(tmp_path, text):
    """Killed while claiming."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=str(tmp_path)):
        workdirs.claim(tmp_path, runs.config())


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["missing", "cut", "rubbish"])
def test_a_damaged_model_folder_is_named(tmp_path, name, damage):
    pretrained.save(tmp_path, runs.model())
    pretrained.load(tmp_path)
    path = tmp_path / name
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if damage == "cut" else b"\0rubbish" * 9)
    with pytest.raises(ValueError, match=str(tmp_path)):
        pretrained.load(tmp_path)


def test_a_missing_model_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere: no readable model"):
        pretrained.load(tmp_path / "nowhere")


def test_a_corrupt_store_is_named(tmp_path):
    path = tmp_path / "episodes.sqlite"
    path.write_bytes(b"no database at all" * 100)
    with pytest.raises(StoreError, match=r"episodes\.sqlite"):
        EpisodeStore(path)


def test_corrupt_weights_are_named_and_the_older_ones_used(tmp_path, caplog):
    from mpo_jax.models import weights

    published = PublishedWeights(tmp_path)
    arrays = weights.flatten(runs.model().params)
    published.publish(arrays, 0)
    newest = published.publish(arrays, 1)
    newest.write_bytes(newest.read_bytes()[:-100])
    with pytest.raises(WeightsError, match=newest.name):
        published.load(1)
    assert published.load()[1] == 0 and newest.name in caplog.text


def test_tasks_are_a_stream_that_asks_everything_before_it_repeats():
    stream = lambda seed: environments.training_questions(runs.config(seed=seed))  # noqa: E731
    tasks = stream(0)
    pool = len(environments.questions("train"))
    asked = [id(tasks(i)["question"]) for i in range(pool)]
    assert len(set(asked)) == pool
    assert [tasks(i) for i in (3, pool + 3)] == [stream(0)(i) for i in (3, pool + 3)]
    assert [tasks(i) for i in range(20)] != [stream(1)(i) for i in range(20)]


def test_a_share_of_the_tasks_is_over_made_up_names():
    tasks = environments.training_questions(runs.config(renaming=0.5))
    share = sum(bool(tasks(i)["rename"]) for i in range(400)) / 400
    assert abs(share - 0.5) < 0.1  # four standard errors of 0.025


@pytest.mark.parametrize(("name", "size"), [("mpo", 1), ("grpo", 8), ("dapo", 16)])
def test_groups_are_settled_by_the_algorithm(name, size):
    config = runs.config(algorithm=name, group_size=None, groups_per_step=None, max_pending_groups=None)
    parts.settle_groups(config, parts.make_algorithm(config))
    assert (config.group_size, config.groups_per_step, config.max_pending_groups) == (size, 128 // size, 256 // size)


def test_groups_of_one_are_refused_where_they_are_compared():
    config = runs.config(algorithm="grpo", group_size=1)
    with pytest.raises(ValueError, match="group_size=1: grpo compares"):
        parts.settle_groups(config, parts.make_algorithm(config))


def test_fixed_questions_are_fixed():
    held_out = environments.fixed_questions("held_out", 8)
    assert held_out == environments.fixed_questions("held_out", 8) and len(held_out) == 8
    assert len(environments.fixed_questions("train", 10**9)) == len(environments.questions("train"))


def test_the_first_state_is_the_warm_start_in_buffers_of_its_own():
    import jax

    model, config = runs.model(), runs.config(algorithm="grpo")
    state = parts.make_state(config, model, parts.make_algorithm(config), parts.make_optimizers(config))
    assert runs.equal(state.policy, model.params) and runs.equal(state.reference, model.params)
    assert state.critic is None and state.critic_optimizer is None
    buffers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((state.policy, state.reference, model.params))]
    assert len(set(buffers)) == len(buffers)


def test_a_monitor_reads_along_only_where_a_threshold_asks_for_it():
    config = runs.config()
    model = pretrained.load(config.model)
    plain = playing.make_rollout(config, model, environments.build(config, model.tokenizer), group_size=1, seed=0)
    assert playing.monitored(config, model, plain) is plain
    config.monitor.threshold, config.monitor.stop = -0.1, True
    watched = playing.monitored(config, model, plain)
    assert isinstance(watched.engine, MonitoredEngine) and watched.engine.num_slots == plain.engine.num_slots
    assert watched.limits == dataclasses.replace(plain.limits, flagged=True)


def test_a_correction_is_configured_with_its_hyperparameters():
    """Token ratios .5/.25 = 2 and .5/1 = .5 of the trainer's to the engine's, truncated at 1.5."""
    config = runs.config(correction="truncated")
    config.truncated.maximum = 1.5
    algorithm = parts.make_algorithm(config)
    assert algorithm.name == "mpo" and parts.make_algorithm(runs.config()).correction is None
    old = np.log(np.array([[0.5, 0.5, 0.5]], np.float32))
    zeros, mask, one = np.zeros((1, 3), np.int32), np.array([[True, True, False]]), np.zeros((1, 1), np.int32)
    batch = Trajectories(
        tokens=zeros,
        positions=zeros,
        sequence_ids=zeros,
        turn_ids=zeros,
        action_mask=mask,
        executable_mask=mask,
        rewards=zeros.astype(np.float32),
        behavior_logprobs=np.log(np.array([[0.25, 1.0, 0.5]], np.float32)),
        state_ids=zeros,
        group_ids=one,
        truncated=one.astype(bool),
        policy_version=one,
    )
    weights, kept = algorithm.correction(old, batch)
    np.testing.assert_allclose(weights, [[1.5, 0.5, 1.0]], rtol=1e-6)
    assert kept.tolist() == batch.action_mask.tolist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"correction": "clipped"}, "unknown correction 'clipped', expected one of: truncated, masked"),
        ({"correction": "masked", "algorithm": "sao"}, "sao accounts for the sampling policy itself"),
    ],
)
def test_a_correction_that_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        parts.make_algorithm(runs.config(**changes))


@pytest.mark.parametrize(("staleness", "pending"), [(None, 4), (0, 2), (3, 8)])
def test_staleness_settles_the_back_pressure(staleness, pending):
    """BUG-143: what is in flight and in the queue is (K + 1) batches of 2 groups at most."""
    config = runs.config(max_staleness=staleness, max_pending_groups=None)
    parts.settle_groups(config, parts.make_algorithm(config))
    assert config.max_pending_groups == pending
    assert parts.make_settings(config).max_staleness == staleness
    admission = playing.make_admission(config)
    assert (admission.groups_per_step, admission.max_staleness, admission.max_pending) == (2, staleness, pending)


def test_a_negative_staleness_is_refused():
    with pytest.raises(ValueError, match="max_staleness=-1"):
        parts.make_settings(runs.config(max_staleness=-1))
