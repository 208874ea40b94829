"""How `pytest --nbval notebooks` runs: away from a learner's work, and never for long on a corpse.

nbval alone waits for the whole cell timeout when a kernel has died, and after a cell that hung it
sends each of the notebook's other cells to the same kernel, to wait again.
"""

import os
import tempfile
import time
from queue import Empty

import pytest
from nbval.kernel import RunningKernel
from nbval.plugin import IPyNbCell

CELL_SECONDS = 100
NBVAL_DEFAULT = 2000


def pytest_configure(config: pytest.Config) -> None:
    if config.option.nbval_cell_timeout == NBVAL_DEFAULT:
        config.option.nbval_cell_timeout = CELL_SECONDS
    work = tempfile.TemporaryDirectory()
    config.add_cleanup(work.cleanup)
    os.environ["NANOSERVE_WORK"] = work.name
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # notebooks run side by side
    RunningKernel.await_reply = _await_reply_of_the_living


def _await_reply_of_the_living(self, msg_id, timeout=None, _await=RunningKernel.await_reply):
    """nbval's await_reply, which asks every second whether the kernel still lives."""
    end = time.monotonic() + (timeout or CELL_SECONDS)
    while True:
        try:
            return _await(self, msg_id, timeout=min(1, max(0, end - time.monotonic())))
        except Empty:
            if not self.is_alive():
                raise RuntimeError("the kernel died in this cell") from None
            if time.monotonic() >= end:
                raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    """Once a notebook's kernel has died or hung, its other cells fail at once, saying so."""
    if not isinstance(item, IPyNbCell):
        return (yield)
    notebook = item.parent
    if broken := getattr(notebook, "broken", None):
        raise RuntimeError(f"not run: {broken}")
    try:
        return (yield)
    finally:
        if notebook.timed_out:
            seconds = item.config.option.nbval_cell_timeout
            notebook.broken = f"cell {item.cell_num} ran for more than {seconds:g} s"
            notebook.timed_out = False  # nbval would expect the other cells to fail, and hide it
        elif not notebook.kernel.is_alive():
            notebook.broken = f"the kernel died in cell {item.cell_num}"
