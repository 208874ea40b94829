"""Day 30: the merge of partial softmaxes by log-sum-exp, equal shares of all keys, the workers."""

import torch

from nanoserve.course import drawings
from nanoserve.course.exercise import Case, Exercise, close, wrong

# the merge ---------------------------------------------------------------------------------------

ROWS, HEAD_DIM = 3, 8


def merge(parts, lse):
    """parts [rows, splits, head_dim], lse [rows, splits] to base 2 -> [rows, head_dim]: the mean of
    the parts, weighted by 2 ** lse; zeros where no part saw a key."""
    largest = lse.amax(-1, keepdim=True).clamp(min=-1e30)  # finite, also where all are -inf
    weight = torch.exp2(lse - largest)
    total = weight.sum(-1, keepdim=True)
    mixed = (weight[..., None] * parts).sum(1)
    return mixed / torch.where(total == 0, 1.0, total)


def partials(scores, values, ends):
    """The softmax of each part of the keys: out [rows, splits, head_dim], lse [rows, splits].

    scores [rows, keys] are natural; part i ends before key ends[i], and may be empty.
    """
    outs, lses, begin = [], [], 0
    for end in ends:
        part = scores[:, begin:end].double()
        empty = torch.zeros(len(scores), values.shape[1], dtype=torch.float64)
        outs.append(part.softmax(-1) @ values[begin:end].double() if end > begin else empty)
        lses.append(part.exp2().sum(-1).log2() if end == begin else part.logsumexp(-1) * LOG2E)
        begin = end
    return torch.stack(outs, 1).float(), torch.stack(lses, 1).float()


LOG2E = 1.4426950408889634


def _merge_cases() -> list[Case]:
    random = torch.Generator().manual_seed(30)
    scores = 2 * torch.randn(ROWS, 13, generator=random)
    values = torch.randn(13, HEAD_DIM, generator=random)

    def case(what: str, kind: str, ends: tuple[int, ...], scores=scores) -> Case:
        truth = (scores.double().softmax(-1) @ values.double()).float()
        args = partials(scores, values, ends)
        return Case(what, args, {}, kind, truth, close(1e-5, 1e-4))

    rows = torch.tensor([[0.0], [300.0], [-300.0]])
    falls = torch.linspace(400, 0, 13).expand(ROWS, -1)
    none = (torch.zeros(2, 5, HEAD_DIM), torch.full((2, 5), -torch.inf))
    some = partials(scores, values, (4, 9, 13))
    mixed = (torch.cat([some[0], torch.zeros(1, 3, HEAD_DIM)]),
             torch.cat([some[1], torch.full((1, 3), -torch.inf)]))  # fmt: skip
    truth = (scores.double().softmax(-1) @ values.double()).float()
    padded = torch.cat([truth, torch.zeros(1, HEAD_DIM)])
    near = close(1e-5, 1e-4)
    return [
        case("two parts, of 6 and 7 keys", "two", (6, 13)),
        case("two parts, of 12 keys and 1 key", "two", (12, 13)),
        case("one part alone", "two", (13,)),
        case("five parts", "many", (2, 5, 9, 10, 13)),
        case("thirteen parts of one key", "many", tuple(range(1, 14))),
        case("four parts, the last two without a key", "empty", (6, 13, 13, 13)),
        case("scores near 300, four parts", "large", (3, 7, 9, 13), scores + 300),
        case("scores near -300, four parts", "large", (3, 7, 9, 13), scores - 300),
        case("rows 300 apart, four parts", "large", (3, 7, 9, 13), scores + rows),
        case("scores that fall from 400 to 0", "large", (3, 7, 9, 13), scores + falls),
        Case("five parts, none saw a key", none, {}, "none", torch.zeros(2, HEAD_DIM), near),
        Case("three rows with keys, one without", mixed, {}, "none", padded, near),
    ]


def _merge_but(parts, lse, *, base=torch.exp2, floor=-1e30, largest=None, weight=None, total=None):
    """The right merge with one step replaced."""
    top = lse.amax(-1, keepdim=True).clamp(min=floor) if largest is None else largest(lse)
    w = base(lse - top) if weight is None else weight(lse)
    found = w.sum(-1, keepdim=True) if total is None else total(w)
    return (w[..., None] * parts).sum(1) / torch.where(found == 0, 1.0, found)


