"""The values of a kernel: a number or a block of numbers per program, for all programs at once."""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import zip_longest
from typing import Any

import torch

from nanoserve.kernels.tlsim.grid import current, fault

HALVES = (torch.float16, torch.bfloat16)


class Buffer:
    """The memory of a tensor argument, flat, from its first element to its last."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        size = last + 1 if tensor.numel() else 0
        self.name = name
        self.flat = tensor.detach().as_strided((size,), (1,), tensor.storage_offset())


@dataclass(frozen=True)
class PointerType:
    """The dtype of a pointer, for `out_ptr.dtype.element_ty`."""

    element_ty: torch.dtype


def _operator(op: Callable) -> tuple[Callable, Callable]:
    """The methods for `value op other` and for `number op value`."""
    return (lambda a, b: combine(op, *paired(a, b))), (lambda a, b: combine(op, *paired(b, a)))


def _division(op: Callable) -> tuple[Callable, Callable]:
    """The same for divisions: halves are divided in float32."""

    def divide(a: "Operand", b: "Operand") -> "Value":
        a, b = paired(a, b)
        if a.dtype in HALVES:
            a, b = a.to(torch.float32), b.to(torch.float32)
        return combine(op, a, b)

    return divide, lambda a, b: divide(b, a)


def _quotient(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.is_floating_point():
        raise fault("// is for integers: use / and tl.floor")
    return torch.div(a, b, rounding_mode="trunc")  # towards 0, as in C: -7 // 2 is -3


def _comparison(op: Callable) -> Callable:
    """The method of a comparison. A mask that is true everywhere is stored as one True."""

    def compare(a: "Value", b: "Operand") -> "Value":
        mask = combine(op, *paired(a, b))
        if mask.shape and bool(mask.data.all()):
            mask.data = mask.data.new_ones((1,) * mask.data.dim())
        return mask

    return compare


class Value:
    """A tl.tensor of every program: a number, a block of numbers, or pointers.

    `data` is [x, y, z, *shape], the grid's axes first. An axis of size 1 stands for all indices
    along it, so that a value that many programs share is stored and computed once. A pointer is a
    buffer and offsets into it, in elements, never an address. With `ramp`, data holds only the
    first lane of the last axis; lane i is the first lane plus i. A load then reads whole rows.
    """

    __slots__ = ("buffer", "data", "ramp", "shape")

    def __init__(
        self,
        data: torch.Tensor,
        shape: tuple[int, ...] = (),
        buffer: Buffer | None = None,
        ramp: bool = False,
    ) -> None:
        self.data, self.shape, self.buffer, self.ramp = data, shape, buffer, ramp

    @property
    def lanes(self) -> torch.Tensor:
        """data, with all lanes of a ramp."""
        if not self.ramp:
            return self.data
        lane = torch.arange(self.shape[-1], dtype=self.data.dtype, device=self.data.device)
        return self.data + lane

    @property
    def whole(self) -> torch.Tensor:
        """All lanes, expanded to shape: [x or 1, y or 1, z or 1, *shape]."""
        return self.lanes.expand(-1, -1, -1, *self.shape)

    @property
    def dtype(self) -> torch.dtype | PointerType:
        return PointerType(self.buffer.flat.dtype) if self.buffer else self.data.dtype

    def summed(self, axes: list[int]) -> torch.Tensor:
        """The sum over axes of data."""
        return self.whole.sum(axes, dtype=self.data.dtype)

    @property
    def T(self) -> "Value":
        shape = (*self.shape[:-2], *self.shape[:-3:-1])
        return Value(self.whole.transpose(-2, -1), shape, self.buffer)

    def to(self, dtype: torch.dtype) -> "Value":
        """The same numbers in another dtype."""
        if dtype == self.dtype:
            return self
        if self.buffer:
            raise fault(f"a pointer into {self.buffer.name} cannot be cast")
        ramp = self.ramp and dtype == torch.int64  # int64 can hold every lane
        return Value((self.data if ramp else self.lanes).to(dtype), self.shape, None, ramp)

    def __getitem__(self, index: Any) -> "Value":
        """x[:, None] and the like: new axes of size 1, the only index that Triton has."""
        index = index if isinstance(index, tuple) else (index,)
        if [i for i in index if i is not None] != [slice(None)] * len(self.shape):
            raise fault(f"a block of shape {list(self.shape)} can be indexed only by None and :")
        ramp, sizes = self.ramp and index[-1] is not None, iter(self.shape)
        data = self.data if ramp else self.lanes
        for axis, i in enumerate(index):
            data = data.unsqueeze(3 + axis) if i is None else data
        shape = tuple(1 if i is None else next(sizes) for i in index)
        return Value(data, shape, self.buffer, ramp)

    def __index__(self) -> int:
        raise fault("this value must be known at compile time: a number or tl.constexpr")

    def __bool__(self) -> bool:
        if self.shape:
            raise fault("a block is neither true nor false: use tl.where, or &, | and ~ on masks")
        if self.data.numel() > 1:
            raise fault(
                "in lockstep all programs take the same branch, but this condition depends on the "
                'program: use a mask, or tlsim.options(order="serial")'
            )
        return bool(self.data)

    def __repr__(self) -> str:
        kind = f"pointer into {self.buffer.name}" if self.buffer else str(self.dtype)[6:]
        return f"<{list(self.shape)} {kind}>\n{self.lanes}"

    def __add__(self, other: "Operand") -> "Value":
        return _sum(self, other)

    __radd__ = __add__

    def __sub__(self, other: "Operand") -> "Value":
        if self.ramp or self.buffer:
            return self + -other
        return combine(operator.sub, *paired(self, other))

    def __rsub__(self, other: "Operand") -> "Value":
        return combine(operator.sub, *paired(other, self))

    def __neg__(self) -> "Value":
        return combine(operator.neg, self)

    def __invert__(self) -> "Value":
        return combine(operator.invert, self)

    def __mul__(self, other: "Operand") -> "Value":
        blocks = isinstance(other, Value) and self.shape and other.shape
        if blocks and self.dtype == other.dtype == torch.float32:
            return Product(self, other)
        return combine(operator.mul, *paired(self, other))

    __rmul__ = __mul__
    __truediv__, __rtruediv__ = _division(operator.truediv)
    __floordiv__, __rfloordiv__ = _division(_quotient)
    __mod__, __rmod__ = _division(torch.fmod)
    __and__, __rand__ = _operator(operator.and_)
    __or__, __ror__ = _operator(operator.or_)
    __xor__, __rxor__ = _operator(operator.xor)
    __lshift__, __rlshift__ = _operator(operator.lshift)
    __rshift__, __rrshift__ = _operator(operator.rshift)
    __eq__, __ne__ = _comparison(operator.eq), _comparison(operator.ne)
    __lt__, __le__ = _comparison(operator.lt), _comparison(operator.le)
    __gt__, __ge__ = _comparison(operator.gt), _comparison(operator.ge)


class Product(Value):
    """a * b in float32, computed when `data` is first used. A sum over a Product does not use
    `data`: torch.einsum multiplies and sums in one call, over the grid's axes and the block's."""

    __slots__ = ("_data", "factors")

    def __init__(self, a: Value, b: Value) -> None:
        self.shape, self.buffer, self.ramp = joint_shape(a.shape, b.shape), None, False
        self.factors, self._data = (a, b), None

    @property
    def data(self) -> torch.Tensor:
        if self._data is None:
            self._data = combine(operator.mul, *self.factors).data
        return self._data

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def summed(self, axes: list[int]) -> torch.Tensor:
        a, b = (spread(x.lanes, len(self.shape)) for x in self.factors)
        if any(max(a.shape[i], b.shape[i]) < self.shape[i - 3] for i in axes):
            return super().summed(axes)
        every = "xyzabcdefg"[: a.dim()]
        kept = "".join(axis for i, axis in enumerate(every) if i not in axes)
        return torch.einsum(f"{every},{every}->{kept}", a, b)


Operand = Value | int | float | bool


def as_value(x: Operand, beside: Value | None = None) -> Value:
    """A number as a Value. It has the dtype of `beside`, the other operand, if that is of the same
    kind or a wider kind (bool, integer, float); else int1, int32 (int64 if large) or float32."""
    if isinstance(x, Value):
        return x
    if not isinstance(x, int | float):
        raise fault(f"a kernel computes with numbers and tensors, not with {type(x).__name__}")
    dtype = torch.int32 if -(2**31) <= x < 2**31 else torch.int64
    if not isinstance(x, int) or isinstance(x, bool):
        dtype = torch.bool if isinstance(x, bool) else torch.float32
    if beside is not None and not beside.buffer and _kind(dtype) <= _kind(beside.dtype):
        dtype = beside.dtype
    try:
        return _constant(x, dtype, current().ids[0].device)
    except RuntimeError:
        raise fault(f"{x} is out of range for {dtype}") from None


@lru_cache(maxsize=1024)
def _constant(x: int | float, dtype: torch.dtype, device: torch.device) -> Value:
    return Value(torch.tensor([[[x]]], dtype=dtype, device=device))


def _kind(dtype: torch.dtype) -> int:
    return 0 if dtype == torch.bool else 1 + dtype.is_floating_point


def paired(a: Operand, b: Operand) -> tuple[Value, Value]:
    """Two operands in the dtype that Triton computes in. This is torch's choice, except that
    bfloat16 with float16 gives float16, and bfloat16 with any other dtype gives float32."""
    if not isinstance(a, Value):
        a = as_value(a, b if isinstance(b, Value) else None)
    if not isinstance(b, Value):
        b = as_value(b, a)
    if a.buffer or b.buffer or a.dtype == b.dtype:
        return a, b
    dtype, both = torch.promote_types(a.dtype, b.dtype), {a.dtype, b.dtype}
    if torch.bfloat16 in both:
        half = torch.float16 in both
        dtype = torch.float16 if half else torch.promote_types(dtype, torch.float32)
    return a.to(dtype), b.to(dtype)


@cache
def joint_shape(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that blocks of these shapes broadcast to, aligned at the last axis."""
    sizes = zip_longest(*(shape[::-1] for shape in shapes), fillvalue=1)
    joint = tuple(map(max, sizes))[::-1]
    if not all(broadcasts(shape, joint) for shape in shapes):
        raise fault(f"shapes {' and '.join(str(list(s)) for s in shapes)} do not broadcast")
    return joint


