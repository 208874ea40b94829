"""The fit of a sweep: closed forms, numpy's own least squares, and refused arguments."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.bench.scaling import ScalingFit, fit_scaling

LENGTHS = (64, 192, 1_000, 16_384)  # not evenly spaced, in either scale


@pytest.mark.parametrize("exponent", [-1.0, 0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("constant", [3e-9, 1.0, 250.0])
def test_a_power_law_gives_its_exponent_and_constant(exponent, constant):
    fit = fit_scaling(LENGTHS, [constant * n**exponent for n in LENGTHS])
    assert fit.exponent == pytest.approx(exponent, abs=1e-12)
    assert fit.constant == pytest.approx(constant, rel=1e-12)
    assert fit.misfit == pytest.approx(1, abs=1e-12)
    assert fit.seconds(333) == pytest.approx(constant * 333**exponent)


points = st.lists(
    st.tuples(st.integers(1, 10**6), st.floats(1e-9, 1e3)), min_size=3, max_size=12
).filter(lambda rows: max(n for n, _ in rows) > 2 * min(n for n, _ in rows))


@given(points)
def test_any_sweep_gives_what_numpys_least_squares_gives(rows):
    lengths, seconds = zip(*rows, strict=True)
    fit = fit_scaling(lengths, seconds)
    slope, intercept = np.polyfit(np.log(lengths), np.log(seconds), 1)
    assert fit.exponent == pytest.approx(slope, rel=1e-6, abs=1e-8)
    assert math.log(fit.constant) == pytest.approx(intercept, rel=1e-6, abs=1e-6)
    off = np.abs(np.log(seconds) - slope * np.log(lengths) - intercept).max()
    assert math.log(fit.misfit) == pytest.approx(off, rel=1e-5, abs=1e-6)


@given(points, st.floats(1e-3, 1e3), st.integers(2, 50))
def test_units_move_the_constant_and_never_the_exponent(rows, factor, longer):
    lengths, seconds = zip(*rows, strict=True)
    fit = fit_scaling(lengths, seconds)
    in_other_units = fit_scaling([longer * n for n in lengths], [factor * s for s in seconds])
    assert in_other_units.exponent == pytest.approx(fit.exponent, rel=1e-6, abs=1e-8)
    assert in_other_units.misfit == pytest.approx(fit.misfit, rel=1e-6)


def test_the_order_of_the_points_does_not_matter():
    seconds = [0.5, 0.25, 4.0, 8.0]
    backwards = fit_scaling(LENGTHS[::-1], seconds[::-1])
    assert backwards.exponent == pytest.approx(fit_scaling(LENGTHS, seconds).exponent)
    assert backwards.seconds_per_token == 8.0 / 16_384


def test_the_cost_of_a_token_is_measured_at_the_longest_length_and_not_fitted():
    fit = fit_scaling([100, 1_000, 500], [5.0, 7.0, 5.0])
    assert fit.seconds_per_token == 7.0 / 1_000
    assert fit.seconds(1_000) != pytest.approx(7.0)


def test_the_misfit_is_the_factor_of_the_worst_point_on_either_side():
    assert fit_scaling([1, 10, 100], [1, 8, 1]).misfit == pytest.approx(4)
    assert fit_scaling([1, 10, 100], [8, 1, 8]).misfit == pytest.approx(4)


@pytest.mark.parametrize(
    ("exponent", "regime"),
    [
        (-0.3, "falling"),
        (-0.19, "flat"),
        (0.0, "flat"),
        (0.2, "flat"),
        (0.21, "slower than linear"),
        (0.79, "slower than linear"),
        (0.81, "linear"),
        (1.0, "linear"),
        (1.2, "linear"),
        (1.21, "faster than linear"),
        (2.0, "faster than linear"),
    ],
)
def test_the_regime_follows_from_the_exponent(exponent, regime):
    assert ScalingFit(exponent, 1.0, 1.0, 1.0).regime == regime


@pytest.mark.parametrize(
    ("lengths", "seconds", "message"),
    [
        ([], [], "at least 3 points, got 0"),
        ([1, 2], [1, 2], "at least 3 points, got 2"),
        ([1, 2, 3], [1, 2], "3 lengths and 2 times"),
        ([1, 2], [1, 2, 3], "2 lengths and 3 times"),
        ([64, 64, 64], [1, 2, 3], "lengths are all equal, 64"),
        ([10**15, 10**15 + 1, 10**15 + 2], [1, 2, 3], "lengths are all equal"),
        ([0, 1, 2], [1, 1, 1], "lengths must be positive and finite, got 0"),
        ([1, -2, 3], [1, 1, 1], "lengths must be positive and finite, got -2"),
        ([1, 2, math.inf], [1, 1, 1], "lengths must be positive and finite, got inf"),
        ([1, 2, 3], [1, 0.0, 1], r"seconds must be positive and finite, got 0\.0"),
        ([1, 2, 3], [1, 1, -1e-9], "seconds must be positive and finite, got -1e-09"),
        ([1, 2, 3], [math.nan, 1, 1], "seconds must be positive and finite, got nan"),
        ([1, 2, 3], [1, math.inf, 1], "seconds must be positive and finite, got inf"),
    ],
)
def test_what_has_no_fit_is_refused_by_name(lengths, seconds, message):
    with pytest.raises(ValueError, match=message):
        fit_scaling(lengths, seconds)
