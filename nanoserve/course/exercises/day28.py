"""Day 28: whose row of q is this, and which slot holds a token."""

from itertools import pairwise

import torch

from nanoserve.course import drawings
from nanoserve.course.exercise import Case, Exercise, wrong

# sequences_of ------------------------------------------------------------------------------------


def _tables(answer: type, starts: list[int], kv_lens: list[int] | None = None, **fields):
    """PagedTables with these query_starts; by default each sequence has 2 more keys than queries.

    In blocks of 4, and the tables name the blocks 30, 31, and so on.
    """
    queries = [b - a for a, b in pairwise(starts)]
    kv_lens = kv_lens or [n + 2 for n in queries]
    width = -(-max(kv_lens) // 4)
    blocks = torch.arange(30, 30 + len(kv_lens) * width).view(len(kv_lens), width)
    given = {
        "block_tables": blocks.int(),
        "kv_lens": torch.tensor(kv_lens, dtype=torch.int32),
        "query_starts": torch.tensor(starts, dtype=torch.int32),
        "block_size": 4,
        "max_query_len": max(queries),
        "max_kv_len": max(kv_lens),
    }
    return answer(**given | fields)


def _sequences(answer: type, starts: list[int], rows: list[int]) -> torch.Tensor:
    return _tables(answer, starts).sequences_of(torch.tensor(rows))


def _sequences_cases() -> list[Case]:
    def case(what: str, kind: str, starts: list[int], rows: list[int]) -> Case:
        return Case(what, (starts, rows), kind=kind, call=_sequences)

    return [
        case("the picture's batch: all 9 rows", "ragged", [0, 5, 8, 9], list(range(9))),
        case("four decodes: rows 0 to 3", "ragged", [0, 1, 2, 3, 4], [0, 1, 2, 3]),
        case("one sequence of 6 rows", "ragged", [0, 6], [0, 1, 2, 3, 4, 5]),
        case("a decode, then a prefill", "ragged", [0, 1, 8], list(range(8))),
        case("some rows, in another order", "some", [0, 5, 8, 9], [8, 0, 7, 5, 4]),
        case("one row", "some", [0, 2, 9, 12], [9]),
        case("sequence 1 has no query in this step", "empty", [0, 4, 4, 7], list(range(7))),
        case("the first has none, and the last", "empty", [0, 0, 3, 5, 5], list(range(5))),
    ]


def _starts(self) -> torch.Tensor:
    return self.query_starts.long()


@wrong(
    "The first row of a sequence goes to the sequence before it: searchsorted counts the starts "
    "below the row, and the row's own start must count too. Say right=True."
)
def _left(self, rows):
    return torch.searchsorted(_starts(self), rows) - 1


@wrong(
    "searchsorted returns how many starts lie at or before the row. Sequence 0 has one such start, "
    "its own: subtract 1."
)
def _counts_itself(self, rows):
    return torch.searchsorted(_starts(self), rows, right=True)


@wrong(
    "The row is compared with the ends of the sequences, and its own end counts. Row 5 is the end "
    "of sequence 0, and belongs to sequence 1: say right=True."
)
def _ends_included(self, rows):
    return torch.searchsorted(_starts(self)[1:].contiguous(), rows)


@wrong(
    "This divides as if all sequences had the same number of queries. They differ: that is why "
    "query_starts exists."
)
def _equal_shares(self, rows):
    num_seqs = len(self.query_starts) - 1
    return rows * num_seqs // int(self.query_starts[-1])


@wrong(
    "This divides by max_query_len, as in a padded batch. Here nothing is padded: sequence 1 "
    "starts where the queries of sequence 0 end."
)
def _padded(self, rows):
    return rows // self.max_query_len


@wrong("Row i belongs to sequence i only in a decode step, where each sequence has one query.")
def _decode_only(self, rows):
    return rows.clone()


@wrong("This takes the sequence whose start is nearest. Take the last start at or before the row.")
def _nearest(self, rows):
    return (_starts(self)[:-1] - rows[:, None]).abs().argmin(dim=1)


@wrong(
    "This is the first sequence that starts at or before the row: always sequence 0. Take the last."
)
def _first_of_them(self, rows):
    return (_starts(self)[:-1] <= rows[:, None]).int().argmax(dim=1)


@wrong(
    "This is the row's number within its sequence. The question is which sequence it belongs to."
)
def _number_within(self, rows):
    sequences = torch.searchsorted(_starts(self), rows, right=True) - 1
    return rows - _starts(self)[sequences]


@wrong(
    "This returns the sequence of every row of q. Return that of the rows that were asked for, in "
    "their order: index with rows.",
    hints="some",
)
def _all_rows(self, rows):
    lengths = _starts(self).diff()
    return torch.arange(len(lengths)).repeat_interleave(lengths)


@wrong(
    "This uses kv_lens. They count the tokens in the cache, of earlier steps too; q holds this "
    "step's only: use query_starts."
)
def _by_kv_lens(self, rows):
    ends = self.kv_lens.long().cumsum(0)
    return torch.searchsorted(ends, rows, right=True)


@wrong(
    "Sequences without queries are not counted, so all later sequences get too small a number. "
    "Such a sequence keeps its number; it only has no row.",
    hints="empty",
)
def _skips_empty(self, rows):
    starts = _starts(self).unique()
    return torch.searchsorted(starts, rows, right=True) - 1


@wrong(
    "If two sequences start at the same row, the first of them has no queries. The row belongs to "
    "the last that starts there.",
    hints="empty",
)
def _first_start(self, rows):
    starts = _starts(self)
    last = torch.searchsorted(starts, rows, right=True) - 1
    return torch.searchsorted(starts, starts[last])


@wrong(
    "The result is int32. It is an index, and index tensors are int64: compare in int64, and leave "
    "out_int32 out.",
    hints=(
        "Which dtype has query_starts, and which dtype is asked for?",
        "query_starts is int32; rows and the result are int64. searchsorted returns int64 itself.",
        "torch.searchsorted(self.query_starts.long(), rows, right=True) - 1",
    ),
)
def _int32(self, rows):
    return (torch.searchsorted(self.query_starts.long(), rows, right=True) - 1).int()


SEQUENCES_OF = Exercise(
    "sequences_of",
    _sequences_cases,
    hints={
        "ragged": (
            "query_starts is sorted. How many of its entries are at most the row?",
            "torch.searchsorted(starts, rows, right=True) counts the starts at or before each row. "
            "Row 0 has one: the start of sequence 0.",
            "return torch.searchsorted(self.query_starts.long(), rows, right=True) - 1",
        ),
        "some": (
            "rows may hold any rows, in any order. Which line of yours looks at rows?",
            "Answer for each entry of rows alone, not for all rows of q.",
            "torch.searchsorted(self.query_starts.long(), rows, right=True) gives one number for "
            "each entry of rows; subtract 1.",
        ),
        "empty": (
            "query_starts 0, 4, 4, 7: sequence 1 starts at row 4, and so does sequence 2. Which of "
            "them has row 4?",
            "The last of them: all others that start there have no query. So take the last start "
            "at or before the row.",
            "return torch.searchsorted(self.query_starts.long(), rows, right=True) - 1",
        ),
    },
    target="nanoserve.kernels.reference:PagedTables.sequences_of",
    wrong=(
        _left, _counts_itself, _ends_included, _equal_shares, _padded, _decode_only, _nearest,
        _first_of_them, _number_within, _all_rows, _by_kv_lens, _skips_empty, _first_start, _int32,
    ),
)  # fmt: skip


# slots_of ----------------------------------------------------------------------------------------

PICTURE = [[5, 2, 0], [0, 6, 3], [8, 1, 7]]  # the tables of the day's picture


def _slots(
    answer: type, table: list[list[int]], size: int, sequences: list[int], positions: list[int]
) -> torch.Tensor:
    blocks = torch.tensor(table, dtype=torch.int32)
    starts = list(range(len(table) + 1))
    full = [len(row) * size for row in table]
    tables = _tables(answer, starts, full, block_tables=blocks, block_size=size)
    return tables.slots_of(torch.tensor(sequences), torch.tensor(positions))


def _slots_cases() -> list[Case]:
    def case(what: str, kind: str, *args) -> Case:
        return Case(what, args, kind=kind, call=_slots)

    wide = [[9, 2, 7, 3], [4, 11, 6, 1]]
    return [
        case("the picture: position 7 of B, which is sequence 1", "one", PICTURE, 4, [1], [7]),
        case("the picture: all 11 tokens of C", "one", PICTURE, 4, [2] * 11, list(range(11))),
        case("the picture: the last token of each", "many", PICTURE, 4, [0, 1, 2], [4, 8, 10]),
        case("two tables of 4 blocks of 5", "many", wide, 5, [0, 1, 0, 1], [4, 4, 5, 19]),
        case("blocks of 16: positions 15, 16, 40", "many", [[3, 1, 5]], 16, [0] * 3, [15, 16, 40]),
        case("blocks of one token", "many", [[6, 2, 9, 4, 0]], 1, [0] * 5, list(range(5))),
        case("block 200,000,000 of 16 slots", "large", [[1, 200_000_000]], 16, [0, 0], [3, 17]),
    ]  # fmt: skip


def _block(self, sequences, positions) -> torch.Tensor:
    return self.block_tables[sequences, positions // self.block_size].long()


@wrong(
    "All tokens are looked up in the table of sequence 0. Each sequence has its own row in "
    "block_tables: index with sequences too."
)
def _one_table(self, sequences, positions):
    blocks = self.block_tables[0, positions // self.block_size].long()
    return blocks * self.block_size + positions % self.block_size


@wrong("The two indices are exchanged: block_tables is [num_seqs, max_blocks], the sequence first.")
def _transposed(self, sequences, positions):
    table = self.block_tables.T
    index = (positions // self.block_size).clamp(max=table.shape[1] - 1)
    blocks = table[sequences.clamp(max=len(table) - 1), index].long()
    return blocks * self.block_size + positions % self.block_size


@wrong(
    "This is a square: every sequence of the call with every position. Index both axes at once, "
    "block_tables[sequences, index], and each token gets one block.",
    hints="many",
)
def _square(self, sequences, positions):
    blocks = self.block_tables[sequences][:, positions // self.block_size].long()
    return (blocks * self.block_size + positions % self.block_size).squeeze(0)


@wrong(
    "This is where the token would lie if each sequence had one strip of memory, as in a padded "
    "batch. The table says which block holds it."
)
def _padded_strip(self, sequences, positions):
    return sequences * self.max_kv_len + positions


_OFFSET = (
    "Your block is right. Where in it does the token lie?",
    "At offset position % block_size, after the block's first slot, block id * block_size.",
    "return blocks * self.block_size + positions % self.block_size",
)


@wrong(
    "This is the first slot of the right block. Add the offset, position % block_size.",
    hints=_OFFSET,
)
def _first_slot(self, sequences, positions):
    return _block(self, sequences, positions) * self.block_size


@wrong("This is the id of the block. The slot is block id * block_size + offset.", hints=_OFFSET)
def _only_block(self, sequences, positions):
    return _block(self, sequences, positions)


@wrong("The id is not multiplied: block b begins at slot b * block_size.", hints=_OFFSET)
def _added(self, sequences, positions):
    return _block(self, sequences, positions) + positions % self.block_size


@wrong(
    "The remainder looks up the block, and the quotient is added. It is the other way round: "
    "position // block_size is the entry of the table."
)
def _exchanged(self, sequences, positions):
    index = (positions % self.block_size).clamp(max=self.block_tables.shape[1] - 1)
    blocks = self.block_tables[sequences, index].long()
    return blocks * self.block_size + positions // self.block_size


@wrong(
    "The blocks are looked up in the flat table with a row of block_size entries. A row has "
    "max_blocks entries: index both axes instead.",
    hints="many",
)
def _flat(self, sequences, positions):
    flat = self.block_tables.flatten()
    index = sequences * self.block_size + positions // self.block_size
    blocks = flat[index.clamp(max=len(flat) - 1)].long()
    return blocks * self.block_size + positions % self.block_size


@wrong("The code assumes blocks of 16 slots. Use self.block_size.")
def _always_16(self, sequences, positions):
    index = (positions // 16).clamp(max=self.block_tables.shape[1] - 1)
    blocks = self.block_tables[sequences, index].long()
    return blocks * 16 + positions % 16


@wrong(
    "It multiplies by max_blocks, the width of the table. Multiply by the block size.",
    hints=_OFFSET,
)
def _times_width(self, sequences, positions):
    width = self.block_tables.shape[1]
    return _block(self, sequences, positions) * width + positions % self.block_size


@wrong(
    "It goes to the next block one token too early. The last position of a block is still in it."
)
def _early(self, sequences, positions):
    index = ((positions + 1) // self.block_size).clamp(max=self.block_tables.shape[1] - 1)
    blocks = self.block_tables[sequences, index].long()
    return blocks * self.block_size + positions % self.block_size


@wrong(
    "int32 holds numbers up to 2,147,483,647. The block id is int32, and so is the product, which "
    "becomes negative here: turn the ids into int64 first, with .long().",
    hints="large",
)
def _overflow(self, sequences, positions):
    blocks = self.block_tables[sequences, positions // self.block_size]
    return (blocks * self.block_size).long() + positions % self.block_size


SLOTS_OF = Exercise(
    "slots_of",
    _slots_cases,
    hints={
        "one": (
            "This is Day 15's division. Which row of block_tables is the table of this sequence?",
            "index = positions // self.block_size is the entry; self.block_tables[sequences, "
            "index] is the block; positions % self.block_size is the offset.",
            "blocks = self.block_tables[sequences, positions // self.block_size].long(); return "
            "blocks * self.block_size + positions % self.block_size",
        ),
        "many": (
            "sequences and positions are tensors of one length: token i is position positions[i] "
            "of sequence sequences[i]. How many slots do you return?",
            "Two index tensors in one pair of brackets go together: table[[0, 1], [4, 2]] is two "
            "entries, table[0, 4] and table[1, 2].",
            "blocks = self.block_tables[sequences, positions // self.block_size].long(); return "
            "blocks * self.block_size + positions % self.block_size",
        ),
        "large": (
            "What is 200,000,000 * 16, and what is the largest int32?",
            "3,200,000,000 is past 2,147,483,647. The block ids are int32, so multiply after "
            ".long().",
            "blocks = self.block_tables[sequences, positions // self.block_size].long()",
        ),
    },
    target="nanoserve.kernels.reference:PagedTables.slots_of",
    wrong=(
        _one_table, _transposed, _square, _padded_strip, _first_slot, _only_block, _added,
        _exchanged, _flat, _always_16, _times_width, _early, _overflow,
    ),
)  # fmt: skip

EXERCISES = (SEQUENCES_OF, SLOTS_OF)

WIDGETS = {"ragged-batch": drawings.ragged_batch}
