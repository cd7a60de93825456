"""Programs with absl flags; run them as modules from the project's root: `python -m experiments.train --help`."""
