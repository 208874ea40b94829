"""The read benchmark: gather the history and attend, against attending in place."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nanoserve.bench.decode import WrongAnswer
from nanoserve.bench.timing import Clock, median_times
from nanoserve.cache import BLOCK_SIZE, KVPool, PagedKVCache
from nanoserve.config import ModelConfig, parse_config
from nanoserve.kernels.dispatch import use_backend
from nanoserve.layers import sdpa

# from the config.json that is published with the model
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
    """One way of reading one layer's history: median seconds, and the bytes it could not avoid."""

    path: str
    history: int
    seconds: float
    bytes: int

    @property
    def bytes_per_second(self) -> float:
        return self.bytes / self.seconds


def attention_benchmark(
    config: ModelConfig,
    histories: Sequence[int] = (16, 64, 256, 1024, 4096),
    dtype: torch.dtype = torch.float32,
    rounds: int = 20,
    clock: Clock = time.perf_counter,
) -> list[AttentionRow]:
    """Time one layer's attention of one new token over histories that lie in scattered blocks.

    "gather" copies the history out of the pool and attends; "fused" is the cache's own read, by the
    reference. They must agree to the last bit, or WrongAnswer is raised and no time is given. Each
    round reads the next layer, and another for each path: a long history never waits in the
    processor's cache.
    """
    rows = []
    for history in histories:
        cache, step = scattered_cache(config, history, dtype)
        layers = [0] * 2  # the layer each path reads next

        def gather(layers=layers, cache=cache, step=step) -> torch.Tensor:
            layers[0] = (layers[0] + 1) % (config.num_layers - 1)
            return sdpa(step["q"], *cache.append(layers[0], step["k"], step["v"]))

        def fused(layers=layers, cache=cache, step=step) -> torch.Tensor:
            layers[1] = (layers[1] + 1) % (config.num_layers - 1)
            with use_backend("reference"):  # what the cache called when the baseline was taken
                return cache.paged_attention(
                    layers[1], step["k"], step["v"], step["q"], config.n_rep
                )

        paths = {"gather": gather, "fused": fused}
        if not torch.equal(fused(), gather()):  # fused first: gather would write for it
            raise WrongAnswer(f"gather and fused differ after {history} tokens")
        layers[1] += config.num_layers // 2  # else fused would find what gather has just read
        moved = 2 * history * config.n_kv * config.head_dim * dtype.itemsize  # keys and values
        times = median_times(paths, rounds, warmup=2, clock=clock)
        rows += [AttentionRow(path, history, seconds, moved) for path, seconds in times.items()]
    return rows


def scattered_cache(
    config: ModelConfig,
    history: int,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> tuple[PagedKVCache, dict[str, torch.Tensor]]:
    """A cache that holds history - 1 random tokens in every second block of a pool, in descending
    order, and the q, k and v of the next token. In any layer but the last, which would move
    seq_len, the same read can be repeated."""
    blocks = -(-history // BLOCK_SIZE)
    pool = KVPool(config, 2 * blocks, BLOCK_SIZE, dtype, device)
    taken = pool.allocator.allocate_for(2 * blocks * BLOCK_SIZE)
    for block in taken[1::2]:  # freed in ascending order, so handed out in descending order
        pool.allocator.free(block)
    random = torch.Generator().manual_seed(history)

    def draw(heads: int, tokens: int) -> torch.Tensor:
        drawn = torch.randn(1, heads, tokens, config.head_dim, generator=random)
        return drawn.to(device, dtype)

    cache = PagedKVCache(pool)
    for layer in range(config.num_layers):
        if history > 1:
            cache.append(layer, draw(config.n_kv, history - 1), draw(config.n_kv, history - 1))
    return cache, {"q": draw(config.n_q, 1), "k": draw(config.n_kv, 1), "v": draw(config.n_kv, 1)}
