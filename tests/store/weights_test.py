"""Published weights: whole files only, damaged ones passed over, old and abandoned ones removed."""

import ml_dtypes
import numpy as np
import pytest

from mpo_jax.store.weights import PublishedWeights, WeightsError


def params(scale=1.0):
    return {
        "layers.0.attn.q": np.full((3, 2), scale, np.float32).T,  # not contiguous
        "head": (scale * np.arange(4)).astype(ml_dtypes.bfloat16),
        "count": np.asarray(7, np.int32),
    }


def test_round_trip_keeps_types_shapes_and_values(tmp_path):
    weights = PublishedWeights(tmp_path / "weights")
    assert weights.latest_version() is None
    path = weights.publish(params(0.5), 12)
    loaded, version = PublishedWeights(tmp_path / "weights").load()
    assert (path.name, version, weights.latest_version()) == ("weights-00000012.safetensors", 12, 12)
    assert loaded.keys() == params().keys()
    for name, array in params(0.5).items():
        assert loaded[name].dtype == array.dtype
        np.testing.assert_array_equal(loaded[name], array, strict=True)


def test_newest_three_stay_and_versions_of_an_abandoned_future_go(tmp_path):
    weights = PublishedWeights(tmp_path)
    for version in range(6):
        weights.publish(params(), version)
    assert sorted(path.name[-13:-12] for path in tmp_path.iterdir()) == ["3", "4", "5"]
    weights.publish(params(2.0), 4)  # resumed from before 5
    assert weights.latest_version() == 4
    assert weights.load()[0]["head"][1] == 2.0


@pytest.mark.parametrize("damage", ["cut", "bit", "empty", "text", "renamed"])
def test_BUG_151_damaged_newest_file_is_passed_over_with_one_warning(tmp_path, caplog, damage):
    weights = PublishedWeights(tmp_path)
    weights.publish(params(), 1)
    path = weights.publish(params(2.0), 2)
    content = path.read_bytes()
    if damage == "renamed":
        path.write_bytes((tmp_path / "weights-00000001.safetensors").read_bytes())
    else:
        last = bytes([content[-1] ^ 1])
        path.write_bytes(
            {"cut": content[:-5], "bit": content[:-1] + last, "empty": b"", "text": b"hello " * 20}[damage]
        )
    with pytest.raises(WeightsError, match=r"weights-00000002"):
        weights.load(2)
    assert weights.load()[1] == 1
    assert weights.load()[1] == weights.latest_version() == 1
    assert len([record for record in caplog.records if "weights-00000002" in record.message]) == 1
    weights.publish(params(2.0), 2)
    assert weights.load()[1] == 2


def test_half_written_file_of_a_killed_publisher_is_never_seen(tmp_path):
    (tmp_path / "weights-00000009.unfinished").write_bytes(b"half")
    weights = PublishedWeights(tmp_path)
    assert weights.latest_version() is None
    weights.publish(params(), 1)
    assert [path.name for path in tmp_path.iterdir()] == ["weights-00000001.safetensors"]


def test_no_readable_weights_and_absent_version_are_named(tmp_path):
    weights = PublishedWeights(tmp_path)
    with pytest.raises(WeightsError, match="no readable weights"):
        weights.load()
    weights.publish(params(), 1)
    with pytest.raises(WeightsError, match=r"no version 5, only \[1\]"):
        weights.load(5)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_non_finite_weights_are_refused(tmp_path, value, dtype):
    weights = PublishedWeights(tmp_path)
    with pytest.raises(WeightsError, match=r"version 1: layers\.3\.up of shape \(2,\) is not finite"):
        weights.publish({"layers.3.up": np.asarray([1.0, value], dtype)}, 1)
    assert weights.latest_version() is None
    with pytest.raises(WeightsError, match="0 parameters"):
        weights.publish({}, 1)
