"""Comparing an answer with the expected value. A difference is one sentence for the learner.

A comparison is `compare(got, expected) -> str | None`: None if they agree, else the sentence.
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

Compare = Callable[[Any, Any], "str | bool | None"]
WIDTH = 44  # characters of a table cell
GIVES_NONE = "it returns None: is a `return` missing?"


def exact(got: Any, expected: Any) -> str | None:
    """Equal in type, shape, dtype and every value, through lists, tuples and dicts."""
    return _differ(got, expected, 0.0, 0.0, ())


def close(atol: float = 1e-6, rtol: float = 1e-5) -> Compare:
    """As `exact`, but floating-point values may differ by atol + rtol * |expected|."""

    def compare(got: Any, expected: Any) -> str | None:
        return _differ(got, expected, atol, rtol, ())

    return compare


def short(value: Any, width: int = WIDTH) -> str:
    """One line for a table cell: a tensor by its shape, anything else cut at `width`."""
    return _cut(_line(value, width), 0, width)


def contrast(one: Any, other: Any, width: int = WIDTH) -> tuple[str, str]:
    """Both values as `short`, but cut so that their first difference is visible."""
    lines = _line(one, None), _line(other, None)
    first = _first_difference(*lines)
    if first < width - 12 or first == max(map(len, lines)):
        return _cut(lines[0], 0, width), _cut(lines[1], 0, width)
    begin = lines[0].rfind(" ", max(0, first - 20), max(0, first - 8)) + 1 or first - 12
    return _cut(lines[0], begin, width), _cut(lines[1], begin, width)


def a(value: Any) -> str:
    """The type of a value with its article: "a list", "an int", "None"."""
    if value is None:
        return "None"
    name = "tensor" if isinstance(value, torch.Tensor) else type(value).__name__
    return f"{'an' if name[0].lower() in 'aeio' else 'a'} {name}"


def _line(value: Any, width: int | None) -> str:
    """A value on one line. `width` limits each item of a collection; None sets no limit."""
    if isinstance(value, torch.Tensor):
        text = f"{_dtype(value)} {list(value.shape)}"
        if value.numel() <= 6 and not value.is_meta:
            text += f" = {_numbers(value.tolist())}"
    elif isinstance(value, torch.dtype):
        text = str(value).removeprefix("torch.")
    elif isinstance(value, type):
        text = f"the class {value.__name__}"
    elif value is None or isinstance(value, str | bytes | bool | numbers.Number):
        text = _number(value) if isinstance(value, float) else repr(value)
    elif isinstance(value, list | tuple | set | frozenset | dict):
        text = _collection(value, width)
    elif hasattr(value, "shape") and hasattr(value, "dtype"):
        text = f"array {list(value.shape)} {value.dtype}"
    else:
        text = a(value)
    text = " ".join(without_addresses(text).split())
    return text if width is None else _cut(text, 0, width)


def _cut(text: str, begin: int, width: int) -> str:
    """`width` characters of a text, from `begin` on. Dots mark text that is left out."""
    text = f"...{text[begin:]}" if begin else text
    return text if len(text) <= width else text[: width - 3] + "..."


def without_addresses(text: str) -> str:
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def _differ(got: Any, expected: Any, atol: float, rtol: float, path: tuple) -> str | None:
    told = _difference(got, expected, atol, rtol, path)
    if told is None or isinstance(told, _Placed):
        return told
    return _Placed(f"{_place(path)}: {told.removeprefix('it returns ')}" if path else told)


class _Placed(str):
    """A sentence that already names the item or key with the difference."""


def _place(path: tuple) -> str:
    """A path in words, innermost step first: "item 4 of 'slots'", "item 0 of the list"."""
    steps = [step if isinstance(step, str) else f"item {step[0]}" for step in reversed(path)]
    return " of ".join(steps) + ("" if isinstance(path[0], str) else f" of the {path[0][1]}")


def _difference(got: Any, expected: Any, atol: float, rtol: float, path: tuple) -> str | None:
    if got is None and expected is not None:
        return f"expected {short(expected)}, got None" if path else GIVES_NONE
    if isinstance(expected, torch.Tensor):
        return _differ_tensor(got, expected, atol, rtol)
    if isinstance(expected, np.ndarray):
        if not isinstance(got, np.ndarray):
            return f"it returns {a(got)} where an array is expected"
        return _differ_tensor(torch.as_tensor(got), torch.as_tensor(expected), atol, rtol)
    if isinstance(got, torch.Tensor):
        return f"it returns a tensor where {a(expected)} is expected"
    if isinstance(expected, bool) or isinstance(got, bool):
        same = isinstance(got, bool) and isinstance(expected, bool) and got == expected
        return None if same else f"expected {short(expected)}, got {short(got)}"
    if isinstance(expected, numbers.Number):
        return _differ_number(got, expected, atol, rtol)
    if isinstance(expected, str | bytes):
        return _differ_text(got, expected)
    if isinstance(expected, list | tuple):
        return _differ_sequence(got, expected, atol, rtol, path)
    if isinstance(expected, Mapping):
        return _differ_mapping(got, expected, atol, rtol, path)
    if type(got) is not type(expected):
        return f"it returns {a(got)} where {a(expected)} is expected"
    same = got is expected or got == expected
    return None if same else f"expected {short(expected)}, got {short(got)}"


def _differ_tensor(got: Any, expected: torch.Tensor, atol: float, rtol: float) -> str | None:
    if not isinstance(got, torch.Tensor):
        return f"it returns {a(got)} where a tensor is expected"
    if got.shape != expected.shape:
        turned = got.dim() > 1 and list(got.shape) == list(reversed(expected.shape))
        hint = " (transposed?)" if turned else ""
        return f"wrong shape: expected {list(expected.shape)}, got {list(got.shape)}{hint}"
    if got.dtype != expected.dtype:
        return f"wrong dtype: expected {_dtype(expected)}, got {_dtype(got)}"
    got, expected = got.detach().cpu(), expected.detach().cpu()
    if expected.is_floating_point():
        extra = torch.isnan(got) & ~torch.isnan(expected)
        if extra.any():
            count, total = int(extra.sum()), extra.numel()
            return f"NaN in {count} of {total} places, first at {_first(extra)}"
        exp, val = expected.double(), got.double()
        bad = ~torch.isclose(val, exp, rtol=rtol, atol=atol, equal_nan=True)
    else:
        bad = got != expected
    if not bad.any():
        return None
    index = _first(bad)
    key = tuple(index)
    return (
        f"{int(bad.sum())} of {bad.numel()} values differ, first at {index}: "
        f"expected {_number(expected[key].item())}, got {_number(got[key].item())}"
    )


def _differ_number(got: Any, expected: Any, atol: float, rtol: float) -> str | None:
    if not isinstance(got, numbers.Number):
        return f"it returns {a(got)} where a number is expected"
    if got != got and expected == expected:
        return f"NaN, expected {_number(expected)}"
    if got == expected or (got != got and expected != expected):
        return None
    if abs(got - expected) <= atol + rtol * abs(expected) and not math.isinf(abs(expected)):
        return None
    return f"expected {_number(expected)}, got {_number(got)}"


def _differ_text(got: Any, expected: Any) -> str | None:
    if type(got) is not type(expected):
        return f"it returns {a(got)} where {a(expected)} is expected"
    if got == expected:
        return None
    first = _first_difference(got, expected)
    begin = max(0, first - 6)
    return (
        f"differs from character {first}: expected {_piece(expected, begin)}, "
        f"got {_piece(got, begin)}"
    )


def _differ_sequence(got, expected, atol, rtol, path) -> str | None:
    kind = list if isinstance(expected, list) else tuple
    if not isinstance(got, kind):
        return f"it returns {a(got)} where {a(expected)} is expected"
    for i, (x, y) in enumerate(zip(got, expected, strict=False)):
        message = _differ(x, y, atol, rtol, (*path, (i, kind.__name__)))
        if message:
            return message
    if len(got) != len(expected):
        return f"wrong length: expected {len(expected)}, got {len(got)}"
    return None


def _differ_mapping(got, expected, atol, rtol, path) -> str | None:
    if not isinstance(got, Mapping):
        return f"it returns {a(got)} where {a(expected)} is expected"
    for key in expected:
        if key not in got:
            return f"the key {short(key)} is missing"
    for key in got:
        if key not in expected:
            return f"the key {short(key)} should not be there"
    for key in expected:
        step = repr(key) if isinstance(key, str) else f"key {short(key)}"
        message = _differ(got[key], expected[key], atol, rtol, (*path, step))
        if message:
            return message
    return None


def _first_difference(one: Any, other: Any) -> int:
    """The first index at which two texts differ, or the length of the shorter one."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(one), len(other)))


def _first(mask: torch.Tensor) -> list[int]:
    return [int(i) for i in mask.nonzero()[0]]


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _numbers(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_numbers(v) for v in value) + "]"
    return _number(value)


def _piece(text: Any, begin: int, width: int = 24) -> str:
    cut = repr(text[begin : begin + width])
    return ("..." if begin else "") + cut + ("..." if len(text) > begin + width else "")


def _collection(value: Any, width: int | None) -> str:
    most = len(value) if width is None else 12
    if isinstance(value, dict):
        pairs = list(value.items())[:most]
        items = [f"{_line(k, width)}: {_line(v, width)}" for k, v in pairs]
        brackets = "{}"
    else:
        ordered = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        items = [_line(v, width) for v in list(ordered)[:most]]
        brackets = "[]" if isinstance(value, list) else "()" if isinstance(value, tuple) else "{}"
    more = ", ..." if len(value) > most else "," if brackets == "()" and len(value) == 1 else ""
    return brackets[0] + ", ".join(items) + more + brackets[1]
