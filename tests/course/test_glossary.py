"""The curriculum and the glossary are consistent: no term is used before its day."""

import re
from itertools import pairwise

import pytest

from nanoserve.course.curriculum import DAYS, PHASES, last_of_week
from nanoserve.course.exercise import CourseError
from nanoserve.course.glossary import TERMS, lookup
from nanoserve.course.lands import ROOT, twins


def test_days_are_numbered_named_and_need_only_earlier_days():
    assert [info.number for info in DAYS] == list(range(32))
    assert len({info.slug for info in DAYS}) == 32
    for info in DAYS:
        assert all(need < info.number for need in info.needs)
        assert info.summary.endswith(".")
        assert 0 <= info.phase < len(PHASES)
    assert DAYS[2].notebook == "day02_weights.ipynb"


def test_weeks_are_those_of_the_curriculum():
    closing = [info.number for info in DAYS if last_of_week(info.number)]
    assert closing == [4, 9, 13, 17, 20, 26, 31]
    assert [DAYS[n].week for n in closing] == [1, 2, 3, 4, 5, 6, 7]


def test_a_days_twin_has_the_name_that_the_curriculum_gives():
    stems = [twin.stem for twin in twins()]
    assert stems == [info.stem for info in DAYS[: len(stems)]]


def test_the_readme_lists_the_days_that_are_out_by_phase_and_week():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    out = DAYS[: len(twins())]
    listed = re.findall(r"\[(\d+) · (.+?)\]\(notebooks/(\S+?)\)", text)
    assert listed == [(str(info.number), info.title, info.notebook) for info in out]
    for before, info in pairwise(out):
        between = text.split(before.notebook)[1].split(info.notebook)[0]
        new_phase = info.phase != before.phase or before.number == 0
        new_week = new_phase or info.week != before.week
        assert (f"### Phase {info.phase} · {info.phase_name}" in between) == new_phase
        assert (f"**Week {info.week}**" in between) == new_week


def test_the_readmes_pictures_and_links_are_there():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!http)(.+?)\)", text):
        assert (ROOT / target).exists(), target


def test_every_term_has_a_day_and_is_defined_once():
    assert {term.day for term in TERMS} <= {info.number for info in DAYS}
    names = [term.term.lower() for term in TERMS]
    assert len(set(names)) == len(names)
    assert all(term.meaning.endswith(".") for term in TERMS)


@pytest.mark.parametrize("term", TERMS, ids=lambda term: term.term)
def test_a_definition_uses_no_term_of_a_later_day(term):
    for later in TERMS:
        if later.day > term.day:
            word = rf"\b{re.escape(later.term)}s?\b"
            assert not re.search(word, term.meaning, re.IGNORECASE), later


def test_terms_are_looked_up_by_name_and_not_before_their_day():
    assert [t.term for t in lookup(("Logits", "token"), 1)] == ["logits", "token"]
    assert all(t.day == 3 for t in lookup((), 3))
    with pytest.raises(CourseError, match="no term 'slott'"):
        lookup(("slott",), 3)
    with pytest.raises(CourseError, match="'GGUF' is defined on day 2, after day 1"):
        lookup(("GGUF",), 1)
