"""Right answers to the exercises of Day 34, in different styles."""

import torch

# pack --------------------------------------------------------------------------------------------


def by_comprehension(step):
    return [
        sequence.ids[position]
        for sequence, n in step.items()
        for position in range(sequence.cache.seq_len, sequence.cache.seq_len + n)
    ]


def by_two_slices(step):
    """Cuts off what the cache holds, then takes n."""
    found = []
    for sequence in step:
        missing = sequence.ids[sequence.cache.seq_len :]
        found.extend(missing[: step[sequence]])
    return found


def by_joining(step):
    """Joins tensors, one for each sequence."""
    parts = [
        torch.tensor(sequence.ids).narrow(0, sequence.cache.seq_len, n)
        for sequence, n in step.items()
    ]
    return torch.cat(parts).tolist()


# _angles -----------------------------------------------------------------------------------------


def by_positions(self, seq, cache):
    """Always indexes the table: positions are counted where the cache has none."""
    positions = getattr(cache, "positions", None)
    if positions is None:
        start = cache.seq_len if cache is not None else 0
        positions = torch.arange(start, start + seq)
    table = self._rope(0, int(positions.max()) + 1)
    return tuple(part[positions] for part in table)


def by_selecting(self, seq, cache):
    try:
        positions, longest = cache.positions, cache.tables.max_kv_len
    except AttributeError:
        start = cache.seq_len if cache else 0
        return self._rope(start, start + seq)
    cos, sin = self._rope(0, longest)
    return cos.index_select(0, positions), sin.index_select(0, positions)


def row_by_row(self, seq, cache):
    """One lookup for each token."""
    if cache is None:
        wanted = range(seq)
    elif hasattr(cache, "positions"):
        wanted = cache.positions.tolist()
    else:
        wanted = range(cache.seq_len, cache.seq_len + seq)
    rows = [self._rope(position, position + 1) for position in wanted]
    return torch.cat([cos for cos, _ in rows]), torch.cat([sin for _, sin in rows])


# last_rows ---------------------------------------------------------------------------------------


def by_counting(query_lens):
    found, row = [], -1
    for n in query_lens:
        row += n
        found.append(row)
    return found


def by_cumsum(query_lens):
    return (torch.tensor(list(query_lens)).cumsum(0) - 1).tolist()


def by_summing(query_lens):
    lens = list(query_lens)
    return [sum(lens[: i + 1]) - 1 for i in range(len(lens))]


RIGHT = {
    "pack": (by_comprehension, by_two_slices, by_joining),
    "_angles": (by_positions, by_selecting, row_by_row),
    "last_rows": (by_counting, by_cumsum, by_summing),
}
