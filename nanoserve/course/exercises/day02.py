"""Day 2's exercises: map names, unpack a quantised block, put the rows of q and k back."""

from __future__ import annotations

import re

import torch

from nanoserve.course.exercise import Case, Exercise, close, wrong
from nanoserve.course.exercises.day00 import IN_PLACE
from nanoserve.weights import GGUF_NAMES, hf_name

# hf_name


def _name_cases() -> list[Case]:
    names = {
        "token_embd.weight": "top",
        "output_norm.weight": "top",
        "output.weight": "top",
        "blk.0.attn_q.weight": "layer",
        "blk.17.attn_output.weight": "layer",
        "blk.3.ffn_norm.weight": "layer",
        "blk.29.attn_k.bias": "bias",
        "blk.5.attn_q_norm.weight": "layer",
        "rope_freqs.weight": "unknown",
        "blk.2.ffn_gate_inp.weight": "unknown",
        "blk.4.attn_q.scale": "unknown",
    }
    return [Case(name, (name,), kind=kind) for name, kind in names.items()]


_NAME_HINTS = {
    "top": (
        "This name has no `blk.` in front: it belongs to no layer.",
        "Take the name apart at its dots. The last piece is the kind; before it stands the part.",
        "`*layer, part, kind = name.split('.')` leaves `layer` empty for such a name.",
    ),
    "layer": (
        "Take the name apart at its dots before you look anything up.",
        "The part is a whole piece between dots, `attn_q_norm` say: look up that piece, unchanged.",
        "With `blk, number, part, kind = name.split('.')` the result is "
        "`f'model.layers.{number}.{GGUF_NAMES[part]}.{kind}'`.",
    ),
    "bias": (
        "Not every tensor is a weight.",
        "The last piece of the name is the kind: `weight` or `bias`. It is the same on both sides.",
        "End the result with `.{kind}`, not with `.weight`.",
    ),
    "unknown": (
        "What does your function return for a part that is not in the table?",
        "A name with an unknown part, or a kind other than weight and bias, comes back unchanged.",
        "Before anything else: `if part not in GGUF_NAMES or kind not in ('weight', 'bias'): "
        "return gguf_name`.",
    ),
}


def _split_name(name: str) -> tuple[str | None, str, str]:
    return re.match(r"(?:blk\.(\d+)\.)?(\w*)\.?(.*)", name).groups()


@wrong("Only the first digit of the layer is read, so layer 17 becomes layer 1.")
def _one_digit(name):
    return re.sub(r"layers\.(\d)\d+\.", r"layers.\1.", hf_name(name))


@wrong("Replacing text inside the name finds `output` in `attn_output` too: look up whole pieces.")
def _replaces_text(name):
    layer, part, kind = _split_name(name)
    for theirs, ours in GGUF_NAMES.items():
        part = part.replace(theirs, ours)
    return f"{'' if layer is None else f'model.layers.{layer}.'}{part}.{kind}"


@wrong("Every result ends in .weight, but a tensor can also be a bias.")
def _always_weight(name):
    return re.sub(r"\.bias$", ".weight", hf_name(name))


@wrong("The layers lie under `model.` in the Hugging Face names: `model.layers.0`, not `layers.0`.")
def _no_model(name):
    return hf_name(name).replace("model.layers.", "layers.")


@wrong("A part that is not in the table raises an error here: return the name unchanged.")
def _raises_on_unknown(name):
    layer, part, kind = _split_name(name)
    return f"{'' if layer is None else f'model.layers.{layer}.'}{GGUF_NAMES[part]}.{kind}"


@wrong("A name with an unknown part is half translated: `blk.2` became `model.layers.2`.")
def _half_translated(name):
    layer, part, kind = _split_name(name)
    ours = GGUF_NAMES.get(part, part)
    return f"{'' if layer is None else f'model.layers.{layer}.'}{ours}.{kind}"


@wrong(
    "`attn_q_norm` begins with `attn_q` but is another part: compare whole pieces, not beginnings."
)
def _by_beginning(name):
    layer, part, kind = _split_name(name)
    for theirs, ours in sorted(GGUF_NAMES.items()):
        if part.startswith(theirs):
            return f"{'' if layer is None else f'model.layers.{layer}.'}{ours}.{kind}"
    return name


@wrong("An unknown name gives None, so the tensor would be lost silently: return it unchanged.")
def _none_for_unknown(name):
    ours = hf_name(name)
    return None if ours == name else ours


