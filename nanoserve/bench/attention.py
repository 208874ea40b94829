"""Times one layer's attention of one new token: gather K and V first, or attend in place.

Also the shapes, inputs and code paths of a batch that bench/roofline.py times.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import scaled_dot_product_attention

from nanoserve.bench.correctness import WrongAnswer
from nanoserve.bench.timing import Clock, median_times
from nanoserve.cache import BLOCK_SIZE, KVPool, PagedKVCache
from nanoserve.config import ModelConfig, parse_config
from nanoserve.kernels import split_kv
from nanoserve.kernels.dispatch import (
    launch_batch,
    paged_attention_batch_dispatch,
    paged_attention_dispatch,
    use_kernel,
    why_not_triton,
)
from nanoserve.kernels.reference import PagedTables, paged_attention_reference, tolerance
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


@dataclass(frozen=True)
class BatchShape:
    """One call of attention for a batch: sequences, tokens in each, heads, and new tokens in each.

    A ragged batch has lengths drawn uniformly from 1 to kv_len.
    """

    num_seqs: int
    kv_len: int
    n_q: int
    n_kv: int
    head_dim: int
    query_len: int = 1
    ragged: bool = False

    @property
    def name(self) -> str:
        """For example "64 x 8,192, 32/8 x 128"."""
        heads = f"{self.num_seqs} x {self.kv_len:,}, {self.n_q}/{self.n_kv} x {self.head_dim}"
        return f"{heads}, {self.kind}" if self.kind != "decode" else heads

    @property
    def kind(self) -> str:
        """ "decode", "ragged" (decode of sequences of different lengths) or "prefill"."""
        return "ragged" if self.ragged else "decode" if self.query_len == 1 else "prefill"

    @property
    def kv_lens(self) -> list[int]:
        """The tokens of each sequence; every call returns the same numbers."""
        if not self.ragged:
            return [self.kv_len] * self.num_seqs
        random = torch.Generator().manual_seed(self.kv_len)
        return torch.randint(1, self.kv_len + 1, (self.num_seqs,), generator=random).tolist()

    def smaller(self) -> "BatchShape":
        """A shape of the same form for a CPU: a 16th of the sequences and of the tokens."""
        seqs, kv_len, query_len = (
            -(-n // 16) for n in (self.num_seqs, self.kv_len, self.query_len)
        )
        return replace(self, num_seqs=seqs, kv_len=kv_len, query_len=query_len)


DECODE = (
    BatchShape(64, 8_192, 32, 8, 128),
    BatchShape(64, 8_192, 32, 8, 64),
    BatchShape(1, 65_536, 32, 8, 128),
    BatchShape(4, 32_768, 32, 8, 128),
    BatchShape(256, 1_024, 32, 8, 128),
    BatchShape(64, 2_048, 9, 3, 64),  # SmolLM2's heads
    BatchShape(16, 4_096, 32, 32, 128),  # no grouping
    BatchShape(1, 4_096, 32, 8, 64),
)
RAGGED = tuple(replace(DECODE[i], ragged=True) for i in (0, 3, 4))
PREFILL = tuple(BatchShape(1, n, 32, 8, 128, query_len=n) for n in (2_048, 8_192))


@dataclass(frozen=True)
class AttentionInputs:
    """Random inputs of a BatchShape: paged, and the same keys and values in contiguous memory.

    The tokens of a sequence are in blocks of BLOCK_SIZE slots, in random order. The slots behind
    its last token hold NaN.
    """

    shape: BatchShape
    q: torch.Tensor  # [num_tokens, n_q, head_dim]
    k_pool: torch.Tensor  # [num_slots, n_kv, head_dim]
    v_pool: torch.Tensor
    tables: PagedTables
    slots: torch.Tensor  # int64 [num_seqs, kv_len]; a shorter row repeats its first slot at its end
    k: torch.Tensor  # [num_seqs, n_kv, kv_len, head_dim]: the content of `slots`, contiguous
    v: torch.Tensor
    mask: torch.Tensor | None  # [num_seqs, 1, 1, kv_len], 0 or -inf, if the batch is ragged

    @property
    def n_rep(self) -> int:
        """Query heads of one KV head."""
        return self.shape.n_q // self.shape.n_kv

    def queries(self) -> torch.Tensor:
        """q as [num_seqs, n_q, query_len, head_dim], a view."""
        return self.q.unflatten(0, (self.shape.num_seqs, self.shape.query_len)).transpose(1, 2)

    def sequences(self) -> list[torch.Tensor]:
        """The slot mapping of each sequence: int64 [kv_len of the sequence]."""
        return [row[:n] for row, n in zip(self.slots, self.shape.kv_lens, strict=True)]


def draw_inputs(
    shape: BatchShape, dtype: torch.dtype, device: str | torch.device = "cpu", seed: int = 0
) -> AttentionInputs:
    """Random inputs; the same numbers for the same arguments on the same device.

    q has a standard deviation of 2. Then some keys get much more weight than others, as in a real
    model, and the output of a long sequence is not near 0, where all results are within the
    tolerance.
    """
    random = torch.Generator(device).manual_seed(seed)
    where = {"device": device, "generator": random}
    lens, longest = shape.kv_lens, shape.kv_len
    held = [-(-n // BLOCK_SIZE) for n in lens]  # blocks of each sequence
    order = torch.randperm(sum(held), **where).to(torch.int32).split(held)
    block_tables = torch.nn.utils.rnn.pad_sequence(order, batch_first=True)
    kv_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    position = torch.arange(longest, device=device)
    position = torch.where(position < kv_lens[:, None], position, 0)  # [num_seqs, kv_len]
    slots = block_tables.gather(1, position // BLOCK_SIZE).long() * BLOCK_SIZE
    slots += position % BLOCK_SIZE

    num_slots, n_kv, head_dim = sum(held) * BLOCK_SIZE, shape.n_kv, shape.head_dim
    pools = [torch.randn(num_slots, n_kv, head_dim, dtype=dtype, **where) for _ in "kv"]
    owned = torch.zeros(num_slots, dtype=torch.bool, device=device)
    owned[slots.flatten()] = True
    for pool in pools:
        pool[~owned] = torch.nan
    k, v = (pool[slots].transpose(1, 2).contiguous() for pool in pools)
    starts = torch.arange(shape.num_seqs + 1, dtype=torch.int32, device=device) * shape.query_len
    bounds = BLOCK_SIZE, shape.query_len, max(lens), sum(lens)
    tables = PagedTables(block_tables, kv_lens, starts, *bounds)
    q = 2 * torch.randn(shape.num_seqs * shape.query_len, shape.n_q, head_dim, dtype=dtype, **where)
    mask = None
    if shape.ragged:
        behind = torch.arange(longest, device=device) >= kv_lens[:, None]
        mask = torch.zeros(behind.shape, dtype=dtype, device=device)
        mask = mask.masked_fill_(behind, -torch.inf)[:, None, None]
    return AttentionInputs(shape, q, *pools, tables, slots, k, v, mask)


BatchPath = Callable[[AttentionInputs], torch.Tensor | list[torch.Tensor]]


def batch_paths() -> dict[str, BatchPath]:
    """The code paths that are installed here, by name. Each computes the attention of the inputs:
    [num_tokens, n_q, head_dim], or a list with such a tensor for each sequence.

    "split_kv" is the engine's kernel, "day22" the kernel of Day 22, and "packed", on a GPU only,
    that of Day 29, which never splits a sequence. "gather" copies K and V out of the pools and
    calls PyTorch's SDPA. "sdpa" is PyTorch's SDPA over contiguous K and V, so it
    reads no pool. "flash3" and "flash2" are FlashAttention's, where it can be imported.
    """
    paths: dict[str, BatchPath] = {
        "split_kv": _split_kv,
        "day22": _day22,
        "gather": _gather,
        "sdpa": lambda x: _sdpa(x, x.k, x.v),
    }
    if torch.cuda.is_available() and why_not_triton(torch.device("cuda")) is None:
        paths["packed"] = _packed
    with suppress(ImportError):
        from flash_attn_interface import flash_attn_with_kvcache as flash3

        paths["flash3"] = lambda x: _flash(x, flash3, page_table=x.tables.block_tables)
    with suppress(ImportError):
        from flash_attn import flash_attn_with_kvcache as flash2

        paths["flash2"] = lambda x: _flash(x, flash2, block_table=x.tables.block_tables)
    return paths


def _split_kv(x: AttentionInputs) -> torch.Tensor:
    with use_kernel("split_kv"):
        return paged_attention_batch_dispatch(x.q, x.k_pool, x.v_pool, x.tables, x.n_rep)


def _packed(x: AttentionInputs) -> torch.Tensor:
    capability = torch.cuda.get_device_capability(x.q.device)
    launch = split_kv.launch_of("packed", capability, x.shape.head_dim, x.q.dtype)
    with torch.cuda.device_of(x.q):
        return launch_batch(
            split_kv, x.q, x.k_pool, x.v_pool, x.tables, x.n_rep, scale=None, launch=launch
        )


def _day22(x: AttentionInputs) -> list[torch.Tensor]:
    """One launch for each sequence. In a CUDA graph, the launches run side by side."""
    outputs = []
    with use_kernel("day22"), _side_by_side(x.q.device, x.shape.num_seqs) as streams:
        for q, slots, stream in zip(x.queries(), x.sequences(), streams, strict=True):
            with torch.cuda.stream(stream):
                out = paged_attention_dispatch(q[None], x.k_pool, x.v_pool, slots, x.n_rep)
            outputs.append(out[0].transpose(0, 1))
    return outputs


@contextmanager
def _side_by_side(device: torch.device, count: int) -> Iterator[list["torch.cuda.Stream | None"]]:
    """`count` streams of a GPU, 32 of them different, that start after the current stream's work
    and that the current stream waits for; elsewhere None."""
    if device.type != "cuda":
        yield [None] * count
        return
    here = torch.cuda.current_stream(device)
    streams = [torch.cuda.Stream(device) for _ in range(min(count, 32))]
    for stream in streams:
        stream.wait_stream(here)
    yield [streams[i % len(streams)] for i in range(count)]
    for stream in streams:
        here.wait_stream(stream)


def _gather(x: AttentionInputs) -> torch.Tensor:
    k, v = (pool[x.slots].transpose(1, 2) for pool in (x.k_pool, x.v_pool))
    return _sdpa(x, k, v)


def _sdpa(x: AttentionInputs, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """PyTorch's SDPA. In a ragged batch, the query heads of a KV head are passed as queries: with
    a mask, PyTorch has no fast code for grouped heads."""
    q = x.queries()
    if x.mask is None:
        causal = x.shape.query_len > 1
        out = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    else:
        grouped = q.reshape(len(q), x.shape.n_kv, x.n_rep, x.shape.head_dim)
        mask = x.mask.expand(*grouped.shape[:3], -1)
        out = scaled_dot_product_attention(grouped, k, v, mask).reshape(q.shape)
    return out.transpose(1, 2).flatten(0, 1)


def _flash(x: AttentionInputs, flash: Callable[..., torch.Tensor], **table: object) -> torch.Tensor:
    q = x.queries().transpose(1, 2)  # [num_seqs, query_len, n_q, head_dim]
    k, v = (pool.unflatten(0, (-1, BLOCK_SIZE)) for pool in (x.k_pool, x.v_pool))
    return flash(q, k, v, cache_seqlens=x.tables.kv_lens, causal=True, **table).flatten(0, 1)


def check_path(name: str, path: BatchPath, x: AttentionInputs) -> None:
    """Compare a code path with the reference, computed in float32, at the tolerance of q's dtype.

    Compares the first, last, shortest and longest sequence, and of a long prompt the first and the
    last 256 queries: the reference needs much memory. Raises WrongAnswer if a result differs.
    """
    out = path(x)
    out = torch.cat(out) if isinstance(out, list) else out
    if (out.shape, out.dtype) != (x.q.shape, x.q.dtype):
        raise WrongAnswer(f"{name} returns {out.dtype} {list(out.shape)} at {x.shape.name}")
    atol, rtol = tolerance(x.q.dtype)
    out = out.unflatten(0, (x.shape.num_seqs, x.shape.query_len)).transpose(1, 2).float()
    lens, slots = x.shape.kv_lens, x.sequences()
    least, most = min(lens), max(lens)
    for i in sorted({0, len(lens) - 1, lens.index(least), lens.index(most)}):
        k, v = (pool[slots[i]].float() for pool in (x.k_pool, x.v_pool))
        query_len, q = x.shape.query_len, x.queries()[i : i + 1].float()
        for first in sorted({0, max(0, query_len - 256)}):
            end = min(first + 256, query_len)
            seen = torch.arange(lens[i] - query_len + end, device=k.device)
            expected = paged_attention_reference(q[:, :, first:end], k, v, seen, x.n_rep)
            if not torch.allclose(out[i : i + 1, :, first:end], expected, atol=atol, rtol=rtol):
                raise WrongAnswer(f"{name} differs from the reference at {x.shape.name}")
