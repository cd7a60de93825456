"""Merging: hand-computed cases, the same numbers from peft, and folders of one file or of shards."""

import importlib.util
import json
import pathlib
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mpo_jax.scoring.merging import METHODS, Recipe, merge_folders, merge_tensor
from mpo_jax.scoring.shards import INDEX, SINGLE, Shards

TAU = np.array([[4, -1, 2, 0.5, 0], [-3, 2, 1, -0.5, 1]], np.float32)
THETA = np.array([1, 1, 1, 1, 1], np.float32)


def merged(method, vectors=TAU, base=THETA, **kwargs):
    """What α multiplies, of policies base + vectors."""
    return merge_tensor(Recipe(method, **kwargs), "w", base, [base + np.asarray(v, np.float32) for v in vectors])


def test_linear_is_the_weighted_mean_of_task_vectors():
    np.testing.assert_allclose(merged("linear"), [0.5, 0.5, 1.5, 0, 0.5])  # (4 − 3)/2, (−1 + 2)/2, (2 + 1)/2, …
    np.testing.assert_allclose(merged("linear", weights=(3.0, 1.0)), [2.25, -0.25, 1.75, 0.25, 0.25])  # (3·4 − 3)/4, …
    np.testing.assert_array_equal(merged("wise_ft"), merged("linear"))


def test_ties_trims_elects_and_averages_those_who_agree():
    vectors = np.array([[4, -1, 2, 0.5, 0.1], [-3, 2, 1, -0.5, 0.2]], np.float32)
    # Kept: (4, −1, 2, 0, 0), (−3, 2, 1, 0, 0). Sums 1, 1, 3, 0, 0: signs + + + 0 0. Agreeing: 4 | 2 | 2, 1.
    np.testing.assert_allclose(merged("ties", vectors, density=0.6), [4, 2, 1.5, 0, 0], rtol=1e-6)
    # Weights 1 and 3 change only the last mean: (2 + 3·1)/4.
    np.testing.assert_allclose(merged("ties", vectors, density=0.6, weights=(1.0, 3.0)), [4, 2, 1.25, 0, 0], rtol=1e-6)
    # Density .2 keeps one of five: 4 and −3 at the same place, of which 4 wins.
    np.testing.assert_allclose(merged("ties", vectors), [4, 0, 0, 0, 0])


def test_bug_171_weights_do_not_elect_the_sign():
    # Sum 1 − .5 = +.5 elects "+"; weighted by .2 and .8 it would be −.2 and elect "−".
    assert merged("ties", [[1.0], [-0.5]], np.zeros(1, np.float32), density=1.0, weights=(0.2, 0.8)) == [1.0]


@pytest.mark.parametrize("method", ["ties", "dare_linear", "dare_ties"])
def test_bug_173_density_zero_leaves_the_reference_and_ties_are_zero(method):
    with np.errstate(all="raise"):
        np.testing.assert_array_equal(merged(method, density=0.0), np.zeros(5))
        np.testing.assert_array_equal(merged(method, [[1.0], [-1.0]], np.zeros(1, np.float32), density=1.0), [0])


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"density": -0.1}, "density is -0.1, expected 0 to 1"),
        ({"density": 1.5}, "density is 1.5"),
        ({"density": float("nan")}, "density is nan"),
        ({"method": "slerp"}, "method 'slerp', expected one of linear, wise_ft, ties"),
        ({"weights": (0.0, 0.0)}, "weights are"),
        ({"weights": (2.0, -1.0)}, "weights are"),
    ],
)
def test_bug_173_recipes_that_make_no_sense_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        Recipe(**kwargs)


def test_dare_keeps_a_share_and_the_expectation():
    base, vector = np.zeros(200_000, np.float32), np.linspace(-1, 2, 200_000, dtype=np.float32)
    found = merged("dare_linear", [vector], base, density=0.25)
    kept = found != 0
    np.testing.assert_allclose(found[kept], 4 * vector[kept], rtol=1e-6)  # divided by .25
    # The share's deviation is √(.25·.75/n) = 1e-3; the mean's √(3 E τ²/n) = √(3·1/2e5) = 3.9e-3 (E τ² = 9/12 + 1/4).
    assert abs(kept.mean() - 0.25) < 4e-3
    assert abs(found.mean() - 0.5) < 1.6e-2
    np.testing.assert_array_equal(merged("dare_linear", [vector], base, density=1.0), vector)