@wrong(
    "This is the plain mean of the parts. A part with larger scores, or with more keys, has more "
    "of the softmax's sum: its weight is 2 ** lse."
)
def _plain_mean(parts, lse):
    return parts.mean(1)


@wrong(
    "This adds the parts up. Each is a mean already, with weights that sum to 1: the parts need "
    "weights too, 2 ** lse divided by the sum of all 2 ** lse."
)
def _plain_sum(parts, lse):
    return parts.sum(1)


@wrong(
    "The weights are not divided by their sum. With the largest lse subtracted, they sum to 1 or "
    "more: divide by the total of the row."
)
def _not_divided(parts, lse):
    return _merge_but(parts, lse, total=lambda w: torch.ones_like(w[:, :1]))


@wrong(
    "The weighted sum is divided by the number of parts. The divisor is the sum of the weights, as "
    "in every weighted mean."
)
def _divided_by_the_number(parts, lse):
    return _merge_but(parts, lse, total=lambda w: torch.full_like(w[:, :1], w.shape[1]))


@wrong(
    "The weights are e ** lse. These lse are to base 2, since the kernel folds with exp2: the "
    "weights are 2 ** lse."
)
def _base_e(parts, lse):
    return _merge_but(parts, lse, base=torch.exp)


@wrong(
    "The weight of a part is its lse itself. lse is a logarithm: the part's share of the sum is "
    "2 ** lse."
)
def _the_logarithm(parts, lse):
    return _merge_but(parts, lse, weight=lambda lse: lse)


@wrong(
    "No maximum is subtracted: 2 ** lse is infinite from lse 128 on, and 0 below -149. Subtract "
    "the row's largest lse first; it cancels in the division.",
    hints="large",
)
def _no_maximum(parts, lse):
    return _merge_but(parts, lse, largest=torch.zeros_like)


@wrong(
    "One maximum is taken over all rows. Under another row's large maximum, every weight of a row "
    "can be 0. Each row needs its own.",
    hints=(
        "One row has lse near 400, another near -400. Which weights does your second row get?",
        "2 ** -800 is 0 in float32, so all of them are 0. The subtracted number must be the row's "
        "own largest lse.",
        "lse - lse.amax(-1, keepdim=True), one maximum for each row",
    ),
)
def _one_for_all(parts, lse):
    return _merge_but(parts, lse, largest=lambda lse: lse.max().clamp(min=-1e30))


@wrong(
    "The sums run over the rows: each part gets weights that sum to 1 over the rows. The parts of "
    "one row belong together: sum over the splits."
)
def _over_the_rows(parts, lse):
    top = lse.amax(0, keepdim=True).clamp(min=-1e30)
    weight = torch.exp2(lse - top)
    total = weight.sum(0, keepdim=True)
    return (weight[..., None] * parts / torch.where(total == 0, 1.0, total)[..., None]).sum(1)


@wrong(
    "A row in which no part saw a key gives NaN. There are two traps: -inf - -inf is NaN, so the "
    "maximum must be finite; and the sum of the weights is 0, so divide by 1 there."
)
def _none_is_nan(parts, lse):
    return _merge_but(parts, lse, floor=-torch.inf)


@wrong(
    "Only the part with the largest lse is kept. The others have a smaller share of the sum, but "
    "not none."
)
def _the_largest(parts, lse):
    return parts[torch.arange(len(parts)), lse.argmax(-1)]


@wrong(
    "Only the first and the last part are merged. Every part has a share of the sum, however many "
    "there are.",
    hints="many",
)
def _only_two(parts, lse):
    ends = [0, -1] if parts.shape[1] > 1 else [0]
    return merge(parts[:, ends], lse[:, ends])


@wrong(
    "The parts are merged in pairs, and a pair's lse is the larger of the two. It is the logarithm "
    "of the sum of both: log2(2 ** a + 2 ** b).",
    hints="many",
)
def _larger_lse(parts, lse):
    out, seen = parts[:, 0], lse[:, 0]
    for i in range(1, parts.shape[1]):
        pair = torch.stack([seen, lse[:, i]], 1)
        out = merge(torch.stack([out, parts[:, i]], 1), pair)
        seen = pair.amax(-1)
    return out


