"""Atomic additions: several lanes and programs may add to one address."""

import torch

from nanoserve.kernels.tlsim.grid import current
from nanoserve.kernels.tlsim.memory import access, fitting
from nanoserve.kernels.tlsim.replay import one_step
from nanoserve.kernels.tlsim.values import Operand, Value


def atomic_add(pointer: Value, value: Operand, mask: Operand | None = None, **_) -> Value:
    """tl.atomic_add: add to memory, and return the numbers before. Lanes that add to one address
    take turns, in an order that a kernel must not rely on."""
    _, live = access("atomic_add", pointer, mask)
    shape = (*current().programs.shape, *pointer.shape)
    live = torch.ones((), dtype=torch.bool, device=pointer.data.device) if live is None else live
    flat, data = pointer.buffer.flat, fitting(pointer, value, "a value")
    at = pointer.lanes.expand(shape)
    return Value(add_in_turn(flat, at, data.to(flat.dtype).expand(shape), live.expand(shape)))


@one_step
def add_in_turn(
    flat: torch.Tensor, at: torch.Tensor, data: torch.Tensor, live: torch.Tensor
) -> torch.Tensor:
    """Add data to flat[at] in the live lanes. In each turn, each address has one lane."""
    before, left = torch.zeros_like(data, memory_format=torch.contiguous_format), live.clone()
    turn = torch.empty(len(flat), dtype=torch.int64, device=flat.device)
    lane = torch.arange(at.numel(), device=flat.device).view(at.shape)
    while left.any():
        turn[at[left]] = lane[left]
        now = left.clone()
        now[left] = turn[at[left]] == lane[left]
        before[now] = flat[at[now]]
        flat[at[now]] = before[now] + data[now]
        left &= ~now
    return before
