"""Day 24: the line through the logarithms of a sweep."""

import math
from statistics import fmean

import numpy as np

from nanoserve.bench.scaling import power_law
from nanoserve.course.exercise import Case, Exercise, close, wrong


def _logs(values) -> list[float]:
    return [math.log(value) for value in values]


def _slope(x, y) -> float:
    mean_x, mean_y = fmean(x), fmean(y)
    top = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return top / sum((a - mean_x) ** 2 for a in x)


@wrong(
    "The bases are mixed: one logarithm is natural, the other is not. Any base will do, if it is "
    "the same for both."
)
def _mixed_bases(lengths, seconds):
    x, y = [math.log10(n) for n in lengths], _logs(seconds)
    slope = _slope(x, y)
    return slope, math.exp(fmean(y) - slope * fmean(x))


@wrong(
    "The way back has another base: the logarithms are to base 2, and e is raised to the result."
)
def _other_way_back(lengths, seconds):
    x, y = ([math.log2(value) for value in values] for values in (lengths, seconds))
    slope = _slope(x, y)
    return slope, math.exp(fmean(y) - slope * fmean(x))


@wrong(
    "This is the regression of x on y: it divides by the spread of y, and predicts lengths from "
    "times. On a line, its slope is 1 over the exponent."
)
def _upside_down(lengths, seconds):
    x, y = _logs(lengths), _logs(seconds)
    slope = _slope(y, x) if min(y) < max(y) else 0.0
    return slope, math.exp(fmean(y) - slope * fmean(x))


@wrong(
    "The squares below the fraction are y's; they should be x's. On a line this gives 1 over the "
    "exponent, and where no time changes it divides by zero."
)
def _squares_of_y(lengths, seconds):
    x, y = _logs(lengths), _logs(seconds)
    mean_x, mean_y = fmean(x), fmean(y)
    top = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    slope = top / sum((b - mean_y) ** 2 for b in y)
    return slope, math.exp(mean_y - slope * mean_x)


@wrong("The fraction is upside down: the products of x and y go above, the squares of x below.")
def _on_its_head(lengths, seconds):
    x, y = _logs(lengths), _logs(seconds)
    mean_x, mean_y = fmean(x), fmean(y)
    products = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    slope = sum((a - mean_x) ** 2 for a in x) / products
    return slope, math.exp(mean_y - slope * mean_x)


@wrong("The intercept is forgotten: the constant is e to the mean of log(seconds) alone.")
def _no_intercept(lengths, seconds):
    return power_law(lengths, seconds)[0], math.exp(fmean(_logs(seconds)))


@wrong(
    "The line goes through the origin, since the means are not subtracted. Subtract mean x and "
    "mean y: the line has an intercept too."
)
def _through_the_origin(lengths, seconds):
    x, y = _logs(lengths), _logs(seconds)
    slope = sum(a * b for a, b in zip(x, y, strict=True)) / sum(a * a for a in x)
    return slope, math.exp(fmean(y) - slope * fmean(x))


@wrong("The constant is still a logarithm: e to the intercept is the seconds at length 1.")
def _still_a_logarithm(lengths, seconds):
    exponent, constant = power_law(lengths, seconds)
    return exponent, math.log(constant)


@wrong("The two are exchanged: return the exponent first, then the constant.")
def _swapped(lengths, seconds):
    return power_law(lengths, seconds)[::-1]


@wrong("The line goes through the plain numbers. Take the logarithms of both first.")
def _plain(lengths, seconds):
    slope, intercept = np.polyfit(lengths, seconds, 1)
    return float(slope), float(intercept)


@wrong(
    "Only the seconds are logarithms here. Take the logarithms of the lengths too: that line is an "
    "exponential of the length, not a power."
)
def _lengths_plain(lengths, seconds):
    slope, intercept = np.polyfit(lengths, _logs(seconds), 1)
    return float(slope), float(np.exp(intercept))


@wrong(
    "This is the mean of the slopes between neighbours. Least squares uses all points together, so "
    "that a wobble in a short step tilts the line less."
)
def _mean_of_slopes(lengths, seconds):
    x, y = _logs(lengths), _logs(seconds)
    slope = fmean((y[i + 1] - y[i]) / (x[i + 1] - x[i]) for i in range(len(x) - 1))
    return slope, math.exp(fmean(y) - slope * fmean(x))


@wrong("This line joins the first and the last point. Least squares uses every point.")
def _ends(lengths, seconds):
    x, y = _logs(lengths), _logs(seconds)
    slope = (y[-1] - y[0]) / (x[-1] - x[0])
    return slope, math.exp(y[0] - slope * x[0])


LENGTHS = (64, 192, 1_000, 4_096)  # spaced evenly in neither scale


def _law(exponent: float, constant: float) -> tuple[float, ...]:
    return tuple(constant * n**exponent for n in LENGTHS)


def _cases() -> list[Case]:
    near = close(atol=1e-9, rtol=1e-6)
    wobbly = (0.030, 0.047, 0.410, 1.350)
    return [
        Case("0.002 * length", (LENGTHS, _law(1.0, 0.002)), kind="law", compare=near),
        Case("5 * sqrt(length)", (LENGTHS, _law(0.5, 5.0)), kind="law", compare=near),
        Case("always 3 seconds", (LENGTHS, _law(0.0, 3.0)), kind="flat", compare=near),
        Case("four times that wobble", (LENGTHS, wobbly), kind="wobble", compare=near),
    ]


POWER_LAW = Exercise(
    "power_law",
    _cases,
    hints={
        "law": (
            "Which line do the points (log length, log seconds) lie on, if seconds = c * length ** "
            "e? What is its slope, and where does it meet a log length of 0?",
            "x = log(length), y = log(seconds). The slope is the sum of (x - mean x) * (y - mean "
            "y), divided by the sum of (x - mean x) squared.",
            "The line goes through (mean x, mean y): the intercept is mean y - slope * mean x, and "
            "the constant math.exp of it.",
        ),
        "flat": (
            "What is the slope of a line that does not climb?",
            "All y are the same, so every y - mean y is 0, and so is the slope.",
            "Then the intercept is mean y, and the constant e to it: the 3 seconds.",
        ),
        "wobble": (
            "These points lie on no line. Which line is the nearest, and does it use all points?",
            "Least squares sums over all points, above and below the fraction: not over two, and "
            "not over the steps between neighbours.",
            "sum((a - mean_x) * (b - mean_y) ...) / sum((a - mean_x) ** 2 ...)",
        ),
    },
    target="nanoserve.bench.scaling:power_law",
    wrong=(
        _mixed_bases, _other_way_back, _upside_down, _squares_of_y, _on_its_head, _no_intercept,
        _through_the_origin, _still_a_logarithm, _swapped, _plain, _lengths_plain,
        _mean_of_slopes, _ends,
    ),
)  # fmt: skip

EXERCISES = (POWER_LAW,)
