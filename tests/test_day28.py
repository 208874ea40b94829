"""Day 28: the picture's batch is what the text says, and a learner's methods are the batch's."""

import pytest
import torch

from nanoserve.cache import PagedBatch, PagedKVCache
from nanoserve.course import check, day, drawings
from nanoserve.course.answers import Answer, installed
from nanoserve.course.exercises import widgets_of
from nanoserve.course.exercises.day28 import PICTURE, SEQUENCES_OF, SLOTS_OF
from nanoserve.kernels.reference import PagedTables
from tests.test_cache import small_pool


def test_the_widget_and_the_exercise_show_one_batch():
    assert widgets_of(28)["ragged-batch"] is drawings.ragged_batch
    starts, tables = drawings.tables_of(drawings.BATCHES["prefill, chunk, decode"], 4)
    assert starts == [0, 5, 8, 9]
    assert [row + [0] * (3 - len(row)) for row in tables] == PICTURE


@pytest.mark.parametrize("name", drawings.BATCHES)
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_the_widget_follows_each_row_as_the_tables_do(name, size):
    lengths = drawings.BATCHES[name]
    starts, tables = drawings.tables_of(lengths, size)
    width = max(map(len, tables))
    blocks = torch.tensor([row + [0] * (width - len(row)) for row in tables], dtype=torch.int32)
    kv_lens = torch.tensor([kv_len for _, kv_len in lengths], dtype=torch.int32)
    query_starts = torch.tensor(starts, dtype=torch.int32)
    batch = PagedTables(blocks, kv_lens, query_starts, size, 5, 12)
    rows = torch.arange(starts[-1])
    sequences, positions = batch.sequences_of(rows), batch.positions_of(rows)
    slots = batch.slots_of(sequences, positions)
    for row in rows.tolist():
        place = drawings.follow(lengths, size, row)
        ours = (sequences[row], positions[row], slots[row])
        assert (place.sequence, place.position, place.slot) == tuple(map(int, ours))


@pytest.mark.parametrize("exercise", [SEQUENCES_OF, SLOTS_OF], ids=lambda e: e.name)
def test_an_untouched_stub_is_not_attempted_and_the_solution_passes(exercise):
    def stub(self, *rest):
        raise NotImplementedError("your turn")

    assert check.run(exercise, exercise.reference()).failed is None
    report = check.run(exercise, stub)
    assert "not attempted" in report.text()


def test_the_requests_of_day_14_are_what_the_plot_draws_from():
    requests = day(28).data("request_lengths")["requests"]
    assert len(requests) >= 128
    assert min(min(pair) for pair in requests) >= 1


def test_a_batch_runs_with_the_learners_methods():
    called = []

    def sequences_of(self, rows):
        called.append("sequences_of")
        return torch.searchsorted(self.query_starts.long(), rows, right=True) - 1

    def slots_of(self, sequences, positions):
        called.append("slots_of")
        blocks = self.block_tables[sequences, positions // self.block_size].long()
        return blocks * self.block_size + positions % self.block_size

    own = [Answer(28, SEQUENCES_OF, sequences_of), Answer(28, SLOTS_OF, slots_of)]
    with installed(own):
        pool = small_pool(8, 4)
        batch = PagedBatch([PagedKVCache(pool), PagedKVCache(pool)], (5, 2))
        assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert set(called) == {"sequences_of", "slots_of"}
