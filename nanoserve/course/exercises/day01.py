"""Day 1: count the work of one token."""

from dataclasses import replace

from nanoserve.config import ModelConfig
from nanoserve.course import widgets
from nanoserve.course.exercise import Case, Exercise, wrong
from nanoserve.course.exercises.day00 import whole
from nanoserve.course.plots import COLOURS, figure

SMOLLM2 = ModelConfig(
    family="llama", vocab_size=49_152, hidden_size=576, intermediate_size=1_536, num_layers=30,
    n_q=9, n_kv=3, head_dim=64, context=8_192, norm_eps=1e-5, rope_theta=100_000.0,
    rope_scaling=None, qkv_bias=False, o_bias=False, qk_norm=False, tied_head=True,
    eos_ids=(2,), bos_id=1,
)  # fmt: skip
TINY = replace(
    SMOLLM2, vocab_size=11, hidden_size=10, intermediate_size=7, num_layers=3,
    n_q=6, n_kv=2, head_dim=4,
)  # fmt: skip


def work_of_a_token(config: ModelConfig, length: int) -> int:
    """Floating-point operations that choose the next token after `length`, nothing remembered."""
    q_size, kv_size = config.n_q * config.head_dim, config.n_kv * config.head_dim
    attention = config.hidden_size * (2 * q_size + 2 * kv_size)  # q and o, k and v
    mlp = 3 * config.hidden_size * config.intermediate_size
    pairs = length * (length + 1) // 2
    layer = 2 * length * (attention + mlp) + 4 * pairs * q_size
    return config.num_layers * layer + 2 * config.hidden_size * config.vocab_size


def _parts(config: ModelConfig, length: int) -> dict[str, int]:
    """The right answer's terms, for wrong answers to leave out or get wrong."""
    hidden, q_size = config.hidden_size, config.n_q * config.head_dim
    return {
        "q and o": 4 * length * hidden * q_size * config.num_layers,
        "k and v": 4 * length * hidden * config.n_kv * config.head_dim * config.num_layers,
        "mlp": 6 * length * hidden * config.intermediate_size * config.num_layers,
        "scores": 2 * length * (length + 1) * q_size * config.num_layers,
        "head": 2 * hidden * config.vocab_size,
    }


@wrong(
    "Half of the right number: a weight costs 2 operations, a multiplication and an addition.",
    hints="linear",
)
def _one_operation(config, length):
    return work_of_a_token(config, length) // 2


@wrong(
    "The head is counted at every position. Only the last one chooses the next token, so the "
    "vocabulary is multiplied once.",
    hints="linear",
)
def _head_everywhere(config, length):
    return work_of_a_token(config, length) + (length - 1) * _parts(config, length)["head"]


@wrong(
    "k and v are counted as wide as q. They have only n_kv heads: n_kv * head_dim rows each.",
    hints="linear",
)
def _all_heads(config, length):
    parts = _parts(config, length)
    extra = parts["k and v"] * config.n_rep - parts["k and v"]
    return work_of_a_token(config, length) + extra


@wrong(
    "Every query is paired with every key. Query i may look at keys 0 to i only: "
    "length * (length + 1) / 2 pairs, not length * length.",
    hints="pairs",
)
def _square(config, length):
    square = 4 * length * length * config.n_q * config.head_dim * config.num_layers
    return work_of_a_token(config, length) - _parts(config, length)["scores"] + square


@wrong(
    "Attention has four matrices, q, k, v and o. o, which is as large as q, was left out.",
    hints="linear",
)
def _no_o(config, length):
    return work_of_a_token(config, length) - _parts(config, length)["q and o"] // 2


@wrong(
    "Attention has four matrices, q, k, v and o. Of k and v only one was counted.",
    hints="linear",
)
def _k_or_v(config, length):
    return work_of_a_token(config, length) - _parts(config, length)["k and v"] // 2


@wrong(
    "The MLP has three matrices, gate, up and down. Two were counted.",
    hints="linear",
)
def _two_matrices(config, length):
    return work_of_a_token(config, length) - _parts(config, length)["mlp"] // 3


@wrong(
    "Only the last position is counted, as if the others were remembered. Without a cache every "
    "position is computed again."
)
def _only_the_last(config, length):
    parts = _parts(config, length)
    linear = parts["q and o"] + parts["k and v"] + parts["mlp"]
    last = 4 * length * config.n_q * config.head_dim * config.num_layers
    return linear // length + last + parts["head"]


@wrong(
    "A pair of positions costs two products, the score and the weighted sum of values: "
    "4 * head_dim operations per head, not 2.",
    hints="pairs",
)
def _scores_only(config, length):
    return work_of_a_token(config, length) - _parts(config, length)["scores"] // 2


@wrong(
    "q and o are counted as hidden_size by hidden_size. They are hidden_size by n_q * head_dim, "
    "which is another number in many models.",
    hints="linear",
)
def _square_matrices(config, length):
    extra = config.hidden_size - config.n_q * config.head_dim
    return work_of_a_token(config, length) + 4 * length * config.hidden_size * extra * (
        config.num_layers
    )


@wrong(
    "The pairs of attention are left out: scores and shares cost 4 * head_dim per pair and head.",
    hints="pairs",
)
def _no_pairs(config, length):
    return work_of_a_token(config, length) - _parts(config, length)["scores"]


@wrong(
    "Pairs are counted for the KV heads only. Every query head has its own: n_q of them.",
    hints="pairs",
)
def _kv_pairs(config, length):
    scores = _parts(config, length)["scores"]
    return work_of_a_token(config, length) - scores + scores // config.n_rep


