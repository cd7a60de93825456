"""`experiments.train` with the rollout in its own process: it repeats from its seed and resumes, bit for bit."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from models import tiny
from training import runs

from experiments import parts, train
from mpo_jax.models import lora, pretrained, weights
from mpo_jax.store.sqlite import EpisodeStore
from mpo_jax.store.weights import PublishedWeights
from mpo_jax.training.checkpoints import Checkpoints
from mpo_jax.training.learner import Learner
from mpo_jax.training.metrics import read_metrics

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Programs compiled once for all runs of this file."""
    folder = str(tmp_path_factory.mktemp("xla"))
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]
    for name, value in zip(names, (folder, 0.0), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield folder
    for name, value in zip(names, before, strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def run(cache, set_flags, capsys):
    """Calls the program's `main` with a config; returns what it printed."""

    def main(workdir, rollout="inline", **changes):
        set_flags(train, CONFIG=runs.config(**changes), WORKDIR=str(workdir), ROLLOUT=rollout)
        train.main(None)
        return capsys.readouterr().out

    return main


def numbers(workdir):
    """The metrics without what a clock says."""
    rows = read_metrics(workdir / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(("seconds", "tokens_per", "overlap"))} for row in rows]


def last_state(workdir, **changes):
    checkpoints = Checkpoints(workdir / "checkpoints")
    found = checkpoints.restore(runs.fresh_state(**changes))
    checkpoints.close()
    return found[0], runs.frozen(found[1])


def episodes(workdir):
    store = EpisodeStore(workdir / "episodes.sqlite", read_only=True)
    found = list(store.episodes())
    store.close()
    return found


@pytest.mark.slow
def test_a_run_repeats_bit_for_bit_and_goes_on_as_if_it_had_never_stopped(run, tmp_path, cache):
    """Five steps in one go; 3 and then 2 in new objects; and the first two by the command, in a process of its own.

    BUG-146, BUG-148, BUG-149.
    """
    whole, broken, other, command = (tmp_path / name for name in ("whole", "broken", "other", "command"))
    printed = run(whole, num_steps=5)
    assert "finished: 5 steps, 20 episodes" in printed and str(whole / "curve.png") in printed

    run(broken, num_steps=3)
    assert last_state(broken)[0] == 3
    run(broken, num_steps=5)
    (step, expected), (other_step, found) = last_state(whole), last_state(broken)
    assert step == other_step == 5 and runs.equal(found, expected)
    assert [row["step"] for row in numbers(whole)] == [0, 1, 2, 3, 4, 5]
    assert numbers(broken)[:5] == numbers(whole)[:5]
    assert numbers(broken)[5] == numbers(whole)[5]
    assert episodes(broken) == episodes(whole)
    with pytest.raises(ValueError, match=rf"num_steps=4, but {broken} has done 5 steps already"):
        run(broken, num_steps=4)
    assert numbers(broken)[5] == numbers(whole)[5]  # to go on would have taken out the last evaluation
    first, second = (PublishedWeights(folder / "weights").load() for folder in (whole, broken))
    assert first[1] == second[1] == 5 and runs.equal(first[0], second[0])

    # Episodes are sampled with the newest weights, each group once; seeds are not used again.
    assert [v for e in episodes(whole) for v in set(e.versions)] == [step for step in range(5) for _ in range(4)]
    assert len({tuple(e.tokens) for e in episodes(whole)}) == 20

    run(other, num_steps=2, seed=1)
    assert numbers(other)[1] != numbers(whole)[1]
    assert {e.task_id for e in episodes(other)} != {e.task_id for e in episodes(whole)[:8]}

    changed = {k: v for k, v in json.loads((whole / "config.json").read_text()).items() if k in runs.SMALL}
    flags = [f"--config.{k}={v}" for k, v in (changed | {"num_steps": 2, "model": runs.model_folder()}).items()]
    result = subprocess.run(
        [sys.executable, "-m", "experiments.train", f"--workdir={command}", "--rollout=inline", *flags],
        cwd=ROOT,
        env=os.environ | {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert "finished: 2 steps, 8 episodes" in result.stdout
    assert numbers(command)[:2] == numbers(whole)[:2]
    assert episodes(command) == episodes(whole)[:8]

    summary = json.loads((whole / "summary.json").read_text())
    assert summary["finished"] and summary["episodes"] == 20 and summary["wall_seconds"] > 0
    assert len(summary["success_train"]) == len(summary["success_held_out"]) == 2
    assert np.isfinite(summary["success_train"] + summary["success_held_out"]).all()


def test_the_learner_refuses_ids_that_its_model_does_not_know(run, tmp_path, monkeypatch):
    """Another program, which knows no vocabulary, has added such a record: it is put aside and never trained on."""

    class Visited(train.Loop):
        def run(self, state):
            foreign = runs.make_episode(0, 0, [[runs.model().config.vocab_size]], [1.0])
            EpisodeStore(self.store.path).add(0, [foreign])
            assert self.store.take(1, 0) is None
            ((group, member, reason),) = self.store.quarantined()
            assert (group, member) == (0, 0)
            assert "tokens of length 5 is wrong at index 3: expected ids in 0..399" in reason
            return state

    monkeypatch.setattr(train, "Loop", Visited)
    assert "stopped" in run(tmp_path / "run")


@pytest.mark.slow
def test_a_run_on_ray_outlives_the_kill_of_a_worker(run, cache, tmp_path, monkeypatch):
    """The killed worker's groups are made again: 2 steps train on groups 0..3, each whole and once."""
    pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "experiments"))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", cache)
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    adapter = {
        "target": "killing:KillsItsWorker",
        "arguments": json.dumps({"marker": str(tmp_path / "killed")}),
    }
    few = {"num_steps": 2, "num_slots": 2, "evaluation_questions": 1, "environment": "adapter", "adapter": adapter}
    printed = run(tmp_path / "run", "ray", **few)
    assert (tmp_path / "killed").exists() and "finished: 2 steps, 8 episodes" in printed
    store = EpisodeStore(tmp_path / "run" / "episodes.sqlite", read_only=True)
    assert store.steps() == {group: group // 2 for group in range(4)}
    made = episodes(tmp_path / "run")
    assert [e.episode_id for e in made[:8]] == [f"{group:08d}-{m:03d}" for group in range(4) for m in range(2)]
    assert not any("error" in e.metadata for e in made)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config.nope=1"], "nope"),
        (["--config.mpo.nope=1"], "nope"),
        (["--rollout=nowhere"], "nowhere"),
    ],
)
def test_an_unknown_key_is_named_before_anything_is_made(tmp_path, arguments, message):
    command = [sys.executable, "-m", "experiments.train", f"--workdir={tmp_path / 'run'}", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode != 0
    assert message in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": "mpoo"}, "unknown algorithm 'mpoo'"),
        ({"model": "/no/such/model"}, "/no/such/model: no readable model"),
        ({"max_pending_groups": 1}, "max_pending_groups=1"),
        ({"row_multiple": 3}, "row_multiple=3"),
    ],
)
def test_bad_values_are_refused_before_the_folder_is_claimed(run, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_with_adapters_resumes_and_leaves_them_beside_its_merged_weights(run, tmp_path):
    changes = {"algorithm": "grpo", "lora": {"rank": 2}, "learning_rate": 0.01, "checkpoint_every": 1}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(whole, num_steps=2, **changes)
    for num_steps in (1, 2):
        run(broken, num_steps=num_steps, **changes)
    files = [folder / "adapter" / "adapter_model.safetensors" for folder in (whole, broken)]
    assert files[0].read_bytes() == files[1].read_bytes()
    model = runs.model()
    config, found = lora.load(whole / "adapter", model.config, model.params)
    published, version = PublishedWeights(whole / "weights").load()
    assert version == 2
    merged = weights.flatten(lora.merge(config, model.params, found))
    for name, x in merged.items():
        np.testing.assert_allclose(published[name], x, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_a_run_on_a_shared_trunk_resumes_and_its_step_is_one_made_by_hand(run, tmp_path):
    """Two steps by two calls; the second is made once more from the first one's checkpoint."""
    model, pair = runs.model(), tmp_path / "pair"  # which rewards every turn, as a random policy finds no answer
    pretrained.save(pair, dataclasses.replace(model, params=tiny.stirred(model.params)))
    changes = {"shared_trunk": 0.5, "minibatches": 1, "value_pretraining_steps": 0, "checkpoint_every": 1}
    changes |= {"learning_rate": 1e-2, "critic_learning_rate": 0.3}
    changes |= {"dense": {"policy": str(pair), "reference": str(runs.model_folder()), "coefficient": 1.0}}
    config, states = runs.config(**changes), []
    algorithm, optimizers = parts.make_algorithm(config), parts.make_optimizers(config)
    for num_steps in (1, 2):
        run(tmp_path / "run", num_steps=num_steps, **changes)
        checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
        states.append(runs.frozen(checkpoints.restore(parts.make_state(config, model, algorithm, optimizers))[1]))
        checkpoints.close()
    first, second = states
    learner = Learner(
        algorithm,
        parts.make_models(config, model),
        optimizers,
        parts.make_settings(config),
        shape=parts.make_shaping(config, model),
    )
    batch, _, _, targets = learner.prepare(first, episodes(tmp_path / "run")[4:8])
    grads = runs.shared_gradient(first.policy, first.critic, batch, targets, 0.5)
    for name, grad in zip(("policy", "critic"), grads, strict=True):
        optimizer, before = getattr(optimizers, name), getattr(first, name)
        updates, _ = optimizer.update(grad, getattr(first, f"{name}_optimizer"), before)
        assert runs.furthest(optax.apply_updates(before, updates), getattr(second, name)) < 1e-5, name
        assert runs.furthest(updates, jax.tree.map(np.zeros_like, updates)) > 1e-3
    alone = runs.shared_gradient(first.policy, first.critic, batch, targets, 0.0)[0]
    assert runs.furthest(alone, grads[0]) > 1e-3, "the value loss reaches the trunk"
    published, version = PublishedWeights(tmp_path / "run" / "weights").load()
    assert version == 2 and runs.equal(published, weights.flatten(second.policy))
