"""The folder of a run: whose it is, and with which config."""

import json
from collections.abc import Iterable
from pathlib import Path

import ml_collections


def claim(workdir: Path, config: ml_collections.ConfigDict) -> None:
    """Makes the folder this run's, or finds that it is already.

    Raises:
      ValueError: it belongs to a run of another config; the message names the first key that differs.
    """
    path, mine = workdir / "config.json", json.loads(config.to_json())
    if not path.exists():
        workdir.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".new")
        beside.write_text(json.dumps(mine, indent=2) + "\n")
        beside.replace(path)
        return
    theirs = json.loads(read_config(workdir).to_json())
    for key in sorted(mine.keys() | theirs.keys()):
        if key not in ("num_steps", "mesh") and mine.get(key) != theirs.get(key):
            raise ValueError(
                f"{workdir} belongs to another run: its {key} is {theirs.get(key)!r}, here {mine.get(key)!r}; "
                "choose another --workdir or delete it"
            )


def read_config(workdir: Path) -> ml_collections.ConfigDict:
    """The config of the run that owns a folder.

    Raises:
      ValueError: no run has claimed it.
    """
    try:
        return ml_collections.ConfigDict(json.loads((workdir / "config.json").read_text()))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{workdir}: not the workdir of a run: {error}") from error


def change(config: ml_collections.ConfigDict, assignments: Iterable[str]) -> None:
    """Sets keys of a config by texts such as "documents.format=gaia", each in the type that the key has.

    Raises:
      ValueError: there is no such key, or the value is not of its type.
    """
    for assignment in assignments:
        path, _, value = assignment.partition("=")
        *sections, name = path.split(".")
        try:
            section = config[".".join(sections)] if sections else config
            kind = section.get_type(name)
            section[name] = {"True": True, "False": False}[value] if kind is bool else kind(value)
        except (KeyError, AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"{assignment!r} does not fit the run's config, expected key=value: {error}") from error
