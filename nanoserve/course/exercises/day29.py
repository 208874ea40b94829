"""Day 29: the query heads of a KV head in the rows of one tile, and the fold of such a tile."""

import math

import torch

from nanoserve.course.exercise import Case, Exercise, close, exact, wrong

# the rows ----------------------------------------------------------------------------------------


def rows_of_tile(tile, rows, kv_head, n_rep, query_len):
    """A tile holds rows // n_rep queries, each with the n_rep heads of its KV head -> query, head,
    used, each [rows]; used is False where a row has no query."""
    queries, row = rows // n_rep, torch.arange(rows)
    query = tile * queries + row // n_rep
    used = (row < queries * n_rep) & (query < query_len)
    return query, kv_head * n_rep + row % n_rep, used


def _used_rows(got, expected):
    """As exact, but an unused row may hold any query and head."""
    if not isinstance(got, tuple) or len(got) != 3:
        return exact(got, expected)
    if (told := exact(got[2], expected[2])) is not None:
        return f"used: {told.removeprefix('it returns ')}"
    for name, one, other in zip(("query", "head"), got, expected, strict=False):
        if isinstance(one, torch.Tensor) and one.shape == other.shape:
            one, other = (torch.where(expected[2], x, 0) for x in (one, other))
        if (told := exact(one, other)) is not None:
            return f"{name}: {told.removeprefix('it returns ')}"
    return None


def _rows_cases() -> list[Case]:
    def case(what: str, kind: str, *args: int) -> Case:
        names = ("tile", "rows", "kv_head", "n_rep", "query_len")
        inputs = ", ".join(f"{name} {value}" for name, value in zip(names, args, strict=True))
        return Case(what, args, kind=kind, compare=_used_rows, inputs=inputs)

    return [
        case("decode: one query of 3 heads, KV head 0", "head", 0, 4, 0, 3, 1),
        case("decode: KV head 2, a tile of 8 rows", "head", 0, 8, 2, 3, 1),
        case("5 queries of 3 heads: the first tile of 8 rows", "order", 0, 8, 1, 3, 5),
        case("5 queries of 3 heads: the second tile of 8 rows", "tile", 1, 8, 1, 3, 5),
        case("5 queries of 3 heads: the last tile of 8 rows", "tile", 2, 8, 1, 3, 5),
        case("11 queries of 5 heads: the fourth tile of 16 rows", "tile", 3, 16, 1, 5, 11),
        case("a tile that lies after the last query", "tile", 3, 8, 1, 3, 5),
        case("no grouping, n_rep 1: 11 queries of one head, second tile", "order", 1, 8, 3, 1, 11),
    ]


def _rows_but(tile, rows, kv_head, n_rep, query_len, *, query=None, head=None, used=None):
    """The right rows with one step replaced: each option is a function of the right three."""
    row = torch.arange(rows)
    right = rows_of_tile(tile, rows, kv_head, n_rep, query_len)
    new_query = right[0] if query is None else query(row)
    new_head = right[1] if head is None else head(row)
    return new_query, new_head, right[2] if used is None else used(row, new_query)


@wrong(
    "`tile` is not used: every tile holds the first queries. Tile number `tile` begins at query "
    "tile * (rows // n_rep)."
)
def _every_tile_the_first(tile, rows, kv_head, n_rep, query_len):
    return rows_of_tile(0, rows, kv_head, n_rep, query_len)


@wrong(
    "The tiles follow each other without a gap, so the heads of one query can lie in two tiles. A "
    "tile holds whole queries, rows // n_rep of them. The rows after these are not used.",
    hints="tile",
)
def _without_a_gap(tile, rows, kv_head, n_rep, query_len):
    row = tile * rows + torch.arange(rows)
    return row // n_rep, kv_head * n_rep + row % n_rep, row < query_len * n_rep


