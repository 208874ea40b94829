"""The values of a kernel: numbers, blocks and pointers, each for all programs at once."""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nanoserve.kernels.tlsim import rules
from nanoserve.kernels.tlsim.grid import current, fault


@dataclass
class Buffer:
    """The memory of a tensor argument, flat, from its first element to its last."""

    name: str
    flat: torch.Tensor


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """All memory from a tensor's first element to its last, as one axis."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((last + 1 if tensor.numel() else 0,), (1,))


def pointer(name: str, flat: torch.Tensor) -> "Value":
    """A pointer to the first element."""
    start = torch.zeros(1, 1, 1, dtype=torch.int64, device=flat.device)
    return Value(start, Buffer(name, flat))


@dataclass(frozen=True)
class PointerType:
    """The dtype of a pointer, for `out_ptr.dtype.element_ty`."""

    element_ty: torch.dtype


def add(a: "Operand", b: "Operand") -> "Value":
    """a + b. A pointer moves by integers. A row stays a row if its lanes all move alike."""
    a, b = paired(a, b)
    buffer, kinds = a.buffer or b.buffer, (rules.kind(a.data.dtype), rules.kind(b.data.dtype))
    if buffer and (a.buffer is b.buffer or kinds != (1, 1)):
        raise fault(f"a pointer into {buffer.name} allows only + and - of integers")
    row, other = (a, b) if a.width > 1 else (b, a)
    alike = other.width == 1 and other.shape[-1:] in ((), (1,))
    x, y = (row.data, other.data) if alike else (row.lanes, other.lanes)
    return Value(combine(operator.add, Value(x), Value(y)).data, buffer, row.width if alike else 1)


def _operator(op: Callable) -> tuple[Callable, Callable]:
    """The methods for `value op other` and for `number op value`."""
    return (lambda a, b: combine(op, *paired(a, b))), (lambda a, b: combine(op, *paired(b, a)))


def _division(op: Callable) -> tuple[Callable, Callable]:
    """The same for divisions: halves are divided in float32."""

    def divide(a: "Operand", b: "Operand") -> "Value":
        a, b = paired(a, b)
        half = a.dtype in (torch.float16, torch.bfloat16)
        return combine(op, *((x.to(torch.float32) for x in (a, b)) if half else (a, b)))

    return divide, lambda a, b: divide(b, a)


def _quotient(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.is_floating_point():
        raise fault("// is for integers: use / and tl.floor")
    return torch.div(a, b, rounding_mode="trunc")  # towards 0, as in C: -7 // 2 is -3


class Value:
    """A tl.tensor of every program: a number, a block of numbers, or pointers.

    `data` is [x, y, z, *shape]: the grid's axes, then the block's. A grid axis has size 1 where no
    program differs along it. A pointer is a buffer and offsets into it, in elements, never an
    address. `width` above 1 means rows of neighbours: the last axis of `data` has size 1 and holds
    the first lane of `width`; each other lane is one more than the lane before it.
    """

    __slots__ = ("buffer", "data", "width")

    def __init__(self, data: torch.Tensor, buffer: Buffer | None = None, width: int = 1) -> None:
        self.data, self.buffer, self.width = data, buffer, width

    @property
    def shape(self) -> tuple[int, ...]:
        """The block's shape; () for a number."""
        shape = tuple(self.data.shape[3:])
        return shape if self.width == 1 else (*shape[:-1], self.width)

    @property
    def dtype(self) -> torch.dtype | PointerType:
        return PointerType(self.buffer.flat.dtype) if self.buffer else self.data.dtype

    @property
    def lanes(self) -> torch.Tensor:
        """data, with all lanes of a row."""
        if self.width == 1:
            return self.data
        return self.data + torch.arange(self.width, dtype=self.data.dtype, device=self.data.device)

    @property
    def T(self) -> "Value":
        return Value(self.lanes.transpose(-2, -1), self.buffer)

    def to(self, dtype: torch.dtype) -> "Value":
        """The same numbers in another dtype."""
        if self.buffer:
            raise fault(f"a pointer into {self.buffer.name} cannot be cast")
        if self.width > 1 and dtype in (self.dtype, torch.int64):  # it can hold every lane
            return Value(self.data.to(dtype), width=self.width)
        return Value(self.lanes.to(dtype))

    def __getitem__(self, index: Any) -> "Value":
        """x[:, None] and the like: None is a new axis of size 1. Triton has no other index."""
        out, width = self.data, self.width
        for axis, i in enumerate(index if isinstance(index, tuple) else (index,)):
            if i is None and axis <= out.dim() - 3:
                if axis == out.dim() - 3:  # a row stands up: one lane in each new row
                    out, width = Value(out, width=width).lanes, 1
                out = out.unsqueeze(3 + axis)
            elif i != slice(None):
                raise fault(
                    f"a block of shape {list(self.shape)} can be indexed only by None and :"
                )
        return Value(out, self.buffer, width)

    def __getattr__(self, name: str) -> Any:
        return rules.method(self, name)

    def __index__(self) -> int:
        raise fault("this value must be known at compile time: a number or tl.constexpr")

    def __bool__(self) -> bool:
        return rules.truth(self)

    def __repr__(self) -> str:
        kind = f"pointer into {self.buffer.name}" if self.buffer else str(self.dtype)[6:]
        return f"<{list(self.shape)} {kind}>\n{self.lanes}"

    def __sub__(self, other: "Operand") -> "Value":
        moves = self.buffer or self.width > 1
        return add(self, -other) if moves else combine(operator.sub, *paired(self, other))

    def __rsub__(self, other: "Operand") -> "Value":
        return combine(operator.sub, *paired(other, self))

    def __neg__(self) -> "Value":
        return combine(operator.neg, self)

    def __invert__(self) -> "Value":
        return combine(operator.invert, self)

    __add__ = __radd__ = add
    __mul__, __rmul__ = _operator(operator.mul)
    __truediv__, __rtruediv__ = _division(operator.truediv)
    __floordiv__, __rfloordiv__ = _division(_quotient)
    __mod__, __rmod__ = _division(torch.fmod)
    __and__, __rand__ = _operator(operator.and_)
    __or__, __ror__ = _operator(operator.or_)
    __xor__, __rxor__ = _operator(operator.xor)
    __lshift__, __rlshift__ = _operator(operator.lshift)
    __rshift__, __rrshift__ = _operator(operator.rshift)
    __eq__, __ne__ = _operator(operator.eq)[0], _operator(operator.ne)[0]
    __lt__, __le__ = _operator(operator.lt)[0], _operator(operator.le)[0]
    __gt__, __ge__ = _operator(operator.gt)[0], _operator(operator.ge)[0]


