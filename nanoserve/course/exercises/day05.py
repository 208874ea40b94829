"""Day 5: the gated MLP."""

import torch
import torch.nn.functional as F

from nanoserve.course.exercise import Case, Exercise, close, wrong
from nanoserve.course.exercises.day00 import IN_PLACE
from nanoserve.layers import swiglu


def _cases() -> list[Case]:
    random = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    curve = (  # up x is 1 everywhere and down changes nothing: silu alone is left
        torch.ones(1, 3),
        torch.diag(torch.tensor([1.0, -2.0, 0.0])),
        torch.eye(3),
        torch.eye(3),
    )
    by_hand = (
        torch.tensor([[1.0, 2.0]]),  # one token, hidden size 2
        torch.tensor([[1.0, 0.0], [0.0, -1.0], [0.0, 0.0]]),  # z = (1, -2, 0)
        torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 1.0]]),  # up = (2, 2, 3)
        torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]]),
    )
    weights = draw(10, 6), draw(10, 6), draw(6, 10)
    square = draw(6, 6), draw(6, 6), draw(6, 6)
    agree = close(atol=1e-5, rtol=1e-5)
    half = [t.bfloat16() for t in (draw(5, 6), *weights)]
    return [
        Case("gate x = (1, -2, 0), up x = (1, 1, 1): silu alone", curve, kind="curve",
             compare=agree),
        Case("one token, 3 hidden units, by hand", by_hand, kind="formula", compare=agree),
        Case("2 texts of 5 tokens, 6 wide, 10 inside", (draw(2, 5, 6), *weights), kind="shape",
             compare=agree),
        Case("as wide inside as outside: 6 and 6", (draw(5, 6), *square), kind="turned",
             compare=agree),
        Case("bfloat16", tuple(half), kind="dtype", compare=close(atol=0.25, rtol=0.05)),
    ]  # fmt: skip


_HINTS = {
    "curve": (
        "What does your gate make of 1, -2 and 0? silu(z) = z * sigmoid(z).",
        "silu makes 0.7311 of 1, -0.2384 of -2 and 0 of 0. Only gate x goes through it.",
        "`F.silu(F.linear(x, gate))`, or `z * torch.sigmoid(z)` with z = F.linear(x, gate).",
    ),
    "formula": (
        "By hand: gate x = (1, -2, 0) and up x = (2, 2, 3). Which of the two goes through silu?",
        "silu(z) = z * sigmoid(z) makes (0.7311, -0.2384, 0) of the first; multiplied number by "
        "number with the second, that is (1.4621, -0.4768, 0).",
        "`F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)`",
    ),
    "shape": (
        "Write the shape under each step. x ends in 6, the middle in 10, the result in 6 again.",
        "A weight is [out, in], and x may have any axes before its last: multiply by the "
        "transposed weight, which is what F.linear does.",
        "`F.linear(x, gate)` is `x @ gate.T`: [2, 5, 6] times [6, 10] is [2, 5, 10].",
    ),
    "dtype": (
        "Which dtype goes in, and which comes out of yours?",
        "Nothing here needs float32: the products and silu keep the dtype of x.",
        "Leave out `.float()` and constants of another dtype.",
    ),
    "turned": (
        "Here every matrix is square, so a transposed weight raises no error.",
        "All three weights are [out, in], down as well.",
        "Use F.linear for all three, and no `.T` anywhere.",
    ),
}


@wrong("Gate and up are swapped. Apply silu to gate x, and leave up x as it is.")
def _swapped(x, gate, up, down):
    return swiglu(x, up, gate, down)


@wrong("That is GEGLU: the gate goes through gelu. This model was trained with silu.")
def _gelu(x, gate, up, down):
    return F.linear(F.gelu(F.linear(x, gate)) * F.linear(x, up), down)


@wrong("The gate goes through relu, which is 0 for every negative z. silu dips below 0 there.")
def _relu(x, gate, up, down):
    return F.linear(F.relu(F.linear(x, gate)) * F.linear(x, up), down)


