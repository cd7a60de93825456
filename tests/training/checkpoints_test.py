"""Checkpoints: what is restored is what was saved, a damaged one is passed over, and saving goes on after that."""

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mpo_jax.training.checkpoints import Checkpoints
from training import runs


@pytest.fixture
def trained():
    """A learner, a batch, and the state after two steps."""
    learner, state = runs.learner("mpo", value_pretraining_steps=1), runs.fresh_state("mpo")
    episodes = runs.as_sampled(learner, state, runs.flat(runs.make_groups()))
    for _ in range(2):
        state, _ = learner.update(state, episodes)
    return learner, episodes, state


def truncate(folder):
    """Cuts every file of a checkpoint to half."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in files:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert files


def remove_data(folder):
    """Leaves a checkpoint's folder without its arrays."""
    for part in folder.iterdir():
        shutil.rmtree(part) if part.is_dir() else part.unlink()


def test_the_third_step_is_that_of_an_uninterrupted_run(tmp_path, trained):
    """BUG-149: moments, counts and the rest come back, and are used."""
    learner, episodes, state = trained
    first = Checkpoints(tmp_path)
    first.save(2, state)
    first.wait()
    saved = runs.frozen(state)
    step, restored = Checkpoints(tmp_path).restore(runs.fresh_state("mpo"))
    assert step == 2 and int(restored.step) == 2
    assert runs.equal(restored, saved)
    assert jax.tree.structure(restored) == jax.tree.structure(saved)
    assert int(optax.tree_utils.tree_get(restored.critic_optimizer, "count")) == 4
    expected, expected_metrics = learner.update(state, episodes)
    found, metrics = learner.update(restored, episodes)
    assert runs.equal(found, expected)
    timed = ("seconds_evaluate", "seconds_step")
    assert {k: v for k, v in metrics.items() if k not in timed} == {
        k: v for k, v in expected_metrics.items() if k not in timed
    }


def test_nothing_saved_is_nothing_restored(tmp_path):
    assert Checkpoints(tmp_path).restore(runs.fresh_state("mpo")) is None


@pytest.mark.parametrize("damage", [truncate, remove_data])
def test_a_damaged_checkpoint_is_named_and_the_older_one_used(tmp_path, caplog, damage):
    """BUG-151."""
    state = runs.fresh_state("mpo")
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(2, state.replace(skipped=state.skipped + 7))
    checkpoints.save(4, state)
    checkpoints.close()
    damage(tmp_path / "4")
    with caplog.at_level(logging.WARNING, logger="mpo_jax.training.checkpoints"):
        step, restored = Checkpoints(tmp_path).restore(state)
    assert step == 2 and int(restored.skipped) == 7
    assert str(tmp_path / "4") in caplog.text and str(tmp_path / "2") + ":" not in caplog.text


def test_what_another_process_cannot_read_is_passed_over_by_all(tmp_path):
    """Else they would go on from different steps: here the other one cannot read its part of 4."""
    state = {"x": jnp.arange(3.0)}
    first = Checkpoints(tmp_path)
    first.save(2, state)
    first.save(4, {"x": jnp.ones(3)})
    first.wait()
    asked = []

    def all_of_two(readable):
        asked.append(readable)
        return readable and len(asked) > 1

    step, restored = Checkpoints(tmp_path, agree=all_of_two).restore(state)
    assert step == 2 and asked == [True, True]
    np.testing.assert_array_equal(restored["x"], [0, 1, 2])


@pytest.mark.parametrize("kind", ["damaged", "of another algorithm"])
def test_a_folder_without_one_readable_checkpoint_is_no_new_run(tmp_path, caplog, kind):
    """A run that began anew there would remove its weights, its metrics and these checkpoints."""
    state = runs.fresh_state("mpo")
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(2, state)
    checkpoints.close()
    if kind == "damaged":
        truncate(tmp_path / "2")
    with pytest.raises(ValueError, match=rf"{tmp_path}: none of the checkpoints \[2\] can be read"):
        Checkpoints(tmp_path).restore(state if kind == "damaged" else runs.fresh_state("gspo"))
    assert str(tmp_path / "2") in caplog.text