@wrong("The number of the layer is 1 too large. GGUF and Hugging Face both count from 0.")
def _one_more(name):
    return re.sub(r"layers\.(\d+)", lambda m: f"layers.{int(m[1]) + 1}", hf_name(name))


@wrong("This kind is neither weight nor bias: return the name unchanged.")
def _any_kind(name):
    layer, part, kind = _split_name(name)
    if part not in GGUF_NAMES:
        return name
    return f"{'' if layer is None else f'model.layers.{layer}.'}{GGUF_NAMES[part]}.{kind}"


@wrong("A name without a layer gets a `model.layers.` prefix too. Only `blk.` names belong to one.")
def _always_a_layer(name):
    ours = hf_name(name)
    known = ours != name and not ours.startswith("model.layers.")
    return f"model.layers.0.{ours}" if known else ours


@wrong("`blk.` is GGUF's word. In the Hugging Face names a layer stands under `model.layers.`.")
def _keeps_blk(name):
    return hf_name(name).replace("model.layers.", "blk.") if name != hf_name(name) else name


@wrong("`model.` is put in front here. Without a layer, the name in the table is complete.")
def _model_twice(name):
    ours = hf_name(name)
    return ours if ours == name or ours.startswith("model.layers.") else f"model.{ours}"


@wrong("An unknown name becomes an empty text, and its tensor would be lost: return it unchanged.")
def _empty_for_unknown(name):
    ours = hf_name(name)
    return "" if ours == name else ours


HF_NAME = Exercise(
    "hf_name",
    _name_cases,
    _NAME_HINTS,
    "nanoserve.weights:hf_name",
    wrong=(
        _one_digit,
        _replaces_text,
        _always_weight,
        _no_model,
        _raises_on_unknown,
        _half_translated,
        _by_beginning,
        _none_for_unknown,
        _one_more,
        _any_kind,
        _always_a_layer,
        _keeps_blk,
        _model_twice,
        _empty_for_unknown,
    ),
)

# dequantize_q4_1


def _blocks(scales: list[float], minima: list[float], packed: torch.Tensor) -> torch.Tensor:
    head = torch.tensor([scales, minima], dtype=torch.float16).T.contiguous()  # [n, 2]
    return torch.cat([head.view(torch.uint8), packed.to(torch.uint8)], dim=1)  # [n, 20]


def _block_cases() -> list[Case]:
    """The first two cases take formula and order apart, so that one mistake hides no other."""
    random = torch.Generator().manual_seed(2)
    numbers = torch.randint(0, 256, (5, 16), generator=random)
    alike = torch.full((1, 16), 0x33)
    ascending = torch.arange(16)[None] + 16 * torch.arange(15, -1, -1)[None]
    scales, minima = [0.25, 1.5, 0.0625, 3.0, 0.1], [-2.0, 0.5, -0.75, 1.0, -0.7]
    cases = [
        ("every byte 0x33, scale 0.5, minimum -1: the value 0.5, 32 times",
         _blocks([0.5], [-1.0], alike), "value"),
        ("low halves 0 to 15, high halves 15 to 0, scale 1, minimum 0: the numbers themselves",
         _blocks([1.0], [0.0], ascending), "order"),
        ("5 blocks of random numbers", _blocks(scales, minima, numbers), "value"),
        ("2 blocks with scale 0", _blocks([0, 0], [0.5, -3], numbers[:2]), "value"),
    ]  # fmt: skip
    return [Case(what, (blocks,), kind=kind, compare=close()) for what, blocks, kind in cases]


_BLOCK_HINTS = {
    "dtype": (
        "In which dtype does your function multiply and add, and which dtype does it return?",
        "The file has the scale and the minimum in float16. The product, the sum and the result "
        "are float32.",
        "Turn the two numbers into float32 first: `.view(torch.float16).float()`.",
    ),
    "order": (
        "A byte holds two numbers of 4 bits. Which of the 32 places does each take?",
        "Byte i holds value i in its low four bits and value i + 16 in its high four.",
        "`torch.cat([packed & 0xF, packed >> 4], dim=1)` puts all low four bits first.",
    ),
    "value": (
        "Take one byte by hand: which number is in its low four bits, and what does the formula "
        "make of it? Scale times the number, plus the minimum.",
        "Bytes 0-1 are the scale, 2-3 the minimum. Read them as float16, then turn to float32.",
        "`blocks[:, :4].contiguous().view(torch.float16).float()` is [n, 2]: scale, minimum.",
    ),
}