@wrong("The gate is the sigmoid alone. silu is z * sigmoid(z): a factor z is missing.")
def _sigmoid(x, gate, up, down):
    return F.linear(torch.sigmoid(F.linear(x, gate)) * F.linear(x, up), down)


@wrong("The two halves are added. A gate multiplies, number by number.")
def _sum(x, gate, up, down):
    return F.linear(F.silu(F.linear(x, gate)) + F.linear(x, up), down)


@wrong("silu is taken of the product. Apply it to gate x alone, before the two are multiplied.")
def _silu_of_product(x, gate, up, down):
    return F.linear(F.silu(F.linear(x, gate) * F.linear(x, up)), down)


@wrong("silu is applied to both halves. Apply it to gate x, and leave up x as it is.")
def _both_bent(x, gate, up, down):
    return F.linear(F.silu(F.linear(x, gate)) * F.silu(F.linear(x, up)), down)


@wrong("silu is missing: gate x is multiplied as it is.")
def _no_silu(x, gate, up, down):
    return F.linear(F.linear(x, gate) * F.linear(x, up), down)


@wrong("up is left out: this is an MLP of two matrices, without a gate.")
def _no_up(x, gate, up, down):
    return F.linear(F.silu(F.linear(x, gate)), down)


@wrong("x is added to the result. The block does that, on Day 7: return only the MLP's own part.")
def _residual(x, gate, up, down):
    return x + swiglu(x, gate, up, down)


@wrong("down is used as if it were [in, out]. It is [hidden, intermediate], [out, in] like all.")
def _down_turned(x, gate, up, down):
    return (F.silu(F.linear(x, gate)) * F.linear(x, up)) @ down


@wrong("The weights are used as if they were [in, out]. They are [out, in]: multiply by weight.T.")
def _all_turned(x, gate, up, down):
    return (F.silu(x @ gate) * (x @ up)) @ down


@wrong("down is missing: the result must come back to the hidden size.")
def _no_down(x, gate, up, down):
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


@wrong("The result is always float32. Return it in the dtype of x.")
def _stays_wide(x, gate, up, down):
    return swiglu(x.float(), gate.float(), up.float(), down.float())


@wrong("That is silu with the sign turned: z * sigmoid(-z). It grows where the gate should close.")
def _sign_turned(x, gate, up, down):
    z = F.linear(x, gate)
    return F.linear(z * torch.sigmoid(-z) * F.linear(x, up), down)


@wrong("The gate is the softplus, log(1 + exp(z)). silu is z * sigmoid(z), and dips below 0.")
def _softplus(x, gate, up, down):
    return F.linear(F.softplus(F.linear(x, gate)) * F.linear(x, up), down)


@wrong("silu is taken of the result, after down. Apply it to gate x alone, before the product.")
def _silu_last(x, gate, up, down):
    return F.silu(F.linear(F.linear(x, gate) * F.linear(x, up), down))


@wrong("The gate goes through a softmax, which makes shares. silu works on each number alone.")
def _softmax(x, gate, up, down):
    return F.linear(F.linear(x, gate).softmax(-1) * F.linear(x, up), down)


@wrong("sigmoid(z) is 1 / (1 + exp(-z)). Here the sign before exp is a minus.")
def _minus(x, gate, up, down):
    z = F.linear(x, gate)
    return F.linear(z / (1 - torch.exp(-z)) * F.linear(x, up), down)


@wrong("The result is right, but x was changed on the way.", hints=IN_PLACE)
def _in_place(x, gate, up, down):
    out = swiglu(x, gate, up, down)
    x.zero_()
    return out


EXERCISES = (
    Exercise(
        "swiglu",
        _cases,
        _HINTS,
        "nanoserve.layers:swiglu",
        wrong=(
            _swapped, _gelu, _relu, _sigmoid, _sum, _silu_of_product, _both_bent, _no_silu,
            _no_up, _residual, _down_turned, _all_turned, _no_down, _stays_wide, _sign_turned,
            _softplus, _silu_last, _softmax, _minus, _in_place,
        ),
    ),
)  # fmt: skip
