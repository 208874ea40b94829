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
    """How many keys, counted from key 0, a tile needs: the queries start to start + tile - 1.

    The queries are the last query_len of kv_len positions; the last tile may be short.
    """
    return kv_len - query_len + min(start + tile, query_len)


@wrong(
    "The cached tokens are ignored: query 0 stands at position kv_len - query_len, not at 0.",
    hints="past",
)
def _no_past(start, tile, query_len, kv_len):
    return min(start + tile, query_len)


@wrong(
    "The cached tokens are not added: start counts queries, and kv_len - query_len keys stand "
    "before query 0.",
    hints="past",
)
def _no_past_to_kv_len(start, tile, query_len, kv_len):
    return min(start + tile, kv_len)


@wrong(
    "All keys are counted. That is right for the last tile; the tiles before it need fewer.",
    hints="first",
)
def _all_keys(start, tile, query_len, kv_len):
    return kv_len


@wrong(
    "The last tile is counted as a full one, so there are more keys than positions. It ends at "
    "query_len.",
    hints="short",
)
def _past_the_end(start, tile, query_len, kv_len):
    return kv_len - query_len + start + tile


@wrong("It counts for the tile's first query. The tile's last query sees the most.", hints="first")
def _first_query(start, tile, query_len, kv_len):
    return kv_len - query_len + start + 1


@wrong("One key too few: the last query of the tile sees its own key too.", hints="first")
def _without_itself(start, tile, query_len, kv_len):
    return keys_of_a_tile(start, tile, query_len, kv_len) - 1


@wrong(
    "Only the tile's own keys are counted. Its queries see all keys before the tile as well.",
    hints="first",
)
def _own_keys(start, tile, query_len, kv_len):
    return min(start + tile, query_len) - start


def _tile_cases() -> list[Case]:
    return [
        Case("queries 0 to 3 of 20", (0, 4, 20, 20), kind="first"),
        Case("queries 8 to 11 of 20", (8, 4, 20, 20), kind="first"),
        Case("queries 4 to 7 of 10, 50 cached", (4, 4, 10, 60), kind="past"),
        Case("a short last tile: queries 8 and 9 of 10", (8, 4, 10, 10), kind="short"),
        Case("a short last tile, 50 cached", (8, 4, 10, 60), kind="short"),
        Case("decode: 1 query, 99 cached", (0, 128, 1, 100), kind="short"),
    ]


KEYS_OF_A_TILE = Exercise(
    "keys_of_a_tile",
    _tile_cases,
    hints={
        "first": (
            "Which query of the tile sees the most keys?",
            "The last one, number start + tile - 1. It sees its own position and all before it.",
            "With an empty cache and a full tile: start + tile.",
        ),
        "past": (
            "At which position of the text does query 0 stand?",
            "At kv_len - query_len: that many keys are cached, and every query sees them.",
            "kv_len - query_len + start + tile, for a full tile.",
        ),
        "short": (
            "Where does the last tile end when query_len is no multiple of the tile?",
            "At query_len: a tile ends at start + tile or at query_len, whichever comes first.",
            "kv_len - query_len + min(start + tile, query_len)",
        ),
    },
    solution=keys_of_a_tile,
    wrong=(
        _no_past,
        _no_past_to_kv_len,
        _all_keys,
        _past_the_end,
        _first_query,
        _without_itself,
        _own_keys,
    ),
)


# bytes_per_token ---------------------------------------------------------------------------------


def _weights(config: ModelConfig) -> int:
    return sum(map(math.prod, expected_shapes(config).values()))


def _cached(config: ModelConfig, context: int) -> int:
    return config.num_layers * 2 * context * config.n_kv * config.head_dim


@wrong(
    "The embedding is counted in addition to the head. A step reads one row of the embedding and "
    "all of the head, so count one table.",
    hints="weights",
)
def _embedding_too(config, context, dtype):
    embedding = config.vocab_size * config.hidden_size
    return bytes_per_token(config, context, dtype) + embedding * dtype.itemsize


@wrong(
    "The head is left out. It is as large as the embedding, and a step reads all of it: count the "
    "one table that expected_shapes lists.",
    hints="weights",
)
def _no_table(config, context, dtype):
    embedding = config.vocab_size * config.hidden_size
    return bytes_per_token(config, context, dtype) - embedding * dtype.itemsize


@wrong(
    "The one row of the embedding is counted in addition. It is small: leave it out.",
    hints="weights",
)
def _row_too(config, context, dtype):
    return bytes_per_token(config, context, dtype) + config.hidden_size * dtype.itemsize


@wrong(
    "The new token's own key and value are counted as cached. Count `context` tokens, not "
    "context + 1.",
    hints="cached",
)
def _own_token_too(config, context, dtype):
    return bytes_per_token(config, context + 1, dtype)


@wrong("The cache is counted for n_q heads. Keys and values have n_kv heads.", hints="cached")
def _query_heads(config, context, dtype):
    cached = _cached(config, context) * config.n_rep
    return (_weights(config) + cached) * dtype.itemsize


