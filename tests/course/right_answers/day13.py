"""Day 13: right answers to `keys_of_a_tile` and `bytes_per_token`, in several styles."""

import torch

from nanoserve.weights import expected_shapes


def keys_by_the_last_query(start, tile, query_len, kv_len):
    last = min(start + tile - 1, query_len - 1)
    return kv_len - query_len + last + 1


def keys_by_counting(start, tile, query_len, kv_len):
    seen = set()
    for query in range(start, min(start + tile, query_len)):
        seen |= set(range(kv_len - query_len + query + 1))
    return len(seen)


def keys_by_a_mask(start, tile, query_len, kv_len):
    visible = torch.ones(query_len, kv_len).tril(kv_len - query_len)[start : start + tile]
    return int(visible.any(dim=0).sum())


def keys_from_the_end(start, tile, query_len, kv_len):
    return kv_len - max(0, query_len - start - tile)


def bytes_by_a_loop(config, context, dtype):
    numbers = 0
    for shape in expected_shapes(config).values():
        product = 1
        for size in shape:
            product *= size
        numbers += product
    for _ in range(config.num_layers):
        numbers += context * config.n_kv * (config.head_dim + config.head_dim)
    return numbers * dtype.itemsize


def bytes_by_tensors(config, context, dtype):
    shapes = list(expected_shapes(config).values())
    shapes += [(2, config.n_kv, context, config.head_dim)] * config.num_layers
    return sum(torch.empty(shape, dtype=dtype, device="meta").nbytes for shape in shapes)


def bytes_by_hand(config, context, dtype):
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.n_q * config.head_dim, config.n_kv * config.head_dim
    layer = 2 * hidden + 2 * q * hidden + 2 * kv * hidden + 3 * hidden * inner
    layer += (q + 2 * kv) * config.qkv_bias + hidden * config.o_bias
    layer += 2 * config.head_dim * config.qk_norm
    numbers = config.vocab_size * hidden + hidden + config.num_layers * (layer + 2 * kv * context)
    return numbers * torch.empty(0, dtype=dtype).element_size()


RIGHT = {
    "keys_of_a_tile": (
        keys_by_the_last_query,
        keys_by_counting,
        keys_by_a_mask,
        keys_from_the_end,
    ),
    "bytes_per_token": (bytes_by_a_loop, bytes_by_tensors, bytes_by_hand),
}
