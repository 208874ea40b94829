"""A day that says the engine runs with your answers calls each of them: its own cell is run."""

import re
from contextlib import contextmanager

import pytest
import torch

from nanoserve import LLM, SamplingParams
from nanoserve.course import answers
from nanoserve.course.curriculum import find
from nanoserve.course.exercises import exercises_of
from nanoserve.course.lands import ROOT
from tests.mutants import right_answers

DAYS = (7, 8, 9, 10, 11, 12, 13)


class Today:
    """`today` of a notebook, with a right answer to each exercise saved."""

    def __init__(self, number: int) -> None:
        right = right_answers(number)
        self.answers = [
            answers.Answer(number, exercise, right[exercise.name][0])
            for exercise in exercises_of(number)
            if exercise.target
        ]

    @contextmanager
    def mine(self):
        with answers.installed(self.answers):
            yield


def mine_cell(number: int) -> str:
    text = (ROOT / "notebooks/source" / f"{find(number).stem}.py").read_text(encoding="utf-8")
    cells = [cell for cell in re.split(r"(?m)^# %%.*\n", text) if "with today.mine()" in cell]
    assert len(cells) == 1, f"day {number} has {len(cells)} cells that run with your answers"
    return cells[0]


@pytest.fixture(scope="module")
def llm():
    return LLM("smollm2")


@pytest.mark.parametrize("number", DAYS)
def test_the_day_s_own_cell_calls_every_answer(number, llm, capsys):
    today = Today(number)
    question = llm.chat_ids([{"role": "user", "content": "List three fruits that are red."}])
    space = {"today": today, "llm": llm, "SamplingParams": SamplingParams, "question": question}
    exec(mine_cell(number), space | {"config": llm.model.config, "torch": torch})
    calls = {answer.exercise.name: answer.calls for answer in today.answers}
    assert calls and all(calls.values()), calls
