"""The choice of a backend for paged attention, the checks of its arguments, and the launch."""

import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache
from types import SimpleNamespace

import torch

from nanoserve.kernels import split_kv, tlsim
from nanoserve.kernels.paged_attention import paged_attention_kernel
from nanoserve.kernels.reference import (
    PagedTables,
    by_sequence,
    paged_attention_batch_reference,
    paged_attention_reference,
)
from nanoserve.kernels.sizes import next_power_of_2
from nanoserve.kernels.split_kv import Launch, choose_launch

BACKENDS = ("triton", "tlsim", "reference")
KERNELS = ("split_kv", "day22")
LEAST_CAPABILITY = (7, 5)  # that of a T4; Triton does not support older GPUs
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int32, torch.int64)  # of slots and block ids


def has_triton() -> bool:
    """Whether Triton can be imported. Triton is published for Linux only."""
    try:
        import triton
    except ImportError:
        return False
    return True


def select_backend(device: torch.device | str) -> str:
    """The backend for tensors on a device: "triton" on a GPU that Triton supports, else "tlsim".

    use_backend and NANOSERVE_BACKEND override the choice, with any of BACKENDS. Raises ValueError
    for an override that is not in BACKENDS or cannot run on the device.
    """
    device = torch.device(device)
    override = _override.get() or os.environ.get("NANOSERVE_BACKEND")
    if override:
        _check_name(override)
        if override == "triton" and (reason := why_not_triton(device)):
            raise ValueError(f'the backend "triton" cannot run on {device}: {reason}')
        return override
    if device.type != "cuda":
        return "tlsim"
    reason = why_not_triton(device)
    if reason is None:
        return "triton"
    _warn_fallback(torch.cuda.get_device_name(device), reason)
    return "tlsim"


