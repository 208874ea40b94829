"""Day 20: the bytes that attention moves for K and V. Closes week 5."""

from dataclasses import replace

import torch

from nanoserve.config import ModelConfig
from nanoserve.course.exercise import Case, Exercise, wrong
from nanoserve.course.exercises.day01 import SMOLLM2, TINY

CONFIG: ModelConfig = replace(TINY, n_q=6, n_kv=2, head_dim=8, hidden_size=20, num_layers=7)


def bytes_of_a_read(config: ModelConfig, kv_len: int, dtype: torch.dtype, gathered: bool) -> int:
    """The bytes that one layer's attention moves to read the keys and values of `kv_len` tokens:
    where they lie, or, gathered, through a copy of them."""
    once = 2 * kv_len * config.n_kv * config.head_dim * dtype.itemsize
    return 5 * once if gathered else once  # read, write; read, write; read


@wrong("The argument gathered is ignored. Gathering copies K and V twice, then reads the copy.")
def _copy_forgotten(config, kv_len, dtype, gathered):
    return bytes_of_a_read(config, kv_len, dtype, False)


@wrong(
    "Two copies are counted, a read and a write each. Attention also reads the last copy: that "
    "makes five."
)
def _copy_not_read(config, kv_len, dtype, gathered):
    return (4 if gathered else 1) * bytes_of_a_read(config, kv_len, dtype, False)


@wrong(
    "One copy is counted. There are two: the slots in order of the text, and then head by head. "
    "Each copy is a read and a write."
)
def _one_copy(config, kv_len, dtype, gathered):
    return (3 if gathered else 1) * bytes_of_a_read(config, kv_len, dtype, False)


@wrong(
    "One read and one write are counted. There are two copies, each a read and a write, and then "
    "attention reads the last copy."
)
def _one_read_one_write(config, kv_len, dtype, gathered):
    return (2 if gathered else 1) * bytes_of_a_read(config, kv_len, dtype, False)


@wrong("Both variants are counted as copies. In place, K and V move once.")
def _always_copied(config, kv_len, dtype, gathered):
    return bytes_of_a_read(config, kv_len, dtype, True)


@wrong("A token has a key and a value: count both.")
def _keys_only(config, kv_len, dtype, gathered):
    return bytes_of_a_read(config, kv_len, dtype, gathered) // 2


@wrong("n_q heads are counted. Keys and values have n_kv heads: the query heads share them.")
def _query_heads(config, kv_len, dtype, gathered):
    return bytes_of_a_read(config, kv_len, dtype, gathered) * config.n_rep


@wrong("hidden_size is the width of the residual stream. A key is n_kv * head_dim numbers.")
def _hidden_size(config, kv_len, dtype, gathered):
    return (5 if gathered else 1) * 2 * kv_len * config.hidden_size * dtype.itemsize


@wrong("All layers are counted. The benchmark times one layer.")
def _all_layers(config, kv_len, dtype, gathered):
    return bytes_of_a_read(config, kv_len, dtype, gathered) * config.num_layers


@wrong("These are numbers, not bytes: multiply by dtype.itemsize.", hints="dtype")
def _numbers(config, kv_len, dtype, gathered):
    return bytes_of_a_read(config, kv_len, dtype, gathered) // dtype.itemsize


@wrong("4 bytes a number is float32. In bfloat16 it is 2: take dtype.itemsize.")
def _four_bytes(config, kv_len, dtype, gathered):
    return bytes_of_a_read(config, kv_len, torch.float32, gathered)


@wrong(
    "Whole blocks are counted. The mapping has one slot for each token: the empty end of the last "
    "block is not read."
)
def _whole_blocks(config, kv_len, dtype, gathered):
    return bytes_of_a_read(config, -(-kv_len // 16) * 16, dtype, gathered)


def _cases() -> list[Case]:
    return [
        Case("in place, 48 tokens", (CONFIG, 48, torch.float32, False), kind="once"),
        Case("in place, 5 tokens", (CONFIG, 5, torch.float32, False), kind="once"),
        Case("gathered, 48 tokens", (CONFIG, 48, torch.float32, True), kind="copy"),
        Case("in place, 48 tokens, bfloat16", (CONFIG, 48, torch.bfloat16, False), kind="dtype"),
        Case("SmolLM2, gathered, 4,096 tokens", (SMOLLM2, 4_096, torch.float32, True), kind="copy"),
    ]


BYTES_OF_A_READ = Exercise(
    "bytes_of_a_read",
    _cases,
    hints={
        "once": (
            "What does one layer store for one token?",
            "A key and a value, each n_kv heads of head_dim numbers, for each of kv_len tokens. "
            "The empty end of the last block does not count.",
            "2 * kv_len * config.n_kv * config.head_dim * dtype.itemsize",
        ),
        "copy": (
            "Follow one key from the pool to its score. How often is it read or written, if it is "
            "copied on the way?",
            "The first copy reads and writes it, token by token. The second copy reads and writes "
            "it, head by head. Attention reads it.",
            "5 times the bytes of the variant in place.",
        ),
        "dtype": (
            "How many bytes is one number?",
            "dtype.itemsize: 4 for float32, 2 for bfloat16.",
            "Multiply the count of numbers by dtype.itemsize.",
        ),
    },
    solution=bytes_of_a_read,
    wrong=(
        _copy_forgotten, _copy_not_read, _one_copy, _one_read_one_write, _always_copied,
        _keys_only, _query_heads, _hidden_size, _all_layers, _numbers, _four_bytes, _whole_blocks,
    ),
)  # fmt: skip

EXERCISES = (BYTES_OF_A_READ,)

REVIEW = (
    (
        "Day 18. The reference is slow and stays slow. Why is it worth having?",
        "It is plain enough to believe. A wrong kernel gives plausible numbers; only a comparison "
        "with independent code finds them.",
    ),
    (
        "Day 18. The mapping holds slots 112, 113, 32. What is the block size of the pool?",
        "The mapping does not contain it, and attention does not need it: a slot is an index into "
        "the pool. Only the block table, which made the mapping, uses blocks.",
    ),
    (
        "Day 18. Why may a kernel differ from the oracle at all, and why both by ATOL and by RTOL?",
        "It adds in another order, and rounding depends on the order. RTOL allows for the digits "
        "that a value of any size loses, ATOL for values near 0, where large terms cancel.",
    ),
    (
        "Day 18. A kernel loses one key of 4,000. What does a test in bfloat16 say?",
        "It probably passes: one key of thousands changes the result less than bfloat16's "
        "rounding. Tests look for such faults in float32, with few tokens and with poison.",
    ),
    (
        "Day 19. Why does attention use hasattr and not isinstance?",
        "Attention needs the method, not a class. A spy, or a cache with another kind of memory, "
        "then needs no branch of its own.",
    ),
    (
        "Day 19. The logits of the paged model are equal to the last bit. Which fault of the "
        "plumbing would they not show, and what does?",
        "A fault that only costs time, such as a second call. A spy shows it: it counts the calls "
        "and records their arguments.",
    ),
    (
        "Day 20. Gather and fused do the same work today. Is the fused method useless?",
        "No. The interface is new: the caller no longer gets K and V, so a kernel can read them in "
        "place.",
    ),
    (
        "Day 20. Suppose that both variants stay far below the peak bandwidth. How much of the gap "
        "can the copies explain?",
        "A factor of 5 at most: K and V move five times instead of once. The rest is arithmetic, "
        "many small operations, and scattered rows.",
    ),
)
