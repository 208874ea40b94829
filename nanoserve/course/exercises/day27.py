"""Day 27: the bytes that attention must read, and the shortest time of a computation."""

import torch

from nanoserve.bench.roofline import attention_bytes
from nanoserve.course.exercise import Case, Exercise, close, wrong

# attention_bytes


@wrong("Only the keys are counted. A token has a key and a value.")
def _keys_only(kv_lens, n_kv, head_dim, dtype):
    return attention_bytes(kv_lens, n_kv, head_dim, dtype) // 2


@wrong(
    "Every sequence is counted with the longest length. Sum the lengths: a kernel reads no key "
    "behind the last token of a sequence.",
    hints="ragged",
)
def _padded(kv_lens, n_kv, head_dim, dtype):
    return len(kv_lens) * attention_bytes([max(kv_lens)], n_kv, head_dim, dtype)


@wrong("Only the longest sequence is counted. The batch reads all of them.", hints="ragged")
def _longest(kv_lens, n_kv, head_dim, dtype):
    return attention_bytes([max(kv_lens)], n_kv, head_dim, dtype)


@wrong("Only the first sequence is counted. The batch reads all of them.", hints="ragged")
def _first(kv_lens, n_kv, head_dim, dtype):
    return attention_bytes(kv_lens[:1], n_kv, head_dim, dtype)


@wrong(
    "Two sequences of the same length count once here. Each sequence has keys of its own.",
    hints="ragged",
)
def _each_length_once(kv_lens, n_kv, head_dim, dtype):
    return attention_bytes(set(kv_lens), n_kv, head_dim, dtype)


@wrong("The sequences are counted, not their tokens: sum the lengths.", hints="ragged")
def _sequences(kv_lens, n_kv, head_dim, dtype):
    return attention_bytes([1] * len(kv_lens), n_kv, head_dim, dtype)


