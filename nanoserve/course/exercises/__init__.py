"""The exercises. dayNN.py and appendix_a.py may define EXERCISES, WIDGETS and REVIEW; all are
optional.

EXERCISES: tuple[Exercise, ...]
WIDGETS: dict[str, Callable[..., FigureWidget]]    shown by today.widget(name)
REVIEW: tuple[tuple[str, str], ...]                 question and answer, shown by today.review()
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType

from nanoserve.course.curriculum import Number, key
from nanoserve.course.exercise import Exercise


def exercises_of(day: Number) -> tuple[Exercise, ...]:
    return tuple(getattr(module_of(day), "EXERCISES", ()))


def widgets_of(day: Number) -> dict[str, Callable]:
    return dict(getattr(module_of(day), "WIDGETS", {}))


def review_of(day: Number) -> tuple[tuple[str, str], ...]:
    return tuple(getattr(module_of(day), "REVIEW", ()))


def module_of(day: Number) -> ModuleType | None:
    """The module of a day, or None where it has none."""
    name = f"{__name__}.{key(day)}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None