@wrong("A cached token has a key and a value in each layer: count both.", hints="cached")
def _keys_only(config, context, dtype):
    return (_weights(config) + _cached(config, context) // 2) * dtype.itemsize


@wrong("It counts numbers, not bytes: multiply by dtype.itemsize.", hints="dtype")
def _numbers(config, context, dtype):
    return _weights(config) + _cached(config, context)


@wrong(
    "Every number is counted as 4 bytes, as in float32. In bfloat16 it is 2: use dtype.itemsize.",
    hints="dtype",
)
def _four_bytes(config, context, dtype):
    return 4 * (_weights(config) + _cached(config, context))


@wrong(
    "Keys and values are counted as 4 bytes a number. They have the model's dtype too.",
    hints="dtype",
)
def _cache_in_float32(config, context, dtype):
    return _weights(config) * dtype.itemsize + 4 * _cached(config, context)


@wrong("Norms and biases are left out. They are small, but they are read.", hints="weights")
def _matrices_only(config, context, dtype):
    shapes = [shape for shape in expected_shapes(config).values() if len(shape) > 1]
    return (sum(map(math.prod, shapes)) + _cached(config, context)) * dtype.itemsize


@wrong(
    "The cache of one layer is counted. Every layer has its own keys and values.", hints="cached"
)
def _one_layer(config, context, dtype):
    cached = _cached(config, context) // config.num_layers
    return (_weights(config) + cached) * dtype.itemsize


@wrong(
    "Only the weights are counted. A step also reads the keys and values of `context` tokens.",
    hints="cached",
)
def _weights_only(config, context, dtype):
    return _weights(config) * dtype.itemsize


@wrong(
    "The weights are counted once for each cached token. A step reads them once.", hints="weights"
)
def _again_and_again(config, context, dtype):
    return (_weights(config) * max(1, context) + _cached(config, context)) * dtype.itemsize


def _byte_cases() -> list[Case]:
    biased = replace(TINY, qkv_bias=True, qk_norm=True)
    all_biased = replace(TINY, qkv_bias=True, o_bias=True)
    return [
        Case("a tiny model, an empty cache", (TINY, 0, torch.float32), kind="weights"),
        Case("q/k/v biases, q/k norms, empty cache", (biased, 0, torch.float32), kind="weights"),
        Case("q/k/v/o biases, empty cache", (all_biased, 0, torch.float32), kind="weights"),
        Case("a tiny model, 5 tokens", (TINY, 5, torch.float32), kind="cached"),
        Case("a tiny model, 5 tokens, bfloat16", (TINY, 5, torch.bfloat16), kind="dtype"),
        Case("SmolLM2, 512 tokens", (SMOLLM2, 512, torch.float32), kind="cached"),
    ]


BYTES_PER_TOKEN = Exercise(
    "bytes_per_token",
    _byte_cases,
    hints={
        "weights": (
            "A step runs one token through every block and the head. Which tensor does it not read "
            "as a whole?",
            "The embedding: it reads one row. The head is as large as the embedding, and "
            "expected_shapes(config) lists only one of the two, so its shapes add up to the "
            "answer.",
            "sum(math.prod(shape) for shape in expected_shapes(config).values())",
        ),
        "cached": (
            "What does attention read in each layer, besides the weights?",
            "A key and a value of each cached token, in n_kv heads of head_dim numbers.",
            "config.num_layers * 2 * context * config.n_kv * config.head_dim",
        ),
        "dtype": (
            "How many bytes is one number?",
            "dtype.itemsize: 4 for float32, 2 for bfloat16, for the weights and for the cache.",
            "(weights + cached) * dtype.itemsize",
        ),
    },
    target="nanoserve.bench.decode:bytes_per_token",
    wrong=(
        _embedding_too, _query_heads, _keys_only, _numbers, _four_bytes, _cache_in_float32,
        _matrices_only, _one_layer, _weights_only, _again_and_again, _no_table, _row_too,
        _own_token_too,
    ),
)  # fmt: skip

EXERCISES = (KEYS_OF_A_TILE, BYTES_PER_TOKEN)

REVIEW = (
    (
        "Day 10. Top-k 40, top-p 0.9 and min-p 0.1 all shorten the list. Which of them keeps many "
        "tokens when the model is unsure, and few when it is sure?",
        "Top-p and min-p: both depend on the probabilities. Top-k keeps 40 in every case.",
    ),
    (
        "Day 10. Why is temperature 0 a case of its own, and not a division by a very small "
        "number?",
        "Dividing by 0 gives infinities and NaN. As the temperature falls, all probability goes to "
        "the largest logit, so at 0 the engine takes that one and draws nothing.",
    ),
    (
        "Day 11. Why may the keys of past tokens be kept at all?",
        "Because of the causal mask. No token sees a later one, so appending tokens cannot change "
        "the keys and values of earlier ones, in any layer.",
    ),
    (
        "Day 11. Suppose that seq_len moves at the first layer instead of the last. What happens?",
        "Layer 0 is right. All other layers write one step too far and leave a gap of memory that "
        "was never written. Every shape is right, so nothing crashes.",
    ),
    (
        "Day 11. In decode there is one query and no mask is needed. When is the mask a rectangle?",
        "When a chunk of several tokens follows cached ones: query i sees kv_len - query_len + i + "
        "1 keys.",
    ),
    (
        "Day 12. Stop string 'END', and the text so far ends in '. E'. What is shown, and when is "
        "the E?",
        "The dot and the space. The E is held until the next piece shows that it does not continue "
        "to END, or until the text ends.",
    ),
    (
        "Day 12. Why can a streamed answer and an answer in one piece never differ?",
        "Because the answer in one piece is made of the stream's pieces, joined.",
    ),
    (
        "Day 13. A decode step is memory-bound on some machine. Why does a processor with twice "
        "the arithmetic, and the same memory, hardly help there?",
        "Each weight is used for one multiplication, and then the next must be fetched. The time "
        "is the bytes divided by the bandwidth; the arithmetic units wait.",
    ),
)
