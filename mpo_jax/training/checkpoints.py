"""What a run needs to go on as if it had never stopped."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

log = logging.getLogger(__name__)


class Checkpoints:
    """Orbax checkpoints of a pytree of arrays, by step, written while training goes on.

    A step that a new process finds is a step wholly on disk: a folder gets its name when all of it is written. What the
    store gave to steps after it is given out again (`EpisodeStore.rewind`), so step and data cannot come apart.

    Args:
      folder: made if absent.
      keep: how many of the newest stay.
      agree: whether every process of the run says so. All of them must save and restore at the same time: each writes
        and reads its own parts.
    """

    def __init__(
        self, folder: str | os.PathLike, *, keep: int = 2, agree: Callable[[bool], bool] = lambda readable: readable
    ):
        self.folder, self._agree = Path(folder).absolute(), agree
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
        # The handler is named, lest the manager guess it from a damaged newest step.
        handler = ocp.StandardCheckpointHandler()
        self._manager = ocp.CheckpointManager(self.folder, options=options, item_handlers=handler)

    def save(self, step: int, state: Any) -> None:
        """Begins to save a state as of after `step` steps; its buffers may be donated as soon as this returns.

        Later steps, which a resumed run did not use, make way for it. What went wrong in the last save is raised here.
        """
        self.wait()
        for other in self._manager.all_steps():
            if other >= step:
                self._manager.delete(other)
        self._manager.save(step, args=ocp.args.StandardSave(state), force=True)

    def wait(self) -> None:
        """Returns when what was begun is on disk, or raises what went wrong."""
        self._manager.wait_until_finished()

    def restore(self, like: Any) -> tuple[int, Any] | None:
        """The newest readable checkpoint.

        Args:
          like: a state of the same structure, shapes and dtypes, in the placement that is wanted: on whatever mesh the
            state was saved, it comes back on that of `like`.

        Returns:
          Its step and state, or None where there is none. A damaged one is passed over with a warning that names it;
          all processes pass over one that any of them cannot read.

        Raises:
          ValueError: there are some, but none can be read: damaged all, or of another model or algorithm. To begin anew
            would make an end of what they belong to.
        """
        self.wait()
        steps = sorted(self._manager.all_steps(), reverse=True)
        for step in steps:
            state = None
            try:
                state = self._manager.restore(step, args=ocp.args.StandardRestore(like))
            except Exception as error:  # orbax raises whatever the damaged part raises
                log.warning("skipped damaged checkpoint %s: %s", self.folder / str(step), error)
            if self._agree(state is not None):
                return step, state
        if steps:
            raise ValueError(
                f"{self.folder}: none of the checkpoints {steps} can be read as this run's, the warnings say why; "
                "to begin anew choose another --workdir, or delete the folder"
            )
        return None

    def close(self) -> None:
        """Releases the folder, when what was begun is on disk."""
        self._manager.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, failure: type[BaseException] | None, *_) -> None:
        """Closes; not after a failure among several processes, where a save ends only if all take part."""
        if failure is None or jax.process_count() == 1:
            self.close()