@wrong(
    "Whole blocks of 16 are counted. The empty slots behind the last token are not read.",
    hints="ragged",
)
def _whole_blocks(kv_lens, n_kv, head_dim, dtype):
    return attention_bytes([-(-n // 16) * 16 for n in kv_lens], n_kv, head_dim, dtype)


@wrong(
    "Each key is counted three times, once for each query head of SmolLM2 that uses it. Day 22's "
    "kernel loads it so often, but it must be read only once: the query heads of a group share it."
)
def _each_query_head(kv_lens, n_kv, head_dim, dtype):
    return 3 * attention_bytes(kv_lens, n_kv, head_dim, dtype)


@wrong("One KV head is counted. A token has a key and a value in each of n_kv heads.")
def _one_head(kv_lens, n_kv, head_dim, dtype):
    return attention_bytes(kv_lens, 1, head_dim, dtype)


@wrong("These are numbers, not bytes: multiply by dtype.itemsize.", hints="dtype")
def _numbers(kv_lens, n_kv, head_dim, dtype):
    return attention_bytes(kv_lens, n_kv, head_dim, dtype) // dtype.itemsize


@wrong("These are bits: a byte has 8 of them.", hints="dtype")
def _bits(kv_lens, n_kv, head_dim, dtype):
    return attention_bytes(kv_lens, n_kv, head_dim, dtype) * 8


@wrong("4 bytes a number is float32. Take dtype.itemsize.", hints="dtype")
def _four_bytes(kv_lens, n_kv, head_dim, dtype):
    return attention_bytes(kv_lens, n_kv, head_dim, torch.float32)


@wrong("2 bytes a number is bfloat16 or float16. Take dtype.itemsize.", hints="dtype")
def _two_bytes(kv_lens, n_kv, head_dim, dtype):
    return attention_bytes(kv_lens, n_kv, head_dim, torch.bfloat16)


def _byte_cases() -> list[Case]:
    return [
        Case("one sequence of 7 tokens", ([7], 3, 20, torch.float32), kind="once"),
        Case("the same in bfloat16", ([7], 3, 20, torch.bfloat16), kind="dtype"),
        Case("four ragged sequences", ([11, 40, 5, 5], 2, 8, torch.float32), kind="ragged"),
        Case(
            "64 sequences of 8,192 tokens, 8 KV heads of 128, bfloat16",
            ([8_192] * 64, 8, 128, torch.bfloat16),
            kind="ragged",
        ),
    ]


ATTENTION_BYTES = Exercise(
    "attention_bytes",
    _byte_cases,
    hints={
        "once": (
            "Which numbers does one layer store for one token?",
            "A key and a value, each n_kv heads of head_dim numbers.",
            "2 * tokens * n_kv * head_dim numbers, each of dtype.itemsize bytes.",
        ),
        "dtype": (
            "How many bytes is one number?",
            "dtype.itemsize: 4 for float32, 2 for bfloat16.",
            "Multiply the count of numbers by dtype.itemsize.",
        ),
        "ragged": (
            "How many tokens do all sequences hold together?",
            "Each sequence holds its own length, even if another sequence is as long or longer.",
            "tokens = sum(kv_lens)",
        ),
    },
    target="nanoserve.bench.roofline:attention_bytes",
    wrong=(
        _keys_only, _padded, _longest, _first, _each_length_once, _sequences, _whole_blocks,
        _each_query_head, _one_head, _numbers, _bits, _four_bytes, _two_bytes,
    ),
)  # fmt: skip

# roofline_seconds


@wrong(
    "The two times are added. The device reads the next bytes while it computes, so only the "
    "longer time counts."
)
def _added(flops, bytes_read, peak_flops, bandwidth):
    return flops / peak_flops + bytes_read / bandwidth


@wrong("This is the shorter of the two times. The computation ends when both parts are done.")
def _shorter(flops, bytes_read, peak_flops, bandwidth):
    return min(flops / peak_flops, bytes_read / bandwidth)


@wrong("The arithmetic is left out. A computation with few bytes is limited by it.", hints="flops")
def _bytes_only(flops, bytes_read, peak_flops, bandwidth):
    return bytes_read / bandwidth


@wrong("The bytes are left out. Decode is limited by them.", hints="bytes")
def _flops_only(flops, bytes_read, peak_flops, bandwidth):
    return flops / peak_flops


@wrong(
    "The fractions are upside down. Work divided by a rate is a time; a rate divided by work is "
    "one over a time."
)
def _upside_down(flops, bytes_read, peak_flops, bandwidth):
    return max(peak_flops / flops, bandwidth / bytes_read)


@wrong("The rates are exchanged: operations go with peak_flops, bytes with bandwidth.")
def _crossed(flops, bytes_read, peak_flops, bandwidth):
    return max(flops / bandwidth, bytes_read / peak_flops)


@wrong(
    "This is the highest rate, in operations per second: the height of the roofline. Divide the "
    "operations by it."
)
def _rate(flops, bytes_read, peak_flops, bandwidth):
    return min(peak_flops, bandwidth * flops / bytes_read)


@wrong("This is the arithmetic intensity, operations per byte. Compare the two times.")
def _intensity(flops, bytes_read, peak_flops, bandwidth):
    return flops / bytes_read


def _roofline_cases() -> list[Case]:
    near = close(atol=0, rtol=1e-9)
    return [
        Case("60 FLOP and 40 bytes, at 20 FLOP/s and 5 bytes/s", (60.0, 40.0, 20.0, 5.0),
             kind="bytes", compare=near),
        Case("70 FLOP and 8 bytes, at 2 FLOP/s and 4 bytes/s", (70.0, 8.0, 2.0, 4.0),
             kind="flops", compare=near),
        Case("a decode on a GPU", (8.6e9, 2.1e9, 8e14, 4.7e12), kind="bytes", compare=near),
        Case("a prefill on a GPU", (5.5e11, 3.4e7, 8e14, 4.7e12), kind="flops", compare=near),
    ]  # fmt: skip


ROOFLINE_SECONDS = Exercise(
    "roofline_seconds",
    _roofline_cases,
    hints={
        "bytes": (
            "How long does reading alone take? And the arithmetic alone?",
            "Bytes divided by bytes per second is a time, and operations divided by operations per "
            "second too. Both run at the same moment.",
            "The longer of flops / peak_flops and bytes_read / bandwidth.",
        ),
        "flops": (
            "Is the memory the limit in this case, or the arithmetic?",
            "A prefill uses each key for many queries: it has few bytes and many operations.",
            "The longer of flops / peak_flops and bytes_read / bandwidth.",
        ),
    },
    target="nanoserve.bench.roofline:roofline_seconds",
    wrong=(
        _added, _shorter, _bytes_only, _flops_only, _upside_down, _crossed, _rate, _intensity,
    ),
)  # fmt: skip

EXERCISES = (ATTENTION_BYTES, ROOFLINE_SECONDS)
