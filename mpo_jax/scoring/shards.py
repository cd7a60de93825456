"""Hugging Face folders of safetensors, read and written one tensor at a time, in one file or in shards."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes  # noqa: F401 - lets numpy read bfloat16
import numpy as np
from safetensors import SafetensorError, safe_open

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}


class Shards:
    """The tensors of a folder; only headers are read until a tensor is asked for.

    Attributes:
      folder: with `model.safetensors`, or shards and their `model.safetensors.index.json`.
      files: file name -> names of its tensors, in the order of their bytes.
      kinds: tensor name -> (dtype as safetensors calls it, shape).

    Raises:
      ValueError: no such folder, or a file that is missing, damaged or not as the index says; the message names it.
    """

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        self.files: dict[str, list[str]] = {}
        self.kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._file_of: dict[str, str] = {}
        listed = self._listed()
        for file_name in sorted(set(listed.values())) or [SINGLE]:
            with self._open(file_name) as file:
                self.files[file_name] = list(file.offset_keys())
                for name in self.files[file_name]:
                    piece = file.get_slice(name)
                    self.kinds[name] = piece.get_dtype(), tuple(piece.get_shape())
                    self._file_of[name] = file_name
        if listed and listed != self._file_of:
            name = min(listed.items() ^ self._file_of.items())[0]
            there, said = self._file_of.get(name), listed.get(name)
            raise ValueError(f"{self.folder / INDEX}: tensor {name!r} is in {there}, the index says {said}")

    def _listed(self) -> dict[str, str]:
        """Tensor -> file by the index; nothing where one file holds all."""
        index = self.folder / INDEX
        if (self.folder / SINGLE).exists():
            return {}
        if not index.exists():
            raise ValueError(f"{self.folder}: neither {SINGLE} nor {INDEX}")
        try:
            return dict(json.loads(index.read_text())["weight_map"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{index}: no readable weight_map: {error!r}") from error

    @contextlib.contextmanager
    def _open(self, file_name: str) -> Iterator[safe_open]:
        try:
            with safe_open(self.folder / file_name, framework="numpy") as file:
                yield file
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{self.folder / file_name}: cannot be read: {error}") from error

    def read(self, name: str) -> np.ndarray:
        """One tensor, in its own dtype."""
        with self._open(self._file_of[name]) as file:
            return file.get_tensor(name)

    def header(self, file_name: str) -> bytes:
        """What precedes the tensors of a file: the length of a JSON object, and the object."""
        with (self.folder / file_name).open("rb") as file:
            length = file.read(8)
            return length + file.read(int.from_bytes(length, "little"))

    def copy_rest(self, folder: Path) -> None:
        """Copies everything but weights (config, tokenizer, index, templates) to another folder."""
        for path in self.folder.iterdir():
            if path.is_file() and path.suffix not in _WEIGHTS:
                shutil.copyfile(path, folder / path.name)


def check_same_tensors(expected: Shards, found: Shards) -> None:
    """Checks that two folders hold tensors of the same names and shapes, in dtypes of the same sort.

    Raises:
      ValueError: naming the first tensor that is missing, unexpected or of another shape, and both folders.
    """
    if wrong := sorted(expected.kinds.keys() ^ found.kinds.keys()):
        kind = "missing" if wrong[0] in expected.kinds else "unexpected"
        raise ValueError(
            f"{found.folder}: {kind} tensor {wrong[0]!r} ({len(wrong)} names differ from those of {expected.folder})"
        )
    for name, (dtype, shape) in expected.kinds.items():
        other_dtype, other_shape = found.kinds[name]
        if shape != other_shape or is_float(dtype) != is_float(other_dtype):
            raise ValueError(
                f"{found.folder}: tensor {name!r} is {other_dtype}{list(other_shape)}, "
                f"expected {dtype}{list(shape)} as in {expected.folder}"
            )


def is_float(dtype: str) -> bool:
    """Whether a safetensors dtype is one of those that can be merged."""
    return dtype in ("F64", "F32", "F16", "BF16")
