# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Day 37 · When memory runs out
#
# Week 9 · Phase 4, many requests · you need: Day 36 (Chunked prefill)

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

today = day(37)

# %%
from nanoserve.cache import KVCacheExhausted
from nanoserve.engine.scheduler import Scheduler, chunk
from nanoserve.engine.sequence import Sequence


# %% jupyter={"source_hidden": true}
# lands in nanoserve/engine/scheduler.py: Scheduler._can_admit, Scheduler._take
class Scheduler(Scheduler):
    def _can_admit(self, sequence: Sequence) -> bool:
        """Whether one more request may run, and the free blocks hold its tokens so far."""
        slots = self._allocator.num_free * self._allocator.block_size
        return len(self.running) < self.max_num_seqs and len(sequence.ids) <= slots

    def _take(self, sequence: Sequence) -> None:
        """Put as many tokens of a request into the step as the budget and the blocks allow."""
        n = chunk(
            sequence.num_uncomputed,
            self._tokens_left(),
            self.max_batch_tokens,
            self._others_wait(sequence),
        )
        if n > 0 and sequence in self.running and self._reserve(sequence, n):
            self._step[sequence] = n


# %% jupyter={"source_hidden": true}
# lands in nanoserve/engine/scheduler.py: Scheduler._reserve, Scheduler._preempt
class Scheduler(Scheduler):
    def _reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Take the blocks for num_tokens more tokens. While too few are free, preempt the newest
        request that runs. False if the newest is this request: then it skips the step."""
        while True:
            try:
                sequence.cache.table.grow(sequence.cache.seq_len + num_tokens)
                return True
            except KVCacheExhausted:
                if self.running[-1] is sequence:
                    return False
                self._preempt(self.running[-1])

    def _preempt(self, sequence: Sequence) -> None:
        """Give the blocks of the newest request back. It waits before all others, and computes
        its tokens again later, those that it has generated included."""
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)
        self._step.pop(sequence, None)
        sequence.cache.free()
        self.num_preemptions += 1