def test_dare_drops_by_seed_and_name_and_differently_for_each_policy():
    policies, base = [np.ones(1000, np.float32)] * 2, np.zeros(1000, np.float32)
    first = merge_tensor(Recipe("dare_linear", density=0.5), "a", base, policies)
    np.testing.assert_array_equal(first, merge_tensor(Recipe("dare_linear", density=0.5), "a", base, policies))
    for other in (
        merge_tensor(Recipe("dare_linear", density=0.5), "b", base, policies),
        merge_tensor(Recipe("dare_linear", density=0.5, seed=1), "a", base, policies),
    ):
        assert np.any(first != other)
    assert {0.0, 1.0, 2.0} == set(first.tolist())  # dropped by both, by one, by none: (2 + 0)/2 = 1


def test_dare_ties_averages_the_survivors_that_agree():
    base = np.zeros(3000, np.float32)
    found = merged("dare_ties", [base + 1, base + 2, base - 1], base, density=0.5)
    # Survivors are 2, 4 and −2. Sums: 2+4−2, 2+4 → mean 3; 2 → 2; 4, 4−2 → 4; 2−2 → 0; −2 → −2; none → 0.
    assert {3.0, 2.0, 4.0, 0.0, -2.0} == set(found.tolist())
    np.testing.assert_allclose((found == 3).mean(), 0.25, atol=0.04)  # the first two survive; √(.25·.75/3000) = .008


def test_emr_takes_the_largest_of_the_elected_sign_behind_the_first_policys_mask():
    # Sums 1, 1, 3, 0, 1: signs + + + 0 +. Largest: 4, 2, 2, ·, 1. The first has the sign at places 0 and 2.
    np.testing.assert_allclose(merged("emr"), [4, 0, 2, 0, 0])


def test_float32_tensors_of_one_policy_reach_it_to_rounding():
    rng = np.random.default_rng(0)
    base, policy = rng.normal(size=(2, 64, 3)).astype(np.float32)
    for method in ("linear", "ties", "dare_linear", "emr"):
        found = base + merge_tensor(Recipe(method, density=1.0), "w", base, [policy])
        np.testing.assert_allclose(found, policy, atol=1e-6)