MERGE = Exercise(
    "merge",
    _merge_cases,
    hints={
        "two": (
            "Part i is a softmax over its own keys: its weights sum to 1. By what did it divide, "
            "and by what would the whole softmax have divided?",
            "By its own sum of exponentials, 2 ** lse[i]. The whole one divides by the sum of "
            "these. So part i counts with weight 2 ** lse[i] / sum(2 ** lse).",
            "weight = torch.exp2(lse - lse.amax(-1, keepdim=True)); out = (weight[..., None] * "
            "parts).sum(1) / weight.sum(-1, keepdim=True)",
        ),
        "many": (
            "Two parts come out right. Is there anything about the formula that needs two?",
            "No: one maximum over all splits of the row, one weight for each split, and sums over "
            "axis 1. If you merge in pairs, a pair's lse is log2(2 ** a + 2 ** b).",
            "weight = torch.exp2(lse - lse.amax(-1, keepdim=True)); sums over axis 1 of parts and "
            "over the last axis of weight",
        ),
        "empty": (
            "Some parts have no key. Which lse do they have, and which weight follows?",
            "lse is -inf, because the logarithm of an empty sum is. 2 ** -inf is 0, so the part "
            "has no weight without any special case.",
            "torch.exp2(lse - largest) gives 0 for -inf, as long as largest is finite",
        ),
        "large": (
            "Which of your exponents can be above 0?",
            "None may be: 2 ** 128 is infinite in float32. Subtract each row's largest lse; the "
            "same factor is above and below the fraction.",
            "torch.exp2(lse - lse.amax(-1, keepdim=True)), one maximum for each row",
        ),
        "none": (
            "What is the largest lse of a row in which no part saw a key, and what is -inf minus "
            "that?",
            "It is -inf, and -inf - -inf is NaN. Keep the maximum finite, for example at least "
            "-1e30. Then all weights are 0, and so is their sum, by which you divide.",
            "largest = lse.amax(-1, keepdim=True).clamp(min=-1e30); divide by torch.where(total == "
            "0, 1.0, total)",
        ),
    },
    solution=merge,
    wrong=(
        _plain_mean, _plain_sum, _not_divided, _divided_by_the_number, _base_e, _the_logarithm,
        _no_maximum, _one_for_all, _over_the_rows, _none_is_nan, _the_largest,
        _only_two, _larger_lse,
    ),
)  # fmt: skip


# the shares --------------------------------------------------------------------------------------


