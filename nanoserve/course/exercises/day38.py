"""Day 38: the chained hash of a block, and how many blocks a prompt may take from the cache."""

from nanoserve.course.exercise import Case, Exercise, wrong

# chained_hash ------------------------------------------------------------------------------------


def _of_chain(answer, blocks: list) -> object:
    """The hash of the last block of a chain."""
    found = 0
    for tokens in blocks:
        found = answer(found, tokens)
    return found


def _compared(answer, first: list, second: list) -> dict:
    """Whether the last blocks of two chains get equal hashes, and of which type they are."""
    # copies, so that equal tokens are not the same object
    one, two = (_of_chain(answer, [list(block) for block in each]) for each in (first, second))
    return {"equal hashes": one == two, "type": type(one).__name__}


def _of_types(answer, before: int, tokens: list) -> dict:
    """Whether a list and a tuple of the same tokens get equal hashes."""
    return {"equal hashes": answer(before, tokens) == answer(before, tuple(tokens))}


def _swapped(answer, before: int, token: int) -> dict:
    """Whether `before` and the only token can change places."""
    return {"equal hashes": answer(before, [token]) == answer(token, [before])}


def _hash_cases() -> list[Case]:
    def case(what: str, kind: str, first: list, second: list) -> Case:
        inputs = f"the last block of {first}, and of {second}"
        return Case(what, (first, second), kind=kind, call=_compared, inputs=inputs)

    return [
        case("the same first block", "equal", [[11, 12, 13]], [[11, 12, 13]]),
        case(
            "the same three blocks",
            "equal",
            [[11, 12], [21, 22], [31, 32]],
            [[11, 12], [21, 22], [31, 32]],
        ),
        case("another last token", "tokens", [[11, 12, 13]], [[11, 12, 99]]),
        case("another token in the middle", "tokens", [[11, 12, 13]], [[11, 99, 13]]),
        case("another first token", "tokens", [[11, 12, 13]], [[99, 12, 13]]),
        case("the same tokens in another order", "order", [[11, 12, 13]], [[13, 12, 11]]),
        case("other tokens with the same sum", "order", [[11, 14, 13]], [[12, 13, 13]]),
        case("a token twice, and two tokens twice", "order", [[7, 7, 8]], [[7, 8, 8]]),
        case(
            "the same block after another", "chain", [[11, 12], [21, 22]], [[13, 14], [21, 22]]
        ),
        case(
            "two blocks changed, three blocks before",
            "chain",
            [[1, 2], [3, 4], [5, 6], [7, 8]],
            [[1, 9], [3, 4], [5, 6], [7, 8]],
        ),
        case("blocks in another order", "chain", [[11, 12], [21, 22]], [[21, 22], [11, 12]]),
        case("a block of zeros once, and twice", "chain", [[0, 0]], [[0, 0], [0, 0]]),
        case(
            "a pair of equal blocks, and another pair", "chain", [[5, 6], [5, 6]], [[8, 9], [8, 9]]
        ),
        Case("a list and a tuple", (345, [11, 12, 13]), kind="equal", call=_of_types),
        Case("before and the token change places", (345, 17), kind="chain", call=_swapped),
    ]  # fmt: skip


@wrong(
    "The hash depends on this block's tokens only. The same tokens behind other text have other "
    "keys and values: put `before` into the hash.",
    hints="chain",
)
def _own_tokens(before, tokens):
    return hash(tuple(tokens))


@wrong(
    "The sum is the same for other tokens and for another order. Hash the tokens themselves.",
    hints="order",
)
def _sum(before, tokens):
    return hash((before, sum(tokens)))


@wrong("The order of the tokens is lost. Do not sort them.", hints="order")
def _sorted(before, tokens):
    return hash((before, tuple(sorted(tokens))))


@wrong(
    "A set loses the order of the tokens, and how often each one occurs. Use a tuple.",
    hints="order",
)
def _as_set(before, tokens):
    return hash((before, frozenset(tokens)))


@wrong(
    "XOR has no order, and two equal values cancel. So blocks may change places. Put `before` into "
    "the tuple that is hashed.",
    hints="chain",
)
def _xor(before, tokens):
    return before ^ hash(tuple(tokens))


@wrong("Only the first token counts here. All tokens of the block belong into the hash.")
def _first_token(before, tokens):
    return hash((before, tokens[0]))


@wrong("Only the last token counts here. All tokens of the block belong into the hash.")
def _last_token(before, tokens):
    return hash((before, tokens[-1]))


@wrong(
    "id() stands for the list object, not for the tokens in it. Two lists with equal tokens need "
    "equal hashes.",
    hints="equal",
)
def _identity(before, tokens):
    return hash((before, id(tokens)))


@wrong(
    "A list cannot be hashed, because a list can change. Make a tuple: (before, *tokens).",
    hints="equal",
)
def _unhashable(before, tokens):
    return hash((before, tokens))


@wrong("This is the tuple itself. Return its hash, one integer: hash(...).", hints="equal")
def _no_hash(before, tokens):
    return (before, *tokens)


