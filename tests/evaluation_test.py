import itertools
import json
import math
import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpo_jax import evaluation

TAU_BENCH = pathlib.Path(__file__).parents[2] / "shared" / "data" / "tau_bench" / "gpt-4o-airline.json"


@st.composite
def counts(draw, largest=60):
    n = draw(st.integers(1, largest))
    return n, draw(st.integers(0, n)), draw(st.integers(1, n))


def labelled_scores(smallest=2):
    score = st.sampled_from([-math.inf, -1.5, 0.0, 0.25, 1.0, 3.0, math.inf])
    return st.lists(st.tuples(st.booleans(), score), min_size=smallest, max_size=25)


# pass@k and pass^k


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_and_pass_hat_k_count_subsets(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        attempts = [True] * c + [False] * (n - c)
        subsets = list(itertools.combinations(attempts, k))
        assert evaluation.pass_at_k(n, c, k) == pytest.approx(np.mean([any(s) for s in subsets]), abs=1e-12)
        assert evaluation.pass_hat_k(n, c, k) == pytest.approx(np.mean([all(s) for s in subsets]), abs=1e-12)


def test_bug_163_more_attempts_asked_than_made_is_an_error():
    for function in (evaluation.pass_at_k, evaluation.pass_hat_k):
        with pytest.raises(ValueError, match="n=2, c=0, k=5"):
            function(2, 0, 5)
        with pytest.raises(ValueError, match="n=3, c=1, k=4"):  # one short task in an array is enough
            function([4, 3], [1, 1], 4)
    with pytest.raises(ValueError, match="k <= n"):
        evaluation.pass_rates([4, 3], [1, 1], ks=[4])
    assert evaluation.pass_at_k(5, 0, 5) == 0.0
    assert evaluation.pass_at_k(5, 1, 5) == 1.0


def test_bug_166_pass_hat_k_is_not_the_plug_in():
    assert evaluation.pass_hat_k(4, 2, 2) == pytest.approx(1 / 6, abs=1e-12)  # C(2,2)/C(4,2); (2/4)^2 would be .25
    assert evaluation.pass_hat_k(3, 2, 3) == 0.0  # C(2,3) = 0; (2/3)^3 would be .296296


def test_bug_168_large_binomials_stay_finite():
    assert evaluation.pass_at_k(200, 1, 100) == pytest.approx(0.5, abs=1e-12)  # C(199,100)/C(200,100) = 100/200
    assert evaluation.pass_at_k(200, 199, 2) == 1.0
    for dtype in (np.int32, np.float32):
        c = np.arange(201, dtype=dtype)
        n, k = dtype(200), dtype(100)
        exact = [math.comb(int(x), 100) / math.comb(200, 100) for x in c]
        np.testing.assert_allclose(evaluation.pass_hat_k(n, c, k), exact, rtol=1e-12)
        np.testing.assert_allclose(evaluation.pass_at_k(n, c, k), 1 - np.array(exact)[::-1], rtol=1e-12)


def test_bug_169_the_two_rates_have_distinct_names():
    rates = evaluation.pass_rates([4], [2])
    assert list(rates) == ["pass@1", "pass^1", "pass@2", "pass^2", "pass@3", "pass^3", "pass@4", "pass^4"]
    assert rates["pass@2"] == pytest.approx(5 / 6, abs=1e-12)  # 1 - C(2,2)/C(4,2)
    assert rates["pass^2"] == pytest.approx(1 / 6, abs=1e-12)


def test_rates_average_over_tasks_not_attempts():
    # Task means 1/2 and 4/4 average to .75; pooled attempts would give 5/6. k stops at the fewest attempts.
    rates = evaluation.pass_rates([2, 4], [1, 4])
    assert rates == pytest.approx({"pass@1": 0.75, "pass^1": 0.75, "pass@2": 1.0, "pass^2": 0.5})
    for n, c in [([], []), ([4, 0], [2, 0])]:
        with pytest.raises(ValueError, match="at least one task"):
            evaluation.pass_rates(n, c)


@pytest.mark.parametrize("wrong", [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 1.5, 1), (float("nan"), 0, 1), (0, 0, 1)])
def test_impossible_counts_are_refused(wrong):
    for function in (evaluation.pass_at_k, evaluation.pass_hat_k):
        with pytest.raises(ValueError, match="whole numbers"):
            function(*wrong)


