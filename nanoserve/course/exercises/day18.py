"""Day 18: attention through the slot mapping, the oracle of every kernel."""

import torch

from nanoserve.course.exercise import Case, Exercise, close, raises, wrong
from nanoserve.layers import sdpa

N_Q, N_KV, HEAD_DIM, NUM_SLOTS, BLOCK = 6, 2, 8, 40, 4


def slots_of(blocks: list[int], kv_len: int) -> torch.Tensor:
    """The slot mapping of kv_len tokens that lie in these blocks of 4 slots."""
    slots = [block * BLOCK + offset for block in blocks for offset in range(BLOCK)]
    return torch.tensor(slots[:kv_len])


def a_case(
    query_len: int, slots: torch.Tensor, n_q: int = N_Q, n_kv: int = N_KV, poison: bool = False
) -> tuple:
    """(q, k_pool, v_pool, slot_mapping, n_rep), at random; with poison, NaN in all other slots."""
    random = torch.Generator().manual_seed(18 + len(slots))
    q = torch.randn(1, n_q, query_len, HEAD_DIM, generator=random)
    k_pool, v_pool = torch.randn(2, NUM_SLOTS, n_kv, HEAD_DIM, generator=random)
    if poison:
        outside = torch.ones(NUM_SLOTS, dtype=torch.bool)
        outside[slots] = False
        k_pool[outside] = v_pool[outside] = torch.nan
    return q, k_pool, v_pool, slots, n_q // n_kv


def _cases() -> list[Case]:
    def case(what: str, kind: str, args: tuple, **kwargs) -> Case:
        return Case(what, args, kwargs, kind=kind, compare=close(1e-6, 1e-5))

    def refused(what: str, n_q: int, n_rep: int) -> Case:
        args = (*a_case(1, slots_of([5, 2], 6), n_q=n_q)[:4], n_rep)
        return Case(what, args, kind="refuse", expected=raises(ValueError, "n_rep"))

    return [
        case("decode: 1 query, 7 tokens, blocks 5 and 2", "gather", a_case(1, slots_of([5, 2], 7))),
        case("prefill: 5 queries, blocks 1 and 8", "band", a_case(5, slots_of([1, 8], 5))),
        case("continuation: 3 queries, 9 tokens", "band", a_case(3, slots_of([6, 0, 3], 9))),
        case("descending blocks 7, 4, 1", "gather", a_case(2, slots_of([7, 4, 1], 11))),
        case("MQA: one KV head", "heads", a_case(2, slots_of([3, 9], 6), n_kv=1)),
        case("MHA: six KV heads", "heads", a_case(2, slots_of([9, 3], 8), n_kv=N_Q)),
        case("scale 0.5", "scale", a_case(3, slots_of([2, 6], 5)), scale=0.5),
        case("NaN in every other slot", "gather", a_case(3, slots_of([4, 1], 7), poison=True)),
        refused("n_rep 2, where 6 query heads and 2 KV heads make 3", N_Q, 2),
        refused("n_rep 4, where 6 query heads and 2 KV heads make 3", N_Q, 4),
        refused("n_rep 3, where 7 query heads do not fit 2 KV heads", 7, 3),
    ]  # fmt: skip


def _right(
    q, k_pool, v_pool, slots, n_rep, scale=None, *, band=0, heads=None, gather=None, refuse=True
):
    """The right answer with one thing changed, its sum written out."""
    n_q, n_kv, (query_len, head_dim) = q.shape[1], k_pool.shape[1], q.shape[2:]
    if refuse and n_q != n_kv * n_rep:
        raise ValueError(f"n_rep {n_rep} does not fit {n_q} query heads and {n_kv} KV heads")
    scale = head_dim**-0.5 if scale is None else scale
    gather = gather or (lambda pool: pool[slots].transpose(0, 1))  # [n_kv, kv_len, head_dim]
    group = torch.arange(n_q) // (n_q // n_kv) if heads is None else heads(n_q, n_kv)
    k, v = gather(k_pool)[group], gather(v_pool)[group]
    scores = q[0] @ k.mT * scale
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + k.shape[1] - query_len + band)
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v)[None]


@wrong(
    "It reads the pool from slot 0 on and ignores the mapping. Those slots are not this sequence's."
)
def _first_slots(q, k_pool, v_pool, slots, n_rep, scale=None):
    def gather(pool):
        return pool[: len(slots)].transpose(0, 1)

    return _right(q, k_pool, v_pool, slots, n_rep, scale, gather=gather)