def _parts(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scale, minimum = blocks[:, :4].contiguous().view(torch.float16).float().split(1, dim=1)
    packed = blocks[:, 4:]
    return scale, minimum, torch.cat([packed & 0xF, packed >> 4], dim=1)


@wrong("The two numbers of a byte stand 16 places apart, not side by side.", hints="order")
def _interleaved(blocks):
    scale, minimum, numbers = _parts(blocks)
    return scale * numbers.unflatten(1, (2, 16)).transpose(1, 2).flatten(1) + minimum


@wrong("The high four bits come first here. The low four bits are values 0 to 15.", hints="order")
def _high_first(blocks):
    scale, minimum, numbers = _parts(blocks)
    return scale * numbers.roll(16, dims=1) + minimum


@wrong("Subtracting 8 belongs to Q4_0, which has no minimum. Q4_1 uses the numbers as they are.")
def _centred(blocks):
    scale, minimum, numbers = _parts(blocks)
    return scale * (numbers.float() - 8) + minimum


@wrong("Scale and minimum are swapped: the scale is in bytes 0-1, the minimum in bytes 2-3.")
def _swapped(blocks):
    scale, minimum, numbers = _parts(blocks)
    return minimum * numbers + scale


@wrong("The minimum is subtracted. Add it: it is already negative where it has to be.")
def _subtracted(blocks):
    scale, minimum, numbers = _parts(blocks)
    return scale * numbers - minimum


@wrong("The minimum is multiplied by the scale too. The scale multiplies only the number.")
def _scaled_minimum(blocks):
    scale, minimum, numbers = _parts(blocks)
    return scale * (numbers + minimum)


@wrong("The high four bits are 16 times too large: shift them down (`packed >> 4`).")
def _not_shifted(blocks):
    scale, minimum, _ = _parts(blocks)
    packed = blocks[:, 4:]
    return scale * torch.cat([packed & 0xF, packed & 0xF0], dim=1) + minimum


@wrong(
    "The values stay in float16, which rounds them again: go to float32 before you multiply.",
    hints="dtype",
)
def _half_precision(blocks):
    scale, minimum, numbers = _parts(blocks)
    return scale.half() * numbers + minimum.half()


@wrong(
    "The sum is made in float16 and widened after that: go to float32 before you multiply.",
    hints="dtype",
)
def _widened_late(blocks):
    scale, minimum, numbers = _parts(blocks)
    return (scale.half() * numbers + minimum.half()).float()


@wrong("Scale and minimum are read as bfloat16. They are float16: another split of the 16 bits.")
def _as_bfloat16(blocks):
    head = blocks[:, :4].contiguous().view(torch.bfloat16).float()
    return head[:, :1] * _parts(blocks)[2] + head[:, 1:]


@wrong("The two bytes of scale and minimum are read in the wrong order: the low byte comes first.")
def _big_endian(blocks):
    turned = blocks.clone()
    turned[:, :4] = blocks[:, [1, 0, 3, 2]]
    scale, minimum, numbers = _parts(turned)
    return scale * numbers + minimum


@wrong("The values are float64. The result is float32.", hints="dtype")
def _double(blocks):
    scale, minimum, numbers = _parts(blocks)
    return scale.double() * numbers + minimum.double()


@wrong(
    "Scale and minimum have lost their second dimension, so they do not fit the rows of numbers.",
    hints=(
        "Which shapes do your scale and your numbers have? They must broadcast.",
        "The numbers are [n, 32]. The scale must be [n, 1], so that each row has its own.",
        "`head[:, :1]` keeps the dimension, and `head[:, 0]` drops it.",
    ),
)
def _dropped_dimension(blocks):
    scale, minimum, numbers = _parts(blocks)
    return scale[:, 0] * numbers + minimum[:, 0]


DEQUANTIZE = Exercise(
    "dequantize_q4_1",
    _block_cases,
    _BLOCK_HINTS,
    "nanoserve.weights:dequantize_q4_1",
    wrong=(
        _interleaved,
        _high_first,
        _centred,
        _swapped,
        _subtracted,
        _scaled_minimum,
        _not_shifted,
        _half_precision,
        _widened_late,
        _as_bfloat16,
        _big_endian,
        _double,
        _dropped_dimension,
    ),
)

# unpermute


def _row_cases() -> list[Case]:
    """Every value says its row (before the point) and its column, as the file has them."""

    def numbered(rows: int, columns: int) -> torch.Tensor:
        return torch.arange(rows)[:, None] + torch.arange(columns)[None] / 100

    order = torch.tensor([0, 3, 1, 4, 2, 5])
    by_hand = order[:, None] + torch.arange(4)[None] / 10
    return [
        Case("1 head of 6 rows, 4 columns", (by_hand, 1), kind="head"),
        Case("q: 6 heads of 8 rows, 36 columns", (numbered(48, 36), 6), kind="heads"),
        Case("k: 3 heads of 8 rows, 36 columns", (numbered(24, 36), 3), kind="heads"),
        Case("a bias: 5 heads of 14 numbers", (torch.arange(70.0), 5), kind="bias"),
    ]


_ROW_HINTS = {
    "head": (
        "Which rows of the file belong to one pair? They are neighbours: 0 and 1, then 2 and 3.",
        "See the rows as a table of [head_dim / 2, 2], a pair to a line. "
        "You want its first column, then its second.",
        "Turn that table: reshape to [n_heads, head_dim / 2, 2, ...], transpose dimensions 1 and 2,"
        " then flatten.",
    ),
    "heads": (
        "A row never leaves its own head. Are your heads kept apart?",
        "Give each head a dimension of its own, the first: n_heads comes in as an argument, since "
        "q and k differ in it.",
        "`weight.unflatten(0, (n_heads, -1, 2))`, then transpose dimensions 1 and 2, then flatten "
        "dimensions 0 to 2.",
    ),
    "bias": (
        "A bias is one-dimensional: it has rows and no columns.",
        "Reshape the first dimension alone and leave those behind it, if any, as they are.",
        "`unflatten(0, ...)` splits the first dimension and `flatten(0, 2)` joins it again, "
        "however many follow.",
    ),
}


@wrong(
    "This is the opposite order: it puts the rows of a pair side by side. They are side by side in "
    "the file, and must be half a head apart."
)
def _forward(weight, n_heads):
    return weight.unflatten(0, (n_heads, 2, -1)).transpose(1, 2).flatten(0, 2)


@wrong("The whole matrix is treated as one head, so rows move from one head into another.")
def _one_head(weight, n_heads):
    return weight.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)


