"""How a time grows with length: a straight line through the logarithms, and what its slope says."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

# the largest exponent of each; twice the length takes 2 ** exponent times as long
REGIMES = (
    (-0.2, "falling"),
    (0.2, "flat"),
    (0.8, "slower than linear"),
    (1.2, "linear"),
    (math.inf, "faster than linear"),
)


@dataclass(frozen=True)
class ScalingFit:
    """seconds = constant * length ** exponent, the power law nearest to a sweep's times."""

    exponent: float
    constant: float  # seconds at a length of 1, which is seldom in the sweep
    seconds_per_token: float  # as measured, at the longest length
    misfit: float  # the largest factor between a time and the line: 1.0 where all lie on it

    @property
    def regime(self) -> str:
        """ "flat" for an exponent of -0.2 to 0.2, "linear" for 0.8 to 1.2, and what lies between
        and beyond; "falling" below -0.2, where something other than the length was measured."""
        return next(name for most, name in REGIMES if self.exponent <= most)

    def seconds(self, length: float) -> float:
        """What the fitted line gives for a length."""
        return self.constant * length**self.exponent


def power_law(lengths: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """(exponent, constant) of the line nearest to the logarithms: least squares of log(seconds) on
    log(length), where a point weighs by its ratio to the line and not by its size."""
    x, y = ([math.log(value) for value in values] for values in (lengths, seconds))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    exponent = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    return exponent, math.exp(mean_y - exponent * mean_x)


def fit_scaling(lengths: Sequence[float], seconds: Sequence[float]) -> ScalingFit:
    """The power law of a sweep, with what it leaves unsaid.

    Raises ValueError for two sequences that differ in length, fewer than three points (two lie on
    a line whatever they are), lengths all equal, and anything that is not positive and finite.
    """
    if len(lengths) != len(seconds):
        raise ValueError(f"there are {len(lengths)} lengths and {len(seconds)} times")
    if len(lengths) < 3:
        raise ValueError(f"a fit needs at least 3 points, got {len(lengths)}")
    for name, values in (("lengths", lengths), ("seconds", seconds)):
        for value in values:
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be positive and finite, got {value}")
    if math.log(min(lengths)) == math.log(max(lengths)):
        raise ValueError(f"the lengths are all equal, {lengths[0]}: there is no slope")
    exponent, constant = power_law(lengths, seconds)
    line = ScalingFit(exponent, constant, seconds_per_token=0.0, misfit=1.0)
    points = list(zip(lengths, seconds, strict=True))
    ratios = [took / line.seconds(length) for length, took in points]
    longest, took = max(points)
    return replace(line, seconds_per_token=took / longest, misfit=max(max(ratios), 1 / min(ratios)))
