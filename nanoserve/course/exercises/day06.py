"""Day 6: which query head reads which KV head, the causal mask, and attention itself."""

import torch

from nanoserve.course import widgets
from nanoserve.course.exercise import Case, Exercise, close, wrong
from nanoserve.course.plots import COLOURS, figure

N_Q, N_KV, SEQ, DIM = 6, 2, 5, 8


def _random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# group_queries -----------------------------------------------------------------------------------


def group_queries(q: torch.Tensor, n_kv: int) -> torch.Tensor:
    """Sort query heads by the KV head they read: [batch, n_q, seq, d] -> [batch, n_kv, n_rep,
    seq, d], a view."""
    return q.unflatten(1, (n_kv, -1))


@wrong(
    "Head h is put into group h % n_kv. Neighbours belong together: the group of h is h // n_rep, "
    "so heads 0, 1 and 2 share one KV head."
)
def _modulo(q, n_kv):
    return q.unflatten(1, (-1, n_kv)).transpose(1, 2)


@wrong(
    "The two new axes have changed places: n_kv must come first, then the n_rep heads of a group."
)
def _swapped(q, n_kv):
    return q.unflatten(1, (n_kv, -1)).transpose(1, 2)


@wrong("The two sizes are swapped: cut axis 1 into n_kv groups of n_rep heads.")
def _sizes_swapped(q, n_kv):
    return q.unflatten(1, (-1, n_kv))


@wrong("The heads are right, but copied. Splitting an axis needs no copy: `unflatten` or `view`.")
def _copied(q, n_kv):
    return q.unflatten(1, (n_kv, -1)).clone()


@wrong("Each head is repeated n_rep times. K and V are shared; no query is needed twice.")
def _repeated(q, n_kv):
    n_rep = q.shape[1] // n_kv
    return q.unsqueeze(2).expand(-1, -1, n_rep, -1, -1)


