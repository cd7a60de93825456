"""Published weights: a folder of versioned safetensors files, written by the learner, read by the rollout processes."""

import json
import logging
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from mpo_jax.types import Array

_NAME = re.compile(r"weights-(\d{8,})\.safetensors")

log = logging.getLogger(__name__)


class WeightsError(RuntimeError):
    """Weights that must not be published or cannot be read; the message names the file or the parameter."""


class PublishedWeights:
    """Versions of a model's parameters in a folder.

    A file appears whole or not at all: it is written beside its place, flushed to disk, renamed over it, and the
    folder flushed. Only one process may publish; any number may read at the same time.

    Args:
      folder: made if absent.
      keep: how many of the newest versions stay.
    """

    def __init__(self, folder: str | os.PathLike, *, keep: int = 3):
        if keep < 1:
            raise ValueError(f"keep is {keep}, expected at least 1")
        self.folder = Path(folder)
        self.keep = keep
        self._damaged: set[tuple[int, int]] = set()  # (inode, time of change) of files that were warned about
        self.folder.mkdir(parents=True, exist_ok=True)

    def path(self, version: int) -> Path:
        """The file of a version, whether it is there or not."""
        return self.folder / f"weights-{version:08d}.safetensors"

    def publish(self, params: Mapping[str, Array], version: int) -> Path:
        """Makes a version readable by everyone, and removes old ones.

        Versions above this one are removed too: they are of a run that was resumed from before them.

        Args:
          params: flat names (`layers.0.attn.q`) to arrays of any float or integer type, bfloat16 included.
          version: not negative.

        Returns:
          The file.

        Raises:
          WeightsError: no parameters, a negative version, or a parameter that is not finite.
        """
        if version < 0 or not params:
            raise WeightsError(f"cannot publish {len(params)} parameters as version {version}: expected ≥ 1 and ≥ 0")
        arrays = {name: np.asarray(value, order="C") for name, value in params.items()}
        for name, array in arrays.items():
            if not np.isfinite(array).all():
                raise WeightsError(f"version {version}: {name} of shape {array.shape} is not finite")
        path = self.path(version)
        beside = path.with_suffix(".unfinished")
        save_file(arrays, beside, metadata={"version": str(version), "checksum": _checksum(arrays)})
        _flush(beside)
        beside.replace(path)
        _flush(self.folder)
        self._remove_all_but_newest(version)
        return path

    def _remove_all_but_newest(self, version: int) -> None:
        files = self._files()
        kept = sorted(other for other in files if other <= version)[-self.keep :]
        for other in files.keys() - kept:
            files[other].unlink(missing_ok=True)
        for unfinished in self.folder.glob("*.unfinished"):  # of a publisher that was killed
            unfinished.unlink(missing_ok=True)

    def _files(self) -> dict[int, Path]:
        return {int(match[1]): path for path in self.folder.iterdir() if (match := _NAME.fullmatch(path.name))}

    def latest_version(self) -> int | None:
        """The newest version not known to be damaged; None while there is none. Cheap enough to poll."""
        return next((version for version, _, _ in self._candidates()), None)

    def load(self, version: int | None = None) -> tuple[dict[str, np.ndarray], int]:
        """Reads one version.

        Args:
          version: which; None reads the newest that is readable, passing over damaged files with a warning.

        Returns:
          The parameters and their version.

        Raises:
          WeightsError: that version is absent or damaged, or no version is readable.
        """
        if version is not None:
            try:
                return _read(self._files()[version], version), version
            except KeyError:
                raise WeightsError(f"{self.folder}: no version {version}, only {sorted(self._files())}") from None
        for candidate, path, identity in self._candidates():
            try:
                return _read(path, candidate), candidate
            except WeightsError as error:
                log.warning("skipped damaged weights: %s", error)
                self._damaged.add(identity)
        raise WeightsError(f"{self.folder}: no readable weights")

    def _candidates(self) -> list[tuple[int, Path, tuple[int, int]]]:
        """(version, file, identity), newest first, without the files known to be damaged."""
        found = []
        for version, path in sorted(self._files().items(), reverse=True):
            try:
                status = path.stat()
            except FileNotFoundError:  # the publisher has just removed it
                continue
            identity = (status.st_ino, status.st_mtime_ns)
            if identity not in self._damaged:
                found.append((version, path, identity))
        return found


def _read(path: Path, version: int) -> dict[str, np.ndarray]:
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
        arrays = load_file(path)
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise WeightsError(f"{path}: cannot be read: {error}") from error
    if metadata.get("version") != str(version):
        raise WeightsError(f"{path}: holds version {metadata.get('version')}, expected {version}")
    if metadata.get("checksum") != _checksum(arrays):
        raise WeightsError(f"{path}: damaged, its checksum is wrong")
    return arrays


def _checksum(arrays: Mapping[str, np.ndarray]) -> str:
    checksum = 0
    for name, array in sorted(arrays.items()):
        checksum = zlib.crc32(f"{name} {array.dtype} {array.shape}".encode(), checksum)
        checksum = zlib.crc32(array.reshape(-1).view(np.uint8), checksum)
    return f"{checksum:08x}"


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
