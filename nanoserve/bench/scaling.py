"""How a time grows with length: a power law, fitted as a straight line to logarithms."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

# (largest exponent, name) of each regime; twice the length takes 2 ** exponent times as long
REGIMES = (
    (-0.2, "falling"),
    (0.2, "flat"),
    (0.8, "slower than linear"),
    (1.2, "linear"),
    (math.inf, "faster than linear"),
)


@dataclass(frozen=True)
class ScalingFit:
    """The power law seconds = constant * length ** exponent that is nearest to measured times."""

    exponent: float
    constant: float  # seconds at length 1, by the power law
    seconds_per_token: float  # measured at the longest length: its time over its length
    misfit: float  # the largest factor between a time and the power law; at least 1.0

    @property
    def regime(self) -> str:
        """The name in REGIMES for the exponent: "flat" up to 0.2, "linear" from 0.8 to 1.2, ...

        A "falling" time (exponent below -0.2) depends mainly on something other than the length.
        """
        return next(name for most, name in REGIMES if self.exponent <= most)

    def seconds(self, length: float) -> float:
        """The power law's time for a length."""
        return self.constant * length**self.exponent


def power_law(lengths: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """(exponent, constant) by least squares of log(seconds) on log(length).

    Logarithms make the fit minimise ratios: an error of 10% counts the same at 1 µs and at 1 s.
    """
    x, y = ([math.log(value) for value in values] for values in (lengths, seconds))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    exponent = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    return exponent, math.exp(mean_y - exponent * mean_x)


def fit_scaling(lengths: Sequence[float], seconds: Sequence[float]) -> ScalingFit:
    """Fit a power law to the seconds measured at some lengths.

    Raises ValueError if the two sequences differ in length, for fewer than three points (a line
    fits any two points), for lengths that are all equal, and for a number that is not positive and
    finite.
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
        raise ValueError(f"the lengths are all equal, {lengths[0]}: no slope can be fitted")
    exponent, constant = power_law(lengths, seconds)
    line = ScalingFit(exponent, constant, seconds_per_token=0.0, misfit=1.0)
    points = list(zip(lengths, seconds, strict=True))
    ratios = [took / line.seconds(length) for length, took in points]
    longest, took = max(points)
    return replace(line, seconds_per_token=took / longest, misfit=max(max(ratios), 1 / min(ratios)))
