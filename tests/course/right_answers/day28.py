"""Right answers to the exercises of Day 28, in different styles."""

import torch

# sequences_of ------------------------------------------------------------------------------------


def by_ends(self, rows):
    """Counts the sequences that end at or before the row."""
    return torch.searchsorted(self.query_starts[1:].long(), rows, right=True)


def by_comparing(self, rows):
    """Compares every row with every start."""
    return (self.query_starts[:-1].long() <= rows[:, None]).sum(dim=1) - 1


def by_listing(self, rows):
    """Writes each sequence's number as often as it has queries, and picks."""
    lengths = self.query_starts.diff().long()
    return torch.arange(len(lengths)).repeat_interleave(lengths)[rows]


def one_by_one(self, rows):
    """Goes through the sequences of each row."""
    starts = self.query_starts.tolist()
    found = []
    for row in rows.tolist():
        found += [i for i in range(len(starts) - 1) if starts[i] <= row < starts[i + 1]]
    return torch.tensor(found)


# slots_of ----------------------------------------------------------------------------------------


def by_divmod(self, sequences, positions):
    """Quotient and remainder, with the tables in int64."""
    index = positions.div(self.block_size, rounding_mode="floor")
    offset = positions - index * self.block_size
    return self.block_tables.long()[sequences, index] * self.block_size + offset


def by_spreading(self, sequences, positions):
    """Lists the slots of all positions of all sequences, and picks."""
    firsts = self.block_tables.long() * self.block_size
    every = firsts[:, :, None] + torch.arange(self.block_size)
    return every.flatten(1)[sequences, positions]


def token_by_token(self, sequences, positions):
    """Day 15's line for each token."""
    tables, size, found = self.block_tables.tolist(), self.block_size, []
    for sequence, position in zip(sequences.tolist(), positions.tolist(), strict=True):
        index, offset = divmod(position, size)
        found.append(tables[sequence][index] * size + offset)
    return torch.tensor(found)


RIGHT = {
    "sequences_of": (by_ends, by_comparing, by_listing, one_by_one),
    "slots_of": (by_divmod, by_spreading, token_by_token),
}
