"""The curriculum and the glossary are consistent: nothing is used before it is defined."""

import re

import pytest

from nanoserve.course.curriculum import DAYS, PHASES, last_of_week
from nanoserve.course.exercise import CourseError
from nanoserve.course.glossary import TERMS, lookup


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
