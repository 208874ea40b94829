# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Day 36 · Chunked prefill
#
# Week 9 · Phase 4, many requests · you need: Day 35 (Continuous batching)

# %% jupyter={"source_hidden": true}
# Set-up: on Colab, installs nanoserve in a minute or two. In your own clone it does nothing.
import importlib.util, subprocess, sys
from pathlib import Path

REPOSITORY = ""  # on GitHub, OWNER/NAME
if importlib.util.find_spec("nanoserve") is None:
    wheels = sorted(Path.cwd().glob("nanoserve-*.whl"), key=lambda wheel: wheel.stat().st_mtime)
    source = f"https://github.com/{REPOSITORY}/archive/refs/heads/main.zip" if REPOSITORY else None
    source = wheels[-1].as_uri() if wheels else source
    if source is None:
        raise ModuleNotFoundError("put a nanoserve-*.whl beside this notebook, then run again")
    pip = [sys.executable, "-m", "pip", "install", "-q", f"nanoserve[notebook] @ {source}"]
    done = subprocess.run(pip, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"pip could not install nanoserve from {source}:\n{done.stdout}")
    importlib.invalidate_caches()

# %%
from nanoserve.course import day

today = day(36)

# %%
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence


# %% jupyter={"source_hidden": true}
# lands in nanoserve/engine/scheduler.py: chunk
def chunk(num_uncomputed: int, tokens_left: int, budget: int, others_wait: bool) -> int:
    """How many tokens of one request run in a step that has tokens_left of its budget left.

    A prompt gets at most half of the budget while other prompts wait, but at least one token.
    """
    most = max(1, budget // 2) if others_wait else budget
    return min(num_uncomputed, tokens_left, most)


# %% jupyter={"source_hidden": true}
# lands in nanoserve/engine/scheduler.py: Scheduler.schedule
class Scheduler(Scheduler):
    def schedule(self) -> dict[Sequence, int]:
        """Choose the next step: the requests that run, and how many tokens of each.

        Decodes come first, one token each; then the prompts that run; then new requests, while
        there are tokens, sequences and blocks for them. Each group is in order of arrival. All
        blocks of the step are taken. The step is empty only if there is no request.
        """
        self._step = {}
        decodes = [s for s in self.running if s.num_uncomputed == 1]
        prompts = [s for s in self.running if s.num_uncomputed > 1]
        for sequence in decodes + prompts:
            self._take(sequence)
        while self._tokens_left() and self.waiting and self._can_admit(self.waiting[0]):
            self.running.append(self.waiting.popleft())
            self._take(self.running[-1])
        return self._step

    def _tokens_left(self) -> int:
        return self.max_batch_tokens - sum(self._step.values())

    def _others_wait(self, sequence: Sequence) -> bool:
        """Whether another prompt has tokens to compute that are not in the step yet."""
        prompts = (s for s in self.running if s.num_uncomputed > 1 and s is not sequence)
        return bool(self.waiting) or any(s.num_uncomputed > self._step.get(s, 0) for s in prompts)


# %% jupyter={"source_hidden": true}
# until day 37: lands in nanoserve/engine/scheduler.py: Scheduler._take
class Scheduler(Scheduler):
    def _take(self, sequence: Sequence) -> None:
        """Put as many tokens of a request into the step as the budget allows."""
        sequence.cache.table.grow(sequence.most_tokens)  # all blocks of the request, taken once
        n = chunk(
            sequence.num_uncomputed,
            self._tokens_left(),
            self.max_batch_tokens,
            self._others_wait(sequence),
        )
        if n > 0:
            self._step[sequence] = n
