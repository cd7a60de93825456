"""The kernels beside other libraries' own, measured in turns in one process; `make bench` runs all of it."""