Operand = Value | int | float | bool


def as_value(x: Operand, beside: Any = None) -> Value:
    """A number as a Value, in the dtype that it has beside another operand (rules.py)."""
    if isinstance(x, Value):
        return x
    other = beside.dtype if isinstance(beside, Value) and not beside.buffer else None
    dtype, device = rules.number_dtype(x, other), current().ids[0].device
    return Value(torch.tensor([[[x]]], dtype=dtype, device=device))


def paired(a: Operand, b: Operand) -> tuple[Value, Value]:
    """Two operands in the dtype that Triton computes in (rules.py)."""
    a, b = as_value(a, b), as_value(b, a)
    if a.buffer or b.buffer or a.dtype == b.dtype:
        return a, b
    dtype = rules.joint_dtype(a.dtype, b.dtype)
    return a.to(dtype), b.to(dtype)


def aligned(*tensors: torch.Tensor, rank: int = 0) -> list[torch.Tensor]:
    """Tensors [x, y, z, ...] with axes of size 1 after the grid's axes, up to the largest rank."""
    rank, out = max(rank + 3, *(x.dim() for x in tensors)), []
    for x in tensors:
        while x.dim() < rank:
            x = x.unsqueeze(3)
        out.append(x)
    return out


def combine(op: Callable, *values: Value) -> Value:
    """op on every lane of every program, with the shapes broadcast."""
    for x in values:
        if x.buffer:
            raise fault(f"a pointer into {x.buffer.name} allows only + and - of integers")
    rules.joint_shape(*(x.shape for x in values))
    return Value(op(*aligned(*(x.lanes for x in values))))