def why_not_triton(device: torch.device) -> str | None:
    """The reason why Triton cannot run on a device; None where it can."""
    if not has_triton():
        return "Triton cannot be imported"
    if type(paged_attention_kernel).__name__ == "InterpretedFunction":
        return None  # TRITON_INTERPRET=1 was set: Triton's interpreter runs anywhere
    if device.type != "cuda":
        return "it is not a CUDA GPU, and TRITON_INTERPRET=1 was not set before Triton was imported"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        has, needs = (".".join(map(str, pair)) for pair in (capability, LEAST_CAPABILITY))
        return f"its compute capability is {has}, and Triton needs {needs}"
    return None


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run paged attention with one backend of BACKENDS inside a `with` block, for experiments.

    Raises ValueError for another name.
    """
    _check_name(name)
    token = _override.set(name)
    try:
        yield
    finally:
        _override.reset(token)


_override: ContextVar[str | None] = ContextVar("backend", default=None)


def _check_name(name: str) -> None:
    if name not in BACKENDS:
        raise ValueError(f"there is no backend {name!r}: the backends are {', '.join(BACKENDS)}")


@contextmanager
def use_kernel(name: str) -> Iterator[None]:
    """Run paged attention with one kernel of KERNELS inside a `with` block, for comparisons.

    "split_kv" is the engine's; "day22" is paged_attention_kernel, one program for each query and
    head. Under "day22" a batch runs sequence by sequence, and reads the tables on the host. Raises
    ValueError for another name.
    """
    if name not in KERNELS:
        raise ValueError(f"there is no kernel {name!r}: the kernels are {', '.join(KERNELS)}")
    token = _kernel.set(name)
    try:
        yield
    finally:
        _kernel.reset(token)


_kernel: ContextVar[str] = ContextVar("kernel", default="split_kv")


@cache
def _warn_fallback(gpu: str, reason: str) -> None:
    """Warn once per GPU: @cache makes the function run once for the same arguments."""
    warnings.warn(f"paged attention falls back to tlsim on {gpu}: {reason}", stacklevel=3)


def check_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    n_rep: int,
    check_slots: bool | None = None,
) -> None:
    """Raise a ValueError that names the argument if a kernel would compute a wrong result.

    Arguments as for paged_attention_reference. Checks shapes, dtypes, devices and head_dim's
    stride. Checks the values in slot_mapping on a CPU only, because reading them on a GPU waits for
    the GPU. `check_slots=True`, or NANOSERVE_CHECK_SLOTS=1, checks them on a GPU too.
    """
    if q.dim() != 4 or q.shape[0] != 1:
        raise ValueError(f"q must be [1, n_q, query_len, head_dim], got {list(q.shape)}")
    _check_pools(q, k_pool, v_pool, n_rep)
    if slot_mapping.dim() != 1 or slot_mapping.dtype not in INTEGERS:
        raise ValueError(
            "slot_mapping must be integers [kv_len], got "
            f"{slot_mapping.dtype} {list(slot_mapping.shape)}"
        )
    query_len, kv_len = q.shape[2], len(slot_mapping)
    if not 1 <= query_len <= kv_len:
        raise ValueError(
            f"q has {query_len} positions, and must have 1 to slot_mapping's kv_len, {kv_len}"
        )
    _check_devices(q, k_pool=k_pool, v_pool=v_pool, slot_mapping=slot_mapping)
    if _reads_values(q, check_slots):
        low, high = _once(_slot_range, slot_mapping)
        if low < 0 or high >= len(k_pool):
            wrong = low if low < 0 else high
            raise ValueError(f"slot_mapping has slot {wrong}, but the pools have {len(k_pool)}")


def check_batch(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    tables: PagedTables,
    n_rep: int,
    check_tables: bool | None = None,
) -> None:
    """Raise a ValueError that names the argument if a kernel would compute a wrong result.

    Arguments as for paged_attention_batch_reference. Checks shapes, dtypes, devices, the host
    integers of the tables and head_dim's stride. Checks the values in the tables on a CPU only,
    because reading them on a GPU waits for the GPU. `check_tables=True`, or
    NANOSERVE_CHECK_SLOTS=1, checks them on a GPU too.
    """
    if q.dim() != 3 or len(q) == 0:
        raise ValueError(
            f"q must be [num_tokens, n_q, head_dim], of at least one token, got {list(q.shape)}"
        )
    _check_pools(q, k_pool, v_pool, n_rep)
    blocks, kv_lens, starts = tables.block_tables, tables.kv_lens, tables.query_starts
    if blocks.dim() != 2 or 0 in blocks.shape or blocks.dtype not in INTEGERS:
        raise ValueError(
            "block_tables must be integers [num_seqs, max_blocks], both at least 1, got "
            f"{blocks.dtype} {list(blocks.shape)}"
        )
    num_seqs, max_blocks = blocks.shape
    for name, x, length in (("kv_lens", kv_lens, num_seqs), ("query_starts", starts, num_seqs + 1)):
        if x.shape != (length,) or x.dtype != torch.int32:
            raise ValueError(
                f"{name} must be int32 [{length}] as block_tables has {num_seqs} sequences, got "
                f"{x.dtype} {list(x.shape)}"
            )
    for name in ("block_size", "max_query_len", "max_kv_len"):
        value = getattr(tables, name)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    if tables.max_kv_len > max_blocks * tables.block_size:
        raise ValueError(
            f"max_kv_len is {tables.max_kv_len}, but block_tables has room for {max_blocks} blocks "
            f"of {tables.block_size} tokens"
        )
    tensors = {"block_tables": blocks, "kv_lens": kv_lens, "query_starts": starts}
    _check_devices(q, k_pool=k_pool, v_pool=v_pool, **tensors)
    if _reads_values(q, check_tables):
        _check_tables(tables, len(q), len(k_pool))


def _check_tables(tables: PagedTables, num_tokens: int, num_slots: int) -> None:
    """Check the values in tables: for num_tokens queries, and pools of num_slots slots."""
    starts, kv_lens = tables.query_starts.tolist(), tables.kv_lens.tolist()
    if starts[0] != 0 or starts[-1] != num_tokens:
        raise ValueError(
            f"query_starts goes from {starts[0]} to {starts[-1]}, and must go from 0 to q's "
            f"{num_tokens} tokens"
        )
    for i, kv_len in enumerate(kv_lens):
        query_len = starts[i + 1] - starts[i]
        if not 0 <= query_len <= tables.max_query_len:
            raise ValueError(
                f"sequence {i} has query_len {query_len}, and must have 0 to max_query_len, "
                f"{tables.max_query_len}"
            )
        if not 0 <= kv_len <= tables.max_kv_len:
            raise ValueError(
                f"sequence {i} has kv_len {kv_len}, and must have 0 to max_kv_len, "
                f"{tables.max_kv_len}"
            )
        if query_len > kv_len > 0:  # kv_len 0 is a padded row
            raise ValueError(f"sequence {i} has query_len {query_len}, more than kv_len {kv_len}")
    num_blocks, blocks = num_slots // tables.block_size, tables.block_tables
    low, high = (int(block) for block in blocks.aminmax())
    if low >= 0 and high < num_blocks:
        return
    firsts = torch.arange(blocks.shape[1], device=blocks.device) * tables.block_size
    used = firsts < tables.kv_lens[:, None]  # the entries past a sequence's tokens may be anything
    wrong = (((blocks < 0) | (blocks >= num_blocks)) & used).nonzero().tolist()
    if wrong:
        sequence, index = wrong[0]
        raise ValueError(
            f"block_tables has block {int(blocks[sequence, index])} for sequence {sequence}, but "
            f"the pools have {num_blocks} blocks of {tables.block_size} slots"
        )


def _check_pools(q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, n_rep: int) -> None:
    """Check the pools and n_rep against q [..., n_q, ..., head_dim], n_q being q's second axis."""
    n_q, head_dim = q.shape[1], q.shape[-1]
    for name, pool in (("k_pool", k_pool), ("v_pool", v_pool)):
        if pool.dim() != 3 or pool.shape[2] != head_dim:
            raise ValueError(
                f"{name} must be [num_slots, n_kv, {head_dim}] as q's head_dim is {head_dim}, got "
                f"{list(pool.shape)}"
            )
    if k_pool.shape != v_pool.shape:
        raise ValueError(
            f"k_pool and v_pool must have one shape, got {list(k_pool.shape)}, {list(v_pool.shape)}"
        )
    n_kv = k_pool.shape[1]
    if n_q != n_kv * n_rep:
        raise ValueError(f"n_rep {n_rep} does not fit {n_q} query heads and {n_kv} KV heads")
    if q.dtype not in DTYPES:
        raise ValueError(f"q must be float32, float16 or bfloat16, got {q.dtype}")
    for name, x in (("q", q), ("k_pool", k_pool), ("v_pool", v_pool)):
        if x.dtype != q.dtype:
            raise ValueError(f"{name} and q must have one dtype, got {x.dtype} and {q.dtype}")
        if x.stride(-1) != 1:
            raise ValueError(f"{name}'s head_dim must be contiguous, got stride {x.stride(-1)}")


