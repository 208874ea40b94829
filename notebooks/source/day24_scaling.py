# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Day 24 · Flat or climbing?
#
# Week 6 · Phase 2, paged memory · you need: Day 20 (A number on the wall)
#
# **Today** you turn a sweep of times into two numbers: how the time grows with the length, and what a token costs.
# You fit a straight line to the logarithms, by least squares. In two days you use the line to compare the kernel
# with the gather.

# %% jupyter={"source_hidden": true}
# Set-up: on Colab, installs nanoserve in a minute or two. In your own clone it does nothing.
import importlib.util, subprocess, sys
from pathlib import Path

REPOSITORY = ""  # on GitHub, OWNER/NAME
if importlib.util.find_spec("nanoserve") is None:
    wheels = sorted(Path.cwd().glob("nanoserve-*.whl"), key=lambda wheel: wheel.stat().st_mtime)
    source = f"https://github.com/{REPOSITORY}/archive/refs/heads/main.zip" if REPOSITORY else None
    source = wheels[-1].as_uri() if wheels else source
    if source is None:
        raise ModuleNotFoundError("put a nanoserve-*.whl beside this notebook, then run again")
    pip = [sys.executable, "-m", "pip", "install", "-q", f"nanoserve[notebook] @ {source}"]
    done = subprocess.run(pip, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"pip could not install nanoserve from {source}:\n{done.stdout}")
    importlib.invalidate_caches()

# %%
from nanoserve.course import day

today = day(24)
today.picture("flat-or-climbing")

# %% [markdown]
# ## Why it matters
#
# Day 20 ended with a table of times. Tables invite two mistakes. The first is to trust a single row: the next row
# may show something else. The second is to plot the rows on plain axes and trust the eye: the largest `kv_len`
# fills such a picture, and everything seems to grow alike.
#
# Whoever runs an engine asks: **if twice as many tokens are in the cache, how much longer does a step take?** Just
# as long (flat), twice as long (linear), or four times as long? And if two code paths grow alike, which one is
# faster, and by how much?

# %%
today.glossary("sweep", "power law", "exponent", "log-log", "least squares", "regime")

# %% [markdown]
# ## A straight line, if you take logarithms
#
# Suppose the time is a **power law** of the length $n$:
#
# $$ t = c \cdot n^{e} \qquad\text{and so}\qquad \log t = \log c + e \cdot \log n $$
#
# With $x = \log n$ and $y = \log t$ that is a straight line. Its slope is the **exponent** $e$. Its height at
# $x = 0$, which is a length of 1, is the logarithm of the **constant** $c$. How many times as long does twice the
# length take?

# %%
for exponent in (0, 0.2, 0.5, 0.8, 1, 1.2, 2):
    print(
        f"exponent {exponent:3}: {2**exponent:.2f} times, and ten times the length {10**exponent:.1f} times"
    )

# %% [markdown]
# Logarithms do a second thing for us. Say the times of a sweep reach from 100 µs to 10 ms, and each is wrong by
# 5 %. For the longest time that is 500 µs: five times the whole of the shortest. So on plain axes, least squares
# follows the last point alone. In logarithms, 5 % is the same distance everywhere: **each point weighs by its
# ratio to the line.**
#
# Least squares takes the line with the smallest sum of squared vertical distances to the points. The line has a
# closed form. $\bar x$ and $\bar y$ are the means:
#
# $$ e = \frac{\sum_i (x_i - \bar x)(y_i - \bar y)}{\sum_i (x_i - \bar x)^2}
# \qquad \log c = \bar y - e\,\bar x $$
#
# ## Your turn: `power_law`
#
# Return `(exponent, constant)` for a list of lengths and a list of seconds. The constant is in seconds: do not
# return its logarithm. You may assume that all numbers are positive, and that the lengths are not all equal.
# Stuck? `today.hint()` looks at the case that failed.
#
# After a kernel restart, run the cells above first (Run → Run All Above Selected Cell).

# %%
import math
from collections.abc import Sequence


