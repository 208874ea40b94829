"""Day 13: the keys of a tile, and the bytes of a token. Closes week 3."""

import math
from dataclasses import replace

import torch

from nanoserve.bench.decode import bytes_per_token
from nanoserve.config import ModelConfig
from nanoserve.course.exercise import Case, Exercise, wrong
from nanoserve.course.exercises.day01 import SMOLLM2, TINY
from nanoserve.weights import expected_shapes

# keys_of_a_tile ----------------------------------------------------------------------------------


def keys_of_a_tile(start: int, tile: int, query_len: int, kv_len: int) -> int:
    """How many keys, counted from key 0, the queries start to start + tile may see between them.

    The queries are the last query_len of kv_len positions; the last tile may be short.
    """
    return kv_len - query_len + min(start + tile, query_len)


@wrong("The past is forgotten: query 0 stands at position kv_len - query_len, not at 0.")
def _no_past(start, tile, query_len, kv_len):
    return min(start + tile, query_len)


@wrong("All keys are counted. That is right for the last tile; the others need not go so far.")
def _all_keys(start, tile, query_len, kv_len):
    return kv_len


@wrong(
    "The last tile is taken for a full one, so there are more keys than the text has positions. "
    "It ends at query_len."
)
def _past_the_end(start, tile, query_len, kv_len):
    return kv_len - query_len + start + tile


@wrong("It stops at the tile's first query. The last one of the tile sees furthest.")
def _first_query(start, tile, query_len, kv_len):
    return kv_len - query_len + start + 1


@wrong("One key too few: the last query of the tile sees its own key too.")
def _without_itself(start, tile, query_len, kv_len):
    return keys_of_a_tile(start, tile, query_len, kv_len) - 1


@wrong("Only the tile's own keys are counted. It looks at everything before it as well.")
def _own_keys(start, tile, query_len, kv_len):
    return min(start + tile, query_len) - start


def _tile_cases() -> list[Case]:
    return [
        Case("queries 0 to 4 of 20", (0, 4, 20, 20), kind="first"),
        Case("queries 8 to 12 of 20", (8, 4, 20, 20), kind="first"),
        Case("queries 4 to 8 of 10, 50 remembered", (4, 4, 10, 60), kind="past"),
        Case("a short last tile: queries 8 and 9 of 10", (8, 4, 10, 10), kind="short"),
        Case("a short last tile with a past", (8, 4, 10, 60), kind="short"),
        Case("decode: 1 query, 99 remembered", (0, 128, 1, 100), kind="short"),
    ]


KEYS_OF_A_TILE = Exercise(
    "keys_of_a_tile",
    _tile_cases,
    hints={
        "first": (
            "Which query of the tile sees the most keys?",
            "The last one, number start + tile - 1. It sees its own position and all before it.",
            "With no past and no short tile: start + tile.",
        ),
        "past": (
            "At which position of the text does query 0 stand?",
            "At kv_len - query_len: so many keys were remembered, and every query sees them.",
            "kv_len - query_len + start + tile, for a full tile.",
        ),
        "short": (
            "Where does the last tile end when the queries do not divide evenly?",
            "At query_len: a tile ends at start + tile or at query_len, whichever comes first.",
            "kv_len - query_len + min(start + tile, query_len)",
        ),
    },
    solution=keys_of_a_tile,
    wrong=(_no_past, _all_keys, _past_the_end, _first_query, _without_itself, _own_keys),
)


# bytes_per_token ---------------------------------------------------------------------------------


def _weights(config: ModelConfig) -> int:
    return sum(map(math.prod, expected_shapes(config).values()))


def _history(config: ModelConfig, context: int) -> int:
    return config.num_layers * 2 * context * config.n_kv * config.head_dim


@wrong(
    "The embedding is counted beside the head. A step looks up one row of it; the head is read "
    "whole, and it is as large."
)
def _embedding_too(config, context, dtype):
    embedding = config.vocab_size * config.hidden_size
    return bytes_per_token(config, context, dtype) + embedding * dtype.itemsize


@wrong("The history is counted for n_q heads. Keys and values have n_kv heads.")
def _query_heads(config, context, dtype):
    history = _history(config, context) * config.n_rep
    return (_weights(config) + history) * dtype.itemsize


