"""Day 22: right answers to `fold` and `paged_attention_kernel`, in several styles."""

import torch

from nanoserve.kernels import tlsim
from nanoserve.kernels.tlsim import language as tl

# fold --------------------------------------------------------------------------------------------


def key_by_key(m, l, acc, scores, values):  # noqa: E741
    """A loop over the keys of the tile: each is a tile of one."""
    for score, value in zip(scores.unbind(1), values, strict=True):
        larger = torch.where(score > m, score, m)
        old, new = (m - larger).exp(), (score - larger).exp()
        l = old * l + new  # noqa: E741
        acc = torch.addcmul(acc * old.unsqueeze(1), new.unsqueeze(1), value)
        m = larger
    return m, l, acc


def row_by_row(m, l, acc, scores, values):  # noqa: E741
    """A loop over the queries."""
    rows = []
    for m_old, l_old, acc_old, row in zip(m, l, acc, scores, strict=True):
        m_new = max(m_old, row.max())
        shrink, p = torch.exp(m_old - m_new), torch.exp(row - m_new)
        rows.append((m_new, l_old * shrink + p.sum(), acc_old * shrink + torch.mv(values.T, p)))
    return tuple(torch.stack(column) for column in zip(*rows, strict=True))


def by_softmax(m, l, acc, scores, values):  # noqa: E741
    """The softmax of the tile by PyTorch, weighed by its share of the sum."""
    m_new = torch.cat([m[:, None], scores], dim=1).amax(dim=1)
    share = torch.exp(torch.logsumexp(scores, dim=1) - m_new)
    alpha = torch.exp(m - m_new)
    tile = torch.softmax(scores, dim=1) @ values
    return m_new, alpha * l + share, alpha[:, None] * acc + share[:, None] * tile


# paged_attention_kernel --------------------------------------------------------------------------


@tlsim.jit
def uniform_while(
    q_ptr,
    k_ptr,
    v_ptr,
    slot_ptr,
    out_ptr,
    scale,
    query_len,
    kv_len,
    q_head,
    q_seq,
    k_slot,
    k_head,
    v_slot,
    v_head,
    out_head,
    out_seq,
    N_REP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
):
    """All programs walk over all keys: the same condition in each, so a `while` is allowed."""
    query, head = tl.program_id(0), tl.program_id(1)
    dim, lane = tl.arange(0, BLOCK_D), tl.arange(0, TILE)
    inside = dim < HEAD_DIM
    q = tl.load(q_ptr + head * q_head + query * q_seq + dim, mask=inside, other=0.0).to(tl.float32)
    last = kv_len - query_len + query  # the last position that this query sees
    k_row, v_row = head // N_REP * k_head, head // N_REP * v_head
    m, l = float("-inf"), 0.0  # noqa: E741
    acc = tl.zeros((BLOCK_D,), tl.float32)
    start = 0
    while start < kv_len:
        position = start + lane
        seen = position <= last
        slot = tl.load(slot_ptr + position, mask=seen, other=0)[:, None]
        mask = seen[:, None] & inside[None, :]
        k = tl.load(k_ptr + slot * k_slot + k_row + dim[None, :], mask=mask, other=0.0)
        v = tl.load(v_ptr + slot * v_slot + v_row + dim[None, :], mask=mask, other=0.0)
        score = tl.where(seen, scale * tl.sum(q[None, :] * k, axis=1), float("-inf"))
        before = m
        m = tl.maximum(before, tl.max(score, axis=0))
        p = tl.exp(score - m)
        l = l * tl.exp(before - m) + tl.sum(p, axis=0)  # noqa: E741
        acc = acc * tl.exp(before - m) + tl.sum(p[:, None] * v, axis=0)
        start += TILE
    tl.store(out_ptr + head * out_head + query * out_seq + dim, acc / l, mask=inside)


