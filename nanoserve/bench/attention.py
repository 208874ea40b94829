"""Times one layer's attention of one new token: gather K and V first, or attend in place."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nanoserve.bench.correctness import WrongAnswer
from nanoserve.bench.timing import Clock, median_times
from nanoserve.cache import BLOCK_SIZE, KVPool, PagedKVCache
from nanoserve.config import ModelConfig, parse_config
from nanoserve.kernels.reference import paged_attention_reference
from nanoserve.layers import sdpa

# the shape of Llama-3.2-1B, from the config.json that is published with the model
LLAMA_1B = parse_config(
    {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 2_048,
        "intermediate_size": 8_192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
    }
)


@dataclass(frozen=True)
class AttentionRow:
    """One code path at one length: median seconds of one layer's attention of one new token.

    `bytes` counts the layer's keys and values once: every code path must read them.
    """

    path: str
    kv_len: int
    seconds: float
    bytes: int

    @property
    def bytes_per_second(self) -> float:
        """The rate at which keys and values were read."""
        return self.bytes / self.seconds


def attention_benchmark(
    config: ModelConfig,
    kv_lens: Sequence[int] = (16, 64, 256, 1024, 4096),
    dtype: torch.dtype = torch.float32,
    rounds: int = 20,
    clock: Clock = time.perf_counter,
) -> list[AttentionRow]:
    """Time one layer's attention of one new token over scattered blocks, on two code paths.

    "gather" copies K and V out of the pool, then attends; "fused" is `attend_in_place`. Raises
    WrongAnswer unless the two results are equal in every bit. Each round moves to the next layer,
    and the two code paths use different layers, so that K and V of a long sequence are no longer in
    the processor's cache.
    """
    rows = []
    for kv_len in kv_lens:
        cache, step = scattered_cache(config, kv_len, dtype)
        layers = [0] * 2  # the layers that gather and fused used last

        def gather(layers=layers, cache=cache, step=step) -> torch.Tensor:
            layers[0] = (layers[0] + 1) % (config.num_layers - 1)
            return sdpa(step["q"], *cache.append(layers[0], step["k"], step["v"]))

        def fused(layers=layers, cache=cache, step=step) -> torch.Tensor:
            layers[1] = (layers[1] + 1) % (config.num_layers - 1)
            return attend_in_place(cache, layers[1], step["k"], step["v"], step["q"], config.n_rep)

        paths = {"gather": gather, "fused": fused}
        # Run fused first: gather also writes K and V, which would hide a missing write.
        if not torch.equal(fused(), gather()):
            raise WrongAnswer(f"gather and fused differ at {kv_len} tokens")
        layers[1] += config.num_layers // 2  # far from the layer that gather read just now
        moved = 2 * kv_len * config.n_kv * config.head_dim * dtype.itemsize  # keys and values
        times = median_times(paths, rounds, warmup=2, clock=clock)
        rows += [AttentionRow(path, kv_len, seconds, moved) for path, seconds in times.items()]
    return rows


def attend_in_place(
    cache: PagedKVCache, layer: int, k: torch.Tensor, v: torch.Tensor, q: torch.Tensor, n_rep: int
) -> torch.Tensor:
    """PagedKVCache.paged_attention of Day 19: write k and v, then call the reference.

    Arguments and result as for PagedKVCache.paged_attention. "gather" runs no checks of the
    dispatcher, so this function does not call the dispatcher either: the two code paths differ only
    in how they read K and V.
    """
    slots = cache._write(layer, k, v)
    return paged_attention_reference(q, cache.pool.k[layer], cache.pool.v[layer], slots, n_rep)


def scattered_cache(
    config: ModelConfig,
    kv_len: int,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> tuple[PagedKVCache, dict[str, torch.Tensor]]:
    """A cache of kv_len - 1 random tokens, and the next token's q, k and v by name.

    q is [1, n_q, 1, head_dim]; k and v are [1, n_kv, 1, head_dim]. The tokens are in every second
    block of the pool, from the last block down. The next token's step can be repeated in every
    layer but the last, because only the last layer advances seq_len.
    """
    blocks = -(-kv_len // BLOCK_SIZE)
    pool = KVPool(config, 2 * blocks, BLOCK_SIZE, dtype, device)
    taken = pool.allocator.allocate_for(2 * blocks * BLOCK_SIZE)
    for block in taken[1::2]:  # the free list is last in, first out: descending order
        pool.allocator.free(block)
    random = torch.Generator().manual_seed(kv_len)

    def draw(heads: int, tokens: int) -> torch.Tensor:
        drawn = torch.randn(1, heads, tokens, config.head_dim, generator=random)
        return drawn.to(device, dtype)

    cache = PagedKVCache(pool)
    for layer in range(config.num_layers):
        if kv_len > 1:
            cache.append(layer, draw(config.n_kv, kv_len - 1), draw(config.n_kv, kv_len - 1))
    return cache, {"q": draw(config.n_q, 1), "k": draw(config.n_kv, 1), "v": draw(config.n_kv, 1)}
