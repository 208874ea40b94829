"""Days 14 and 15: the recorded lengths equal their recipe's, and the explorer shows the pool."""

import math
import random

import pytest

from nanoserve.course import day
from nanoserve.course.exercises.day15 import POOL, SCRIPT, events, play


def test_the_recorded_lengths_are_what_their_recipe_draws():
    recorded = day(14).data("request_lengths")
    recipe, requests = recorded["recipe"], []
    draw = random.Random(recipe["seed"]).lognormvariate
    while len(requests) < recipe["count"]:
        shapes = (recipe["prompt"], recipe["answer"])
        drawn = [max(1, round(draw(math.log(s["median"]), s["sigma"]))) for s in shapes]
        if sum(drawn) <= recipe["longest"]:
            requests.append(drawn)
    assert recorded["requests"] == requests
    assert recorded["what"].startswith("Synthetic, not measured")


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("script", [SCRIPT, "A30 B30 C30 -B A9 B1 -A -C", "A9 B5 -A -A", ""])
def test_the_explorer_shows_a_sound_pool_at_every_step(script, size):
    for step in range(len(events(script)) + 1):
        pool, tables, lengths, told = play(script, step, size)
        owned = [block for table in tables.values() for block in table.blocks]
        assert sorted(owned + pool._free) == list(range(POOL))
        assert told
        for name, table in tables.items():
            assert lengths[name] <= table.capacity < lengths[name] + size


def test_the_explorer_tells_what_a_step_did():
    told = [play("A2 B1 -A C5", step, 2)[3] for step in range(9)]
    assert told[1:6] == [
        "A takes block 0, and writes slot 0",
        "A has a free slot, and writes slot 1",
        "B takes block 1, and writes slot 2",
        "A ends and gives back 0",
        "C takes block 0, and writes slot 0",
    ]
    assert "refused" in play("A25", 25, 2)[3]


@pytest.mark.parametrize("word", ["D3", "A", "A-1", "-", "-AB", "A100"])
def test_the_explorer_names_a_word_it_does_not_know(word):
    with pytest.raises(ValueError, match=word):
        events(f"A1 {word}")