def _check_devices(q: torch.Tensor, **tensors: torch.Tensor) -> None:
    for name, x in tensors.items():
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, but q is on {q.device}")


def _reads_values(q: torch.Tensor, asked: bool | None) -> bool:
    """Whether to read slots or tables on the host: on a CPU, or if the caller or the user asks."""
    if asked is not None:
        return asked
    return q.device.type == "cpu" or os.environ.get("NANOSERVE_CHECK_SLOTS") == "1"


def launch(
    kernel: object,
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    n_rep: int,
    scale: float | None = None,
    tile: int = 128,
) -> torch.Tensor:
    """Launch paged_attention_kernel, jitted by Triton or by tlsim: one program per query and head.

    Arguments and result as for paged_attention_reference. q and the pools may have any strides, but
    head_dim's must be 1. `tile` is the number of keys in one iteration of the kernel's loop, a
    power of two.
    """
    _, n_q, query_len, head_dim = q.shape
    # The kernel reads the mapping at stride 1. Copying a strided mapping moves 8 bytes per token; a
    # key and a value have hundreds. The engine's own mapping is contiguous, so it is not copied.
    slot_mapping = slot_mapping.contiguous()
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    kernel[(query_len, n_q)](
        q,
        k_pool,
        v_pool,
        slot_mapping,
        out,
        head_dim**-0.5 if scale is None else float(scale),
        query_len,
        len(slot_mapping),
        *q.stride()[1:3],
        *k_pool.stride()[:2],
        *v_pool.stride()[:2],
        *out.stride()[1:3],
        N_REP=n_rep,
        HEAD_DIM=head_dim,
        BLOCK_D=next_power_of_2(head_dim),
        TILE=tile,
    )
    return out