@tlsim.jit
def two_passes(
    q_ptr,
    k_ptr,
    v_ptr,
    slot_ptr,
    out_ptr,
    scale,
    query_len,
    kv_len,
    q_head,
    q_seq,
    k_slot,
    k_head,
    v_slot,
    v_head,
    out_head,
    out_seq,
    N_REP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
):
    """The largest score in a first loop, the sums under it in a second: no alpha."""
    query, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    dim = tl.arange(0, BLOCK_D)[None, :]
    q_row = q_ptr + head * q_head + query * q_seq + dim
    q = tl.load(q_row, mask=dim < HEAD_DIM, other=0.0).to(tl.float32) * scale  # [1, BLOCK_D]
    visible = query + 1 + kv_len - query_len
    kv_head = head // N_REP
    m = float("-inf")
    for start in range(0, visible, TILE):
        position = start + tl.arange(0, TILE)[:, None]
        slot = tl.load(slot_ptr + position, mask=position < visible, other=0).to(tl.int64)
        mask = (position < visible) & (dim < HEAD_DIM)
        k = tl.load(k_ptr + slot * k_slot + kv_head * k_head + dim, mask=mask, other=0.0)
        score = tl.sum(q * k.to(tl.float32), axis=1, keep_dims=True)
        m = tl.maximum(m, tl.max(tl.where(position < visible, score, float("-inf"))))
    l = 0.0  # noqa: E741
    acc = tl.zeros((1, BLOCK_D), tl.float32)
    for start in range(0, visible, TILE):
        position = start + tl.arange(0, TILE)[:, None]
        slot = tl.load(slot_ptr + position, mask=position < visible, other=0).to(tl.int64)
        mask = (position < visible) & (dim < HEAD_DIM)
        k = tl.load(k_ptr + slot * k_slot + kv_head * k_head + dim, mask=mask, other=0.0)
        v = tl.load(v_ptr + slot * v_slot + kv_head * v_head + dim, mask=mask, other=0.0)
        score = tl.sum(q * k.to(tl.float32), axis=1, keep_dims=True)
        p = tl.where(position < visible, tl.exp(score - m), 0.0)
        l += tl.sum(p)  # noqa: E741
        acc += tl.sum(p * v.to(tl.float32), axis=0, keep_dims=True)
    out_row = out_ptr + head * out_head + query * out_seq + dim
    tl.store(out_row, acc / l, mask=dim < HEAD_DIM)


@tlsim.jit
def powers_of_two(
    q_ptr,
    k_ptr,
    v_ptr,
    slot_ptr,
    out_ptr,
    scale,
    query_len,
    kv_len,
    q_head,
    q_seq,
    k_slot,
    k_head,
    v_slot,
    v_head,
    out_head,
    out_seq,
    N_REP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
):
    """exp2 in place of exp, blocks of one lane for m and l, pointers that move to the head."""
    query, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    dim = tl.arange(0, BLOCK_D)
    in_head = dim < HEAD_DIM
    k_ptr += head // N_REP * k_head
    v_ptr += head // N_REP * v_head
    q = tl.load(q_ptr + head * q_head + query * q_seq + dim, in_head, 0.0).to(tl.float32)
    q = q * (scale * 1.4426950408889634)  # log2(e)
    limit = kv_len - (query_len - query - 1)
    m = tl.full((1,), float("-inf"), tl.float32)
    l = tl.zeros((1,), tl.float32)  # noqa: E741
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for tile in range(tl.cdiv(limit, TILE)):
        position = tile * TILE + tl.arange(0, TILE)
        live = position < limit
        slot = tl.load(slot_ptr + position, live, 0).to(tl.int64)[:, None]
        k = tl.load(k_ptr + slot * k_slot + dim[None, :], live[:, None] & in_head[None, :], 0.0)
        v = tl.load(v_ptr + slot * v_slot + dim[None, :], live[:, None] & in_head[None, :], 0.0)
        score = tl.sum(k.to(tl.float32) * q[None, :], axis=1)
        score = score + tl.where(live, 0.0, float("-inf"))
        top = tl.maximum(m, tl.max(score, axis=0))
        p = tl.exp2(score - top)
        l = tl.exp2(m - top) * l + tl.sum(p, axis=0)  # noqa: E741
        acc = tl.exp2(m - top) * acc + tl.sum(p[:, None] * v.to(tl.float32), axis=0)
        m = top
    tl.store(out_ptr + head * out_head + query * out_seq + dim, acc / l, in_head)


RIGHT = {
    "fold": (key_by_key, row_by_row, by_softmax),
    "paged_attention_kernel": (uniform_while, two_passes, powers_of_two),
}