def test_counts_broadcast_and_scalars_stay_scalars():
    assert evaluation.pass_at_k([[4], [5]], 2, [1, 2, 3]).shape == (2, 3)
    assert evaluation.pass_hat_k(np.zeros(0), np.zeros(0), 1).shape == (0,)
    assert type(evaluation.pass_at_k(4, 2, 2)) is float
    mixed = evaluation.pass_at_k([2, 6], [1, 3], [1, 4])  # 1/2, and 1 - C(3,4)/C(6,4) = 1
    np.testing.assert_allclose(mixed, [0.5, 1.0])


@given(counts())
def test_pass_rates_are_ordered_and_dual(count):
    n, c, k = count
    at, hat = evaluation.pass_at_k(n, c, k), evaluation.pass_hat_k(n, c, k)
    assert 0.0 <= hat <= c / n + 1e-12 and c / n - 1e-12 <= at <= 1.0
    assert at == pytest.approx(1 - evaluation.pass_hat_k(n, n - c, k), abs=1e-12)  # some succeed = not all fail
    assert hat == pytest.approx(math.comb(c, k) / math.comb(n, k), rel=1e-9, abs=1e-300)
    if k < n:
        assert evaluation.pass_at_k(n, c, k + 1) >= at - 1e-12
        assert evaluation.pass_hat_k(n, c, k + 1) <= hat + 1e-12


# Success


def test_success_allows_rounding_but_no_partial_reward():
    reward = [1.0, 1.0 + 5e-7, 0.9999, 2.0, 0.0, float("nan"), -1.0]
    assert evaluation.success(reward).tolist() == [True, True, False, False, False, False, False]
    assert evaluation.success(reward, threshold=0.9).tolist() == [True, True, True, True, False, False, False]
    assert evaluation.success(np.float32(1.0)) is True
    assert evaluation.success(0.5, threshold=0.5) is True


# AUROC and Spearman


def test_bug_170_one_class_is_undefined_and_ties_count_half():
    assert math.isnan(evaluation.auroc([1, 1], [0.2, 0.9]))
    assert math.isnan(evaluation.auroc([False, False], [0.2, 0.9]))
    assert evaluation.auroc([1, 0, 1, 0], [0.5] * 4) == 0.5
    assert evaluation.auroc([0, 1, 1], [0.5, 0.5, 0.9]) == 0.75  # pairs: a tie (half) and a win
    with pytest.raises(ValueError, match="NaN at \\[1\\]"):
        evaluation.auroc([1, 0], [0.5, float("nan")])
    with pytest.raises(ValueError, match="NaN"):  # also where one class alone would already decide
        evaluation.auroc([1, 1], [0.5, float("nan")])
    several = [evaluation.auroc([1, 1], [0.2, 0.9]), evaluation.auroc([0, 1], [0.2, 0.9])]
    assert np.nanmean(several) == 1.0


@given(labelled_scores())
def test_auroc_counts_pairs(rows):
    wins = [(p > q) + (p == q) / 2 for (a, p), (b, q) in itertools.product(rows, rows) if a and not b]
    labels, scores = zip(*rows, strict=True)
    result = evaluation.auroc(labels, scores)
    if not wins:
        assert math.isnan(result)
        return
    assert result == pytest.approx(np.mean(wins), abs=1e-12)
    assert evaluation.auroc(labels, np.negative(scores)) == pytest.approx(1 - result, abs=1e-12)
    assert evaluation.auroc(labels, np.arctan(scores)) == pytest.approx(result, abs=1e-12)  # only the order counts


def test_wrong_labels_and_shapes_are_refused():
    with pytest.raises(ValueError, match="0 or 1"):
        evaluation.auroc([0.5, 1.0], [0.1, 0.2])
    with pytest.raises(ValueError, match="shape"):
        evaluation.auroc([0, 1], [0.1])
    with pytest.raises(ValueError, match="shape"):
        evaluation.spearman([[1.0, 2.0]], [[1.0, 2.0]])


