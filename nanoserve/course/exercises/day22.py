"""Day 22: a softmax folded tile by tile, and the kernel made of it."""

import ast
import inspect
import linecache
from functools import lru_cache

import torch

from nanoserve.course import widgets
from nanoserve.course.exercise import Case, Exercise, Wrong, close, wrong
from nanoserve.course.plots import COLOURS, figure, style
from nanoserve.course.source import source_of
from nanoserve.kernels import paged_attention, tlsim
from nanoserve.kernels.dispatch import launch, use_kernel
from nanoserve.kernels.reference import paged_attention_reference, tolerance

# the fold ----------------------------------------------------------------------------------------

ROWS, HEAD_DIM = 3, 8


def fold(m, l, acc, scores, values):  # noqa: E741
    """m, l [rows], acc [rows, head_dim], scores [rows, tile], values [tile, head_dim] -> the three
    after this tile: the largest score, the sum of exp(score - m), and that sum of values."""
    m_new = torch.maximum(m, scores.amax(-1))
    alpha = torch.exp(m - m_new)
    p = torch.exp(scores - m_new[:, None])
    return m_new, l * alpha + p.sum(-1), acc * alpha[:, None] + p @ values


def start(rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """m, l and acc before the first tile."""
    return torch.full((rows,), -torch.inf), torch.zeros(rows), torch.zeros(rows, HEAD_DIM)


def _folded(answer, scores, values, tile):
    """acc / l after all tiles."""
    m, l, acc = start()  # noqa: E741
    for first in range(0, scores.shape[1], tile):
        last = first + tile
        m, l, acc = answer(m, l, acc, scores[:, first:last], values[first:last])  # noqa: E741
    return acc / l[:, None]


def _folded_by_all(answer, scores, values):
    """acc / l for tiles of 1 key, of 2, and so on to all at once."""
    return torch.stack([_folded(answer, scores, values, 1 + n) for n in range(scores.shape[1])])


def _fold_cases() -> list[Case]:
    random = torch.Generator().manual_seed(22)
    scores = torch.randn(ROWS, 13, generator=random) * 2
    values = torch.randn(13, HEAD_DIM, generator=random)
    before = fold(*start(), scores[:, :5], values[:5])

    def one(what: str, kind: str, state: tuple, tile: slice, shift: float = 0.0) -> Case:
        args = (*state, scores[:, tile] + shift, values[tile])
        return Case(what, args, kind=kind, compare=close(1e-5, 1e-5))

    def whole(what: str, kind: str, scores: torch.Tensor, tile: int) -> Case:
        truth = (scores.double().softmax(-1) @ values.double()).float()
        args = (scores, values, tile)
        return Case(what, args, {}, kind, truth, close(1e-5, 1e-4), call=_folded)

    truth = (scores.double().softmax(-1) @ values.double()).float().expand(13, -1, -1)
    every = Case(
        "tiles of 1, 2, ... 13 keys", (scores, values), {}, "whole", truth, close(1e-5, 1e-4),
        call=_folded_by_all,
    )  # fmt: skip
    steps = torch.linspace(0, 1_200, 13).expand(ROWS, -1)
    rows = torch.tensor([[0.0], [300.0], [-300.0]])
    single = (*start(1), scores[:1, :1], values[:1])
    return [
        Case("one row, one key, nothing before it", single, kind="one", compare=close(1e-5, 1e-5)),
        one("the first tile, 5 keys for each of 3 rows", "first", start(), slice(0, 5)),
        one("a second tile, 4 keys, its scores higher by 3", "second", before, slice(5, 9), 3.0),
        one("a second tile, its scores lower by 6", "second", before, slice(5, 9), -6.0),
        one("a tile of one key", "second", before, slice(9, 10)),
        whole("13 keys in tiles of 5, the last one ragged", "whole", scores, 5),
        whole("13 keys, one at a time", "whole", scores, 1),
        every,
        whole("scores near 1,000", "large", scores + 1_000, 4),
        whole("scores that fall from 1,200 to 0", "large", scores + steps.flip(1), 4),
        whole("rows 300 apart", "large", scores + rows, 4),
    ]


def _fold_but(
    m, l, acc, scores, values, *,  # noqa: E741
    largest=None, alpha=None, l_alpha=None, acc_alpha=None, under=None, part=None, out=None,
):  # fmt: skip
    """The right fold with one step replaced: each option is a function of its inputs."""
    m_new = (largest or (lambda m, s: torch.maximum(m, s.amax(-1))))(m, scores)
    shrink = (alpha or (lambda m, m_new: torch.exp(m - m_new)))(m, m_new)
    p = torch.exp(scores - (under or (lambda m, m_new: m_new))(m, m_new)[:, None])
    l_new = l * (l_alpha or (lambda a: a))(shrink) + p.sum(-1)
    new = (part or (lambda p, s, v: p @ v))(p, scores, values)
    acc_new = acc * (acc_alpha or (lambda a: a))(shrink)[:, None] + new
    return (out or (lambda *three: three[1:]))(m, m_new, l_new, acc_new)


@wrong(
    "alpha is dropped from acc: the old values were summed under a smaller maximum, and now weigh "
    "too much. acc shrinks by alpha, as l does."
)
def _no_alpha_acc(*args):
    return _fold_but(*args, acc_alpha=torch.ones_like)


@wrong(
    "alpha is dropped from l: its old part was summed under a smaller maximum, so the sum comes "
    "out too large. l shrinks by alpha, as acc does."
)
def _no_alpha_l(*args):
    return _fold_but(*args, l_alpha=torch.ones_like)


@wrong(
    "There is no alpha at all. When the maximum grows, all that was summed under the old one must "
    "shrink by exp(m_old - m_new)."
)
def _no_alpha(*args):
    return _fold_but(*args, alpha=lambda m, m_new: torch.ones_like(m))


@wrong(
    "alpha is upside down: it is exp(m_old - m_new), at most 1. exp(m_new - m_old) makes the old "
    "part grow, and is infinite at the first tile.",
    hints="second",
)
def _alpha_upside_down(*args):
    return _fold_but(*args, alpha=lambda m, m_new: torch.exp(m_new - m))


@wrong(
    "alpha shrinks the new tile instead of the old sums. The tile's exponentials are taken against "
    "m_new already; the old sums were taken against m.",
    hints="second",
)
def _alpha_on_the_new(m, l, acc, scores, values):  # noqa: E741
    m_new = torch.maximum(m, scores.amax(-1))
    alpha = torch.exp(m - m_new)
    p = torch.exp(scores - m_new[:, None])
    return m_new, l + alpha * p.sum(-1), acc + alpha[:, None] * (p @ values)


@wrong(
    "The maximum is not carried: m is this tile's own, and a larger one from before is lost. Then "
    "alpha is above 1, and overflows when the scores fall far enough. Take the larger of both."
)
def _tile_s_maximum(*args):
    return _fold_but(*args, largest=lambda m, s: s.amax(-1))


@wrong(
    "The maximum is not carried: the m that comes back is the old one, so the next tile shrinks "
    "what is there by the wrong alpha. Return m_new.",
    hints="whole",
)
def _old_m_returned(*args):
    return _fold_but(*args, out=lambda m, m_new, l, acc: (m, l, acc))  # noqa: E741


@wrong(
    "One maximum is taken over all rows. Each query has a maximum of its own: under another row's "
    "large maximum, a row of small scores becomes 0 / 0."
)
def _one_for_all(*args):
    return _fold_but(*args, largest=lambda m, s: torch.maximum(m, s.max()))


@wrong(
    "The tile's exponentials are taken against the old maximum. It is -inf at the first tile, and "
    "too small later: use m_new."
)
def _under_the_old(*args):
    return _fold_but(*args, under=lambda m, m_new: m)


@wrong(
    "No maximum is subtracted: exp(score) itself is summed. It is right on paper, and infinite "
    "for a score above 88.",
    hints="large",
)
def _no_maximum(m, l, acc, scores, values):  # noqa: E741
    p = torch.exp(scores)
    return torch.maximum(m, scores.amax(-1)), l + p.sum(-1), acc + p @ values


@wrong(
    "There is no maximum: m comes back as it went in, and exp(score) itself is summed. That is "
    "right on paper, and infinite for a score above 88. The new m is the largest score so far.",
    hints="large",
)
def _m_untouched(m, l, acc, scores, values):  # noqa: E741
    p = torch.exp(scores)
    return m, l + p.sum(-1), acc + p @ values


@wrong(
    "p.sum() adds up all rows. Each query has an l of its own: p.sum(-1), over the keys of a row."
)
def _sum_of_all_rows(m, l, acc, scores, values):  # noqa: E741
    m_new, _, acc = fold(m, l, acc, scores, values)
    return m_new, l * torch.exp(m - m_new) + torch.exp(scores - m_new[:, None]).sum(), acc


@wrong(
    "That is the softmax of this tile alone: what l and acc held from before is lost. Shrink the "
    "old sums by alpha and add the tile to them.",
    hints="second",
)
def _this_tile_alone(m, l, acc, scores, values):  # noqa: E741
    return scores.amax(-1), torch.ones_like(l), scores.softmax(-1) @ values


@wrong(
    "l and acc hold this tile and none before it. Shrink the old sums by alpha and add the tile to "
    "them."
)
def _forgets(*args):
    return _fold_but(*args, alpha=lambda m, m_new: torch.zeros_like(m))


@wrong(
    "acc is divided by l at each tile, so the next tile divides again what was divided. The check "
    "divides once, after the last tile.",
    hints="whole",
)
def _divided(*args):
    return _fold_but(*args, out=lambda m, m_new, l, acc: (m_new, l, acc / l[:, None]))  # noqa: E741


@wrong(
    "Each tile is divided by its own sum: a softmax per tile. Every tile then weighs the same, "
    "whatever its scores.",
    hints="whole",
)
def _softmax_per_tile(*args):
    return _fold_but(*args, part=lambda p, s, v: s.softmax(-1) @ v)


@wrong("acc sums the values weighted by the scores. The weights are their exponentials, p.")
def _raw_scores(*args):
    return _fold_but(*args, part=lambda p, s, v: s @ v)


@wrong("The three are right, in another order: return m, l, acc.")
def _another_order(*args):
    return _fold_but(*args, out=lambda m, m_new, l, acc: (l, m_new, acc))  # noqa: E741


FOLD = Exercise(
    "fold",
    _fold_cases,
    hints={
        "one": (
            "One key and nothing before it: then m is its score, l is exp(0) = 1 and acc is its "
            "value. Which of your three is not?",
            "m_new is the larger of m, here -inf, and the row's largest score: scores.amax(-1). A "
            "score counts as exp(score - m_new), and what was summed before shrinks by "
            "alpha = exp(m - m_new), here 0.",
            "m_new = torch.maximum(m, scores.amax(-1)); alpha = torch.exp(m - m_new); "
            "p = torch.exp(scores - m_new[:, None])",
        ),
        "first": (
            "One key comes out right, five of them in three rows do not. Over which axis does each "
            "sum and each maximum run?",
            "Over the keys, so that every row keeps a number of its own: amax(-1), sum(-1), and "
            "p @ values for acc. m_new[:, None] stands beside a row of scores. Nothing is divided.",
            "p = torch.exp(scores - m_new[:, None]); p.sum(-1) is added to l, p @ values to acc",
        ),
        "second": (
            "l and acc were summed under the old maximum. What are they worth under the new one?",
            "exp(s - m_new) is exp(s - m) * exp(m - m_new). The second factor is alpha, the same "
            "for all that the row has summed: multiply l and acc by it, then add the tile.",
            "alpha = torch.exp(m - m_new); return m_new, l * alpha + p.sum(-1), "
            "acc * alpha[:, None] + p @ values",
        ),
        "whole": (
            "One tile comes out right. What does the next one find in m, l and acc?",
            "The check divides acc by l once, after the last tile. So neither is divided here, and "
            "m goes on as the largest of all tiles so far.",
            "alpha = torch.exp(m - m_new); return m_new, l * alpha + p.sum(-1), "
            "acc * alpha[:, None] + p @ values",
        ),
        "large": (
            "Which of your exponents can be above 0?",
            "None may be: exp(89) is infinite in float32. Subtract from each row's scores the "
            "largest of that row, in this tile and in all before.",
            "m_new = torch.maximum(m, scores.amax(-1)), one number per row, in every exponent",
        ),
    },
    solution=fold,
    wrong=(
        _no_alpha_acc, _no_alpha_l, _no_alpha, _alpha_upside_down, _alpha_on_the_new,
        _tile_s_maximum, _old_m_returned, _one_for_all, _under_the_old, _no_maximum, _m_untouched,
        _divided, _softmax_per_tile, _raw_scores, _another_order, _sum_of_all_rows,
        _this_tile_alone, _forgets,
    ),
)  # fmt: skip


# the kernel --------------------------------------------------------------------------------------


STUB = {"query", "head", "dim", "in_head", "q", "out"}  # what the head and the tail assign


@lru_cache(maxsize=64)
def _read(answer) -> tuple[tlsim.launch.Kernel, bool, bool]:
    """The answer as tlsim runs it, whether the learner wrote anything, and whether it loops."""
    kernel = tlsim.jit(answer)
    inside = list(ast.walk(ast.parse(source_of(kernel.fn))))
    named = {x.id for x in inside if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
    loops = any(isinstance(node, ast.For | ast.While) for node in inside)
    return kernel, loops or bool(named - STUB), loops


ADVICE = {  # words of an error, and what to do about it here; the table shows 160 characters
    "this condition depends on the program": (
        "a `while` ends in all programs at once, a `for` may end sooner in one: write "
        "`for start in range(0, visible, TILE)`"
    ),
    "local variable": "bind m, l and acc before the loop: names bound inside it end with the turn",
}


def _launched(answer, q, k_pool, v_pool, slots, n_rep, tile, gap=0, view=False, **options):
    """The kernel's output under tlsim, with its checks on. Without a loop it can do one tile.

    With `gap`, NaN lies between the slots and the heads of v_pool, so that its strides are not
    k_pool's. With `view`, q is a view of [1, query_len, n_q, head_dim], as attention makes it, so
    that its strides are not the output's.
    """
    kernel, written, loops = _read(answer)
    if not written:
        raise NotImplementedError("your turn")
    if not loops and len(slots) > tile:
        raise tlsim.KernelError(
            "there is no loop yet: the kernel computes one tile, and these keys take several"
        )
    q = q.transpose(1, 2).contiguous().transpose(1, 2) if view else q
    v_pool = _spaced(v_pool, gap)
    try:
        with tlsim.options(checks=True, **options):
            return launch(kernel, q, k_pool, v_pool, slots, n_rep, tile=tile)
    except (tlsim.KernelError, NameError) as error:
        for words, advice in ADVICE.items():
            if words in str(error):
                raise tlsim.KernelError(f"{advice} ({error})") from error
        raise


def _spaced(pool: torch.Tensor, gap: int) -> torch.Tensor:
    """The same numbers, with `gap` heads and channels of NaN between them."""
    num_slots, n_kv, head_dim = pool.shape
    wide = torch.full((num_slots, n_kv + gap, head_dim + gap), torch.nan, dtype=pool.dtype)
    spaced = wide[:, :n_kv, :head_dim]
    spaced.copy_(pool)
    return spaced


def a_read(
    query_len: int, kv_len: int, n_q: int = 6, n_kv: int = 2, head_dim: int = 8, num_slots: int = 50
) -> tuple:
    """(q, k_pool, v_pool, slot_mapping, n_rep), at random; position 0 lies in the last slot."""
    random = torch.Generator().manual_seed(query_len + kv_len)
    q = torch.randn(1, n_q, query_len, head_dim, generator=random)
    k_pool, v_pool = torch.randn(2, num_slots, n_kv, head_dim, generator=random)
    slots = torch.randperm(num_slots - 1, generator=random)[: kv_len - 1]
    return q, k_pool, v_pool, torch.cat([torch.tensor([num_slots - 1]), slots]), n_q // n_kv


def _kernel_cases() -> list[Case]:
    def case(what: str, kind: str, read: tuple, tile: int, **options) -> Case:
        truth = paged_attention_reference(*read)
        settings = {"tile": tile, **options}
        return Case(
            what, read, settings, kind, truth, close(*tolerance(truth.dtype)), call=_launched
        )

    poisoned = a_read(3, 13)
    owned = torch.zeros(50, dtype=torch.bool)
    owned[poisoned[3]] = True
    for pool in poisoned[1:3]:
        pool[~owned] = torch.nan
    *tensors, mapping, n_rep = a_read(2, 11)
    halves = (*(x.half() for x in tensors), mapping, n_rep)
    falling, rising, low = a_read(1, 17), a_read(1, 19), a_read(1, 9, head_dim=16)
    for read, channels in (
        (falling, torch.linspace(70, -70, 17)),
        (rising, torch.linspace(-70, 70, 19)),
        (low, -500 - torch.arange(9.0)),
    ):
        read[0].fill_(1.0)  # so a score is sqrt(head_dim) times a channel of its key
        read[1][read[3]] = channels[:, None, None].expand(-1, 2, read[0].shape[-1])
    rising[1][:, 1] += 100  # the second KV head's scores are larger by 280
    return [
        case("one query of one head: 4 keys, one tile", "tile", a_read(1, 4, 1, 1), 4),
        case("one head: 5 keys in a tile of 16", "tail", a_read(1, 5, 1, 1), 16),
        case("one head: 32 keys, four whole tiles", "loop", a_read(1, 32, 1, 1), 8),
        case("one head: 37 keys in tiles of 16", "tail", a_read(1, 37, 1, 1), 16),
        case("six query heads, two KV heads", "heads", a_read(1, 32), 16),
        case("MQA: one KV head", "heads", a_read(1, 12, n_kv=1), 4),
        case("MHA: six KV heads", "heads", a_read(1, 12, n_kv=6), 4),
        case("prefill: 5 queries, tiles of 4", "band", a_read(5, 5), 4),
        case("continuation: 3 queries, 21 keys, tiles of 8", "band", a_read(3, 21), 8),
        case("14 channels, padded to 16", "pad", a_read(2, 12, head_dim=14), 4),
        case("NaN in every other slot", "pad", poisoned, 8, poison=True),
        case("v_pool with strides of its own", "stride", a_read(2, 11), 4, gap=1),
        case("q with strides of its own, not the output's", "stride", a_read(3, 11), 4, view=True),
        case("float16", "half", halves, 4),
        case("scores that fall from 200 to -200", "large", falling, 4),
        case("scores that rise by 400", "large", rising, 4),
        case("scores of -2,000 and below", "large", low, 4),
        case("one program at a time, shuffled", "band", a_read(2, 6, 2, 1), 4, order="serial"),
    ]


def _kernel_but(why: str, *edits: tuple[str, str], hints: str | None = None) -> Wrong:
    """The package's kernel with some text replaced, as a learner might have written it."""
    source = inspect.getsource(tlsim.jit(paged_attention.paged_attention_kernel).fn)
    for old, new in edits:
        assert source.count(old) == 1, f"the kernel says {old!r} {source.count(old)} times"
        source = source.replace(old, new)
    source = source.removeprefix("@triton.jit\n")
    file = f"<day22 {abs(hash(edits))}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace = dict(vars(paged_attention))
    exec(compile(source, file, "exec"), namespace)
    return Wrong(namespace["paged_attention_kernel"], why, hints)


_KERNEL_WRONG = (
    _kernel_but(
        "The slots are loaded without the tail's mask: the last tile is ragged, and behind the "
        "last position lies other memory. mask=position < kv_len.",
        ("position, mask=held, other=0)", "position)"),
    ),
    _kernel_but(
        "The lanes behind the last key are not hidden. Their score is 0, not -inf, so each adds "
        "exp(0 - m) to the sum.",
        ('tl.where(position < visible, score, float("-inf"))', "score"),
    ),
    _kernel_but(
        "The tail is masked, and the future is not: in a prefill the first queries see keys that "
        "come after them. Hide every lane that is not position < visible.",
        ("tl.where(position < visible", "tl.where(held"),
    ),
    _kernel_but(
        "The ragged last tile is left out: the loop ends with the last whole tile. Let it run to "
        "visible, and mask.",
        ("range(0, visible, TILE)", "range(0, visible - TILE + 1, TILE)"),
    ),
    _kernel_but(
        "The loop goes on by one key, and loads TILE of them at each turn, so most keys count many "
        "times. The step is TILE.",
        ("range(0, visible, TILE)", "range(0, visible)"),
        hints="loop",
    ),
    _kernel_but(
        "Every turn loads the first tile again: start is missing from the positions.",
        ("start + tl.arange(0, TILE)", "tl.arange(0, TILE)"),
    ),
    _kernel_but(
        "The query does not see itself: position p sees p + 1 keys, 0 to p. The very first query "
        "would see none, and divide 0 by 0.",
        ("query_len + query + 1", "query_len + query"),
        hints="band",
    ),
    _kernel_but(
        "m starts at a number. Where all scores are far below it, every exp(score - m) is 0, and "
        "so is l. It starts at -inf, below any score.",
        ('m = float("-inf")', "m = 0.0"),
    ),
    _kernel_but(
        "Query head h reads KV head h % N_REP. Neighbouring heads share: head // N_REP.",
        ("head // N_REP", "head % N_REP"),
    ),
    _kernel_but(
        "visible = query + 1 is a prefill from empty. In a decode query 0 is the last token: "
        "kv_len - query_len + query + 1.",
        ("kv_len - query_len + query + 1", "query + 1"),
        hints="band",
    ),
    _kernel_but(
        "visible = kv_len lets every query see every key, those after it too. Only the last one "
        "sees all: kv_len - query_len + query + 1.",
        ("kv_len - query_len + query + 1", "kv_len"),
    ),
    _kernel_but(
        "The loop counts tiles, and start is used as the position of a key, so the tiles overlap. "
        "It goes by keys: range(0, visible, TILE).",
        ("range(0, visible, TILE)", "range(0, tl.cdiv(visible, TILE))"),
    ),
    _kernel_but(
        "A hidden key gets the score 0, so its weight is exp(0 - m). The score with weight 0 is "
        'float("-inf").',
        ('visible, score, float("-inf")', "visible, score, 0.0"),
    ),
    _kernel_but(
        "No maximum is subtracted: exp(score) itself is summed. That is right on paper, infinite "
        "for a score above 88, and 0 / 0 where all lie far below 0.",
        ("alpha = tl.exp(m - m_new)", "alpha = 1.0"),
        ("p = tl.exp(score - m_new)", "p = tl.exp(score)"),
    ),
    _kernel_but(
        "Keys and values are loaded without other: a masked lane is NaN then (on a GPU, anything), "
        "and 0 times NaN is NaN. tl.load(..., mask=mask, other=0.0).",
        ("k_head)[:, None] + dim[None, :], mask, 0.0)", "k_head)[:, None] + dim[None, :], mask)"),
        ("v_head)[:, None] + dim[None, :], mask, 0.0)", "v_head)[:, None] + dim[None, :], mask)"),
        hints="pad",
    ),
    _kernel_but(
        "The values are loaded without other: behind the last key they are NaN then (on a GPU, "
        "anything), and a weight of 0 times NaN is NaN. Add other=0.0.",
        ("v_head)[:, None] + dim[None, :], mask, 0.0)", "v_head)[:, None] + dim[None, :], mask)"),
        hints="pad",
    ),
    _kernel_but(
        "The keys are loaded without other: in the padded channels they are NaN then (on a GPU, "
        "anything), and so is the score that sums over them. Add other=0.0.",
        ("k_head)[:, None] + dim[None, :], mask, 0.0)", "k_head)[:, None] + dim[None, :], mask)"),
    ),
    _kernel_but(
        "The values of KV head 0 are mixed, whatever the head: add kv_head * v_head, as the keys "
        "have kv_head * k_head.",
        ("slot * v_slot + kv_head * v_head", "slot * v_slot"),
    ),
    _kernel_but(
        "The keys of KV head 0 are read, whatever the head: add kv_head * k_head, as the values "
        "have kv_head * v_head.",
        ("slot * k_slot + kv_head * k_head", "slot * k_slot"),
    ),
    _kernel_but(
        "Query head h reads KV head h % n_kv. Neighbours share: it is h // N_REP.",
        ("head // N_REP", "head % (tl.num_programs(1) // N_REP)"),
    ),
    _kernel_but(
        "Query head h reads KV head h, and there are fewer of those: it is h // N_REP.",
        ("head // N_REP", "head"),
    ),
    _kernel_but(
        "The KV head is left out of the keys' and values' offsets: every query head reads KV head "
        "0. Add kv_head times its stride.",
        ("slot * k_slot + kv_head * k_head", "slot * k_slot"),
        ("slot * v_slot + kv_head * v_head", "slot * v_slot"),
    ),
    _kernel_but(
        "The slot is used without its stride. A slot is n_kv * head_dim numbers long: row `slot` "
        "begins at slot * k_slot.",
        ("slot * k_slot", "slot"),
        ("slot * v_slot", "slot"),
        hints="stride",
    ),
    _kernel_but(
        "The values are loaded with the keys' strides. The two pools need not lie alike: use "
        "v_slot and v_head.",
        ("slot * v_slot + kv_head * v_head", "slot * k_slot + kv_head * k_head"),
    ),
    _kernel_but(
        "The position is used as the slot, and the slot mapping is never loaded. Key number i lies "
        "in slot slot_ptr[i].",
        ("tl.load(slot_ptr + position, mask=held, other=0)", "tl.where(held, position, 0)"),
    ),
    _kernel_but(
        "Keys and values are loaded without a mask. The padded channels belong to the next head or "
        "lie outside the pool, and the tail loads a slot of another sequence.",
        ("k_head)[:, None] + dim[None, :], mask, 0.0)", "k_head)[:, None] + dim[None, :])"),
        ("v_head)[:, None] + dim[None, :], mask, 0.0)", "v_head)[:, None] + dim[None, :])"),
    ),
    _kernel_but(
        "The mask of the keys and values covers the channels and not the tail. The tail's slot is "
        "0, which may hold NaN, and a weight of 0 times NaN is NaN.",
        ("held[:, None] & in_head[None, :]", "in_head[None, :]"),
    ),
    _kernel_but(
        "alpha is upside down: it is exp(m - m_new), at most 1. exp(m_new - m) is infinite at the "
        "first tile, where m is -inf, and infinity times 0 is NaN.",
        ("alpha = tl.exp(m - m_new)", "alpha = tl.exp(m_new - m)"),
        hints="loop",
    ),
    _kernel_but(
        "The output is stored with q's strides. The two need not lie alike, since q may be a view: "
        "use out_head and out_seq.",
        ("head * out_head + query * out_seq", "head * q_head + query * q_seq"),
        hints="stride",
    ),
    _kernel_but(
        "alpha is dropped from acc: the old values were summed under a smaller maximum, and weigh "
        "too much.",
        ("acc * alpha +", "acc +"),
    ),
    _kernel_but(
        "alpha is dropped from l: its old part was summed under a smaller maximum.",
        ("l * alpha +", "l +"),
    ),
    _kernel_but(
        "The maximum is not carried: m_new is this tile's own, alpha grows above 1, and where "
        "scores fall far enough it overflows. Take the larger of m and the tile's.",
        ("tl.maximum(m, tl.max(score, axis=0))", "tl.max(score, axis=0)"),
    ),
    _kernel_but(
        "The maximum is not carried: m is never set to m_new, so alpha is exp(-inf) = 0 at every "
        "turn, and only the last tile is left.",
        ("        m = m_new\n", ""),
    ),
    _kernel_but(
        "acc is divided by l inside the loop, and the next turn adds to an acc that is divided "
        "already. Divide once, at the end.",
        ("        m = m_new\n", "        m = m_new\n        acc = acc / l\n"),
        hints="loop",
    ),
    _kernel_but(
        "The scores are multiplied by scale twice: q is scaled already, in the head of the kernel.",
        ("k.to(tl.float32), axis=1)", "k.to(tl.float32), axis=1) * scale"),
        hints=(
            "Which lines multiply by scale? Read the head of the kernel, too.",
            "The head computes q.to(tl.float32) * scale. So the sum of q times k is the score.",
            "score = tl.sum(q[None, :] * k.to(tl.float32), axis=1)",
        ),
    ),
    _kernel_but(
        "acc sums the keys. The weights p belong to the values: sum p times v.",
        ("tl.sum(p[:, None] * v.to", "tl.sum(p[:, None] * k.to"),
    ),
)  # fmt: skip

KERNEL = Exercise(
    "paged_attention_kernel",
    _kernel_cases,
    runs_in=lambda: use_kernel("day22"),  # Day 31 gives the engine another kernel
    hints={
        "tile": (
            "One tile, all of it in use. What comes first, and what does each line need from the "
            "one before, from a key's position to its score?",
            "position, then its slot, then k and v [TILE, BLOCK_D], then one score for each key. "
            "Row `slot` of this head begins at slot * k_slot + kv_head * k_head; with [:, None] it "
            "stands up, and dim[None, :] goes along it. With one query, visible is kv_len.",
            "k = tl.load(k_ptr + (slot * k_slot + kv_head * k_head)[:, None] + dim[None, :], mask, "
            "0.0); score = tl.sum(q[None, :] * k.to(tl.float32), axis=1)",
        ),
        "loop": (
            "One tile comes out right. What does the second one find in m, l and acc, and where "
            "does it begin?",
            "At start, which goes up by TILE. Then your fold from above, for one row: m_new from "
            "tl.maximum and tl.max, alpha and p from tl.exp. l and acc shrink by alpha before the "
            "tile is added, and m_new becomes m.",
            "m_new = tl.maximum(m, tl.max(score, axis=0)); alpha = tl.exp(m - m_new); l = l * "
            "alpha + tl.sum(p, axis=0); acc likewise, with p[:, None] * v; m = m_new",
        ),
        "tail": (
            "The last tile reaches behind the last key. What do those lanes load, and which weight "
            "do they get?",
            "Three places: held = position < kv_len masks the load of the slots; held and "
            "in_head together mask the keys and values; and the score of a lane that is not "
            "position < visible becomes -inf, so that its exp is 0.",
            'score = tl.where(position < visible, score, float("-inf")), and every load with a '
            "mask and other=0",
        ),
        "band": (
            "How far does query number `query` see? The last one sees all kv_len keys.",
            "It sees visible = kv_len - query_len + query + 1 keys, its own the last. The loop "
            "ends there, and in the last tile the lanes behind it get -inf.",
            "for start in range(0, visible, TILE): position = start + tl.arange(0, TILE); ... "
            'score = tl.where(position < visible, score, float("-inf"))',
        ),
        "heads": (
            "Which KV head does query head `head` read?",
            "Neighbours share: N_REP query heads in a row read one KV head. It is a part of both "
            "offsets, the keys' and the values'.",
            "kv_head = head // N_REP; the rows begin at slot * k_slot + kv_head * k_head",
        ),
        "stride": (
            "How far apart are two slots of k_pool? And of v_pool?",
            "k_slot and v_slot elements; the pools need not be laid out alike. Each has its own "
            "two strides: one for the slot, one for the head.",
            "k at slot * k_slot + kv_head * k_head, v at slot * v_slot + kv_head * v_head, both "
            "with [:, None] + dim[None, :]",
        ),
        "half": (
            "In which dtype does each of your blocks live, when the tensors are float16?",
            "The head of the kernel casts q to float32. tl.exp exists for float32 alone, and what "
            "a loop carries keeps its dtype: m, l and acc begin in float32.",
            "acc = tl.zeros((BLOCK_D,), tl.float32); k.to(tl.float32) and v.to(tl.float32) where "
            "they are multiplied",
        ),
        "pad": (
            "Which lanes of a block [TILE, BLOCK_D] are this head's keys, and which are not?",
            "The lanes of a held position and of a channel below HEAD_DIM. The others may belong "
            "to another head or sequence, or lie outside: load 0 for them.",
            "mask = held[:, None] & in_head[None, :], as the second argument of both loads, with "
            "0.0 as the third",
        ),
        "large": (
            "Which of your exponents can be above 0?",
            "m begins at -inf, and m_new is the larger of m and of the tile's largest score; alpha "
            "is exp(m - m_new), p is exp(score - m_new), and m = m_new ends the turn.",
            "m_new = tl.maximum(m, tl.max(score, axis=0)); alpha = tl.exp(m - m_new)",
        ),
    },
    target="nanoserve.kernels.paged_attention:paged_attention_kernel",
    wrong=_KERNEL_WRONG,
)

EXERCISES = (FOLD, KERNEL)


# the stepper -------------------------------------------------------------------------------------

SCORES = {
    "as they come": (1.0, 3.0, 0.0, 2.0, 2.0, 5.0, 1.0, 4.0, 3.0, 0.0, 2.0, 1.0),
    "rising": (0.0, 0.5, 1.0, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0),
    "falling": (5.0, 4.5, 4.0, 3.5, 3.0, 2.5, 2.0, 1.5, 1.0, 1.0, 0.5, 0.0),
}
VALUES = (0.2, 0.9, 0.5, 0.1, 0.8, 0.6, 0.3, 0.7, 0.4, 1.0, 0.2, 0.5)  # one channel will do


@style()
def _draw_stepper(tiles: int, tile: int, scores: str):
    """Scores and their maximum at the left; at the right the weights that the numbers mean."""
    s, v = torch.tensor(SCORES[scores]), torch.tensor(VALUES)
    m, l, acc, alpha = torch.tensor(-torch.inf), torch.tensor(0.0), torch.tensor(0.0), 0.0  # noqa: E741
    seen = min(tiles * tile, len(s))
    for first in range(0, seen, tile):
        part = slice(first, first + tile)
        m_new = torch.maximum(m, s[part].max())
        alpha, p = float(torch.exp(m - m_new)), torch.exp(s[part] - m_new)
        m, l, acc = m_new, l * alpha + p.sum(), acc * alpha + p @ v[part]  # noqa: E741
    truth, keys = s.softmax(0), list(range(len(s)))
    kept = torch.exp(s - m) / l if seen else 0 * s  # what the three stand for, had it been kept
    weights = [float(w) if i < seen else 0.0 for i, w in enumerate(kept)]
    fig, (left, right) = figure(height=4.1, xlabel="key", panels=2)
    first = max(0, (seen - 1) // tile * tile)
    for i, score in enumerate(s.tolist()):
        colour = COLOURS["tlsim"] if i < seen else COLOURS["grid"]
        left.bar(i, score, color=colour, alpha=0.55 if i < first else 1)
    for edge in range(tile, len(s), tile):
        left.axvline(edge - 0.5, color=COLOURS["muted"], linewidth=0.8, linestyle=":")
    right.bar(keys, weights, color=COLOURS["tlsim"])
    outline = {"edgecolor": COLOURS["oracle"], "linestyle": "--", "linewidth": 1.3}
    right.bar(keys, truth.tolist(), fill=False, **outline)
    top = 1.12 * max(*weights, float(truth.max()))
    right.set(ylabel="weight", ylim=(0, top))
    left.set(xlabel="key   (acc: one channel shown)", ylabel="score", ylim=(0, 6.3))
    numbers = "nothing folded yet"
    if seen:
        left.axhline(float(m), color=COLOURS["ink"], linewidth=1.2)
        left.text(-0.6, float(m) + 0.12, f"m = {m:.1f}", color=COLOURS["ink"], weight="bold")
        numbers = f"alpha {alpha:.2f}   m {m:.1f}   l {l:.3f}   acc {acc:.3f}"
    result = f"acc / l = {acc / l:.3f}" if seen else ""
    left.set_title(numbers, fontsize=10)
    right.set_title(f"{result}   softmax of all: {truth @ v:.3f}", fontsize=10)
    for ax in (left, right):
        ax.set_xticks(keys[::2])
        ax.grid(axis="x", visible=False)
    return fig


def _stepper(tiles: int = 2, tile: int = 4, scores: str = "as they come"):
    """Tiles folded one after another; dashed, the softmax of all scores at once."""
    return widgets.figure_widget(
        _draw_stepper,
        tiles=widgets.slider(
            0, lambda v: -(-len(VALUES) // v["tile"]), tiles, label="tiles folded"
        ),
        tile=widgets.choice([1, 2, 3, 4, 6], tile, label="keys in a tile"),
        scores=widgets.choice(list(SCORES), scores),
    )


WIDGETS = {"online-softmax": _stepper}
