"""Many requests over one pool: `Engine` runs them together, one step at a time.

sequence.py   a request: its tokens, its cache, and what it does with a chosen token
scheduler.py  which tokens run in the next step
engine.py     the forward pass of a step, and the public interface
"""

from nanoserve.engine.engine import Engine
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Output, Sequence

__all__ = ["Engine", "Output", "Scheduler", "Sequence"]
