"""Day 24: right answers to `power_law`, in several styles."""

import math

import numpy as np
import torch


def by_polyfit(lengths, seconds):
    """NumPy's own least squares."""
    slope, intercept = np.polyfit(np.log(lengths), np.log(seconds), 1)
    return float(slope), float(np.exp(intercept))


def by_the_normal_equations(lengths, seconds):
    """The four sums of the textbook, in a loop, with logarithms to base 2."""
    n, sx, sy, sxx, sxy = len(lengths), 0.0, 0.0, 0.0, 0.0
    for length, took in zip(lengths, seconds, strict=True):
        x, y = math.log2(length), math.log2(took)
        sx, sy, sxx, sxy = sx + x, sy + y, sxx + x * x, sxy + x * y
    slope = (n * sxy - sx * sy) / (n * sxx - sx * sx)
    return slope, 2 ** ((sy - slope * sx) / n)


def by_a_matrix(lengths, seconds):
    """The least-squares solution of a system: one column of ones, one of logarithms."""
    x = torch.tensor(lengths, dtype=torch.float64).log()
    y = torch.tensor(seconds, dtype=torch.float64).log()
    design = torch.stack([torch.ones_like(x), x], dim=1)
    intercept, slope = torch.linalg.lstsq(design, y[:, None]).solution.flatten().tolist()
    return slope, math.exp(intercept)


RIGHT = {"power_law": (by_polyfit, by_the_normal_equations, by_a_matrix)}
