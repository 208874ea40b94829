"""Cases of paged attention for every runtime: shapes and layouts, tensors, expected result."""

from dataclasses import dataclass, replace
from functools import cache
from random import Random

import torch

from nanoserve.kernels.dispatch import launch
from nanoserve.kernels.reference import PagedTables, paged_attention_reference, tolerance
from nanoserve.layers import sdpa


@dataclass(frozen=True)
class AttentionCase:
    """One call: its shape, and the layout of its tensors. Unused slots hold NaN."""

    n_q: int = 6
    n_kv: int = 2
    head_dim: int = 8
    query_len: int = 1
    kv_len: int = 37
    tile: int = 32
    dtype: torch.dtype = torch.float32
    scale: float | None = None
    integer: torch.dtype = torch.int64  # of the slot mapping
    q_transposed: bool = False  # [1, query_len, n_q, head_dim] in memory, as in a model
    pools_strided: bool = False  # views into larger tensors, and v with its heads before its slots
    drift: float = 0.0  # scores rise by this much from the oldest key to the newest

    def __str__(self) -> str:
        kind = f"{self.n_q}/{self.n_kv} heads of {self.head_dim}, {self.query_len} of {self.kv_len}"
        return f"{kind}, {str(self.dtype)[6:]}, tile {self.tile}"


EVERYTHING = {"scale": 0.5, "integer": torch.int32, "q_transposed": True, "pools_strided": True}
STEPS = {"decode": (1, 37), "prefill": (37, 37), "continuation": (5, 37)}  # query_len, kv_len
SHAPES = {
    f"{step}, {n_q}/{n_kv} heads of {head_dim}": AttentionCase(n_q, n_kv, head_dim, *positions)
    for n_q, n_kv in [(6, 2), (9, 3), (4, 1), (3, 3)]  # GQA, GQA, MQA, MHA
    for head_dim in (8, 14, 64, 80, 128)
    for step, positions in STEPS.items()
}
LENGTHS = {
    f"decode at {n}": AttentionCase(9, 3, 64, 1, n, tile=64)
    for n in (1, 2, 63, 64, 65, 128, 512, 1000, 4096, 8192)
}
TILES = {
    f"{step} in tiles of {tile}": AttentionCase(9, 3, 14, *positions, tile=tile)
    for tile in (16, 64, 128, 256, 512)
    for step, positions in {"decode": (1, 300), "continuation": (70, 300)}.items()
}
LAYOUTS = {
    f"{step}, {what}": replace(AttentionCase(9, 3, 14, *positions), **how)
    for what, how in {
        "scale 0.05": {"scale": 0.05},
        "scale 1": {"scale": 1.0},
        "int32 slots": {"integer": torch.int32},
        "q transposed": {"q_transposed": True},
        "pools strided": {"pools_strided": True},
        "all at once": EVERYTHING,
        "scores rising": {"drift": 240.0},  # exp would overflow or underflow in float32
        "scores falling": {"drift": -240.0},
    }.items()
    for step, positions in {**STEPS, "one token": (1, 1)}.items()
}
HALVES = {
    f"{str(dtype)[6:]}, {name}": replace(case, dtype=dtype)
    for dtype in (torch.float16, torch.bfloat16)
    for name, case in {
        **{
            f"{step}, {d}": AttentionCase(6, 2, d, *at)
            for d in (14, 64, 128)
            for step, at in STEPS.items()
        },
        "decode at 512": LENGTHS["decode at 512"],
        "prefill, all at once": LAYOUTS["prefill, all at once"],
        "continuation, all at once": LAYOUTS["continuation, all at once"],
    }.items()
}
ALL = SHAPES | LENGTHS | TILES | LAYOUTS | HALVES
# For runtimes that take a millisecond per instruction: one case of each kind, in few programs
BRIEF = {"decode": (1, 37), "prefill": (5, 5), "continuation": (2, 37)}
SMALL = {
    f"{step}, {what}": replace(AttentionCase(6, 2, 14, *positions, tile=16), **how)
    for what, how in {
        "plain": {},
        "all at once": EVERYTHING,
        "bfloat16": {"dtype": torch.bfloat16},
    }.items()
    for step, positions in BRIEF.items()
} | {
    f"continuation, {what}": replace(AttentionCase(6, 2, 14, 2, 37, tile=16), **how)
    for what, how in {
        "16 channels": {"head_dim": 16},
        "4/1 heads": {"n_q": 4, "n_kv": 1},
        "3/3 heads": {"n_q": 3, "n_kv": 3},
        "one tile": {"tile": 64},
        "no key past the tile": {"kv_len": 32},
        "scores rising": {"drift": 240.0},
        "scores falling": {"drift": -240.0},
        "float16": {"dtype": torch.float16},
        "float16, all at once": {"dtype": torch.float16, **EVERYTHING},
        "bfloat16, all at once": {"dtype": torch.bfloat16, **EVERYTHING},
    }.items()
} | {
    "decode, 9/3 heads of 128": AttentionCase(9, 3, 128, 1, 37, tile=16),
    "one token": AttentionCase(6, 2, 14, 1, 1, tile=16),
    "one head": AttentionCase(1, 1, 16, 1, 37, tile=16),
}  # fmt: skip


