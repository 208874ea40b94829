"""Day 29: right answers to `rows_of_tile` and `fold_tile`, in several styles."""

import math

import torch

# rows_of_tile ------------------------------------------------------------------------------------


def row_by_row(tile, rows, kv_head, n_rep, query_len):
    """A table with one line for each row of the tile, with divmod."""
    whole, table = rows // n_rep, []
    for row in range(rows):
        inside, member = divmod(row, n_rep)
        query = tile * whole + inside
        table.append((query, kv_head * n_rep + member, inside < whole and query < query_len))
    return tuple(torch.tensor(column) for column in zip(*table, strict=True))


def by_a_grid(tile, rows, kv_head, n_rep, query_len):
    """The pairs of query and head of the tile in order, then rows without a query."""
    whole = rows // n_rep
    mine = torch.arange(query_len)[tile * whole : (tile + 1) * whole]
    query = mine.repeat_interleave(n_rep)
    head = torch.arange(kv_head * n_rep, (kv_head + 1) * n_rep).repeat(len(mine))
    used = torch.arange(rows) < len(query)
    unused = torch.arange(rows)[~used]  # any numbers
    return torch.cat([query, unused]), torch.cat([head, unused]), used


def by_torch_division(tile, rows, kv_head, n_rep, query_len):
    """torch.div and torch.remainder."""
    row = torch.arange(rows)
    whole = rows // n_rep
    inside = torch.div(row, n_rep, rounding_mode="floor")
    query = inside + tile * whole
    used = torch.lt(inside, whole).logical_and(torch.lt(query, query_len))
    return query, torch.remainder(row, n_rep) + kv_head * n_rep, used


# fold_tile ---------------------------------------------------------------------------------------


def key_by_key(m, l, acc, q, k, v, seen, scale):  # noqa: E741
    """A loop over the keys: each is a tile of one."""
    factor = scale / math.log(2)
    for key, value, sees in zip(k, v, seen.T, strict=True):
        score = torch.mv(q, key) * factor
        score[~sees] = -torch.inf
        larger = torch.maximum(score, m)
        old, new = 2.0 ** (m - larger), 2.0 ** (score - larger)
        l = old * l + new  # noqa: E741
        acc = old.unsqueeze(1) * acc + torch.outer(new, value)
        m = larger
    return m, l, acc


def row_by_row_fold(m, l, acc, q, k, v, seen, scale):  # noqa: E741
    """A loop over the rows, each with the keys that it sees."""
    out = []
    for m_old, l_old, acc_old, query, sees in zip(m, l, acc, q, seen, strict=True):
        keys, values = k[sees], v[sees]
        score = keys @ query * scale * 1.4426950408889634
        m_new = torch.cat([m_old[None], score]).max()
        shrink, p = torch.exp2(m_old - m_new), torch.exp2(score - m_new)
        out.append((m_new, l_old * shrink + p.sum(), acc_old * shrink + p @ values))
    return tuple(torch.stack(column) for column in zip(*out, strict=True))


def by_natural_exponents(m, l, acc, q, k, v, seen, scale):  # noqa: E741
    """Natural scores inside, and the factor log2(e) at the two ends."""
    to_e, to_2 = math.log(2), math.log2(math.e)
    score = torch.einsum("rd,kd->rk", q, k).mul(scale).masked_fill(~seen, -torch.inf)
    largest = torch.maximum(m * to_e, score.max(dim=1).values)
    alpha, p = torch.exp(m * to_e - largest), torch.exp(score - largest.unsqueeze(1))
    mixed = torch.einsum("rk,kd->rd", p, v)
    return largest * to_2, alpha * l + p.sum(1), alpha.unsqueeze(1) * acc + mixed


RIGHT = {
    "rows_of_tile": (row_by_row, by_a_grid, by_torch_division),
    "fold_tile": (key_by_key, row_by_row_fold, by_natural_exponents),
}