def launch_batch(
    kernels: object,
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    tables: PagedTables,
    n_rep: int,
    scale: float | None,
    launch: Launch,
    workers: int = 0,
    overlap: bool = False,
    once: bool = False,
) -> torch.Tensor:
    """Launch packed_kernel; or, with workers, split_kv_kernel and merge_kernel.

    `kernels` has the three under these names, jitted by Triton or by tlsim. Other arguments and
    result as for paged_attention_batch_reference. A split needs sequences whose queries fit in the
    rows of one tile. `overlap` starts the merge early, which needs compute capability 9.0. `once`
    says that each sequence has 1 to launch.tile keys; it has no effect on a split.
    """
    num_tokens, _, head_dim = q.shape
    num_seqs, n_kv = len(tables.kv_lens), k_pool.shape[1]
    rows = max(launch.rows, next_power_of_2(n_rep))
    one_tile = tables.max_query_len <= rows // n_rep  # for each sequence
    longest = max(x.stride(0) * len(x) for x in (k_pool, v_pool))
    shape = {
        "N_REP": n_rep,
        "HEAD_DIM": head_dim,
        "BLOCK_D": max(16, next_power_of_2(head_dim)),
        "ROWS": rows,
        "TILE": launch.tile,
    }
    sizes = {"BLOCK_SIZE": tables.block_size, "LONG": longest >= 1 << 31, **shape}
    compiler = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    blocks = tables.block_tables.contiguous()  # the engine's tables are: no copy
    kv_lens, starts = tables.kv_lens.contiguous(), tables.query_starts.contiguous()
    scale = head_dim**-0.5 if scale is None else float(scale)
    if scale <= 0:  # the kernels take the largest score before they scale it
        q, scale = q * scale, 1.0
    scale *= LOG2_E
    strides = (*q.stride()[:2], *k_pool.stride()[:2], *v_pool.stride()[:2], blocks.stride(0))
    inputs = (q, k_pool, v_pool, blocks, kv_lens, starts)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    seqs = next_power_of_2(num_seqs)
    if not workers:
        tiles = num_seqs if one_tile else num_tokens // (rows // n_rep) + num_seqs
        seqs = 1 if one_tile else max(2, seqs)
        kernels.packed_kernel[(n_kv, tiles)](
            *inputs, out, scale, num_seqs, *strides, SEQS=seqs, ONCE=once, **sizes, **compiler
        )
        return out
    parts = (workers + num_seqs, n_kv, rows)
    part = torch.empty(*parts, head_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(parts, dtype=torch.float32, device=q.device)
    both = {"SEQS": seqs, "OVERLAP": overlap}
    kernels.split_kv_kernel[(n_kv, workers)](
        *inputs, out, part, lse, scale, num_seqs, *strides, **both, **sizes, **compiler
    )
    parts_at_once = min(  # what the registers of a warp hold; but no more than a sequence has
        max(1, 4096 // shape["BLOCK_D"]), next_power_of_2(-(-workers // num_seqs) + 1)
    )
    compiler = {"num_warps": 1} | ({"launch_pdl": True} if overlap else {})
    kernels.merge_kernel[(n_kv, workers, n_rep * tables.max_query_len)](
        part, lse, kv_lens, starts, out, num_seqs, PARTS=parts_at_once, **both, **shape, **compiler
    )
    return out


LOG2_E = math.log2(math.e)  # 2 ** (x * LOG2_E) is e ** x


def paged_attention_batch_triton(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    tables: PagedTables,
    n_rep: int,
    scale: float | None = None,
) -> torch.Tensor:
    """Paged attention of many sequences by Triton: compiled, or interpreted.

    Arguments and result as for paged_attention_batch_reference; ValueError as for check_batch.
    """
    check_batch(q, k_pool, v_pool, tables, n_rep)
    return _batch_triton(q, k_pool, v_pool, tables, n_rep, scale)


def _batch_triton(q, k_pool, v_pool, tables, n_rep, scale):
    capability, multiprocessors = _gpu(q.device)
    launch, workers = choose_launch(
        tables, n_rep, k_pool.shape[1], q.shape[2], q.dtype, capability, multiprocessors
    )
    overlap = capability >= (9, 0) and _can_overlap()
    with torch.cuda.device_of(q):
        return launch_batch(
            split_kv, q, k_pool, v_pool, tables, n_rep, scale, launch, workers, overlap
        )


@cache
def _gpu(device: torch.device) -> tuple[tuple[int, int], int]:
    """(compute capability, multiprocessors) of a GPU. Triton's interpreter acts as a small GPU."""
    if device.type != "cuda":
        return (8, 0), 4
    found = torch.cuda.get_device_properties(device)
    return (found.major, found.minor), found.multi_processor_count


@cache
def _can_overlap() -> bool:
    """Whether this Triton has programmatic dependent launch (3.4 and newer)."""
    import triton.language as tl

    return hasattr(getattr(tl.extra, "cuda", None), "gdc_wait")


def paged_attention_batch_tlsim(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    tables: PagedTables,
    n_rep: int,
    scale: float | None = None,
) -> torch.Tensor:
    """Paged attention of many sequences by the same kernel under tlsim, without tlsim's checks.

    Arguments and result as for paged_attention_batch_reference; ValueError as for check_batch.
    """
    integers = tables.block_tables, tables.kv_lens, tables.query_starts
    graph = _graph_of(q, k_pool, v_pool, integers, tables, n_rep, scale)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if graph.replay(q, k_pool, v_pool, out):
        return out
    check_batch(q, k_pool, v_pool, tables, n_rep)
    return _batch_tlsim(q, k_pool, v_pool, tables, n_rep, scale, graph)


def _batch_tlsim(q, k_pool, v_pool, tables, n_rep, scale, graph):
    rows = next_power_of_2(n_rep * tables.max_query_len)
    rows = min(rows, max(128, next_power_of_2(n_rep)))
    tile = min(1024 if rows < 128 else 256, max(16, next_power_of_2(tables.max_kv_len)))
    n_kv, lens = k_pool.shape[1], tables.kv_lens
    once = tables.max_kv_len <= tile and lens.device.type == "cpu" and bool(lens.min() > 0)
    wave = n_kv * max(1, LANES // (rows * tile * n_kv))  # the programs of whole tiles of queries
    graph = True if scale is not None and scale <= 0 else graph  # the launch replaces q
    with tlsim.options(checks=False, replay=graph, wave=wave):
        kernels, launch = _simulated_kernels(), Launch(rows, tile, 1, 1)
        return launch_batch(kernels, q, k_pool, v_pool, tables, n_rep, scale, launch, once=once)


LANES = 1 << 18  # scores of one loop iteration, over all programs of a wave


def _graph_of(q, k_pool, v_pool, integers: tuple[torch.Tensor, ...], *rest) -> tlsim.Graph:
    """The launch of an equal call, checked and captured; an empty graph for the first such call.

    The layers of a step make equal calls: only the numbers in q and the pools differ. A change in
    place of `integers`, the slots or the tables, makes the call another one, since a tensor counts
    such changes. It does not count a change through numpy. A tensor made in torch.inference_mode
    counts none, so no graph is kept for it.
    """
    if any(x.is_inference() for x in integers):
        return _new_graph.__wrapped__()
    shapes = [(x.shape, x.stride(), x.dtype, x.device) for x in (q, k_pool, v_pool)]
    return _new_graph(*rest, *shapes, *(x._version for x in integers))


@lru_cache(maxsize=4)
def _new_graph(*_) -> tlsim.Graph:
    return tlsim.Graph("q_ptr", "k_ptr", "v_ptr", "out_ptr")


@cache
def _simulated_kernels() -> SimpleNamespace:
    """The kernels of split_kv under tlsim, which reads their source once."""
    names = ("packed_kernel", "split_kv_kernel", "merge_kernel")
    return SimpleNamespace(**{name: tlsim.jit(getattr(split_kv, name)) for name in names})


def paged_attention_triton(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    n_rep: int,
    scale: float | None = None,
) -> torch.Tensor:
    """Paged attention by Triton: compiled, or interpreted if TRITON_INTERPRET=1 was set.

    Arguments and result as for paged_attention_reference; ValueError as for check_attention.
    """
    check_attention(q, k_pool, v_pool, slot_mapping, n_rep)
    if _kernel.get() == "day22":
        with torch.cuda.device_of(q):
            return launch(paged_attention_kernel, q, k_pool, v_pool, slot_mapping, n_rep, scale)
    tables = _once(_tables_of, slot_mapping, q.shape[2])
    return _one_sequence(_batch_triton(_packed(q), k_pool, v_pool, tables, n_rep, scale))


def paged_attention_tlsim(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    n_rep: int,
    scale: float | None = None,
) -> torch.Tensor:
    """Paged attention by the same kernel under tlsim, with tlsim's checks off for speed.

    Arguments and result as for paged_attention_reference; ValueError as for check_attention.
    """
    if _kernel.get() == "day22":
        check_attention(q, k_pool, v_pool, slot_mapping, n_rep)
        programs = min(q.shape[1] * q.shape[2], 512)
        tile = next_power_of_2(min(len(slot_mapping), 512, (1 << 15) // programs))
        with tlsim.options(checks=False, wave=512):
            kernel = _simulated(paged_attention_kernel)
            return launch(kernel, q, k_pool, v_pool, slot_mapping, n_rep, scale, tile)
    graph = _graph_of(q, k_pool, v_pool, (slot_mapping,), slot_mapping, n_rep, scale)
    if graph.run is None:
        check_attention(q, k_pool, v_pool, slot_mapping, n_rep)
    q = _packed(q)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if not graph.replay(q, k_pool, v_pool, out):
        tables = _once(_tables_of, slot_mapping, len(q))
        out = _batch_tlsim(q, k_pool, v_pool, tables, n_rep, scale, graph)
    return _one_sequence(out)


_simulated = cache(tlsim.jit)  # reads the source of a kernel once


def _once(compute: Callable, slot_mapping: torch.Tensor, *rest: int):
    """compute(slot_mapping, ...), once for all layers of a step: they pass the same tensor.

    A tensor counts its changes in place; a change makes the result new. A tensor made in
    torch.inference_mode counts none, so nothing is kept for it.
    """
    if slot_mapping.is_inference():
        return compute.__wrapped__(slot_mapping, 0, *rest)
    return compute(slot_mapping, slot_mapping._version, *rest)


@lru_cache(maxsize=16)
def _slot_range(slot_mapping: torch.Tensor, _version: int) -> tuple[int, int]:
    """The lowest and the highest slot."""
    low, high = (int(slot) for slot in slot_mapping.aminmax())
    return low, high


@lru_cache(maxsize=16)
def _tables_of(slot_mapping: torch.Tensor, _version: int, query_len: int) -> PagedTables:
    with torch.inference_mode(False):  # made in that mode, nothing derived from them would be kept
        return PagedTables.from_slots(slot_mapping, query_len)


def _packed(q: torch.Tensor) -> torch.Tensor:
    """[1, n_q, query_len, head_dim] -> [query_len, n_q, head_dim], a view."""
    return q[0].transpose(0, 1)


def _one_sequence(out: torch.Tensor) -> torch.Tensor:
    """[query_len, n_q, head_dim] -> [1, n_q, query_len, head_dim], a view."""
    return out.transpose(0, 1)[None]


def paged_attention_dispatch(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    n_rep: int,
    scale: float | None = None,
) -> torch.Tensor:
    """Paged attention by the backend that select_backend chooses for q's device.

    Arguments and result as for paged_attention_reference; every backend's result is within
    `tolerance` of the reference's. Raises ValueError as check_attention and select_backend do.
    """
    backend = select_backend(q.device)
    if backend == "triton":
        return paged_attention_triton(q, k_pool, v_pool, slot_mapping, n_rep, scale)
    if backend == "tlsim":
        return paged_attention_tlsim(q, k_pool, v_pool, slot_mapping, n_rep, scale)
    check_attention(q, k_pool, v_pool, slot_mapping, n_rep)
    return paged_attention_reference(q, k_pool, v_pool, slot_mapping, n_rep, scale)


def paged_attention_batch_dispatch(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    tables: PagedTables,
    n_rep: int,
    scale: float | None = None,
) -> torch.Tensor:
    """Paged attention of many sequences, by the backend that select_backend chooses.

    Arguments and result as for paged_attention_batch_reference; every backend's result is within
    `tolerance` of the reference's. Raises ValueError as check_batch and select_backend do.
    """
    backend = select_backend(q.device)
    if _kernel.get() == "day22":
        check_batch(q, k_pool, v_pool, tables, n_rep)
        return by_sequence(paged_attention_dispatch, q, k_pool, v_pool, tables, n_rep, scale)
    if backend == "triton":
        return paged_attention_batch_triton(q, k_pool, v_pool, tables, n_rep, scale)
    if backend == "tlsim":
        return paged_attention_batch_tlsim(q, k_pool, v_pool, tables, n_rep, scale)
    check_batch(q, k_pool, v_pool, tables, n_rep)
    return paged_attention_batch_reference(q, k_pool, v_pool, tables, n_rep, scale)