@cache
def broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Whether a block of one shape broadcasts to another shape."""
    pairs = zip(shape[::-1], to[::-1], strict=False)
    return len(shape) <= len(to) and all(n in (1, size) for n, size in pairs)


def spread(data: torch.Tensor, rank: int) -> torch.Tensor:
    """Give data [x, y, z, ...] axes of size 1 after the grid's axes, up to a block's rank."""
    for _ in range(rank + 3 - data.dim()):
        data = data.unsqueeze(3)
    return data


def combine(op: Callable, *values: Value) -> Value:
    """op on every lane of every program, with the shapes broadcast."""
    shape = joint_shape(*[x.shape for x in values])
    for x in values:
        if x.buffer:
            raise fault(f"a pointer into {x.buffer.name} allows only + and - of integers")
    try:
        return Value(op(*[spread(x.lanes, len(shape)) for x in values]), shape)
    except RuntimeError as error:  # of torch, for a dtype that the operator does not support
        raise fault(str(error)) from None


def _sum(a: Operand, b: Operand) -> Value:
    """a + b. A pointer stays a pointer. Adding the same number to all lanes keeps a ramp a ramp."""
    a, b = paired(a, b)
    buffer = a.buffer or b.buffer
    if buffer and ((a.buffer and b.buffer) or _kind(a.data.dtype) + _kind(b.data.dtype) != 2):
        raise fault(f"a pointer into {buffer.name} allows only + and - of integers")
    ramp, other = (a, b) if a.ramp else (b, a)
    stays = ramp.ramp and not other.ramp and (not other.shape or other.data.shape[-1] == 1)
    shape = joint_shape(a.shape, b.shape)
    x, y = (spread(v.data if stays else v.lanes, len(shape)) for v in (a, b))
    return Value(x + y, shape, buffer, stays)
