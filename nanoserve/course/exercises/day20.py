"""Day 20: the bytes that a read moves. Closes week 5."""

from dataclasses import replace

import torch

from nanoserve.config import ModelConfig
from nanoserve.course.exercise import Case, Exercise, wrong
from nanoserve.course.exercises.day01 import SMOLLM2, TINY

CONFIG: ModelConfig = replace(TINY, n_q=6, n_kv=2, head_dim=8, hidden_size=20, num_layers=3)


def bytes_of_a_read(config: ModelConfig, kv_len: int, dtype: torch.dtype, gathered: bool) -> int:
    """The bytes that one layer's attention moves to read the keys and values of `kv_len` tokens:
    where they lie, or, gathered, through a copy of them."""
    once = 2 * kv_len * config.n_kv * config.head_dim * dtype.itemsize
    return 5 * once if gathered else once  # read, write; read, write; read


@wrong("The way makes no difference here: gathering copies the history twice, then reads the copy.")
def _copy_forgotten(config, kv_len, dtype, gathered):
    return bytes_of_a_read(config, kv_len, dtype, False)


@wrong(
    "Two copies are counted, a read and a write each. Attention then has to read the last one as "
    "well, which makes five."
)
def _copy_not_read(config, kv_len, dtype, gathered):
    return (4 if gathered else 1) * bytes_of_a_read(config, kv_len, dtype, False)


@wrong(
    "One copy is counted. There are two: the slots by token, and those turned to lie by head. Each "
    "is a read and a write."
)
def _one_copy(config, kv_len, dtype, gathered):
    return (3 if gathered else 1) * bytes_of_a_read(config, kv_len, dtype, False)


@wrong("Both ways are counted as a copy. Read in place, the history moves once.")
def _always_copied(config, kv_len, dtype, gathered):
    return bytes_of_a_read(config, kv_len, dtype, True)


@wrong("A token has a key and a value: count both.")
def _keys_only(config, kv_len, dtype, gathered):
    return bytes_of_a_read(config, kv_len, dtype, gathered) // 2


@wrong("The history is counted for n_q heads. Keys and values have n_kv: the heads share them.")
def _query_heads(config, kv_len, dtype, gathered):
    return bytes_of_a_read(config, kv_len, dtype, gathered) * config.n_rep


@wrong("hidden_size is the width of the stream. A key is n_kv heads of head_dim numbers.")
def _hidden_size(config, kv_len, dtype, gathered):
    return (5 if gathered else 1) * 2 * kv_len * config.hidden_size * dtype.itemsize


@wrong("All layers are counted. The benchmark times the read of one.")
def _all_layers(config, kv_len, dtype, gathered):
    return bytes_of_a_read(config, kv_len, dtype, gathered) * config.num_layers


@wrong("These are numbers, not bytes: multiply by dtype.itemsize.")
def _numbers(config, kv_len, dtype, gathered):
    return bytes_of_a_read(config, kv_len, dtype, gathered) // dtype.itemsize


@wrong("4 bytes a number is float32. In bfloat16 it is 2: take dtype.itemsize.")
def _four_bytes(config, kv_len, dtype, gathered):
    return bytes_of_a_read(config, kv_len, torch.float32, gathered)


@wrong(
    "Whole blocks are counted. The mapping names slots, one for each token: the empty end of the "
    "last block is not read."
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
            "What does one layer remember of one token?",
            "A key and a value, each n_kv heads of head_dim numbers. For every token of the "
            "history, and nothing for the empty end of its last block.",
            "2 * kv_len * config.n_kv * config.head_dim * dtype.itemsize",
        ),
        "copy": (
            "Follow one key from the pool to the score: how often does it move, if it is copied "
            "on the way?",
            "It is read from the pool and written by token, read and written again by head, and "
            "read by attention.",
            "5 times the bytes of a read in place.",
        ),
        "dtype": (
            "How many bytes is one number?",
            "dtype.itemsize: 4 for float32, 2 for bfloat16.",
            "Multiply the count of numbers by dtype.itemsize.",
        ),
    },
    solution=bytes_of_a_read,
    wrong=(
        _copy_forgotten, _copy_not_read, _one_copy, _always_copied, _keys_only, _query_heads,
        _hidden_size, _all_layers, _numbers, _four_bytes, _whole_blocks,
    ),
)  # fmt: skip

EXERCISES = (BYTES_OF_A_READ,)

REVIEW = (
    (
        "Day 18. The reference is slow and stays slow. Why is it worth having?",
        "It is plain enough to be believed. A kernel that is wrong gives plausible numbers; only "
        "something independent can tell.",
    ),
    (
        "Day 18. The mapping holds slots 112, 113, 32. What is the block size of the pool?",
        "It cannot be told, and the read need not know: a slot is ready to be an index. Only the "
        "table, which made the mapping, knows of blocks.",
    ),
    (
        "Day 18. Why may a kernel differ from the oracle at all, and why both by ATOL and by RTOL?",
        "It adds in another order, and rounding depends on the order. RTOL allows for the digits "
        "that a value of any size loses; ATOL for values near 0, left where large ones cancel.",
    ),
    (
        "Day 18. A kernel loses one key of 4,000. What does a test in bfloat16 say?",
        "Probably nothing: one key of thousands weighs less than bfloat16's rounding. Such faults "
        "are hunted in float32, on short histories, with poison.",
    ),
    (
        "Day 19. Why does attention ask hasattr and not isinstance?",
        "What matters is what the cache can do. A class that attention has never heard of, a spy "
        "or a cache with another kind of memory, then needs no branch of its own.",
    ),
    (
        "Day 19. The logits of the paged model are equal to the last bit. Which fault of the "
        "plumbing would they not show, and what does?",
        "One that costs only time, such as reading everything twice. A spy, which counts the calls "
        "and looks at what they were handed.",
    ),
    (
        "Day 20. Gather and fused take the same time. Is the fused read useless?",
        "Its sum is the same today, gather included. What is new is the place: the caller no "
        "longer sees the history, so a kernel can read it where it lies.",
    ),
    (
        "Day 20. Both paths read at a sixth to a seventh of the roof, at best, on the machine "
        "where it was recorded. How much of the gap is the copying?",
        "It moves the history five times instead of once, so a factor of 5 at most. The rest is "
        "arithmetic, many small operations, and scattered rows.",
    ),
)