def test_an_unfinished_save_is_no_checkpoint_and_its_step_can_be_saved(tmp_path):
    """BUG-151: killed while saving 4."""
    state = runs.fresh_state("mpo")
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(2, state)
    checkpoints.close()
    shutil.copytree(tmp_path / "2", tmp_path / "4.orbax-checkpoint-tmp")
    truncate(tmp_path / "4.orbax-checkpoint-tmp")
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.restore(state)[0] == 2
    checkpoints.save(4, state.replace(skipped=state.skipped + 1))
    step, restored = checkpoints.restore(state)
    assert step == 4 and int(restored.skipped) == 1


def test_after_a_damaged_checkpoint_every_later_save_is_made(tmp_path):
    """A step listed is a step on disk: the damaged 4 must not swallow the 3 of the run that went on from 2."""
    state = runs.fresh_state("mpo")
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(2, state)
    checkpoints.save(4, state)
    checkpoints.close()
    truncate(tmp_path / "4")
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.restore(state)[0] == 2
    for step in (3, 4):
        checkpoints.save(step, state.replace(skipped=state.skipped + step))
        checkpoints.wait()
        found, restored = Checkpoints(tmp_path).restore(state)
        assert found == step and int(restored.skipped) == step


def test_a_step_saved_again_is_replaced_and_old_ones_go(tmp_path):
    state = runs.fresh_state("mpo")
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3):
        checkpoints.save(step, state)
    checkpoints.wait()
    checkpoints.save(3, state.replace(skipped=state.skipped + 9))
    checkpoints.wait()
    assert sorted(int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()) == [2, 3]
    assert int(checkpoints.restore(state)[1].skipped) == 9


def test_a_state_without_critic_and_reference_comes_back_too(tmp_path):
    state = runs.fresh_state("gspo")
    assert state.critic is None and state.reference is None
    saved = runs.frozen(state)
    first = Checkpoints(tmp_path)
    first.save(1, state)
    first.wait()
    restored = Checkpoints(tmp_path).restore(runs.fresh_state("gspo"))[1]
    assert restored.critic is None and runs.equal(restored, saved)
    assert not any(np.isnan(x).any() for x in jax.tree.leaves(restored))


def test_bug_151_a_state_that_is_donated_while_it_is_written_comes_back_as_it_was(tmp_path):
    """The next step takes the buffers at once; the one on disk must be the one that was given."""
    donating = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state = {"w": jnp.arange(2_000_000, dtype=jnp.float32), "step": jnp.int32(7)}
    checkpoints = Checkpoints(tmp_path)
    jax.block_until_ready(donating(jax.tree.map(jnp.copy, state)))  # compiled before the race
    checkpoints.save(7, state)
    for _ in range(3):
        state = donating(state)
    jax.block_until_ready(state)
    checkpoints.wait()
    step, restored = Checkpoints(tmp_path).restore(state)
    assert step == 7 and int(restored["step"]) == 7
    np.testing.assert_array_equal(restored["w"], np.arange(2_000_000, dtype=np.float32))


def test_bug_151_what_went_wrong_while_writing_is_raised_at_the_next_save(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)

    def full_disk():
        raise OSError("no space left")

    monkeypatch.setattr(checkpoints._manager, "wait_until_finished", full_disk)
    with pytest.raises(OSError, match="no space left"):
        checkpoints.save(1, {"w": jnp.ones(2)})


MESHES = """
import sys
import jax, jax.numpy as jnp, numpy as np
from mpo_jax.training import sharding
from mpo_jax.training.checkpoints import Checkpoints

def state(**sizes):
    number = int(np.prod(list(sizes.values())))
    with jax.set_mesh(sharding.make_mesh(**sizes, devices=jax.devices()[:number])):
        values = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
        return sharding.place_state({"policy": {"attention": {"query": {"kernel": values}}}, "step": np.int32(3)})

saved = state(fsdp=2)
checkpoints = Checkpoints(sys.argv[1])
checkpoints.save(3, saved)
checkpoints.wait()
for sizes in ({"fsdp": 1}, {"fsdp": 4}, {"fsdp": 2, "tensor": 4}):
    like = jax.tree.map(jnp.zeros_like, state(**sizes))
    step, found = Checkpoints(sys.argv[1]).restore(like)
    assert step == 3
    for a, b, c in zip(*map(jax.tree.leaves, (found, saved, like)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        assert a.sharding == c.sharding, (a.sharding, c.sharding)
"""


def test_bug_152_saved_on_two_devices_it_comes_back_on_one_four_and_eight(tmp_path):
    root = Path(__file__).parents[2]
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", MESHES, str(tmp_path)]
    done = subprocess.run(command, env=os.environ | flags, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "unsafe" not in done.stderr.lower()