def test_spearman_averages_tied_ranks():
    # Ranks 1, 2.5, 2.5, 4 against 1, 3, 2, 4: centred products 2.25+0+0+2.25 = 4.5, squares 4.5 and 5.
    assert evaluation.spearman([0, 1, 1, 9], [1, 3, 2, 4]) == pytest.approx(4.5 / math.sqrt(4.5 * 5.0), abs=1e-12)
    assert evaluation.spearman([1, 2, 3], [1, 8, 27]) == 1.0
    assert evaluation.spearman([1, 2, 3], [-1, -8, -27]) == -1.0


@pytest.mark.parametrize("x, y", [([1, 1, 1], [1, 2, 3]), ([1, 2, 3], [0.1, 0.1, 0.1]), ([1], [2]), ([], [])])
def test_spearman_of_a_constant_is_undefined(x, y):
    assert math.isnan(evaluation.spearman(x, y))


def test_spearman_refuses_nan():
    with pytest.raises(ValueError, match="second argument"):
        evaluation.spearman([1.0, 2.0], [1.0, float("nan")])


@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=2, max_size=25))
def test_spearman_is_the_correlation_of_counted_ranks(rows):
    x, y = map(np.array, zip(*rows, strict=True))
    ranks = [np.array([(v < u).sum() + ((v == u).sum() + 1) / 2 for u in v]) for v in (x, y)]
    result = evaluation.spearman(x, y)
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        assert math.isnan(result)
        return
    assert result == pytest.approx(np.corrcoef(*ranks)[0, 1], abs=1e-12)
    assert evaluation.spearman(y, x) == pytest.approx(result, abs=1e-12)


# Choosing among attempts


def test_best_of_n_takes_the_first_of_the_highest():
    none = -math.inf
    scores = [[0.1, 0.7, 0.7], [none, none, none], [none, -9.0, none]]
    rewards = [[0, 1, 0], [0, 1, 1], [1, 0, 1]]
    result = evaluation.best_of_n(scores, rewards)
    np.testing.assert_array_equal(result.best_of_n, [1, 0, 0])
    np.testing.assert_array_equal(result.oracle, [1, 1, 1])
    np.testing.assert_allclose(result.mean, [1 / 3, 2 / 3, 2 / 3])
    assert evaluation.best_of_n(scores[0], rewards[0]) == (1.0, 1.0, pytest.approx(1 / 3))


def test_best_of_n_refuses_what_it_cannot_order():
    for scores, rewards in [([1.0, math.nan], [0, 1]), ([1.0, 2.0], [0, math.nan])]:
        with pytest.raises(ValueError, match="NaN"):
            evaluation.best_of_n(scores, rewards)
    for scores, rewards in [([1.0, 2.0], [1.0]), ([], []), (1.0, 1.0)]:
        with pytest.raises(ValueError, match="shape"):
            evaluation.best_of_n(scores, rewards)


@given(labelled_scores(smallest=1))
def test_best_of_n_lies_below_the_oracle(rows):
    labels, scores = zip(*rows, strict=True)
    result = evaluation.best_of_n(scores, labels)
    n, c = len(labels), sum(labels)
    assert result.oracle == evaluation.pass_at_k(n, c, n)
    assert result.mean == pytest.approx(evaluation.pass_at_k(n, c, 1), abs=1e-12)
    assert result.best_of_n <= result.oracle
    assert result.best_of_n == labels[max(range(n), key=scores.__getitem__)]
    assert evaluation.best_of_n(labels, labels).best_of_n == result.oracle  # a perfect score reaches it


def test_majority_vote_ignores_missing_answers():
    assert evaluation.majority_vote(["b", "a", "a", "b"]) == "b"
    assert evaluation.majority_vote([None, None, 7]) == 7
    assert evaluation.majority_vote([1, 2, 2]) == 2
    assert evaluation.majority_vote([None]) is None
    assert evaluation.majority_vote([]) is None


# Uncertainty


def test_risk_coverage_accepts_ties_together():
    coverage, risk = evaluation.risk_coverage([1, 0, 1, 0], [0.9, 0.5, 0.5, 0.1])
    np.testing.assert_allclose(coverage, [1 / 4, 3 / 4, 1])
    np.testing.assert_allclose(risk, [0, 1 / 3, 1 / 2])
    assert [part.shape for part in evaluation.risk_coverage([], [])] == [(0,), (0,)]