@cache
def inputs(case: AttentionCase) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [1, n_q, query_len, head_dim]; k and v [kv_len, n_kv, head_dim], oldest position first."""
    random = torch.Generator().manual_seed(case.kv_len)
    q = torch.randn(1, case.n_q, case.query_len, case.head_dim, generator=random)
    k, v = torch.randn(2, case.kv_len, case.n_kv, case.head_dim, generator=random)
    if case.drift:  # the same direction, of length 1, in all queries and in keys by their age
        direction = torch.full((case.head_dim,), case.head_dim**-0.5)
        age = torch.linspace(-0.5, 0.5, case.kv_len)[:, None, None]
        q = q + 8 * direction
        k = k + age * case.drift / 8 * case.head_dim**0.5 * direction
    return q.to(case.dtype), k.to(case.dtype), v.to(case.dtype)


@cache
def expected(case: AttentionCase) -> torch.Tensor:
    """The oracle's result, with slot = position: [1, n_q, query_len, head_dim], on the CPU."""
    every = torch.arange(case.kv_len)
    return paged_attention_reference(*inputs(case), every, case.n_q // case.n_kv, case.scale)


def tensors(
    case: AttentionCase,
    device: str = "cpu",
    empty: float = torch.nan,
    pools: tuple[torch.Tensor, torch.Tensor] | None = None,
    slots: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, float | None]:
    """The arguments of a case: q, k_pool, v_pool, slot_mapping, n_rep, scale.

    K and V lie in scattered slots of new pools whose other slots hold `empty`, or in `slots` of
    `pools`, whose other slots keep their content.
    """
    q, k, v = (x.to(device) for x in inputs(case))
    if pools is None:
        pools = _pools(case, 2 * case.kv_len + 5, device, empty)
    if slots is None:
        random = torch.Generator().manual_seed(case.query_len)
        slots = torch.randperm(len(pools[0]), generator=random)[: case.kv_len]
    slots = slots.to(device)
    for pool, x in zip(pools, (k, v), strict=True):
        pool[slots] = x
    if case.q_transposed:
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    return q, *pools, slots.to(case.integer), case.n_q // case.n_kv, case.scale


def _pools(
    case: AttentionCase, num_slots: int, device: str, empty: float
) -> tuple[torch.Tensor, ...]:
    """k_pool and v_pool [num_slots, n_kv, head_dim]."""

    def full(*shape: int) -> torch.Tensor:
        return torch.full(shape, empty, dtype=case.dtype, device=device)

    if not case.pools_strided:
        return tuple(full(num_slots, case.n_kv, case.head_dim) for _ in range(2))
    k_pool = full(num_slots, case.n_kv + 2, case.head_dim + 3)[:, 1:-1, 2:-1]
    return k_pool, full(case.n_kv, num_slots, case.head_dim).transpose(0, 1)


def assert_expected(out: torch.Tensor, case: AttentionCase) -> None:
    """out equals the oracle's result within the tolerance of the case's dtype."""
    assert (out.shape, out.dtype) == (expected(case).shape, case.dtype)
    atol, rtol = tolerance(case.dtype)
    torch.testing.assert_close(out.cpu(), expected(case), atol=atol, rtol=rtol)


def laid_out(random: Random, x: torch.Tensor, other: float, unit_last: bool = True) -> torch.Tensor:
    """A view with x's shape and dtype, in a layout that `random` draws: its dimensions in any
    order in memory, behind an offset, with gaps that hold `other`, and one of them perhaps expanded
    (then x's first element along it counts). With unit_last the last dimension keeps stride 1.
    """
    dims = list(range(x.dim()))
    order = random.sample(dims, len(dims))
    steps = [random.choice((1, 1, 2, 3)) for _ in dims]
    starts = [random.choice((0, 0, 1, 2)) for _ in dims]
    if unit_last:
        order = [dim for dim in order if dim != dims[-1]] + dims[-1:]
        steps[-1] = 1
    sizes = [starts[dim] + x.shape[dim] * steps[dim] for dim in order]
    memory = torch.full(sizes, other, dtype=x.dtype).permute([order.index(dim) for dim in dims])
    view = memory[tuple(slice(starts[dim], None, steps[dim]) for dim in dims)]
    view.copy_(x)
    expanded = random.choice([None, None, *(dims[:-1] if unit_last else dims)])
    return view if expanded is None else view.narrow(expanded, 0, 1).expand_as(x)


def call_laid_out(random: Random, dtype: torch.dtype = torch.float32) -> tuple:
    """(q, k_pool, v_pool, slot_mapping, n_rep) of a small call, each in a layout of its own."""
    n_kv, n_rep, head_dim = random.randint(1, 3), random.randint(1, 3), random.choice((8, 14, 16))
    query_len = random.randint(1, 4)
    kv_len = query_len + random.choice((0, 1, 30))
    numbers = torch.Generator().manual_seed(random.getrandbits(32))
    num_slots = kv_len + 3
    q = torch.randn(1, n_kv * n_rep, query_len, head_dim, generator=numbers).to(dtype)
    pools = torch.randn(2, num_slots, n_kv, head_dim, generator=numbers).to(dtype)
    pools[:, -1] = torch.nan  # the slot that gaps in the mapping name
    slots = torch.randperm(num_slots - 1, generator=numbers)[:kv_len]
    if random.random() < 0.3:
        slots = slots.flip(0)
    slots = slots.to(random.choice((torch.int32, torch.int64)))
    tensors = [laid_out(random, x, torch.nan) for x in (q, *pools)]
    for pool in tensors[1:]:  # an expanded pool repeats its first slot
        assert not pool[slots.long()].isnan().any()
    return *tensors, laid_out(random, slots, num_slots - 1, unit_last=False), n_rep


def compact(tensors: tuple) -> tuple:
    """The same arguments as contiguous copies, the slot mapping as int64."""
    q, k_pool, v_pool, slots, n_rep = tensors
    q, k_pool, v_pool, slots = (
        x.clone(memory_format=torch.contiguous_format) for x in (q, k_pool, v_pool, slots.long())
    )
    return q, k_pool, v_pool, slots, n_rep


def with_out_laid_out(kernel: object, random: Random, tensors: tuple) -> torch.Tensor:
    """Run the kernel as `launch` does, but into an output in a layout that `random` draws."""
    given = {}

    class Recorder:
        def __getitem__(self, grid):
            return lambda *args, **meta: given.update(grid=grid, args=args, meta=meta)

    out = launch(Recorder(), *tensors, tile=16)
    views = [laid_out(random, torch.zeros_like(out), 7.0) for _ in range(9)]
    out = next((x for x in views if 0 not in x.stride()), out)  # two programs, one address: no
    args = list(given["args"])
    args[4], args[14:16] = out, out.stride()[1:3]
    kernel[given["grid"]](*args, **given["meta"])
    return out


# The backends that run on a CPU without TRITON_INTERPRET=1
BACKENDS = ("reference", "tlsim")
# (query_len, kv_len) of each sequence of a launch; (1, 0) is a padded row
MIXED = ((40, 40), (7, 40), (1, 100))  # a prefill, a chunk after 33 tokens, a decode after 99
BATCHES = {
    "mixed": MIXED,
    "decodes": ((1, 1), (1, 64), (1, 37), (1, 5)),
    "prefills": ((3, 3), (17, 17), (1, 1)),
    "chunks": ((5, 37), (16, 48), (2, 3)),
    "one sequence": ((4, 21),),
    "padded rows": ((1, 33), (1, 0), (1, 7), (1, 0)),
}


def ragged(
    steps: tuple[tuple[int, int], ...],
    block_size: int = 16,
    heads: tuple[int, int] = (6, 2),
    head_dim: int = 8,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    empty: float = torch.nan,
    seed: int = 0,
    extra_blocks: int = 0,
) -> tuple[tuple, torch.Tensor]:
    """((q, k_pool, v_pool, tables, n_rep), expected) of one launch for these (query_len, kv_len).

    Blocks are scattered over pools whose other slots hold `empty`. Entries of the block tables past
    a sequence's tokens name a block that holds `empty` only; `extra_blocks` adds such columns.
    `expected` [num_tokens, n_q, head_dim] is sdpa over contiguous K and V, sequence by sequence,
    and zeros for a padded row.
    """
    numbers = torch.Generator().manual_seed(seed)
    n_q, n_kv = heads
    widths = [-(-kv_len // block_size) for _, kv_len in steps]
    order = torch.randperm(2 * sum(widths) + 3, generator=numbers)
    pools = torch.full((2, len(order) * block_size, n_kv, head_dim), empty, dtype=dtype)
    tables = torch.full((len(steps), max(*widths, 1) + extra_blocks), int(order[-1]))
    rows, expected, taken = [], [], 0
    for i, (query_len, kv_len) in enumerate(steps):
        q = torch.randn(query_len, n_q, head_dim, generator=numbers).to(dtype)
        kv = torch.randn(2, kv_len, n_kv, head_dim, generator=numbers).to(dtype)
        blocks = order[taken : taken + widths[i]]
        taken += widths[i]
        tables[i, : widths[i]] = blocks
        for position in range(kv_len):
            block, offset = divmod(position, block_size)
            pools[:, blocks[block] * block_size + offset] = kv[:, position]
        rows.append(q)
        if kv_len == 0:
            expected.append(torch.zeros_like(q))
            continue
        k, v = kv.transpose(1, 2).contiguous().unsqueeze(1)  # each [1, n_kv, kv_len, head_dim]
        expected.append(sdpa(q.transpose(0, 1)[None], k, v)[0].transpose(0, 1))
    lens = torch.tensor([kv_len for _, kv_len in steps], dtype=torch.int32, device=device)
    starts = torch.tensor([0, *(n for n, _ in steps)]).cumsum(0).to(device, torch.int32)
    longest = [max(*pair, 1) for pair in zip(*steps, strict=True)]
    found = PagedTables(tables.to(device, torch.int32), lens, starts, block_size, *longest)
    pools = pools.to(device)
    return (torch.cat(rows).to(device), *pools, found, n_q // n_kv), torch.cat(expected)


def batch_laid_out(random: Random, dtype: torch.dtype = torch.float32) -> tuple:
    """The arguments of a small batch, each tensor in a layout of its own, gaps filled with others.

    Free slots hold 5, not NaN: a table or pool that is expanded repeats its first entry, and so
    may name a free slot.
    """
    steps, lengths = [], random.choice([(1,), (1, 1, 4), (2, 7)])
    for _ in range(random.randint(1, 4)):
        query_len = random.choice(lengths)
        steps.append((query_len, query_len + random.choice((0, 0, 1, 30))))
    if random.random() < 0.3:
        steps = steps[:1] * len(steps)
    n_kv = random.randint(1, 3)
    (q, k_pool, v_pool, tables, n_rep), _ = ragged(
        tuple(steps),
        block_size=random.choice((1, 3, 16)),
        heads=(n_kv * random.randint(1, 3), n_kv),
        head_dim=random.choice((8, 14, 16)),
        dtype=dtype,
        empty=5.0,
        seed=random.getrandbits(32),
        extra_blocks=random.choice((0, 2)),
    )
    q, k_pool, v_pool = (laid_out(random, x, torch.nan) for x in (q, k_pool, v_pool))
    blocks = tables.block_tables.to(random.choice((torch.int32, torch.int64)))
    views = {"block_tables": laid_out(random, blocks, 10**6, unit_last=False)}
    for name in ("kv_lens", "query_starts"):
        x = getattr(tables, name)
        layouts = (laid_out(random, x, 10**6, unit_last=False) for _ in range(99))
        views[name] = next(view for view in layouts if torch.equal(view, x))  # expanded: if equal
    return q, k_pool, v_pool, replace(tables, **views), n_rep


def compact_batch(arguments: tuple) -> tuple:
    """The same arguments as contiguous copies, the block tables as int32."""
    q, k_pool, v_pool, tables, n_rep = arguments
    copies = [x.clone(memory_format=torch.contiguous_format) for x in (q, k_pool, v_pool)]
    views = {
        name: getattr(tables, name).int().clone(memory_format=torch.contiguous_format)
        for name in ("block_tables", "kv_lens", "query_starts")
    }
    return *copies, replace(tables, **views), n_rep


def assert_batch(out: torch.Tensor, expected: torch.Tensor) -> None:
    """out equals the expected rows of a launch, within the tolerance of their dtype."""
    assert (out.shape, out.dtype) == (expected.shape, expected.dtype)
    atol, rtol = tolerance(expected.dtype)
    torch.testing.assert_close(out.cpu(), expected, atol=atol, rtol=rtol)