@wrong("A past token has a key and a value: count both.")
def _keys_only(config, context, dtype):
    return (_weights(config) + _history(config, context) // 2) * dtype.itemsize


@wrong("These are numbers, not bytes: multiply by dtype.itemsize.")
def _numbers(config, context, dtype):
    return _weights(config) + _history(config, context)


@wrong("4 bytes a number is float32. In bfloat16 it is 2: take dtype.itemsize.")
def _four_bytes(config, context, dtype):
    return 4 * (_weights(config) + _history(config, context))


@wrong("The history has the model's dtype too: it is counted at 4 bytes a number whatever comes.")
def _history_in_float32(config, context, dtype):
    return _weights(config) * dtype.itemsize + 4 * _history(config, context)


@wrong("Norms and biases are left out. They are small, but they are read.")
def _matrices_only(config, context, dtype):
    shapes = [shape for shape in expected_shapes(config).values() if len(shape) > 1]
    return (sum(map(math.prod, shapes)) + _history(config, context)) * dtype.itemsize


@wrong("The history of one layer is counted. Every layer keeps its own keys and values.")
def _one_layer(config, context, dtype):
    history = _history(config, context) // config.num_layers
    return (_weights(config) + history) * dtype.itemsize


@wrong("Only the weights are counted. The step reads the keys and values of `context` tokens too.")
def _no_history(config, context, dtype):
    return _weights(config) * dtype.itemsize


@wrong("The weights are read once for each past token. That is what the cache saves: once a step.")
def _again_and_again(config, context, dtype):
    return (_weights(config) * max(1, context) + _history(config, context)) * dtype.itemsize


def _byte_cases() -> list[Case]:
    biased = replace(TINY, qkv_bias=True, qk_norm=True)
    return [
        Case("a tiny model, nothing remembered", (TINY, 0, torch.float32), kind="weights"),
        Case("with biases and q/k norms", (biased, 0, torch.float32), kind="weights"),
        Case("a tiny model, 5 tokens", (TINY, 5, torch.float32), kind="history"),
        Case("a tiny model, 5 tokens, bfloat16", (TINY, 5, torch.bfloat16), kind="dtype"),
        Case("SmolLM2, 512 tokens", (SMOLLM2, 512, torch.float32), kind="history"),
    ]


BYTES_PER_TOKEN = Exercise(
    "bytes_per_token",
    _byte_cases,
    hints={
        "weights": (
            "A step runs one token through every block and the head. Which of the tensors does it "
            "not read whole?",
            "Only the embedding, of which it takes one row. But the head is just as large, tied "
            "or not: so the tensors of expected_shapes(config), which has one of the two, add up.",
            "sum(math.prod(shape) for shape in expected_shapes(config).values())",
        ),
        "history": (
            "What does attention look at, in each layer, besides the new token?",
            "A key and a value of each past token, in n_kv heads of head_dim numbers.",
            "config.num_layers * 2 * context * config.n_kv * config.head_dim",
        ),
        "dtype": (
            "How many bytes is one number?",
            "dtype.itemsize: 4 for float32, 2 for bfloat16, for weights and history alike.",
            "(weights + history) * dtype.itemsize",
        ),
    },
    target="nanoserve.bench.decode:bytes_per_token",
    wrong=(
        _embedding_too, _query_heads, _keys_only, _numbers, _four_bytes, _history_in_float32,
        _matrices_only, _one_layer, _no_history, _again_and_again,
    ),
)  # fmt: skip

EXERCISES = (KEYS_OF_A_TILE, BYTES_PER_TOKEN)

REVIEW = (
    (
        "Day 10. Top-k 40, top-p 0.9 and min-p 0.1 all shorten the list. Which of them keeps many "
        "tokens when the model is unsure, and few when it is sure?",
        "Top-p and min-p: both look at the probabilities. Top-k keeps 40 whatever they are.",
    ),
    (
        "Day 10. Why is temperature 0 a case of its own, and not a division by a very small "
        "number?",
        "Dividing by 0 gives infinities and NaN. The limit is the largest logit, so the engine "
        "takes that, and draws nothing.",
    ),
    (
        "Day 11. Why may the keys of past tokens be kept at all?",
        "Because of the causal mask. No token sees what comes after it, so nothing that is "
        "appended can change its keys and values, in any layer.",
    ),
    (
        "Day 11. seq_len moved at the first layer instead of the last. What happens?",
        "Layer 0 is right, and all others write one step too far, behind a gap that nobody wrote. "
        "No shape is wrong, so nothing crashes.",
    ),
    (
        "Day 11. In decode there is one query and no mask is needed. When is the mask a rectangle?",
        "When a chunk of several tokens meets a history: query i sees kv_len - query_len + i + 1 "
        "keys.",
    ),
    (
        "Day 12. Stop string 'END', and the text so far ends in '. E'. What is shown, and when is "
        "the E?",
        "The dot and the space. The E is held until the next piece shows that it does not go on "
        "to END, or the text ends.",
    ),
    (
        "Day 12. How can a streamed answer and a batch answer never differ?",
        "By being one: the batch answer is all the pieces of the stream, joined.",
    ),
    (
        "Day 13. Decode reads every weight to make one token. Why does a processor with twice the "
        "arithmetic, and the same memory, hardly help?",
        "Each weight is used for one multiplication and then the next must be fetched. The time "
        "is the bytes over the bandwidth; the arithmetic waits.",
    ),
)