# %%
def power_law(lengths: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """(exponent, constant) of the line nearest to the logarithms: seconds = constant * length **
    exponent, by least squares of log(seconds) on log(length)."""
    raise NotImplementedError("your turn")


today.check(power_law)

# %% [markdown]
# ## What lands
#
# The package stores two more numbers beside your line, and a name. **`seconds_per_token`** is measured at the
# largest `kv_len`; it is not taken from the line. **`misfit`** is the factor between the worst point and the line.
# A line can be drawn through any points, and a large misfit shows that it describes them badly. **`regime`** is a
# name for the exponent. The bounds between the names are a choice: up to 0.2 is "flat", for example, because ten
# times the length then takes at most 1.6 times as long. The word has two senses here: in the text a regime is a
# range in which one cost dominates the time, and `fit.regime` is only a name for the exponent, such as "linear".

# %%
from dataclasses import dataclass, replace

# %% jupyter={"source_hidden": true}
# lands in nanoserve/bench/scaling.py: REGIMES, ScalingFit, power_law, fit_scaling
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


# %% [markdown]
# ## Prove it
#
# First with times that come from a formula, so that the right exponent is known:

# %%
lengths = (64, 192, 1_000, 4_096, 16_384)
for exponent in (0.0, 0.5, 1.0, 2.0):
    fit = fit_scaling(lengths, [3e-6 * n**exponent for n in lengths])
    print(
        f"3e-6 * n ** {exponent}: exponent {fit.exponent:.6f}, constant {fit.constant:.2e}, {fit.regime}"
    )

# %% [markdown]
# Then with noisy times, against NumPy's least squares. Two more things must hold for any sweep: the exponent is
# the same in other units, and the order of the points does not matter.

# %%
import random

import numpy as np

dice = random.Random(24)
noisy = [2e-6 * n**0.7 * dice.uniform(0.7, 1.4) for n in lengths]
fit = fit_scaling(lengths, noisy)
slope, intercept = np.polyfit(np.log(lengths), np.log(noisy), 1)
print(
    "as numpy:", math.isclose(fit.exponent, slope), math.isclose(fit.constant, math.exp(intercept))
)
in_ms = fit_scaling(lengths, [1e3 * t for t in noisy])
backwards = fit_scaling(lengths[::-1], noisy[::-1])
print("in ms the same exponent:", math.isclose(in_ms.exponent, fit.exponent))
print("backwards the same exponent:", math.isclose(backwards.exponent, fit.exponent))

# %% [markdown]
# Last, sweeps that have no fit. There is a line through any two points, so a sweep of two is refused.

# %%
for times, at in (
    ([1.0, 2.0], [64, 128]),
    ([1.0, 2.0, 3.0], [64, 64, 64]),
    ([1.0, 0.0, 3.0], [64, 128, 256]),
    ([1.0, 2.0], [64, 128, 256]),
    ([1.0, math.nan, 3.0], [64, 128, 256]),
):
    try:
        fit_scaling(at, times)
    except ValueError as error:
        print(error)

# %% [markdown]
# ## A power law from two plain costs
#
# Before you measure, look at a sweep that is made up: every call costs 200 µs to begin with, and then 0.2 µs for
# each token. Each part alone is simple: the first is flat, the second is linear.

# %%
sweep = (16, 64, 256, 1_024, 4_096)
whole = fit_scaling(sweep, [200e-6 + 0.2e-6 * n for n in sweep])
short = fit_scaling(sweep[:3], [200e-6 + 0.2e-6 * n for n in sweep[:3]])
far = (65_536, 131_072, 262_144)
long = fit_scaling(far, [200e-6 + 0.2e-6 * n for n in far])
for name, fit in (("16 to 256", short), ("16 to 4,096", whole), ("65,536 and on", long)):
    print(f"{name:14} exponent {fit.exponent:.2f}  {fit.regime:18}  misfit {fit.misfit:.2f}")

# %% [markdown]
# The whole sweep has an exponent of about a quarter, although nothing here grows like a fourth root. The **fixed
# cost flattens the short end**, where one more token changes almost nothing. At large lengths the fixed cost no
# longer matters, and the time is linear. The whole sweep's exponent is a mixture that depends on where you began
# and stopped. The misfit shows it: the worst point is off by far more than noise would be.
#
# ## Predict, then measure
#
# Now Day 20's two code paths, live: gather, and the fused path as it stood then. Llama's shape again, with
# six layers, which are enough to take turns. What is the exponent of the gather from 16 to 4,096 tokens?

# %%
today.predict("exponent", "The gather's exponent, 0 (flat) to 1 (linear)?", guess=None)

# %% tags=["nbval-ignore-output"]
from nanoserve.bench.attention import LLAMA_1B, attention_benchmark

rows = attention_benchmark(replace(LLAMA_1B, num_layers=6), sweep, rounds=9)
took = {path: [row.seconds for row in rows if row.path == path] for path in ("gather", "fused")}
fits = {path: fit_scaling(sweep, times) for path, times in took.items()}
for path, fit in fits.items():
    print(
        f"{path:6} exponent {fit.exponent:.2f}, {fit.regime}; misfit {fit.misfit:.2f}; "
        f"{fit.seconds_per_token * 1e9:.0f} ns a token at 4,096"
    )
ends = {
    "16 to 256": fit_scaling(sweep[:3], took["gather"][:3]),
    "256 to 4,096": fit_scaling(sweep[2:], took["gather"][2:]),
}
for name, fit in ends.items():
    print(f"gather, {name:12} exponent {fit.exponent:.2f}, {fit.regime}")
if (guess := today.guess("exponent")) is not None:
    print("your guess for the whole:", guess)
assert all(-0.5 < fit.exponent < 2 for fit in fits.values())
assert all(times[0] < times[-1] for times in took.values())

# %% jupyter={"source_hidden": true}
# Draws the plot: one layer's attention, by tokens in the cache
from nanoserve.course.plots import COLOURS, figure, label_line, log2_axis

fig, axes = figure(
    height=4.6,
    panels=2,
    xlabel="kv_len (tokens in the cache)",
    ylabel="µs for one layer's attention",
)
micro = {path: [1e6 * t for t in times] for path, times in took.items()}
for path, colour, at, where in (
    ("gather", "contiguous", 64, "above"),
    ("fused", "engine", 1_024, "below"),
):
    axes[0].plot(sweep, micro[path], "o", color=COLOURS[colour])
    axes[0].plot(sweep, [1e6 * fits[path].seconds(n) for n in sweep], color=COLOURS[colour])
    words = f"{path}: {fits[path].exponent:.2f}"
    height = 1e6 * fits[path].seconds(at) * (1.5 if where == "above" else 0.6)
    label_line(axes[0], at, height, words, COLOURS[colour], where)
if (guess := today.guess("exponent")) is not None:
    guessed = [micro["gather"][0] * (n / 16) ** guess for n in sweep]
    axes[0].plot(sweep, guessed, color=COLOURS["prediction"], linestyle=":")
    label_line(axes[0], 4_096, guessed[-1], "your guess", COLOURS["prediction"], "left")
axes[1].plot(sweep, micro["gather"], "o", color=COLOURS["contiguous"])
for part, fit in zip((sweep[:3], sweep[2:]), ends.values()):
    axes[1].plot(part, [1e6 * fit.seconds(n) for n in part], color=COLOURS["contiguous"])
    label_line(
        axes[1],
        part[1],
        1e6 * fit.seconds(part[1]),
        f"{fit.exponent:.2f}",
        COLOURS["contiguous"],
        "above",
    )
for ax, title in zip(axes, ("One line for each path", "The gather's two ends")):
    log2_axis(ax)
    ax.set_yscale("log")
    ax.set_title(title, loc="left", fontweight="bold")
    ax.set(xlim=(10, 7_000), xticks=sweep, ylim=(min(micro["fused"]) / 2, 3 * max(micro["gather"])))
fig

# %% [markdown]
# **The honest reading.** On the left is a line for each path. If your dots lie below the line in the middle and
# above it at both ends, then its exponent is an average over two regimes, and describes neither. On the right are
# the same dots in two parts. If the short end is flatter than the long end, a part of its time is the start of a
# dozen small operations. If the exponent of the long end is below 1, a fixed part remains even at 4,096 tokens. If
# it is above 1, there are two possible reasons: the keys and values no longer fit in a cache of your processor, so
# that each byte costs more than before, or other work ran beside yours. Run the cell again to tell these apart.
#
# So: quote the exponent **with its range**, and the cost of a token **at the largest `kv_len`**. And the two
# paths? They compute the same sum. Run the cell twice. If the two paths differ by less than the two runs do, call
# them equal.
#
# Three things the fit does not say. It does not say *why*: flat may be a fixed cost, or a timer that measures
# nothing. It says nothing beyond its last dot: at 100,000 tokens, a line from this sweep can promise a time that
# is far too short. And a low exponent is not the mark of a fast path: **the larger the fixed cost, the flatter the
# line.** Remember that in two days, when you fit a kernel in a simulator beside a gather.
#
# ## With your own code
#
# The package's fit calls `power_law` too. If yours passed, this is your line:

# %%
from nanoserve.bench import scaling

with today.mine():
    judged = scaling.fit_scaling(sweep, took["gather"])
print("the same exponent:", math.isclose(judged.exponent, fits["gather"].exponent, rel_tol=1e-6))

# %% [markdown]
# ## What you learned
#
# 1. **The slope on log-log axes answers a common question:** how much longer does twice the length take?
# 2. **A fit describes the range that was measured.** A fixed cost flattens the short end, and a line through
#    both ends describes neither.
# 3. **The exponent says how the time grows, the constant how large it is.** Quote both: the slowest path can
#    have the smallest exponent.
#
# ## Tomorrow
#
# The kernel is written, compiled and chosen by a dispatcher, and nothing calls it. Day 25 moves one line.
#
# **In one paragraph.** We took the logarithms of lengths and times and fitted a line to them: its slope is the
# exponent, and e to the power of its intercept is the constant. Known formulas and NumPy agree with the fit. A
# sweep that has no fit raises an error that gives the reason. Then you fitted Day 20's sweep: a fixed cost makes a
# short end flatter, the bytes make a long end steeper, and the exponent of the whole sweep may describe neither.