def keys_of_worker(worker, workers, kv_lens, tile):
    """The key tiles of all sequences, one after another, in equal shares -> the keys of one worker:
    a list of (sequence, low, high). A sequence without keys counts as one tile."""
    tiles = [max(-(-kv_len // tile), 1) for kv_len in kv_lens]
    share = -(-sum(tiles) // workers)
    parts, before = [], 0
    for i, kv_len in enumerate(kv_lens):
        low = max(worker * share - before, 0)
        high = min((worker + 1) * share - before, tiles[i])
        if low < high:
            parts.append((i, low * tile, min(high * tile, kv_len)))
        before += tiles[i]
    return parts


def _all_workers(answer, workers, kv_lens, tile):
    """The parts of every worker."""
    return [answer(worker, workers, kv_lens, tile) for worker in range(workers)]


def _share_cases() -> list[Case]:
    def case(what: str, kind: str, workers: int, kv_lens: tuple[int, ...], tile: int = 16) -> Case:
        inputs = f"workers {workers}, kv_lens {list(kv_lens)}, tile {tile}; all workers in order"
        args = (workers, list(kv_lens), tile)
        return Case(what, args, kind=kind, call=_all_workers, inputs=inputs)

    return [
        case("one sequence of 96 keys, 3 workers", "one", 3, (96,)),
        case("one sequence of 90 keys: the last tile is ragged", "tail", 3, (90,)),
        case("5 tiles for 3 workers", "share", 3, (75,)),
        case("9 tiles for 4 workers, tiles of 8", "share", 4, (70,), 8),
        case("more workers than tiles", "share", 5, (40,)),
        case("two sequences of 32 keys, 2 workers", "several", 2, (32, 32)),
        case("sequences of 100, 20 and 150 keys, 4 workers", "several", 4, (100, 20, 150)),
        case("the same, one worker", "several", 1, (100, 20, 150)),
        case("a padded row between two sequences", "empty", 3, (49, 0, 65)),
        case("padded rows only", "empty", 2, (0, 0)),
        case("tiles of one key: 1, 0 and 4 keys, 3 workers", "empty", 3, (1, 0, 4), 1),
        case("three sequences of one key, 2 workers", "several", 2, (1, 1, 1)),
    ]


def _share_but(
    worker, workers, kv_lens, tile, *, share=None, clamp=True, rebase=True, keep=False, least=1
):  # fmt: skip
    """The right shares with one step replaced."""
    tiles = [max(-(-kv_len // tile), least) for kv_len in kv_lens]
    size = -(-sum(tiles) // workers) if share is None else share(tiles, workers)
    parts, before = [], 0
    for i, kv_len in enumerate(kv_lens):
        low, high = max(worker * size - before, 0), min((worker + 1) * size - before, tiles[i])
        shift = 0 if rebase else before
        if low < high or (keep and low <= high):
            last = (high + shift) * tile
            parts.append((i, (low + shift) * tile, min(last, kv_len) if clamp else last))
        before += tiles[i]
    return parts


@wrong(
    "The share is rounded down: total // workers. The tiles that are left over belong to no "
    "worker, and their keys are never read. Round up."
)
def _rounded_down(*args):
    return _share_but(*args, share=lambda tiles, workers: sum(tiles) // workers)


@wrong(
    "The share is rounded to the nearest number. Where that is down, the last tiles belong to no "
    "worker. Round up."
)
def _rounded(*args):
    return _share_but(*args, share=lambda tiles, workers: round(sum(tiles) / workers))


@wrong(
    "The share is one tile too large where the tiles divide evenly: total // workers + 1 is not "
    "the quotient rounded up."
)
def _plus_one(*args):
    return _share_but(*args, share=lambda tiles, workers: sum(tiles) // workers + 1)


@wrong(
    "The last part ends at the end of its tile, behind the sequence's last key. high is at most "
    "kv_len."
)
def _past_the_end(*args):
    return _share_but(*args, clamp=False)


@wrong(
    "low and high count from the first key of the first sequence. They are positions in their own "
    "sequence: subtract the tiles of the sequences before it."
)
def _not_rebased(*args):
    return _share_but(*args, rebase=False, clamp=False)


@wrong(
    "A part that begins and ends at one place is in the list, although the share does not reach "
    "into that sequence. Only a sequence without keys has such a part."
)
def _empty_parts(*args):
    return _share_but(*args, keep=True)


@wrong(
    "A sequence without keys has no tile here, so no worker visits it, and its zeros are never "
    "written. Count it as one tile: its part is (sequence, 0, 0)."
)
def _padded_row_lost(*args):
    return _share_but(*args, least=0)


@wrong(
    "Every sequence is cut into `workers` pieces, and a worker gets one piece of each. Then a "
    "worker visits all sequences, and short sequences give pieces of a tile or less. Share out "
    "the tiles of all sequences together."
)
def _each_sequence_split(worker, workers, kv_lens, tile):
    found = []
    for i, kv_len in enumerate(kv_lens):
        found += [(i, *part[1:]) for part in keys_of_worker(worker, workers, [kv_len], tile)]
    return found


@wrong(
    "The shares are equal in keys, not in tiles, so a worker begins in the middle of a tile. Count "
    "whole tiles: a program loads whole tiles anyway.",
    hints=(
        "How many tiles of 16 do 90 keys have, and how many of them does each of 2 workers get?",
        "Six tiles, the last with 10 keys: three tiles each. Compute the shares in tiles, and "
        "multiply by `tile` at the end.",
        "tiles = [max(-(-kv_len // tile), 1) for kv_len in kv_lens]; share = -(-sum(tiles) // "
        "workers)",
    ),
)
def _shares_of_keys(worker, workers, kv_lens, tile):
    return keys_of_worker(worker, workers, kv_lens, 1)


@wrong(
    "Whole sequences are dealt out. Then a long sequence keeps one worker busy while the others "
    "have nothing to do: a share may end inside a sequence."
)
def _whole_sequences(worker, workers, kv_lens, tile):
    return [(i, 0, n) for i, n in enumerate(kv_lens) if i % workers == worker]


@wrong(
    "The tiles are dealt out in turn: worker w gets tiles w, w + workers, and so on. Then each "
    "sequence has a part of every worker, and the merge has more to do. A share is consecutive."
)
def _dealt_in_turn(worker, workers, kv_lens, tile):
    all_tiles = [(i, low) for i, n in enumerate(kv_lens) for low in range(0, max(n, 1), tile)]
    return [(i, low, min(low + tile, kv_lens[i])) for i, low in all_tiles[worker::workers]]


@wrong(
    "There is one entry for each tile. Tiles of one sequence that follow each other are one part: "
    "the worker folds them one after another and stores one result."
)
def _one_for_each_tile(worker, workers, kv_lens, tile):
    return [
        (i, start, min(start + tile, high))
        for i, low, high in keys_of_worker(worker, workers, kv_lens, tile)
        for start in range(low, max(high, 1), tile)
    ]


@wrong("Only the first sequence of the share is returned. A share can reach into the next ones.")
def _first_sequence_only(*args):
    return keys_of_worker(*args)[:1]


SHARES = Exercise(
    "keys_of_worker",
    _share_cases,
    hints={
        "one": (
            "How many tiles has the sequence, and how many of them does each worker get?",
            "96 keys are 6 tiles of 16, and 3 workers get 2 each. Worker w reads from tile "
            "w * share to tile (w + 1) * share.",
            "low = worker * share * tile; high = (worker + 1) * share * tile; return [(0, low, "
            "high)]",
        ),
        "tail": (
            "Where does the last tile end, and where does the sequence end?",
            "The tile ends at a multiple of `tile`, the sequence at kv_len, which may come first.",
            "high = min(high_tile * tile, kv_len)",
        ),
        "share": (
            "The tiles do not divide evenly. Is every tile read by one worker?",
            "Round the share up: then the first workers have full shares, one has the rest, and "
            "the workers after it have nothing.",
            "share = -(-total // workers); a worker whose first tile is not below the total "
            "returns []",
        ),
        "several": (
            "Number the tiles of all sequences from 0. Which numbers does sequence i have?",
            "From `before`, the tiles of the sequences before it, to before + tiles[i]. The part "
            "of a worker in it is where its share and this range overlap, minus before.",
            "low = max(worker * share - before, 0); high = min((worker + 1) * share - before, "
            "tiles[i]); keep it if low < high",
        ),
        "empty": (
            "A padded row has no keys, and its result is zeros. Which worker writes them?",
            "The worker whose share holds its tile. So a sequence has at least one tile, with keys "
            "or without, and the part of a padded row ends at kv_len: (sequence, 0, 0).",
            "tiles = [max(-(-kv_len // tile), 1) for kv_len in kv_lens]",
        ),
    },
    solution=keys_of_worker,
    wrong=(
        _rounded_down, _rounded, _plus_one, _past_the_end, _not_rebased, _empty_parts,
        _padded_row_lost, _each_sequence_split, _shares_of_keys, _whole_sequences, _dealt_in_turn,
        _one_for_each_tile, _first_sequence_only,
    ),
)  # fmt: skip


# the number of workers ---------------------------------------------------------------------------


def _workers_cases() -> list[Case]:
    def case(what: str, kind: str, *args: int) -> Case:
        names = ("multiprocessors", "n_kv", "num_seqs", "tiles", "programs")
        inputs = ", ".join(f"{name} {value}" for name, value in zip(names, args, strict=False))
        return Case(what, args, kind=kind, inputs=inputs)

    return [
        case("4 KV heads on 20 multiprocessors: 10 fit, 8 are used", "share", 20, 4, 1, 1_024),
        case("an H200, one long sequence of a Llama", "share", 132, 8, 1, 1_024),
        case("the same, 3 programs for each multiprocessor", "share", 132, 8, 1, 1_024, 3),
        case("a T4, two sequences, 3 KV heads", "share", 40, 3, 2, 700, 4),
        case("room for 5.6 workers", "few", 45, 32, 1, 600, 4),
        case("room for 9 workers", "share", 36, 8, 1, 600),
        case("room for 8 workers", "few", 40, 10, 1, 600, 2),
        case("a short sequence: 6 tiles", "tiles", 132, 8, 1, 6),
        case("20 tiles, and room for more workers", "tiles", 132, 8, 1, 20),
        case("one tile", "tiles", 132, 8, 1, 1),
        case("more KV heads than programs", "least", 10, 32, 1, 600),
        case("131 sequences: just too few to fill the GPU", "full", 132, 8, 131, 9_000),
        case("132 sequences fill it", "full", 132, 8, 132, 9_000),
        case("a T4, 29 sequences, 11 KV heads: 319 programs", "full", 40, 11, 29, 9_000, 4),
        case("a T4, 400 sequences, 3 KV heads", "full", 40, 3, 400, 9_000, 4),
        case("a T4, 107 sequences, 3 KV heads", "full", 40, 3, 107, 9_000, 4),
        case("a T4, 106 sequences, 3 KV heads", "full", 40, 3, 106, 9_000, 4),
    ]


def _by_eight(workers: int) -> int:
    return workers // 8 * 8 if workers > 8 else workers


def _workers_but(
    multiprocessors, n_kv, num_seqs, tiles, programs=2, *, full=None, share=None, least=1, none=0,
    even=_by_eight,
):  # fmt: skip
    """The right rule with one step replaced."""
    split = (full or (lambda: num_seqs * n_kv >= 8 * multiprocessors))()
    if split:
        return none
    workers = even((share or (lambda: programs * multiprocessors // n_kv))())
    return max(least, min(workers, tiles))


@wrong(
    "These are the programs of the whole GPU. A worker is one program for each KV head, so divide "
    "by n_kv."
)
def _programs_not_workers(multiprocessors, n_kv, num_seqs, tiles, programs=2):
    share = lambda: programs * multiprocessors  # noqa: E731
    return _workers_but(multiprocessors, n_kv, num_seqs, tiles, programs, share=share)


@wrong(
    "More than eight workers should be a multiple of eight, since the merge reads the parts in "
    "groups: round down to a multiple of 8."
)
def _any_number(*args):
    return _workers_but(*args, even=lambda workers: workers)


@wrong(
    "The multiple of eight is rounded up. Then there are more programs than the GPU runs at once, "
    "and a few wait for all others. Round down."
)
def _rounded_up(*args):
    return _workers_but(*args, even=lambda n: -(-n // 8) * 8 if n > 8 else n)


@wrong(
    "Up to eight workers stay as they are. Rounded to a multiple of eight, 5 become 0, and then "
    "the rule gives 1."
)
def _few_rounded(*args):
    return _workers_but(*args, even=lambda workers: workers // 8 * 8)


@wrong(
    "The number of tiles is rounded too. First round the workers that fit, then take the smaller "
    "of them and the tiles: with 20 tiles, 20 workers have one tile each."
)
def _tiles_rounded(multiprocessors, n_kv, num_seqs, tiles, programs=2):
    share = lambda: min(programs * multiprocessors // n_kv, tiles)  # noqa: E731
    return _workers_but(multiprocessors, n_kv, num_seqs, tiles, programs, share=share)


@wrong("`programs` is not used: each multiprocessor runs that many programs at once.")
def _one_program(multiprocessors, n_kv, num_seqs, tiles, programs=2):
    share = lambda: multiprocessors // n_kv  # noqa: E731
    return _workers_but(multiprocessors, n_kv, num_seqs, tiles, programs, share=share)


@wrong("`programs` is not used: 2 is its default, and the caller may pass another number.")
def _always_two(multiprocessors, n_kv, num_seqs, tiles, programs=2):
    return _workers_but(multiprocessors, n_kv, num_seqs, tiles, 2)


@wrong(
    "The workers are divided by the number of sequences too, as if each sequence had workers of "
    "its own. All sequences share all workers."
)
def _divided_by_the_sequences(multiprocessors, n_kv, num_seqs, tiles, programs=2):
    share = lambda: programs * multiprocessors // (n_kv * num_seqs)  # noqa: E731
    return _workers_but(multiprocessors, n_kv, num_seqs, tiles, programs, share=share)


@wrong(
    "There can be more workers than tiles. A worker reads whole tiles, so those past the last tile "
    "have nothing to do: at most `tiles`."
)
def _more_than_tiles(multiprocessors, n_kv, num_seqs, tiles, programs=2):
    return _workers_but(multiprocessors, n_kv, num_seqs, 1 << 30, programs)


@wrong(
    "With more KV heads than programs the quotient is 0, which means: do not split. At least one "
    "worker is needed, unless the sequences fill the GPU."
)
def _none_left(*args):
    return _workers_but(*args, least=0)


@wrong(
    "The test for a full GPU forgets the KV heads. Each sequence makes n_kv programs without a "
    "split: num_seqs * n_kv."
)
def _full_by_sequences(multiprocessors, n_kv, num_seqs, tiles, programs=2):
    full = lambda: num_seqs >= 8 * multiprocessors  # noqa: E731
    return _workers_but(multiprocessors, n_kv, num_seqs, tiles, programs, full=full)


@wrong(
    "The GPU counts as full too early. A multiprocessor runs several programs at once, and a few "
    "more even out their ends: without a split, it takes eight for each.",
    hints="full",
)
def _full_by_one(multiprocessors, n_kv, num_seqs, tiles, programs=2):
    full = lambda: num_seqs * n_kv >= multiprocessors  # noqa: E731
    return _workers_but(multiprocessors, n_kv, num_seqs, tiles, programs, full=full)


@wrong("Eight programs for each multiprocessor are enough: the test is >=, not >.")
def _full_later(multiprocessors, n_kv, num_seqs, tiles, programs=2):
    full = lambda: num_seqs * n_kv > 8 * multiprocessors  # noqa: E731
    return _workers_but(multiprocessors, n_kv, num_seqs, tiles, programs, full=full)


@wrong(
    "Where the sequences fill the GPU, the answer is 1 worker. One worker would read all keys of "
    "all sequences by itself: 0 means that the packed kernel runs, without a split."
)
def _one_where_full(*args):
    return _workers_but(*args, none=1)


@wrong("The test for a full GPU is missing. There the packed kernel needs no split and no merge.")
def _never_full(*args):
    return _workers_but(*args, full=lambda: False)


WORKERS = Exercise(
    "num_workers",
    _workers_cases,
    hints={
        "share": (
            "How many programs does the whole GPU run at once, and how many of them does one "
            "worker take?",
            "programs * multiprocessors in all. A worker is one program for each of the n_kv KV "
            "heads. Round down, and above eight down to a multiple of eight.",
            "workers = programs * multiprocessors // n_kv; if workers > 8: workers = workers // 8 "
            "* 8",
        ),
        "few": (
            "There is room for eight workers or fewer. Which rule of yours changes their number?",
            "None should: only more than eight workers are rounded to a multiple of eight.",
            "if workers > 8: workers = workers // 8 * 8",
        ),
        "tiles": (
            "What would a worker do that begins after the last tile?",
            "Nothing. So there are never more workers than tiles. The tiles themselves are not "
            "rounded.",
            "min(workers, tiles), after the workers are rounded",
        ),
        "least": (
            "There are more KV heads than programs that run at once. What does your quotient give?",
            "0, and 0 means: do not split. Here one worker has to do it.",
            "max(1, min(workers, tiles))",
        ),
        "full": (
            "How many programs do the sequences make without a split?",
            "num_seqs * n_kv, one for each sequence and KV head. From eight for each "
            "multiprocessor on, return 0.",
            "if num_seqs * n_kv >= 8 * multiprocessors: return 0",
        ),
    },
    target="nanoserve.kernels.split_kv:num_workers",
    wrong=(
        _programs_not_workers, _any_number, _rounded_up, _few_rounded, _tiles_rounded,
        _one_program, _always_two, _divided_by_the_sequences, _more_than_tiles, _none_left,
        _full_by_sequences, _full_by_one, _full_later, _one_where_full, _never_full,
    ),
)  # fmt: skip

EXERCISES = (MERGE, SHARES, WORKERS)
WIDGETS = {"split-history": drawings.split_history}