@wrong(
    "It reads one run of slots behind the first slot. Only the slots of a block lie side by side; "
    "the next block may lie anywhere."
)
def _one_run(q, k_pool, v_pool, slots, n_rep, scale=None):
    def gather(pool):
        return pool[(slots[0] + torch.arange(len(slots))) % len(pool)].transpose(0, 1)

    return _right(q, k_pool, v_pool, slots, n_rep, scale, gather=gather)


@wrong(
    "The slots are read in the order of the pool, as with a boolean mask. The mapping has the "
    "order of the text: oldest first.",
    hints="gather",
)
def _sorted_slots(q, k_pool, v_pool, slots, n_rep, scale=None):
    return _right(q, k_pool, v_pool, slots.sort().values, n_rep, scale)


@wrong(
    "The slots are read newest first. The mapping is oldest first, and sdpa needs that order.",
    hints="gather",
)
def _newest_first(q, k_pool, v_pool, slots, n_rep, scale=None):
    return _right(q, k_pool, v_pool, slots.flip(0), n_rep, scale)


@wrong(
    "The entries of the mapping are treated as block ids and multiplied again. They are slots "
    "already: block * block_size + offset, an index into the pool."
)
def _blocks_as_slots(q, k_pool, v_pool, slots, n_rep, scale=None):
    return _right(q, k_pool, v_pool, slots * BLOCK % len(k_pool), n_rep, scale)


@wrong(
    "It reads a stale slot: whole blocks, with an earlier owner's keys behind the last token. The "
    "text ends where the mapping ends."
)
def _stale_block(q, k_pool, v_pool, slots, n_rep, scale=None):
    behind = torch.arange(1, 1 + (-len(slots) % BLOCK or BLOCK))
    slots = torch.cat([slots, (slots[-1] + behind) % len(k_pool)])
    return _right(q, k_pool, v_pool, slots, n_rep, scale, band=len(behind))


@wrong(
    "The transpose is missing: pool[slots] is [kv_len, n_kv, head_dim], and a reshape mixes tokens "
    "with heads. Swap the two axes."
)
def _no_transpose(q, k_pool, v_pool, slots, n_rep, scale=None):
    def gather(pool):
        return pool[slots].reshape(pool.shape[1], len(slots), -1)

    return _right(q, k_pool, v_pool, slots, n_rep, scale, gather=gather)


@wrong(
    "The causal mask is shifted by one: each query sees the token after its own. Query i sees "
    "positions 0 to kv_len - query_len + i."
)
def _band_ahead(q, k_pool, v_pool, slots, n_rep, scale=None):
    return _right(q, k_pool, v_pool, slots, n_rep, scale, band=1)


@wrong(
    "The causal mask begins at the top left, as if the queries were the first positions. They are "
    "the last query_len positions: query 0 has position kv_len - query_len.",
    hints="band",
)
def _top_left(q, k_pool, v_pool, slots, n_rep, scale=None):
    return _right(q, k_pool, v_pool, slots, n_rep, scale, band=q.shape[2] - len(slots))


@wrong("Nothing is masked. With several queries the first must not see the last one's token.")
def _no_mask(q, k_pool, v_pool, slots, n_rep, scale=None):
    return _right(q, k_pool, v_pool, slots, n_rep, scale, band=len(slots))


@wrong(
    "Query head h reads KV head h % n_kv. Neighbouring query heads share a KV head: it is "
    "h // n_rep.",
    hints="heads",
)
def _modulo(q, k_pool, v_pool, slots, n_rep, scale=None):
    def heads(n_q, n_kv):
        return torch.arange(n_q) % n_kv

    return _right(q, k_pool, v_pool, slots, n_rep, scale, heads=heads)


@wrong("The argument scale is ignored. head_dim ** -0.5 is only its default.")
def _scale_ignored(q, k_pool, v_pool, slots, n_rep, scale=None):
    return _right(q, k_pool, v_pool, slots, n_rep)


@wrong("With a scale given, the scores are scaled twice. The scale replaces head_dim ** -0.5.")
def _scale_twice(q, k_pool, v_pool, slots, n_rep, scale=None):
    usual = q.shape[-1] ** -0.5
    return _right(q, k_pool, v_pool, slots, n_rep, usual if scale is None else scale * usual)


