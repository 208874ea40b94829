"""After a NameError: a sentence that says which cells of the notebook to run first."""

from __future__ import annotations

import json
import symtable
import sys
from typing import Any

from nanoserve.course.curriculum import DayInfo
from nanoserve.course.show import in_notebook, show
from nanoserve.course.store import clone_dir

ABOVE = "Run → Run All Above Selected Cell"


def point_above(info: DayInfo) -> None:
    """Add a sentence to each later NameError about a name that a cell of the day defines.

    The sentence says which cells to run. Outside a notebook, nothing happens.
    """
    if in_notebook():
        shell = sys.modules["IPython"].get_ipython()

        def tell(
            shell: Any, kind: type, error: NameError, trace: Any, tb_offset: Any = None
        ) -> None:
            shell.showtraceback((kind, error, trace), tb_offset=tb_offset)
            if kind is NameError and error.name in names_of(info):
                show(
                    f"Another cell of this notebook defines `{error.name}`. That cell has not run "
                    f"since the kernel started. Run the cells above first: {ABOVE}."
                )

        shell.set_custom_exc((NameError,), tell)


def names_of(info: DayInfo) -> set[str]:
    """The names that the cells of a day's published notebook define."""
    clone, names = clone_dir(), set()
    try:
        text = (clone / "notebooks" / info.notebook).read_text(encoding="utf-8") if clone else "{}"
        cells = ["".join(cell["source"]) for cell in json.loads(text).get("cells", ())]
    except (OSError, ValueError, KeyError, TypeError):
        return names
    for cell in cells:
        try:
            table = symtable.symtable(cell, "<cell>", "exec")
        except (SyntaxError, ValueError):
            continue  # prose, or a line that only IPython understands
        names |= {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()}
    return names