@wrong("The positions are cut into groups, not the heads: split axis 1, which counts the heads.")
def _positions(q, n_kv):
    batch, n_q, seq, dim = q.shape
    return q.transpose(1, 2).reshape(batch, n_kv, n_q // n_kv, seq, dim)


@wrong("Heads and head_dim are mixed: the numbers of one head must stay together, as last axis.")
def _mixed(q, n_kv):
    batch, n_q, seq, dim = q.shape
    return q.transpose(1, 3).reshape(batch, n_kv, n_q // n_kv, seq, dim)


def _and_is_view(answer, q, n_kv):
    out = answer(q, n_kv)
    if not isinstance(out, torch.Tensor):
        return out
    same = out.untyped_storage().data_ptr() == q.untyped_storage().data_ptr()
    return "a view of q" if same else "a copy"


def _group_cases() -> list[Case]:
    numbered = torch.arange(6.0).view(1, 6, 1, 1).expand(1, 6, 1, 1).clone()
    apart = _random(2, 2, SEQ, N_Q * DIM).unflatten(-1, (N_Q, DIM)).transpose(1, 2)
    return [
        Case("heads that are their own number, 2 KV heads", (numbered, 2), kind="order"),
        Case("6 query heads, 2 KV heads", (_random(1, 2, N_Q, SEQ, DIM), N_KV), kind="order"),
        Case("as many KV heads as query heads", (_random(3, 1, 3, SEQ, DIM), 3), kind="order"),
        Case("one KV head for all", (_random(4, 1, 3, SEQ, DIM), 1), kind="order"),
        Case("is it a view?", (_random(5, 2, N_Q, SEQ, DIM), N_KV), kind="view", call=_and_is_view),
        Case("heads cut from a projection", (apart, N_KV), kind="view", call=_and_is_view),
    ]


# causal_mask -------------------------------------------------------------------------------------


def causal_mask(seq: int) -> torch.Tensor:
    """True where query i may not see key j, that is where j > i: bool [seq, seq]."""
    return torch.ones(seq, seq, dtype=torch.bool).triu(1)


@wrong("A token may see itself: the diagonal must be False. `triu(1)` begins one above it.")
def _hides_itself(seq):
    return torch.ones(seq, seq, dtype=torch.bool).triu()


@wrong("It hides the past and shows the future. Rows are queries: row 0 may see key 0 alone.")
def _hides_the_past(seq):
    return torch.ones(seq, seq, dtype=torch.bool).tril(-1)


@wrong("It is True where a query may look. Here True means hidden, as `masked_fill` wants it.")
def _inverted(seq):
    return torch.ones(seq, seq, dtype=torch.bool).tril()


@wrong("Each query sees one token too many: the token that it should predict.")
def _one_ahead(seq):
    return torch.ones(seq, seq, dtype=torch.bool).triu(2)


@wrong("It holds numbers to be added to the scores. Return True or False: dtype torch.bool.")
def _numbers(seq):
    return torch.full((seq, seq), -torch.inf).triu(1)


@wrong("A row and a column too many: query and key both count seq positions.")
def _too_large(seq):
    return torch.ones(seq + 1, seq + 1, dtype=torch.bool).triu(1)


@wrong("Only the very next token is hidden: hide all later tokens as well.")
def _next_only(seq):
    return torch.ones(seq, seq, dtype=torch.bool).triu(1).tril(1)


def _mask_cases() -> list[Case]:
    return [
        Case("5 tokens", (5,), kind="mask"),
        Case("2 tokens", (2,), kind="mask"),
        Case("a single token sees itself", (1,), kind="mask"),
    ]


# sdpa --------------------------------------------------------------------------------------------


def _sdpa(
    q,
    k,
    v,
    scale=None,
    *,
    kv_head=lambda h, n_rep, n_kv: h // n_rep,
    divide=None,
    axis=-1,
    first_hidden=None,
    mask_late=False,
    own_scale=True,
    square=False,
    turned=False,
    softmax=lambda scores, axis: scores.softmax(axis),
):
    """Attention head by head, with the places where people go wrong as options."""
    (n_q, query_len, dim), (n_kv, kv_len) = q.shape[1:], k.shape[1:3]
    if scale is None or not own_scale:
        scale = dim**-0.5 if divide is None else divide(dim)
    edge = 1 + kv_len - query_len if first_hidden is None else first_hidden
    hidden = torch.ones(query_len, query_len if square else kv_len, dtype=torch.bool).triu(edge)
    hidden = ~hidden if turned else hidden
    heads = []
    for h in range(n_q):
        g = kv_head(h, n_q // n_kv, n_kv)
        scores = (q[:, h] @ k[:, g].mT).float() * scale
        if not mask_late:
            scores = scores.masked_fill(hidden, -torch.inf)
        weights = softmax(scores, axis)
        if mask_late:
            weights = weights.masked_fill(hidden, 0)
        heads.append(weights.to(v.dtype) @ v[:, g])
    return torch.stack(heads, 1)


@wrong(
    "Nothing is hidden: each token attends to later tokens too.",
    hints="mask",
)
def _no_mask(q, k, v, scale=None):
    return _sdpa(q, k, v, scale, first_hidden=10_000)


@wrong(
    "Query head h reads KV head h % n_kv. It must read KV head h // n_rep.",
    hints="heads",
)
def _wrong_heads(q, k, v, scale=None):
    return _sdpa(q, k, v, scale, kv_head=lambda h, n_rep, n_kv: h % n_kv)


@wrong(
    "All query heads read KV head 0, and the other KV heads are not used.",
    hints="heads",
)
def _first_head(q, k, v, scale=None):
    return _sdpa(q, k, v, scale, kv_head=lambda h, n_rep, n_kv: 0)


@wrong(
    "The scores are not scaled: multiply them by head_dim ** -0.5 before the softmax.",
    hints="scale",
)
def _no_scale(q, k, v, scale=None):
    return _sdpa(q, k, v, scale, divide=lambda dim: 1.0)


@wrong(
    "The scores are divided by head_dim. Divide by its square root: head_dim ** -0.5.",
    hints="scale",
)
def _no_root(q, k, v, scale=None):
    return _sdpa(q, k, v, scale, divide=lambda dim: 1 / dim)


@wrong(
    "The scores are divided by 8 whatever comes in. Take head_dim from q: q.shape[-1] ** -0.5.",
    hints="scale",
)
def _always_8(q, k, v, scale=None):
    return _sdpa(q, k, v, scale, divide=lambda dim: 1 / 8)


@wrong(
    "The scores are multiplied by the root of head_dim. Divide by it: head_dim ** -0.5.",
    hints="scale",
)
def _root_multiplied(q, k, v, scale=None):
    return _sdpa(q, k, v, scale, divide=lambda dim: dim**0.5)


@wrong(
    "A scale that is handed in is multiplied by head_dim ** -0.5 too. Use the scale alone.",
    hints="scale",
)
def _both_scales(q, k, v, scale=None):
    own = q.shape[-1] ** -0.5
    return _sdpa(q, k, v, own if scale is None else own * scale)


@wrong(
    "The mask is upside down: it hides the past and shows the future. Hide the keys j > i.",
    hints="mask",
)
def _mask_turned(q, k, v, scale=None):
    return _sdpa(q, k, v, scale, turned=True)


@wrong(
    "exp of a large score is infinite, and infinity divided by infinity is NaN. torch.softmax "
    "first subtracts the maximum of each row.",
    hints="large",
)
def _no_maximum(q, k, v, scale=None):
    def naive(scores, axis):
        return scores.exp() / scores.exp().sum(axis, keepdim=True)

    return _sdpa(q, k, v, scale, softmax=naive)


@wrong(
    "A scale that is handed in is ignored. Use head_dim ** -0.5 only if scale is None.",
    hints="scale",
)
def _ignores_scale(q, k, v, scale=None):
    return _sdpa(q, k, v, scale, own_scale=False)


@wrong(
    "The future is set to 0 after the softmax, so a query's weights no longer add up to 1. Fill "
    "the scores with -inf before it.",
    hints="mask",
)
def _late_mask(q, k, v, scale=None):
    return _sdpa(q, k, v, scale, mask_late=True)


@wrong(
    "The softmax runs over the queries. The weights of a query over the keys add up to 1: dim=-1.",
    hints="sum",
)
def _wrong_axis(q, k, v, scale=None):
    return _sdpa(q, k, v, scale, axis=-2)


@wrong(
    "The mask starts in the upper left corner though there are more keys than queries. The "
    "queries are the last positions: a single one sees every key.",
    hints="newest",
)
def _upper_left(q, k, v, scale=None):
    return _sdpa(q, k, v, scale, first_hidden=1)


@wrong(
    "The mask is a square, query_len by query_len. It needs a column for each of the "
    "kv_len keys, and the queries are the last of these positions.",
    hints="newest",
)
def _square_mask(q, k, v, scale=None):
    return _sdpa(q, k, v, scale, first_hidden=1, square=True)


@wrong(
    "Here no token sees itself, and the first token sees nothing: hide j > i, not j >= i.",
    hints="mask",
)
def _hides_diagonal(q, k, v, scale=None):
    return _sdpa(q, k, v, scale, first_hidden=k.shape[2] - q.shape[2])


@wrong(
    "The result is always float32. Return it in the dtype of q. Only the softmax is float32.",
    hints="dtype",
)
def _stays_wide(q, k, v, scale=None):
    return _sdpa(q.float(), k.float(), v.float(), scale)


@wrong(
    "The groups are still separate: flatten n_kv and n_rep into one axis of n_q heads.",
    hints="sum",
)
def _grouped(q, k, v, scale=None):
    return _sdpa(q, k, v, scale).unflatten(1, (k.shape[1], -1))


@wrong(
    "Queries and keys have different numbers of heads, so they do not broadcast: group the queries "
    "by their KV head first.",
    hints="heads",
)
def _ungrouped(q, k, v, scale=None):
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2])
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


def _sdpa_cases() -> list[Case]:
    """Heads, mask and scale each have cases of their own, in which the other two do not show."""

    def case(what, q, k, v, kind, scale=(), atol=1e-5, rtol=1e-4):
        return Case(what, (q, k, v, *scale), kind=kind, compare=close(atol, rtol))

    q, k, v = (_random(i, 2, n, SEQ, DIM) for i, n in enumerate((N_Q, N_KV, N_KV)))
    numbered = torch.arange(2.0).view(1, 2, 1, 1).expand(1, 2, SEQ, DIM).clone()
    alike = torch.zeros(1, 2, SEQ, DIM)
    wide = [_random(10 + i, 1, 2, n, 12) for i, n in enumerate((1, SEQ, SEQ))]  # head_dim 12
    poked_k, poked_v = k.clone(), v.clone()
    poked_k[:, :, 3], poked_v[:, :, 3] = 5.0, 1000.0
    longer = _random(3, 2, N_KV, 10, DIM), _random(4, 2, N_KV, 10, DIM)
    many = [_random(20 + i, 1, n, m, 4) for i, n, m in ((0, 2, 129), (1, 1, 200), (2, 1, 200))]
    half = (2 * q).half(), (2 * k).half(), v.half()
    return [
        case("values that are their KV head's number", q[:1], k[:1], numbered, "heads"),
        case("queries of zeros: the mean of what a token may see", alike, k[:1], v[:1], "mask"),
        case("one query, 2 heads of 12, 2 KV heads", *wide, "scale"),
        case("the same with a scale of 0.1", *wide, "scale", (0.1,)),
        case("6 query heads, 2 KV heads, 5 tokens", q, k, v, "sum"),
        case("token 3 made huge: tokens 0 to 2 do not notice", q, poked_k, poked_v, "mask"),
        case("one query, the newest of 5 tokens", q[:, :, -1:], k, v, "newest"),
        case("3 queries, the newest of 10 tokens", q[:, :, -3:], *longer, "newest"),
        case("scores in the hundreds", 60 * q, k, v, "large", rtol=1e-3, atol=1e-3),
        case("129 queries, the newest of 200 tokens", *many, "newest"),
        case("float16 in, float16 out", *half, "dtype", atol=5e-3, rtol=1e-2),
        case("one query in float16", half[0][:, :, -1:], *half[1:], "dtype", atol=5e-3, rtol=1e-2),
    ]


EXERCISES = (
    Exercise(
        "group_queries",
        _group_cases,
        hints={
            "order": (
                "Write down for n_q = 6 and n_kv = 2 which KV head each of the query heads 0 to 5 "
                "reads. Which heads are neighbours?",
                "The heads of a group are neighbours, so nothing has to be moved: axis 1 is cut "
                "into n_kv runs of n_rep heads.",
                "q.unflatten(1, (n_kv, n_rep)), with n_rep = q.shape[1] // n_kv.",
            ),
            "view": (
                "Which calls copy? `repeat`, `clone`, `stack` and `contiguous` do, `reshape` "
                "sometimes.",
                "Splitting one axis into two is only another way of counting; `view` and "
                "`unflatten` do it on any tensor.",
                "q.unflatten(1, (n_kv, n_rep)) and nothing after it.",
            ),
        },
        solution=group_queries,
        wrong=(_modulo, _swapped, _copied, _repeated, _positions, _mixed, _sizes_swapped),
    ),
    Exercise(
        "causal_mask",
        _mask_cases,
        hints={
            "mask": (
                "Draw it for 3 tokens, a row for each query. What may query 0 see? And query 2?",
                "Hidden is what lies right of the diagonal, and the diagonal itself stays visible.",
                "torch.ones(seq, seq, dtype=torch.bool).triu(1)",
            ),
        },
        solution=causal_mask,
        wrong=(_hides_itself, _hides_the_past, _inverted, _one_ahead, _numbers, _next_only,
               _too_large),
    ),
    Exercise(
        "sdpa",
        _sdpa_cases,
        hints={
            "sum": (
                "Five steps in this order: product with the keys, scale, mask, softmax, product "
                "with the values. Print the shape after each.",
                "scores = queries @ keys.transpose(-1, -2), times the scale; the softmax runs over "
                "the last axis; then weights @ values.",
                "With q grouped as [batch, n_kv, n_rep, seq, d] and k.unsqueeze(2), k and v "
                "broadcast over the group; flatten(1, 2) at the end gives n_q heads back.",
            ),
            "heads": (
                "Here each result says which KV head it came from. Which heads should say 1?",
                "The query heads 0, 1, 2 read KV head 0 and the heads 3, 4, 5 read KV head 1: your "
                "group_queries sorts them like that.",
                "q = group_queries(q, k.shape[1]), then multiply with k.unsqueeze(2) and "
                "v.unsqueeze(2).",
            ),
            "mask": (
                "Which scores must never count for query i? And does query i see key i?",
                "Fill the scores of keys j > i with -torch.inf before the softmax over the keys.",
                "scores.masked_fill(causal_mask(kv_len), -torch.inf), where there are as many "
                "queries as keys.",
            ),
            "newest": (
                "If there is one query and five keys, at which position does that query stand?",
                "The queries are the last query_len positions: query i is position "
                "kv_len - query_len + i, and it sees every key up to that one.",
                "future = torch.ones(query_len, kv_len, dtype=torch.bool)"
                ".triu(1 + kv_len - query_len), then scores.masked_fill(future, -torch.inf).",
            ),
            "scale": (
                "What are the scores multiplied by if no scale is handed in? And if one is?",
                "The default is head_dim ** -0.5, with head_dim from q. A scale that is handed in "
                "takes its place.",
                "scale = q.shape[-1] ** -0.5 if scale is None else scale",
            ),
            "large": (
                "exp(100) is more than float32 can hold. What does your softmax do there?",
                "Subtract the largest score of a row from all its scores. No share changes, and "
                "then no exponent is above 0. torch.softmax does that.",
                "torch.softmax(scores, dim=-1, dtype=torch.float32)",
            ),
            "dtype": (
                "Which dtype has your result, and which have the weights after the softmax?",
                "The softmax is taken in float32, and its result goes back to the dtype of v "
                "before the last product.",
                "torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype) @ v",
            ),
        },
        target="nanoserve.layers:sdpa",
        wrong=(
            _no_mask, _wrong_heads, _first_head, _no_scale, _no_root, _always_8, _root_multiplied,
            _both_scales, _ignores_scale, _mask_turned, _late_mask, _wrong_axis, _upper_left,
            _square_mask, _hides_diagonal, _no_maximum, _stays_wide, _grouped, _ungrouped,
        ),
    ),
)  # fmt: skip


def draw_pattern(ax, weights: torch.Tensor, words: list[str]) -> None:
    """One head's weights [seq, seq] as a square: a row for each query, dark where it looks."""
    ax.imshow(weights.numpy(), cmap="Greys", vmin=0, vmax=1)
    ax.set_xticks(range(len(words)), words, rotation=90, fontsize=8)
    ax.set_yticks(range(len(words)), words, fontsize=8)
    ax.grid(False)


def _pattern(weights: torch.Tensor, words: list[str]):
    """A widget over the weights [layers, heads, seq, seq] that the notebook computed."""

    def draw(layer: int, head: int):
        title = f"layer {layer}, query head {head}, KV head {head // 3}"
        fig, ax = figure(width=6.2, height=5.4, title=title)
        ax.set(xlabel="key", ylabel="query")
        draw_pattern(ax, weights[layer, head], words)
        to_first = float(weights[layer, head, 1:, 0].mean())
        ax.text(
            len(words) - 1, 1, f"{to_first:.0%} goes to the first token",
            ha="right", color=COLOURS["ink"],
        )  # fmt: skip
        return fig

    layers, heads = weights.shape[:2]
    return widgets.figure_widget(
        draw, layer=widgets.slider(0, layers - 1, 16), head=widgets.slider(0, heads - 1, 0)
    )


WIDGETS = {"pattern": _pattern}
