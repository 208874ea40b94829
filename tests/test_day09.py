"""Day 9: the notebook compares with the same recorded tokens as test_generate.py."""

import json

from nanoserve.course import day
from nanoserve.course.lands import ROOT


def test_the_notebook_s_recorded_answers_are_those_of_the_tests():
    figures = json.loads((ROOT / "tests/data/smollm2_reference.json").read_text(encoding="utf-8"))
    shown = day(9).data("reference_greedy")["greedy"]
    assert list(shown) == list(figures["greedy"])
    for name, case in shown.items():
        assert case == {key: figures["greedy"][name][key] for key in case}
    assert sum(len(case["greedy_ids"]) for case in shown.values()) == 513