def peers():
    """torch and peft's merging functions, from its wheel: to import peft is to import transformers."""
    torch = pytest.importorskip("torch")
    path = pathlib.Path(__file__).parents[2] / ".venv-peers" / "peft" / "utils" / "merge_utils.py"
    if not path.exists():
        pytest.skip("peers are absent: make .venv-peers/.installed")
    spec = importlib.util.spec_from_file_location("peft_merge_utils", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return torch, module


@pytest.mark.parametrize("method", ["linear", "ties"])
@pytest.mark.parametrize("density", [0.1, 0.5, 0.9])
def test_agrees_with_peft(method, density):
    torch, peft = peers()
    vectors = np.random.default_rng(1).normal(size=(3, 17, 23)).astype(np.float32)
    tensors, third = [torch.tensor(vector) for vector in vectors], torch.full((3,), 1 / 3)
    theirs = {
        "linear": lambda: peft.task_arithmetic(tensors, third),
        "ties": lambda: peft.ties(tensors, torch.ones(3), density),
    }[method]()
    found = merged(method, vectors, np.zeros((17, 23), np.float32), density=density)
    np.testing.assert_allclose(found, theirs.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
def test_dare_agrees_with_peft_in_distribution(method):
    torch, peft = peers()
    base = np.zeros(20_000, np.float32)
    vectors, weights = [base + 1, base + 2, base - 1.5], {"dare_linear": 1 / 3, "dare_ties": 1.0}[method]
    torch.manual_seed(0)
    tensors = [torch.tensor(vector) for vector in vectors]
    theirs = getattr(peft, method)(tensors, torch.full((3,), weights), 0.5).numpy()
    found = merged(method, vectors, base, density=0.5)
    values = sorted(set(found.round(4).tolist()))
    assert values == sorted(set(theirs.round(4).tolist()))
    shares = [[np.mean(np.abs(x - value) < 1e-3) for value in values] for x in (found, theirs)]
    np.testing.assert_allclose(*shares, atol=0.02)  # two shares of n = 2e4 differ by .005 (one deviation) at most


def tensors(seed, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return {
        "embed": rng.normal(size=(7, 4)).astype(dtype),
        "layer.0": rng.normal(size=(4, 4)).astype(dtype),
        "layer.1": rng.normal(size=4).astype(dtype),
        "scalar": np.array(rng.normal(), dtype),
        "positions": np.arange(5, dtype=np.int64),
    }


def write(folder, arrays, shards=1):
    """A folder as transformers writes it: one file, or an index and several."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"of": folder.name}))
    (folder / "pytorch_model.bin").write_text("old weights")
    if shards == 1:
        save_file(arrays, folder / SINGLE, metadata={"format": "pt"})
        return folder
    names = {f"model-{i + 1:05d}-of-{shards:05d}.safetensors": list(arrays)[i::shards] for i in range(shards)}
    for file, held in names.items():
        save_file({name: arrays[name] for name in held}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, held in names.items() for name in held}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return folder


def read(folder):
    return {name: array for file in folder.glob("*.safetensors") for name, array in load_file(file).items()}


@pytest.mark.parametrize("shards", [(1, 1), (3, 1), (2, 3)])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_a_sweep_goes_from_the_reference_to_the_policy(tmp_path, shards, dtype):
    reference = write(tmp_path / "reference", tensors(0, dtype), shards[0])
    policy = write(tmp_path / "policy", tensors(1, dtype), shards[1])
    outputs = {tmp_path / "sweep" / str(alpha): alpha for alpha in (0.0, 0.25, 1.0)}
    merge_folders(Recipe(), reference, [policy], outputs)
    assert {path.name for path in (tmp_path / "sweep").iterdir()} == {"0.0", "0.25", "1.0"}
    expected, target = tensors(0, dtype), tensors(1, dtype)
    rounding = 2 * float(ml_dtypes.finfo(dtype).eps)
    for folder, alpha in outputs.items():
        found = read(folder)
        names = {path.name for path in reference.iterdir()} - {"pytorch_model.bin"} | {"merge.json"}
        assert {path.name for path in folder.iterdir()} == names
        assert json.loads((folder / "config.json").read_text()) == {"of": "reference"}
        assert json.loads((folder / "merge.json").read_text())["alpha"] == alpha
        assert found.keys() == expected.keys()
        for name, base in expected.items():
            assert found[name].dtype == base.dtype and found[name].shape == base.shape
            ends = base.astype(np.float64), target[name].astype(np.float64)
            middle = (1 - alpha) * ends[0] + alpha * ends[1]
            np.testing.assert_allclose(found[name].astype(np.float64), middle, rtol=rounding, atol=1e-6)
    for file in Shards(reference).files:
        assert Shards(tmp_path / "sweep" / "0.25").header(file) == Shards(reference).header(file)


@pytest.mark.parametrize("method", METHODS)
def test_shards_change_nothing(tmp_path, method):
    policies = [write(tmp_path / f"policy{i}", tensors(i), i) for i in (1, 2)]
    found = []
    for shards in (1, 3):
        reference, output = write(tmp_path / f"reference{shards}", tensors(0), shards), tmp_path / f"merged{shards}"
        merge_folders(Recipe(method, density=0.5), reference, policies, {output: 0.7})
        found.append(read(output))
    for name in found[0]:
        np.testing.assert_array_equal(found[0][name], found[1][name])
    assert any(np.any(found[0][name] != tensors(0)[name]) for name in found[0])


def test_emr_rescales_by_sums_over_the_whole_model(tmp_path):
    zeros = {"a": np.zeros(2, np.float32), "b": np.zeros(3, np.float32)}
    first = {"a": np.array([4, -1], np.float32), "b": np.array([2, 0.5, 0], np.float32)}
    second = {"a": np.array([-3, 2], np.float32), "b": np.array([1, -0.5, 1], np.float32)}
    folders = [write(tmp_path / name, x) for name, x in (("zero", zeros), ("first", first), ("second", second))]
    merge_folders(Recipe("emr"), folders[0], folders[1:], {tmp_path / "merged": 0.5})
    # Masked and unified: (4, 0), (2, 0, 0), sum 6. Σ|τ_1| = 4 + 1 + 2 + .5 = 7.5, so λ = 1.25; times α = .5: .625.
    np.testing.assert_allclose(read(tmp_path / "merged")["a"], [2.5, 0])
    np.testing.assert_allclose(read(tmp_path / "merged")["b"], [1.25, 0, 0])


def broken(tmp_path, change):
    arrays = tensors(1)
    change(arrays)
    return write(tmp_path / "policy", arrays)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.pop("layer.1"), r"policy: missing tensor 'layer.1' \(1 names differ from those of .*reference\)"),
        (lambda x: x.update(head=x["embed"]), "policy: unexpected tensor 'head'"),
        (lambda x: x.update(embed=x["embed"].T.copy()), r"policy: tensor 'embed' is F32\[4, 7\], expected F32\[7, 4\]"),
        (lambda x: x.update(scalar=np.array(1)), r"policy: tensor 'scalar' is I64\[\], expected F32\[\]"),
        (lambda x: x.update(positions=x["positions"] + 1), "policy: integers of tensor 'positions' differ"),
        (lambda x: x["layer.0"].fill(np.nan), r"tensor 'layer.0' of shape \(4, 4\) is not finite at alpha=0.5"),
    ],
)
def test_tensors_that_do_not_fit_are_named_and_nothing_is_written(tmp_path, change, message):
    reference = write(tmp_path / "reference", tensors(0))
    with pytest.raises(ValueError, match=message):
        merge_folders(Recipe(), reference, [broken(tmp_path, change)], {tmp_path / "merged": 0.5})
    assert {path.name for path in tmp_path.iterdir()} == {"reference", "policy"}


def test_unreadable_folders_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere: neither model\.safetensors nor model\.safetensors\.index"):
        Shards(tmp_path / "nowhere")
    sharded = write(tmp_path / "sharded", tensors(0), 3)
    index = json.loads((sharded / INDEX).read_text())
    moved = {**index["weight_map"], "embed": "model-00002-of-00003.safetensors"}
    (sharded / INDEX).write_text(json.dumps({"weight_map": moved}))
    with pytest.raises(ValueError, match=r"'embed' is in model-00001.*, the index says model-00002"):
        Shards(sharded)
    (sharded / INDEX).write_text(json.dumps(index))
    last = sharded / "model-00003-of-00003.safetensors"
    last.write_bytes(last.read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"model-00003-of-00003.safetensors: cannot be read"):
        Shards(sharded)
    last.unlink()
    with pytest.raises(ValueError, match=r"model-00003-of-00003.safetensors: cannot be read"):
        Shards(sharded)
    (sharded / INDEX).write_text("{}")
    with pytest.raises(ValueError, match="no readable weight_map"):
        Shards(sharded)


def test_outputs_weights_and_alphas_are_checked_before_anything_is_written(tmp_path):
    reference, policy = write(tmp_path / "reference", tensors(0)), write(tmp_path / "policy", tensors(1))
    for recipe, outputs, message in (
        (Recipe(), {policy: 0.5}, "policy: exists already"),
        (Recipe(weights=(1.0, 2.0)), {tmp_path / "merged": 0.5}, "2 weights for 1 policies"),
        (Recipe(), {tmp_path / "merged": float("nan")}, "alpha is nan"),
        (Recipe(), {}, "0 values of alpha"),
    ):
        with pytest.raises(ValueError, match=message):
            merge_folders(recipe, reference, [policy], outputs)
    assert {path.name for path in tmp_path.iterdir()} == {"reference", "policy"}


def test_memory_does_not_grow_with_the_number_of_tensors(tmp_path):
    peaks = []
    for number in (4, 16):
        arrays = [{f"{i}": np.full(250_000, i + k, np.float32) for i in range(number)} for k in range(2)]
        folders = [write(tmp_path / f"{number}-{k}", x) for k, x in enumerate(arrays)]
        del arrays
        tracemalloc.start()
        merge_folders(Recipe("ties"), folders[0], folders[1:], {tmp_path / f"{number}-merged": 0.5})
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0]
    assert peaks[1] < 16e6  # tensors are of 1 MB: the models together would take 32