@given(labelled_scores(smallest=1))
def test_risk_coverage_recounts_at_every_threshold(rows):
    labels, scores = map(np.array, zip(*rows, strict=True))
    coverage, risk = evaluation.risk_coverage(labels, scores)
    thresholds = sorted(set(scores.tolist()), reverse=True)
    np.testing.assert_allclose(coverage, [(scores >= t).mean() for t in thresholds])
    np.testing.assert_allclose(risk, [(~labels[scores >= t]).mean() for t in thresholds])
    order = np.random.default_rng(0).permutation(len(rows))
    np.testing.assert_array_equal(evaluation.risk_coverage(labels[order], scores[order])[1], risk)


def test_bootstrap_interval_matches_the_normal_one():
    values = np.repeat([0.0, 1.0], 200)  # mean .5, standard error .5/√400 = .025, so .5 ± 1.96·.025
    low, high = evaluation.bootstrap_interval(values, num_samples=4000)
    assert (low, high) == (pytest.approx(0.451, abs=0.005), pytest.approx(0.549, abs=0.005))
    assert evaluation.bootstrap_interval(values, num_samples=4000) == (low, high)
    assert evaluation.bootstrap_interval(values, num_samples=4000, seed=1) != (low, high)


def test_bootstrap_interval_by_enumeration_of_the_redraws():
    # Two tasks 0 and 1: means 0, .5, 1 with chances 1/4, 1/2, 1/4, so the middle 40 % is .5 alone and the 60 % all.
    assert evaluation.bootstrap_interval([0, 1], level=0.4, num_samples=2000) == (0.5, 0.5)
    assert evaluation.bootstrap_interval([0, 1], level=0.6, num_samples=2000) == (0.0, 1.0)
    assert evaluation.bootstrap_interval([0.3], num_samples=10) == (0.3, 0.3)


@pytest.mark.parametrize(
    "values, options",
    [([], {}), ([[0.0, 1.0]], {}), ([0.0, math.nan], {}), ([0.0], {"level": 1.0}), ([0.0], {"num_samples": 0})],
)
def test_bootstrap_interval_refuses(values, options):
    with pytest.raises(ValueError):
        evaluation.bootstrap_interval(values, **options)


@settings(max_examples=25)
@given(st.lists(st.floats(-10, 10), min_size=1, max_size=12), st.integers(0, 5))
def test_bootstrap_interval_is_inside_the_range_and_nested(values, seed):
    wide = evaluation.bootstrap_interval(values, num_samples=100, seed=seed)
    narrow = evaluation.bootstrap_interval(values, level=0.5, num_samples=100, seed=seed)
    assert min(values) - 1e-9 <= wide[0] <= narrow[0] <= narrow[1] <= wide[1] <= max(values) + 1e-9


# Real episodes


def test_tau_bench_golden_numbers():
    if not TAU_BENCH.exists():
        pytest.skip("the published τ-bench airline episodes are not here")
    episodes = json.loads(TAU_BENCH.read_text())
    tasks = sorted({episode["task_id"] for episode in episodes})
    assert (len(tasks), len(episodes)) == (50, 200)
    succeeded = evaluation.success([episode["reward"] for episode in episodes])
    of_task = np.array([episode["task_id"] for episode in episodes])
    correct = np.array([succeeded[of_task == task].sum() for task in tasks])
    rates = evaluation.pass_rates(4, correct)
    assert [rates[f"pass^{k}"] for k in range(1, 5)] == pytest.approx([0.420, 0.273, 0.220, 0.200], abs=5e-4)
    assert [rates[f"pass@{k}"] for k in range(1, 5)] == pytest.approx([0.420, 0.567, 0.660, 0.720], abs=5e-4)
    message_count = [len(episode["traj"]) for episode in episodes]
    assert evaluation.auroc(succeeded, np.negative(message_count)) == pytest.approx(0.683, abs=5e-4)
    low, high = evaluation.bootstrap_interval(evaluation.pass_hat_k(4, correct, 1), num_samples=2000)
    assert 0.30 < low < rates["pass^1"] < high < 0.54  # .42 ± 1.96·√(.42·.58/50) at the very widest: .283, .557