@wrong("The values are gathered from k_pool. Keys give the scores; gather the values from v_pool.")
def _keys_as_values(q, k_pool, v_pool, slots, n_rep, scale=None):
    return _right(q, k_pool, k_pool, slots, n_rep, scale)


@wrong(
    "The numbers are right, but the shape is [1, query_len, n_q, head_dim]. Heads come first: "
    "[1, n_q, query_len, head_dim]."
)
def _heads_last(q, k_pool, v_pool, slots, n_rep, scale=None):
    return _right(q, k_pool, v_pool, slots, n_rep, scale).transpose(1, 2)


@wrong("The axis of the one sequence is missing: return [1, n_q, query_len, head_dim].")
def _no_batch(q, k_pool, v_pool, slots, n_rep, scale=None):
    return _right(q, k_pool, v_pool, slots, n_rep, scale)[0]


@wrong(
    "An n_rep that does not fit the heads is accepted. Raise ValueError and name n_rep: a kernel "
    "would read the wrong KV heads with it."
)
def _not_refused(q, k_pool, v_pool, slots, n_rep, scale=None):
    return _right(q, k_pool, v_pool, slots, n_rep, scale, refuse=False)


@wrong(
    "n_rep is compared with n_q // n_kv, which rounds down: 7 query heads and 2 KV heads also give "
    "3. Compare n_q with n_kv * n_rep."
)
def _rounded_down(q, k_pool, v_pool, slots, n_rep, scale=None):
    if n_rep != q.shape[1] // k_pool.shape[1]:
        raise ValueError(f"n_rep {n_rep} does not fit")
    k, v = (pool[slots].transpose(0, 1).contiguous()[None] for pool in (k_pool, v_pool))
    return sdpa(q, k, v, scale)


def contiguous(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Keys or values copied out token by token: [num_slots, n_kv, d] -> [1, n_kv, kv_len, d]."""
    return torch.stack([pool[int(slot)] for slot in slots], dim=1)[None].contiguous()


def by_contiguous(q, k_pool, v_pool, slots, n_rep, scale=None) -> torch.Tensor:
    """The result that the oracle must equal: sdpa over contiguous keys and values."""
    return sdpa(q, contiguous(k_pool, slots), contiguous(v_pool, slots), scale)


REFERENCE = Exercise(
    "paged_attention_reference",
    _cases,
    hints={
        "gather": (
            "Which rows of the pool are this sequence's, and in which order?",
            "Index the pool with the mapping: pool[slot_mapping] is [kv_len, n_kv, head_dim], "
            "oldest first. sdpa needs heads before tokens, and a batch axis in front.",
            "k = k_pool[slot_mapping].transpose(0, 1).contiguous()[None], the same for v, then "
            "return sdpa(q, k, v, scale)",
        ),
        "band": (
            "Does each query see exactly the tokens before it, and itself?",
            "The queries are the last query_len of kv_len positions. sdpa applies this mask "
            "itself: it needs q with query_len tokens and k, v with kv_len tokens.",
            "return sdpa(q, k, v, scale), with k and v [1, n_kv, kv_len, head_dim]",
        ),
        "heads": (
            "Which KV head does query head h read?",
            "h // n_rep: neighbours share. sdpa groups the query heads by a view; do not repeat or "
            "reorder the KV heads.",
            "Pass k and v to sdpa with their n_kv heads, as they come out of the pool.",
        ),
        "scale": (
            "Is the last argument used?",
            "sdpa takes a scale too, with the same default for None.",
            "return sdpa(q, k, v, scale)",
        ),
        "refuse": (
            "n_rep follows from n_q and n_kv. What if the three numbers disagree?",
            "q.shape[1] query heads must be k_pool.shape[1] KV heads times n_rep. Check it before "
            "you gather, and raise ValueError.",
            'if n_q != n_kv * n_rep: raise ValueError(f"n_rep {n_rep} does not fit {n_q} query '
            'heads and {n_kv} KV heads")',
        ),
    },
    target="nanoserve.kernels.reference:paged_attention_reference",
    wrong=(
        _first_slots, _one_run, _sorted_slots, _newest_first, _blocks_as_slots, _stale_block,
        _no_transpose, _band_ahead, _top_left, _no_mask, _modulo, _scale_ignored, _scale_twice,
        _keys_as_values, _heads_last, _no_batch, _not_refused, _rounded_down,
    ),
)  # fmt: skip

EXERCISES = (REFERENCE,)
