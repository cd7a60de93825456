"""The benchmark of asynchrony: what it makes of a run's metrics."""

from benchmarks import asynchrony

ROWS = [
    {"step": 0, "episodes": 9, "seconds": 99.0, "seconds_evaluation": 90.0, "seconds_wait": 1.0,
     "version_lag": 0.0, "version_lag_max": 7.0, "pending_groups": 5},
    {"step": 1, "episodes": 8, "seconds": 3.0, "seconds_evaluation": 1.0, "seconds_wait": 0.5,
     "version_lag": 1.0, "version_lag_max": 1.0, "pending_groups": 4},
    {"step": 2, "episodes": 8, "seconds": 2.0, "seconds_evaluation": 0.0, "seconds_wait": 0.5,
     "version_lag": 2.0, "version_lag_max": 2.0, "pending_groups": 3},
    {"step": 3, "success_train": 0.75, "success_held_out": 0.5},
]  # fmt: skip


def test_rates_leave_out_the_first_steps_and_the_evaluations():
    found = asynchrony.summary(ROWS, skip=1, group_size=2)
    assert found["rate"] == 12 / 4  # 8 + 8 episodes, of which 2 · (5 − 3) waited before, in (3 − 1) + 2 seconds
    assert asynchrony.summary(ROWS[1:], skip=1, group_size=2)["rate"] == 22 / 4  # nothing before: 2 · 3 more were made
    assert (found["waited"], found["lag"], found["lag_max"]) == (0.25, 1.5, 2.0)
    assert (found["success_train"], found["success_held_out"]) == (0.75, 0.5)


def test_the_table_compares_seed_by_seed():
    base = asynchrony.summary(ROWS, skip=1, group_size=2)
    runs = {"sync": [base | {"rate": 2.0}, base | {"rate": 4.0}], "async": [base | {"rate": 4.0}, base | {"rate": 4.0}]}
    row = asynchrony.table(runs).splitlines()[-1]
    assert row.startswith("| async | 4.000 [4.000, 4.000] | 1.50 |")  # (4/2 + 4/4) / 2
    assert row.endswith("| 1.50, 2 | 25% |")


def test_success_is_compared_with_what_chance_does():
    base = asynchrony.summary(ROWS, skip=1, group_size=2)
    worse = base | {"success_held_out": 0.375}
    said = asynchrony.equality({"sync": [base] * 2, "async": [worse, base]}, questions=64)
    # (.375 + .5) / 2 − .5 = −.0625; two standard errors: 2 · √(2/2 / 256) = .125
    assert said == "Success differs from the first's by -0.062 at most; two standard errors of that are 0.125."