@wrong("Nothing has moved: a reshape keeps the order of the rows, and only a transpose changes it.")
def _unchanged(weight, n_heads):
    return weight.unflatten(0, (n_heads, -1, 2)).flatten(0, 2)


@wrong("The columns are put in order, not the rows: a head's outputs are the rows of the weight.")
def _columns(weight, n_heads):
    return weight.unflatten(-1, (n_heads, -1, 2)).transpose(-1, -2).flatten(-3)


@wrong(
    "The rows are right but still in pieces: flatten head, half and pair back into one dimension."
)
def _in_pieces(weight, n_heads):
    return weight.unflatten(0, (n_heads, -1, 2)).transpose(1, 2)


@wrong("The second row of each pair comes first here. The even rows must be the first half.")
def _odd_first(weight, n_heads):
    return weight.unflatten(0, (n_heads, -1, 2)).flip(2).transpose(1, 2).flatten(0, 2)


@wrong("n_heads stands where half of head_dim belongs: it is the number of heads, not of pairs.")
def _heads_as_pairs(weight, n_heads):
    return weight.unflatten(0, (-1, n_heads, 2)).transpose(1, 2).flatten(0, 2)


@wrong("It needs a second dimension, and a bias has none: reshape the first dimension alone.")
def _needs_columns(weight, n_heads):
    pairs = weight.view(n_heads, -1, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)


@wrong("k is cut into 6 heads too, but it has fewer (GQA): use the argument n_heads.")
def _heads_of_q(weight, n_heads):
    heads = 6 if weight.dim() == 2 and n_heads > 1 else n_heads
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


@wrong("The rows are right, but they were written into the argument.", hints=IN_PLACE)
def _in_place(weight, n_heads):
    weight[:] = weight.unflatten(0, (n_heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    return weight


UNPERMUTE = Exercise(
    "unpermute",
    _row_cases,
    _ROW_HINTS,
    "nanoserve.weights:unpermute",
    wrong=(
        _forward,
        _one_head,
        _unchanged,
        _columns,
        _in_pieces,
        _odd_first,
        _heads_as_pairs,
        _needs_columns,
        _heads_of_q,
        _in_place,
    ),
)

EXERCISES = (HF_NAME, DEQUANTIZE, UNPERMUTE)
