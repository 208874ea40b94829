"""Day 30: right answers to `merge` and `num_splits`, in several styles."""

import torch

# merge -------------------------------------------------------------------------------------------


def in_pairs(parts, lse):
    """One part after another is merged into the result, with a sigmoid of the two lse."""
    pairs = zip(parts.unbind(1), lse.unbind(1), strict=True)
    out, seen = next(pairs)
    for part, new in pairs:
        ahead = torch.where(new > -torch.inf, new - seen, -torch.inf)
        share = torch.sigmoid(ahead * 0.6931471805599453)[:, None]
        out = (1 - share) * out + share * part
        seen = seen.logaddexp2(new)
    return out


def row_by_row(parts, lse):
    """A loop over the rows, each with the parts that saw a key."""
    out = torch.zeros(len(parts), parts.shape[2])
    for i in range(len(parts)):
        seen = lse[i] > -torch.inf
        if seen.any():
            found = lse[i][seen]
            share = 2.0 ** (found - found.max())
            out[i] = share @ parts[i][seen] / share.sum()
    return out


def by_softmax(parts, lse):
    """softmax over the splits, with log2(e) taken out of the exponent; NaN becomes 0."""
    share = torch.softmax(lse * 0.6931471805599453, dim=-1)
    return torch.einsum("rs,rsd->rd", share.nan_to_num(), parts)


RIGHT = {"merge": (in_pairs, row_by_row, by_softmax)}