@wrong(
    "No position is paired with itself here. Query i looks at i + 1 keys, its own included.",
    hints="pairs",
)
def _no_diagonal(config, length):
    scores = 2 * length * (length - 1) * config.n_q * config.head_dim * config.num_layers
    return work_of_a_token(config, length) - _parts(config, length)["scores"] + scores


@wrong(
    "The output head is left out. Count hidden_size by vocab_size, once.",
    hints="linear",
)
def _no_head(config, length):
    return work_of_a_token(config, length) - _parts(config, length)["head"]


@wrong(
    "The output head is counted in every block. Count it once, after the last block.",
    hints="linear",
)
def _head_in_each_block(config, length):
    head = _parts(config, length)["head"]
    return work_of_a_token(config, length) + (config.num_layers - 1) * head


@wrong(
    "Only one block is counted. The model has num_layers blocks.",
    hints="linear",
)
def _one_block(config, length):
    return work_of_a_token(replace(config, num_layers=1), length)


@wrong(
    "The embedding is counted as a product. It is a table: looking up a row multiplies nothing. "
    "Only the output head multiplies by hidden_size x vocab_size."
)
def _embedding_too(config, length):
    return work_of_a_token(config, length) + _parts(config, length)["head"]


@wrong("One position too many is counted: the model runs over `length` tokens, not length + 1.")
def _one_position_more(config, length):
    return work_of_a_token(config, length + 1)


@wrong(
    "The number is right, but it is a float. A count is an int.",
    hints=(
        "Which of your operations makes a float?",
        "`/` always makes a float, also where nothing is left over. So do 0.5 and 2.0.",
        "length * (length + 1) is always even, so `length * (length + 1) // 2` is exact.",
    ),
)
def _as_float(config, length):
    return float(work_of_a_token(config, length))


def _sizes(config: ModelConfig, length: int) -> str:
    """The inputs of a case as the row shows them."""
    blocks = "1 block" if config.num_layers == 1 else f"{config.num_layers} blocks"
    return (
        f"{blocks}, hidden_size {config.hidden_size}, intermediate_size "
        f"{config.intermediate_size}, n_q {config.n_q}, n_kv {config.n_kv}, head_dim "
        f"{config.head_dim}, vocab_size {config.vocab_size}, length {length}"
    )


def _cases() -> list[Case]:
    wide = replace(TINY, n_q=4, n_kv=4, num_layers=1, head_dim=6)
    cases = [
        ("a tiny model, 1 token", TINY, 1, "linear"),
        ("a tiny model, 5 tokens", TINY, 5, "pairs"),
        ("one block, 4 KV heads for 4 query heads, 3 tokens", wide, 3, "linear"),
        ("SmolLM2, 100 tokens", SMOLLM2, 100, "pairs"),
    ]
    return [
        Case(what, (config, n), kind=kind, compare=whole, inputs=_sizes(config, n))
        for what, config, n, kind in cases
    ]


EXERCISES = (
    Exercise(
        "work_of_a_token",
        _cases,
        hints={
            "linear": (
                "Go through one block matrix by matrix: q, k, v, o, then gate, up, down. How many "
                "numbers does each hold?",
                "q is hidden_size by n_q * head_dim, and o the other way round; k and v are "
                "hidden_size by n_kv * head_dim. Each number costs 2 operations per position.",
                "layer = 2 * length * hidden * (2 * n_q * head_dim + 2 * n_kv * head_dim "
                "+ 3 * intermediate); the head adds 2 * hidden * vocab, once.",
            ),
            "pairs": (
                "With one token there is one query and one key. What does attention add when "
                "there are five?",
                "Query i looks at i + 1 keys: 1 + 2 + ... + length pairs. A pair costs a product "
                "for the score and one for the value, in every query head.",
                "pairs = length * (length + 1) // 2, and a layer's attention adds "
                "4 * pairs * n_q * head_dim.",
            ),
        },
        solution=work_of_a_token,
        wrong=(
            _one_operation, _head_everywhere, _all_heads, _square,
            _no_o, _k_or_v, _two_matrices, _only_the_last, _scores_only, _square_matrices,
            _no_pairs, _kv_pairs, _no_diagonal, _no_head, _head_in_each_block, _one_block,
            _embedding_too, _one_position_more, _as_float,
        ),
    ),
)  # fmt: skip


def _draw_work(tokens: int, remember: bool):
    """A row for each step: what was new in it, and what had been computed before."""
    done = tokens if remember else tokens * (tokens + 1) // 2
    fig, ax = figure(
        height=4.2,
        xlabel="position in the text",
        ylabel="token generated",
        title=f"{tokens} tokens, {done} positions computed",
    )
    for step in range(1, tokens + 1):
        if not remember:
            ax.barh(step, step - 1, height=0.8, color=COLOURS["oracle"], alpha=0.45)
        ax.barh(step, 1, left=step - 1, height=0.8, color=COLOURS["engine"])
    ax.set(xlim=(0, 32), ylim=(32.6, 0.4))
    ax.grid(False)
    ax.text(31.5, 2.0, "new", color=COLOURS["ink"], ha="right", va="center")
    ax.barh(2.0, 1, left=27.2, height=0.8, color=COLOURS["engine"])
    if not remember:
        ax.text(31.5, 3.6, "again", color=COLOURS["ink"], ha="right", va="center")
        ax.barh(3.6, 1, left=27.2, height=0.8, color=COLOURS["oracle"], alpha=0.45)
    return fig


WIDGETS = {
    "work": lambda: widgets.figure_widget(
        _draw_work,
        tokens=widgets.slider(1, 32, 24),
        remember=widgets.toggle(False, label="remember what was computed"),
    )
}