CHAINED_HASH = Exercise(
    "chained_hash",
    _hash_cases,
    hints={
        "equal": (
            "Which Python function turns a tuple of integers into one integer?",
            "hash((1, 2, 3)) is an integer, and the same for equal tuples. A list has no hash.",
            "return hash((before, *tokens))",
        ),
        "tokens": (
            "Which tokens of the block does your hash depend on?",
            "All tokens of the block belong into the tuple.",
            "return hash((before, *tokens))",
        ),
        "order": (
            "Do [11, 12] and [12, 11] have the same keys and values?",
            "No: each token has its own position. A tuple keeps the order; a sum and a set do not.",
            "return hash((before, *tokens))",
        ),
        "chain": (
            "Two blocks have equal tokens, and the text before them differs. Are their keys equal?",
            "No: from the second layer on, a key depends on all tokens before it. `before` stands "
            "for them: hash it together with the tokens, as the first entry of the tuple.",
            "return hash((before, *tokens))",
        ),
    },
    target="nanoserve.cache:chained_hash",
    wrong=(
        _own_tokens, _sum, _sorted, _as_set, _xor, _first_token, _last_token, _identity,
        _unhashable, _no_hash,
    ),
)  # fmt: skip


# shareable_blocks --------------------------------------------------------------------------------


def _count_cases() -> list[Case]:
    def case(what: str, kind: str, num_tokens: int, block_size: int) -> Case:
        return Case(what, (num_tokens, block_size), kind=kind)

    return [
        case("11 tokens, blocks of 4", "part", 11, 4),
        case("8 tokens, blocks of 4: both blocks are full", "whole", 8, 4),
        case("9 tokens, blocks of 4", "one more", 9, 4),
        case("4 tokens, blocks of 4: one full block", "whole", 4, 4),
        case("5 tokens, blocks of 4", "one more", 5, 4),
        case("3 tokens, blocks of 4: no full block", "part", 3, 4),
        case("1 token, blocks of 16", "part", 1, 16),
        case("a prompt of 1,000 tokens, blocks of 16", "part", 1000, 16),
        case("1,008 tokens, blocks of 16", "whole", 1008, 16),
        case("1,009 tokens, blocks of 16", "one more", 1009, 16),
        case("6 tokens, blocks of 1", "whole", 6, 1),
    ]


@wrong(
    "If the prompt fills its last block exactly, this takes all blocks, and no token is left to "
    "compute. Then there are no logits: the last token is always computed.",
    hints="whole",
)
def _all_full(num_tokens, block_size):
    return num_tokens // block_size


@wrong(
    "A block that is partly full counts here too. Its owner still writes to it, so it is not "
    "shared: round down.",
    hints="part",
)
def _rounded_up(num_tokens, block_size):
    return -(-num_tokens // block_size)


@wrong(
    "This leaves a whole block out in every case. Only the last token must be computed: with 11 "
    "tokens and blocks of 4, both full blocks can be taken.",
    hints="part",
)
def _one_block_less(num_tokens, block_size):
    return max(0, num_tokens // block_size - 1)


@wrong("These are tokens. Return the number of blocks.", hints="part")
def _in_tokens(num_tokens, block_size):
    return (num_tokens - 1) // block_size * block_size


@wrong("A number of blocks is an integer: divide with //, which rounds down.", hints="part")
def _a_float(num_tokens, block_size):
    return (num_tokens - 1) / block_size


@wrong(
    "The token goes the wrong way: one token must stay to be computed, so subtract 1.",
    hints="whole",
)
def _one_token_more(num_tokens, block_size):
    return (num_tokens + 1) // block_size


@wrong("round() rounds up from a half on. A block that is not full is not shared: round down.")
def _nearest(num_tokens, block_size):
    return round((num_tokens - 1) / block_size)


@wrong(
    "Two tokens are left out here. One is enough: with 9 tokens and blocks of 4, two blocks can be "
    "taken, and token 8 is computed.",
    hints="one more",
)
def _two_left(num_tokens, block_size):
    return max(0, num_tokens - 2) // block_size


SHAREABLE = Exercise(
    "shareable_blocks",
    _count_cases,
    hints={
        "part": (
            "How many blocks of the prompt are full?",
            "Dividing with // rounds down to full blocks. One token must be left to compute.",
            "return (num_tokens - 1) // block_size",
        ),
        "whole": (
            "All blocks are full, and all are in the cache. Where do the first logits come from?",
            "From the hidden state of the last token, which must be computed. So the block of the "
            "last token is not taken, even if it is full.",
            "return (num_tokens - 1) // block_size",
        ),
        "one more": (
            "One token stands behind the last full block. May all full blocks be taken?",
            "Yes: that token is computed, and it is the last. Count the full blocks of the other "
            "num_tokens - 1 tokens.",
            "return (num_tokens - 1) // block_size",
        ),
    },
    target="nanoserve.cache:shareable_blocks",
    wrong=(
        _all_full, _rounded_up, _one_block_less, _in_tokens, _a_float, _one_token_more, _nearest,
        _two_left,
    ),
)  # fmt: skip

EXERCISES = (CHAINED_HASH, SHAREABLE)
