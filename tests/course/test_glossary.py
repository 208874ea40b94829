"""The curriculum and the glossary are consistent: no term is used before its day."""

import re
from itertools import pairwise

import pytest

from nanoserve.course.curriculum import (
    ALL,
    APPENDICES,
    DAYS,
    PHASES,
    find,
    key,
    last_of_week,
    name,
    number_in,
    position,
)
from nanoserve.course.exercise import CourseError
from nanoserve.course.glossary import TERMS, lookup
from nanoserve.course.lands import ROOT, day_number, twins


def test_days_are_numbered_named_and_need_only_earlier_days():
    assert [info.number for info in DAYS] == list(range(45))
    assert len({info.slug for info in ALL}) == len({info.title for info in ALL}) == len(ALL)
    for info in ALL:
        assert all(need < position(info.number) for need in info.needs)
        assert info.summary.endswith(".")
        assert 0 <= info.phase < len(PHASES)
    assert DAYS[2].notebook == "day02_weights.ipynb"


def test_weeks_are_those_of_the_curriculum():
    closing = [info.number for info in DAYS if last_of_week(info.number)]
    assert closing == [4, 9, 13, 17, 20, 26, 31, 33, 37, 40, 44]
    assert [DAYS[n].week for n in closing] == list(range(1, 12))


def test_phases_are_those_of_the_curriculum():
    first = [next(info.number for info in DAYS if info.phase == i) for i in range(len(PHASES))]
    assert first == [0, 8, 14, 32, 34, 41]
    assert [info.phase for info in DAYS] == sorted(info.phase for info in DAYS)


def test_an_appendix_has_a_letter_and_comes_after_the_days_that_it_needs():
    (a,) = APPENDICES
    assert (a.number, a.sign, a.name) == ("a", "A", "Appendix A")
    assert a.notebook == "appendix_a_inside_tlsim.ipynb"
    assert (key("a"), name("a"), number_in(a.notebook)) == ("appendix_a", "Appendix A", "a")
    assert (key(7), name(7), number_in("day07_block.py")) == ("day07", "Day 7", 7)
    assert number_in("glossary.py") is None
    assert 22 < position("a") < 23
    assert not last_of_week("a")


@pytest.mark.parametrize("asked", ["a", "A", "appendix_a", "Appendix A", "appendix_a_inside.ipynb"])
def test_an_appendix_is_found_by_any_of_its_names(asked):
    assert find(asked) is APPENDICES[0]


@pytest.mark.parametrize("asked", ["b", "day_a", "appendix_b", "appendix", "appendix_ab", 45])
def test_what_is_neither_a_day_nor_an_appendix_is_refused(asked):
    with pytest.raises(CourseError, match="the days are 0 to 44, the appendix is A"):
        find(asked)


OUT = [find(day_number(twin.stem)) for twin in twins()]


def test_a_days_twin_has_the_name_that_the_curriculum_gives():
    assert [twin.stem for twin in twins()] == [info.stem for info in OUT]


def test_the_readme_lists_the_days_that_are_out_by_phase_and_week():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"\[(\d+|[A-Z]) · (.+?)\]\(notebooks/(\S+?)\)", text)
    assert listed == [(info.sign, info.title, info.notebook) for info in OUT]
    for before, info in pairwise(OUT):
        if info.is_appendix:
            break
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
    assert {term.day for term in TERMS} <= {info.number for info in ALL}
    names = [term.term.lower() for term in TERMS]
    assert len(set(names)) == len(names)
    assert all(term.meaning.endswith(".") for term in TERMS)


@pytest.mark.parametrize("term", TERMS, ids=lambda term: term.term)
def test_a_definition_uses_no_term_of_a_later_day(term):
    for later in TERMS:
        if position(later.day) > position(term.day):
            word = rf"\b{re.escape(later.term)}s?\b"
            assert not re.search(word, term.meaning, re.IGNORECASE), later


def test_terms_are_looked_up_by_name_and_not_before_their_day():
    assert [t.term for t in lookup(("Logits", "token"), 1)] == ["logits", "token"]
    assert all(t.day == 3 for t in lookup((), 3))
    with pytest.raises(CourseError, match="no term 'slott'"):
        lookup(("slott",), 3)
    with pytest.raises(CourseError, match="Day 2 defines 'GGUF', and Day 2 comes after Day 1"):
        lookup(("GGUF",), 1)
