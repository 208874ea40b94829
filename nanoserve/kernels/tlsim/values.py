"""The values of a kernel: numbers, blocks and pointers, each for all programs at once."""

import operator
from collections import namedtuple
from collections.abc import Callable

import torch

from nanoserve.kernels.tlsim import rules
from nanoserve.kernels.tlsim.grid import current, fault, refuse
from nanoserve.kernels.tlsim.replay import one_step

# ---- pointers

Buffer = namedtuple("Buffer", ["name", "flat"])  # an argument's memory, as flattened() returns it
PointerType = namedtuple("PointerType", ["element_ty"])  # a pointer's dtype


@one_step
def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """All memory from a tensor's first element to its last, as one axis."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((last + 1 if tensor.numel() else 0,), (1,))


def pointer(name: str, flat: torch.Tensor) -> "Value":
    """A pointer to the first element of an argument."""
    return Value(torch.zeros(1, 1, 1, dtype=torch.int64, device=flat.device), Buffer(name, flat))


def add(a, b) -> "Value":
    """a + b. A pointer moves by integers. A row stays a row if all its lanes move alike."""
    a, b = paired(a, b)
    buffer = rules.moved_buffer(a, b)
    row, by = (a, b) if a.width > 1 else (b, a)
    alike = by.width == 1 and by.shape[-1:] in ((), (1,))
    sum = combine(operator.add, *(Value(x.data if alike else x.lanes) for x in (row, by)))
    return Value(sum.data, buffer, row.width if alike else 1)


# ---- values


def _operator(op: Callable, divides: bool = False) -> tuple[Callable, Callable]:
    """The methods for `value op other` and for `number op value`."""

    def forward(a, b) -> "Value":
        return combine(op, *paired(a, b, divides))

    return forward, lambda a, b: forward(b, a)


def _quotient(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    refuse(a.is_floating_point(), "// is for integers: use / and tl.floor")
    return torch.div(a, b, rounding_mode="trunc")  # towards 0, as in C: -7 // 2 is -3


class Value:
    """A tl.tensor of every program: a number, a block of numbers, or pointers.

    `data` is [x, y, z, *shape]: the grid's axes, then the block's. A grid axis has size 1 where no
    program differs along it. A pointer is a buffer and offsets into it, in elements, never an
    address. `width` above 1 means rows of neighbours: the last axis of `data` has size 1 and holds
    the first lane of `width`; each other lane is one more than the lane before it.
    """

    T = property(lambda self: Value(self.lanes.transpose(-2, -1), self.buffer))

    def __init__(self, data: torch.Tensor, buffer: Buffer | None = None, width: int = 1) -> None:
        self.data, self.buffer, self.width = data, buffer, width
        self.dtype = PointerType(buffer.flat.dtype) if buffer else data.dtype
        self.shape = (*data.shape[3:-1], width) if width > 1 else tuple(data.shape[3:])

    @property
    def lanes(self) -> torch.Tensor:
        """data, with all lanes of a row."""
        if self.width == 1:
            return self.data
        return self.data + torch.arange(self.width, dtype=self.data.dtype, device=self.data.device)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> "Value":
        """The same numbers in another dtype; with bitcast, the same bits."""
        width = self.width if dtype in (self.dtype, torch.int64) else 1  # which hold every lane
        data = self.data if width > 1 else rules.number(self).lanes
        return Value((rules.bitcast if bitcast else torch.Tensor.to)(data, dtype), None, width)

    def expand_dims(self, axis: int) -> "Value":
        """The same lanes, with a new axis of size 1."""
        axis = rules.torch_axis(axis, len(self.shape) + 1) if self.shape else 3
        stands = axis == self.data.dim()  # a row that stands up has one lane in each row
        data = (self.lanes if stands else self.data).unsqueeze(axis)
        return Value(data, self.buffer, 1 if stands else self.width)

    def __getitem__(self, index) -> "Value":
        """x[:, None] and the like: None is a new axis of size 1. Triton has no other index."""
        out = self
        for axis, i in enumerate(index if isinstance(index, tuple) else (index,)):
            known = i is None or i == slice(None)
            refuse(not known, "a block can be indexed only by None and :")
            out = out.expand_dims(axis) if i is None else out
        return out

    def __index__(self) -> int:
        raise fault("this value must be known at compile time: a number or tl.constexpr")

    def __repr__(self) -> str:
        kind = f"pointer into {self.buffer.name}" if self.buffer else str(self.dtype)[6:]
        return f"<{list(self.shape)} {kind}>\n{self.lanes}"

    def __neg__(self) -> "Value":
        return combine(operator.neg, self)

    def __invert__(self) -> "Value":
        return combine(operator.invert, self)

    def __sub__(self, other) -> "Value":
        moves = self.buffer or self.width > 1
        return add(self, -other) if moves else combine(operator.sub, *paired(self, other))

    __bool__, __getattr__ = rules.truth, rules.method
    __add__ = __radd__ = add
    __rsub__ = _operator(operator.sub)[1]
    __mul__, __rmul__ = _operator(operator.mul)
    __truediv__, __rtruediv__ = _operator(operator.truediv, divides=True)
    __floordiv__, __rfloordiv__ = _operator(_quotient, divides=True)
    __mod__, __rmod__ = _operator(torch.fmod, divides=True)
    __and__, __rand__ = _operator(operator.and_)
    __or__, __ror__ = _operator(operator.or_)
    __xor__, __rxor__ = _operator(operator.xor)
    __lshift__, __rlshift__ = _operator(operator.lshift)
    __rshift__, __rrshift__ = _operator(operator.rshift)
    __eq__, __ne__ = _operator(operator.eq)[0], _operator(operator.ne)[0]
    __lt__, __gt__ = _operator(operator.lt)
    __le__, __ge__ = _operator(operator.le)


def as_value(x, beside=None, device: torch.device | None = None) -> Value:
    """A number as a Value, in the dtype that it has beside another operand."""
    if isinstance(x, Value):
        return x
    near = beside.dtype if isinstance(beside, Value) and not beside.buffer else None
    dtype, device = rules.number_dtype(x, near), device or current().ids[0].device
    return Value(torch.tensor([[[x]]], dtype=dtype, device=device))


def paired(a, b, divides: bool = False) -> tuple[Value, Value]:
    """Two operands in the dtype in which they meet."""
    a, b = as_value(a, b), as_value(b, a)
    if a.buffer or b.buffer or (a.dtype == b.dtype and not divides):
        return a, b
    dtype = rules.joint_dtype(a.dtype, b.dtype, divides)
    return a.to(dtype), b.to(dtype)


def combine(op: Callable, *values: Value) -> Value:
    """op on every lane of every program, with the shapes broadcast."""
    rules.joint_shape(*(rules.number(x).shape for x in values))
    return Value(op(*aligned(*(x.lanes for x in values))))


def fitting(x, shape: tuple[int, ...]) -> torch.Tensor:
    """x's lanes, in a shape that broadcasts to this shape of a block."""
    x = as_value(x)
    larger = rules.joint_shape(x.shape, shape) != shape
    refuse(larger, f"a block of shape {list(x.shape)} does not broadcast to {list(shape)}")
    return aligned(x.lanes, rank=len(shape))[0]


def aligned(*tensors: torch.Tensor, rank: int = 0) -> list[torch.Tensor]:
    """Tensors [x, y, z, ...] with axes of size 1 after the grid's axes, up to the largest rank."""
    rank, out = max(rank + 3, *(x.dim() for x in tensors)), []
    for x in tensors:
        while x.dim() < rank:
            x = x.unsqueeze(3)
        out.append(x)
    return out
