"""Programs with absl flags; run them as modules from the project's root: `python -m experiments.train --help`."""

import os
from pathlib import Path

if not any(Path("/dev").glob("accel*")) and not Path("/dev/vfio").exists():
    # No TPU is here: libtpu, which experiments.plan needs, is not to look for one and complain.
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-8")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
