"""The numbers behind the widgets of Week 7: places in a ragged batch, parts and their merge."""

from itertools import pairwise

import pytest
import torch

from nanoserve.course.drawings import (
    BATCHES,
    GAPS,
    POOL,
    SCORES,
    VALUES,
    follow,
    merged,
    parts_of,
    ragged_batch,
    split_history,
    tables_of,
)

CASES = [(batch, size) for batch in BATCHES for size in GAPS]


@pytest.mark.parametrize(("batch", "size"), CASES)
def test_no_block_has_two_owners_and_each_table_covers_its_sequence(batch, size):
    _, tables = tables_of(BATCHES[batch], size)
    owned = [block for table in tables for block in table]
    assert len(set(owned)) == len(owned)
    assert all(0 <= block < POOL // size for block in owned)
    for (_, kv_len), table in zip(BATCHES[batch], tables, strict=True):
        assert 0 <= len(table) * size - kv_len < size
        assert all(after != before + 1 for before, after in pairwise(table))  # scattered


@pytest.mark.parametrize(("batch", "size"), CASES)
def test_every_row_of_q_is_followed_to_the_slot_of_its_position(batch, size):
    lengths = BATCHES[batch]
    starts, tables = tables_of(lengths, size)
    rows = [  # written out without a division: sequence, query, position
        (i, query, kv_len - query_len + query)
        for i, (query_len, kv_len) in enumerate(lengths)
        for query in range(query_len)
    ]
    assert len(rows) == starts[-1]
    for token, (sequence, query, position) in enumerate(rows):
        slots = [b * size + offset for b in tables[sequence] for offset in range(size)]
        found = follow(lengths, size, token)
        assert (found.sequence, found.query, found.position) == (sequence, query, position)
        assert found.slot == slots[position]
        assert found.block == tables[sequence][found.index]


def test_the_first_state_is_that_of_the_days_picture():
    found = follow(BATCHES["prefill, chunk, decode"], 4, 6)
    assert (found.sequence, found.position, found.block, found.slot) == (1, 7, 6, 27)
    assert "Row 6 is sequence B" in ragged_batch().alt


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("splits", [1, 2, 3, 4, 5, 12])
def test_the_merged_parts_are_the_softmax_of_all_keys(name, splits):
    scores = torch.tensor(SCORES[name], dtype=torch.float64)
    parts = parts_of(SCORES[name], splits)
    assert [key for part in parts for key in part.keys] == list(range(len(scores)))
    for part in parts:
        total = torch.exp2(scores[list(part.keys)]).sum()
        assert part.lse == pytest.approx(float(total.log2()))
        assert part.m == max(SCORES[name][i] for i in part.keys)
    values = torch.tensor(VALUES, dtype=torch.float64)
    weights, out = merged(parts)
    assert max(weights) == 1.0
    assert out == pytest.approx(float((scores * torch.tensor(2.0).log()).softmax(0) @ values))


def test_before_the_merge_the_parts_differ_from_the_result():
    parts = parts_of(SCORES["as they come"], 3)
    assert all(abs(one.part - other.part) > 0.05 for one, other in pairwise(parts))


def test_the_stepper_says_whether_the_parts_are_merged():
    assert "They are not merged yet" in split_history(step=3).alt
    assert (
        "Merged, the result is 0.580; the softmax of all keys gives 0.580" in split_history(4).alt
    )
