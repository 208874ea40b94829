"""Numerical bounds that hold on any processor: shares of the largest number, in units of a dtype.

Another processor, library or number of threads adds in another order. The difference is then some
units in the last place of the largest number in a sum, wherever that number lies.
"""

import torch

UNITS = 64  # about 8e-6 of the largest number in float32


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference, as a share of the largest number of theirs. Shapes must agree."""
    assert ours.shape == theirs.shape
    return float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max())


def units_apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The same share, in units of the precision of ours.dtype: 2 ** -23 for float32."""
    return apart(ours, theirs) / torch.finfo(ours.dtype).eps


def assert_near(ours: torch.Tensor, theirs: torch.Tensor, units: float = UNITS) -> None:
    """The largest difference is at most `units` of the precision of ours.dtype."""
    found = units_apart(ours, theirs)
    assert found <= units, f"{found:.1f} units of {ours.dtype} apart, more than {units}"
