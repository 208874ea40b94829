"""Day 30: right answers to `merge`, `keys_of_worker` and `num_workers`, in several styles."""

import math

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


# keys_of_worker ----------------------------------------------------------------------------------


def tile_by_tile(worker, workers, kv_lens, tile):
    """All tiles in a list, the worker's slice of it, and neighbours joined."""
    tiles = [(i, low) for i, kv_len in enumerate(kv_lens) for low in range(0, max(kv_len, 1), tile)]
    share = (len(tiles) + workers - 1) // workers
    parts = {}
    for i, low in tiles[worker * share : worker * share + share]:
        first = parts.get(i, (i, low))[1]
        parts[i] = (i, first, min(low + tile, kv_lens[i]))
    return list(parts.values())


def by_ranges(worker, workers, kv_lens, tile):
    """The overlap of two ranges for each sequence."""
    counts = [len(range(0, kv_len, tile)) or 1 for kv_len in kv_lens]
    share = math.ceil(sum(counts) / workers)
    mine = range(worker * share, worker * share + share)
    found, start = [], 0
    for i, count in enumerate(counts):
        both = range(max(mine.start, start), min(mine.stop, start + count))
        if len(both):
            low, high = (tile * (edge - start) for edge in (both.start, both.stop))
            found.append((i, low, min(high, kv_lens[i])))
        start += count
    return found


def by_walking(worker, workers, kv_lens, tile):
    """Walk through the sequences with the number of tiles to skip and the number still to take."""
    tiles = [(kv_len + tile - 1) // tile if kv_len else 1 for kv_len in kv_lens]
    take = (sum(tiles) + workers - 1) // workers
    skip, parts = worker * take, []
    for i, (kv_len, count) in enumerate(zip(kv_lens, tiles, strict=True)):
        skipped = min(skip, count)
        taken = min(take, count - skipped)
        skip, take = skip - skipped, take - taken
        if taken > 0:
            end = tile * (skipped + taken)
            parts.append((i, tile * skipped, min(end, kv_len)))
    return parts


# num_workers -------------------------------------------------------------------------------------


def by_cases(multiprocessors, n_kv, num_seqs, tiles, programs=2):
    """One condition after another."""
    if num_seqs * n_kv / multiprocessors >= 8:
        return 0
    room = math.floor(multiprocessors * programs / n_kv)
    if room > 8:
        room -= room % 8
    return min(room, tiles) if room else 1


def by_counting(multiprocessors, n_kv, num_seqs, tiles, programs=2):
    """Workers are added while they fit: one at a time up to eight, then eight at a time."""
    if n_kv * num_seqs >= multiprocessors << 3:
        return 0
    workers = 1
    while (grown := workers + (8 if workers >= 8 else 1)) * n_kv <= multiprocessors * programs:
        workers = grown
    return min(workers, tiles)


def by_sorting(multiprocessors, n_kv, num_seqs, tiles, programs=2):
    """The middle one of 1, the room and the tiles, unless the GPU is full."""
    full = 8 * multiprocessors - num_seqs * n_kv <= 0
    room, _ = divmod(programs * multiprocessors, n_kv)
    eights, rest = divmod(room, 8)
    even = 8 * eights if eights else rest
    return 0 if full else sorted([1, even, tiles])[1]


RIGHT = {
    "merge": (in_pairs, row_by_row, by_softmax),
    "keys_of_worker": (tile_by_tile, by_ranges, by_walking),
    "num_workers": (by_cases, by_counting, by_sorting),
}