@wrong(
    "The tile begins at query tile * rows. A query takes n_rep rows, so a tile holds rows // n_rep "
    "queries."
)
def _tile_counts_rows(tile, rows, kv_head, n_rep, query_len):
    query = tile * rows + torch.arange(rows) // n_rep
    used = (torch.arange(rows) < rows // n_rep * n_rep) & (query < query_len)
    return query, kv_head * n_rep + torch.arange(rows) % n_rep, used


@wrong(
    "The rows after the last whole query of the tile count as used. The next tile begins with this "
    "query, so it would be computed twice, here with a part of its heads: used needs "
    "row < (rows // n_rep) * n_rep.",
    hints="tile",
)
def _left_over_used(tile, rows, kv_head, n_rep, query_len):
    used = lambda row, query: query < query_len  # noqa: E731
    return _rows_but(tile, rows, kv_head, n_rep, query_len, used=used)


@wrong(
    "The rows after the sequence's last query count as used. The last tile may hold fewer queries: "
    "used needs query < query_len."
)
def _past_the_last(tile, rows, kv_head, n_rep, query_len):
    used = lambda row, query: row < rows // n_rep * n_rep  # noqa: E731
    return _rows_but(tile, rows, kv_head, n_rep, query_len, used=used)


@wrong(
    "`used` compares the query's number within its tile with query_len. Compare the query itself, "
    "the tile's first query included."
)
def _used_within_the_tile(tile, rows, kv_head, n_rep, query_len):
    used = lambda row, query: (row < rows // n_rep * n_rep) & (row // n_rep < query_len)  # noqa: E731
    return _rows_but(tile, rows, kv_head, n_rep, query_len, used=used)


@wrong(
    "Every row counts as used. Two kinds of rows hold no query: those after the tile's last "
    "whole query, and those after the sequence's last query."
)
def _all_used(tile, rows, kv_head, n_rep, query_len):
    used = lambda row, query: row >= 0  # noqa: E731
    return _rows_but(tile, rows, kv_head, n_rep, query_len, used=used)


@wrong("One query too many is used: queries count from 0, so query_len itself is none.")
def _one_too_many(tile, rows, kv_head, n_rep, query_len):
    used = lambda row, query: (row < rows // n_rep * n_rep) & (query <= query_len)  # noqa: E731
    return _rows_but(tile, rows, kv_head, n_rep, query_len, used=used)


@wrong(
    "The KV head is left out of the head: every KV head gets the query heads of KV head 0. The "
    "group begins at head kv_head * n_rep."
)
def _no_kv_head(tile, rows, kv_head, n_rep, query_len):
    return _rows_but(tile, rows, kv_head, n_rep, query_len, head=lambda row: row % n_rep)


@wrong("The group begins at head kv_head * n_rep, not at head kv_head: each group has n_rep heads.")
def _head_without_n_rep(tile, rows, kv_head, n_rep, query_len):
    head = lambda row: kv_head + row % n_rep  # noqa: E731
    return _rows_but(tile, rows, kv_head, n_rep, query_len, head=head)


@wrong(
    "Quotient and remainder are exchanged: the head within the group is row % n_rep, and the query "
    "is row // n_rep."
)
def _exchanged(tile, rows, kv_head, n_rep, query_len):
    query = lambda row: tile * (rows // n_rep) + row % n_rep  # noqa: E731
    head = lambda row: kv_head * n_rep + row // n_rep  # noqa: E731
    return _rows_but(tile, rows, kv_head, n_rep, query_len, query=query, head=head)


@wrong(
    "The rows of the tile are sorted by head. Here all heads of a query come first, then those of "
    "the next query: row // n_rep is the query, row % n_rep the head."
)
def _sorted_by_head(tile, rows, kv_head, n_rep, query_len):
    queries = rows // n_rep
    query = lambda row: tile * queries + row % queries  # noqa: E731
    head = lambda row: kv_head * n_rep + row // queries  # noqa: E731
    return _rows_but(tile, rows, kv_head, n_rep, query_len, query=query, head=head)


@wrong("The three are right, in another order: return query, head, used.")
def _head_first(tile, rows, kv_head, n_rep, query_len):
    query, head, used = rows_of_tile(tile, rows, kv_head, n_rep, query_len)
    return head, query, used


ROWS = Exercise(
    "rows_of_tile",
    _rows_cases,
    hints={
        "head": (
            "One query and n_rep heads: which heads read this KV head, and in which rows do they "
            "lie?",
            "Heads kv_head * n_rep to kv_head * n_rep + n_rep - 1, in rows 0 to n_rep - 1. A row "
            "after them is not used.",
            "head = kv_head * n_rep + row % n_rep; query = row // n_rep; used = query < query_len, "
            "and row < (rows // n_rep) * n_rep",
        ),
        "order": (
            "Write the rows on paper, each with its query and its head. Which of the two changes "
            "from row to row?",
            "The head changes: the first n_rep rows are one query, and the next n_rep rows are the "
            "next query. A remainder gives the head, a quotient the query.",
            "query = tile * (rows // n_rep) + row // n_rep; head = kv_head * n_rep + row % n_rep",
        ),
        "tile": (
            "How many whole queries fit into a tile, and which query does tile number `tile` begin "
            "with?",
            "rows // n_rep whole queries, so it begins with query tile * (rows // n_rep). Two "
            "kinds of rows are not used: those after the whole queries, and those after query_len.",
            "queries = rows // n_rep; query = tile * queries + row // n_rep; used = (row < queries "
            "* n_rep) & (query < query_len)",
        ),
    },
    solution=rows_of_tile,
    wrong=(
        _every_tile_the_first, _without_a_gap, _tile_counts_rows, _left_over_used, _past_the_last,
        _used_within_the_tile, _all_used, _one_too_many, _no_kv_head, _head_without_n_rep,
        _exchanged, _sorted_by_head, _head_first,
    ),
)  # fmt: skip


# the fold ----------------------------------------------------------------------------------------

LOG2E = math.log2(math.e)
FLOOR = -1e30  # m before the first key: finite, so that m - m is 0 and not NaN
PACKED, KEYS, HEAD_DIM = 6, 5, 8  # rows of the tile, keys of the tile, channels
SCALE = 0.3


def fold_tile(m, l, acc, q, k, v, seen, scale):  # noqa: E741
    """m, l [rows], acc [rows, head_dim], q [rows, head_dim], k, v [keys, head_dim], seen
    [rows, keys] -> the three after these keys, with scores and m in units of log2."""
    score = torch.where(seen, q @ k.T * (scale * LOG2E), -torch.inf)
    m_new = torch.maximum(m, score.amax(-1))
    alpha = torch.exp2(m - m_new)
    p = torch.exp2(score - m_new[:, None])
    return m_new, l * alpha + p.sum(-1), acc * alpha[:, None] + p @ v


def start(rows: int = PACKED) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """m, l and acc before the first tile."""
    return torch.full((rows,), FLOOR), torch.zeros(rows), torch.zeros(rows, HEAD_DIM)


def _folded(answer, q, k, v, seen, scale, keys):
    """acc / l after all keys, `keys` at a time."""
    m, l, acc = start(len(q))  # noqa: E741
    for first in range(0, len(k), keys):
        part = slice(first, first + keys)
        m, l, acc = answer(m, l, acc, q, k[part], v[part], seen[:, part], scale)  # noqa: E741
    return acc / l[:, None]


def _fold_cases() -> list[Case]:
    random = torch.Generator().manual_seed(29)
    q = torch.randn(PACKED, HEAD_DIM, generator=random)
    k, v = torch.randn(2, 13, HEAD_DIM, generator=random)
    all_seen = torch.ones(PACKED, 13, dtype=torch.bool)
    visible = 12 + torch.arange(PACKED)[:, None] // 3  # two queries of three heads: 12 and 13 keys
    causal = torch.arange(13)[None] < visible
    first, second = slice(0, KEYS), slice(KEYS, KEYS + 4)
    before = fold_tile(*start(), q, k[first], v[first], all_seen[:, first], SCALE)

    def one(what: str, kind: str, state: tuple, keys: slice, seen: torch.Tensor, size=1.0) -> Case:
        args = (*state, q * size, k[keys], v[keys], seen[:, keys], SCALE)
        return Case(what, args, kind=kind, compare=close(1e-5, 1e-5))

    def whole(what: str, kind: str, seen: torch.Tensor, keys: int, scale=SCALE) -> Case:
        score = (q.double() @ k.T.double() * scale).masked_fill(~seen, -torch.inf)
        truth = (score.softmax(-1) @ v.double()).float()
        args = (q, k, v, seen, scale, keys)
        return Case(what, args, {}, kind, truth, close(1e-5, 1e-4), call=_folded)

    last = slice(12, 13)  # the newest key: only the second query sees it
    return [
        one("6 rows and 5 keys, nothing before them", "first", start(), first, all_seen),
        one("then 4 keys more", "second", before, second, all_seen),
        one(
            "4 keys more, with scores four times as large", "second", before, second, all_seen, 4.0
        ),
        one("one key more, which 3 of the 6 rows see", "seen", before, last, causal),
        one("the same key, and nothing before it", "nothing", start(), last, causal),
        whole("acc / l over 13 keys, 5 at a time", "base", all_seen, 5),
        whole("the same, with 12 keys for one query and 13 for the other", "seen", causal, 5),
        whole("the same, 4 keys at a time, a scale of 40", "large", causal, 4, 40.0),
    ]


def _fold_but(
    m, l, acc, q, k, v, seen, scale, *,  # noqa: E741
    factor=None, base=torch.exp2, alpha_base=None, hide=None, largest=None, l_alpha=None,
    acc_alpha=None, part=None,
):  # fmt: skip
    """The right fold with one step replaced."""
    score = q @ k.T * (scale * LOG2E if factor is None else factor(scale))
    score = torch.where(seen, score, -torch.inf) if hide is None else hide(seen, score)
    m_new = torch.maximum(m, score.amax(-1)) if largest is None else largest(m, score)
    alpha = (alpha_base or base)(m - m_new)
    p = base(score - m_new[:, None])
    l_new = l * (alpha if l_alpha is None else l_alpha(alpha)) + p.sum(-1)
    acc_new = acc * (alpha if acc_alpha is None else acc_alpha(alpha))[:, None]
    return m_new, l_new, acc_new + (p @ v if part is None else part(p, score))


@wrong(
    "exp2 takes the scores as they are, so each weight is 2 ** score: a softmax in base 2, and a "
    "flatter one. e ** x is 2 ** (x * log2(e)): the scores need the factor scale * log2(e)."
)
def _no_log2e(*args):
    return _fold_but(*args, factor=lambda scale: scale)


@wrong(
    "The factor is upside down: the scores are divided by log2(e), which is 1.44. e ** x is "
    "2 ** (x * log2(e)), so they are multiplied by it."
)
def _divided_by_log2e(*args):
    return _fold_but(*args, factor=lambda scale: scale / LOG2E)


@wrong("The scale is lost: the factor of the scores is log2(e) alone. It is scale * log2(e).")
def _no_scale(*args):
    return _fold_but(*args, factor=lambda scale: LOG2E)


@wrong(
    "The scores are in units of log2, and exp takes them as natural ones: each weight is too "
    "sharp, e ** (x * 1.44). With the factor log2(e), both exponentials are exp2."
)
def _exp_not_exp2(*args):
    return _fold_but(*args, base=torch.exp)


@wrong(
    "The weights are powers of 2, but alpha is a power of e. The old sums have to shrink in the "
    "same base: alpha = exp2(m - m_new)."
)
def _alpha_natural(*args):
    return _fold_but(*args, alpha_base=torch.exp)


@wrong(
    "The weights are powers of e, but alpha is a power of 2. The scores are in units of log2: "
    "p = exp2(score - m_new)."
)
def _p_natural(*args):
    return _fold_but(*args, base=torch.exp, alpha_base=torch.exp2)


@wrong(
    "`seen` is not used: rows that do not see a key get its value all the same. A score that is "
    "not seen becomes -inf, so that its weight is 0."
)
def _all_seen(*args):
    return _fold_but(*args, hide=lambda seen, score: score)


@wrong(
    "A score that is not seen becomes 0, and its weight 2 ** (0 - m_new) is not 0. It has to be "
    "-inf."
)
def _hidden_is_zero(*args):
    return _fold_but(*args, hide=lambda seen, score: torch.where(seen, score, 0.0))


@wrong(
    "A score that is not seen becomes -1e30, like m before the first key. In a row that has seen "
    "no key, m_new is -1e30 too, and each weight is 2 ** 0 = 1. -inf gives 0 in every row."
)
def _hidden_is_floor(*args):
    return _fold_but(*args, hide=lambda seen, score: torch.where(seen, score, FLOOR))


@wrong("The mask is upside down: the scores that are seen become -inf.", hints="seen")
def _mask_upside_down(*args):
    return _fold_but(*args, hide=lambda seen, score: torch.where(seen, -torch.inf, score))


@wrong(
    "One maximum is taken over all rows. The rows are different heads and queries: each has a "
    "maximum of its own, score.amax(-1).",
    hints=(
        "How many softmaxes does a tile of 6 rows hold, and how many maxima does yours take?",
        "One softmax for each row. So m_new has one number for each row: the largest of the row.",
        "m_new = torch.maximum(m, score.amax(-1))",
    ),
)
def _one_for_all(*args):
    return _fold_but(*args, largest=lambda m, score: torch.maximum(m, score.max()))


@wrong(
    "The maximum is not carried: m is the tile's own, and a larger score from before is lost. Take "
    "the larger of m and of this tile's maximum."
)
def _tile_s_maximum(*args):
    return _fold_but(*args, largest=lambda m, score: score.amax(-1))


@wrong(
    "alpha is upside down: it is exp2(m - m_new), at most 1. exp2(m_new - m) makes the old sums "
    "grow, and is infinite before the first key.",
    hints="second",
)
def _alpha_upside_down(*args):
    return _fold_but(*args, l_alpha=torch.reciprocal, acc_alpha=torch.reciprocal)


@wrong(
    "acc is divided by l in this tile, so the next tile rescales a quotient. The division comes "
    "once, after the last tile.",
    hints=(
        "Who divides acc by l, and how often?",
        "The caller divides once, after the last tile: here l and acc stay sums.",
        "return m_new, l * alpha + p.sum(-1), acc * alpha[:, None] + p @ v",
    ),
)
def _divided(*args):
    m, l, acc = fold_tile(*args)  # noqa: E741
    return m, l, acc / l[:, None]


@wrong("alpha is dropped from l: its old part was summed under a smaller maximum.")
def _no_alpha_l(*args):
    return _fold_but(*args, l_alpha=torch.ones_like)


@wrong("alpha is dropped from acc: its old part was summed under a smaller maximum.")
def _no_alpha_acc(*args):
    return _fold_but(*args, acc_alpha=torch.ones_like)


@wrong("acc sums keys. The weights belong to the values: p @ v.")
def _keys_summed(m, l, acc, q, k, v, seen, scale):  # noqa: E741
    part = lambda p, score: p @ k  # noqa: E731
    return _fold_but(m, l, acc, q, k, v, seen, scale, part=part)


FOLD = Exercise(
    "fold_tile",
    _fold_cases,
    hints={
        "first": (
            "Nothing came before: m is -1e30, l and acc are 0. Which of your three differs, and "
            "does m differ? m holds a score, so it shows the factor.",
            "One product gives all scores of the tile, [rows, keys]. Their factor is scale * "
            "log2(e), so m is 1.44 times Day 22's. Then l is p.sum(-1) and acc is p @ v.",
            "score = q @ k.T * (scale * math.log2(math.e)); m_new = torch.maximum(m, "
            "score.amax(-1)); p = torch.exp2(score - m_new[:, None])",
        ),
        "second": (
            "What are l and acc worth under the new maximum, in base 2?",
            "2 ** (s - m_new) is 2 ** (s - m) * 2 ** (m - m_new). The second factor is alpha: both "
            "l and acc shrink by it.",
            "alpha = torch.exp2(m - m_new); return m_new, l * alpha + p.sum(-1), "
            "acc * alpha[:, None] + p @ v",
        ),
        "seen": (
            "Which score makes a weight of exactly 0?",
            "2 ** -inf is 0. So a score that its row does not see becomes -inf, before the maximum "
            "is taken.",
            "score = torch.where(seen, score, -torch.inf)",
        ),
        "nothing": (
            "Some rows have seen no key at all. Which m, l and acc should they keep?",
            "Those from before: m is -1e30, l and acc are 0. Their scores are all -inf. m is "
            "finite, so that alpha is 2 ** 0 = 1, and every weight is 2 ** -inf = 0.",
            "score = torch.where(seen, score, -torch.inf); m_new = torch.maximum(m, "
            "score.amax(-1)), which stays at -1e30",
        ),
        "base": (
            "The result is a softmax, but of other scores. In which base is it?",
            "e ** x equals 2 ** (x * log2(e)). If the scores have this factor, every exponential "
            "is exp2: that of p and that of alpha.",
            "q @ k.T * (scale * math.log2(math.e)), torch.exp2(score - m_new[:, None]) and "
            "torch.exp2(m - m_new)",
        ),
        "large": (
            "Which of your exponents can be above 0?",
            "m_new is the largest score of the row so far, in this tile and in all before it: no "
            "exponent is above 0 then.",
            "m_new = torch.maximum(m, score.amax(-1)), subtracted in p; alpha = "
            "torch.exp2(m - m_new)",
        ),
    },
    solution=fold_tile,
    wrong=(
        _no_log2e, _divided_by_log2e, _no_scale, _exp_not_exp2, _alpha_natural, _p_natural,
        _all_seen, _hidden_is_zero, _hidden_is_floor, _mask_upside_down, _one_for_all,
        _tile_s_maximum, _alpha_upside_down, _divided, _no_alpha_l, _no_alpha_acc, _keys_summed,
    ),
)  # fmt: skip

EXERCISES = (ROWS, FOLD)
