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
#
# **Today** requests take blocks only when their tokens come, so more of them run at once. When no block is left, one
# request gives its blocks back and is computed again later. You write whom to preempt, and how.

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
today.picture("preemption")

# %% [markdown]
# ## Why it matters
#
# A request with `max_tokens=1000` may write 1,000 tokens, or stop after 20. Since Day 35 it takes the blocks for all
# 1,000 at once, and many of them stay empty for long. Paging was made to avoid exactly this. So let a request
# take a block when its next token needs one.
#
# Then the requests together may want more than the pool has: it is **oversubscribed**, as an airline sells more
# seats than the aeroplane has. Most of the time all is well. Sometimes somebody has to give a seat back, and the
# engine must do this without any user seeing another text.

# %%
today.glossary("oversubscribe", "preempt", "recomputation", "swapping", "starve")

# %% [markdown]
# ## How much is empty?
#
# Take the first 32 requests of Day 14's list (synthetic, drawn to look like short chats with a few long documents).
# Suppose that all of them run at once, and each is somewhere in its answer. How much of what they hold is used?

# %%
import random

requests = [tuple(pair) for pair in today.data("request_lengths")["requests"][:32]]
draw = random.Random(37)


def blocks_of(tokens):
    return -(-tokens // 16)


reserved = sum(blocks_of(prompt + answer - 1) for prompt, answer in requests)
needed = sum(blocks_of(prompt + draw.randrange(answer)) for prompt, answer in requests)
print(f"{reserved} blocks reserved, {needed} needed now: {100 * needed / reserved:.0f}%")
assert needed < 0.8 * reserved

# %% [markdown]
# And this is a favourable case: here each answer ends where its `max_tokens` said it might. The more an answer stops
# before its limit, the more of the reserved blocks are never used.
#
# ## Blocks when they are needed
#
# Two methods change. `_can_admit` no longer asks for all that a request may need: the free blocks must hold its
# tokens so far. And `_take` calls `_reserve`, which takes the blocks for the tokens of this step. If `_reserve`
# returns False, the request skips the step.

# %%
from nanoserve.cache import KVCacheExhausted
from nanoserve.course.exercises.day36 import advance, toy_pool, toy_requests
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


# %% [markdown]
# Why does `_take` test whether the request runs? It may have been preempted a moment ago, in the same `schedule`.
#
# ## Your turn: `_preempt`
#
# To **preempt** a request is to interrupt it and to take its blocks. What must be kept? The keys and values lie in the
# pool and are lost. All else is small and lies elsewhere: the tokens, the generator, the text. So a request that
# comes back needs only a prefill of all its tokens, prompt and output, and goes on where it was. This is
# **recomputation**, which vLLM does too. (The other way is **swapping**: copy the blocks to other memory, and back.)
#
# `Sequence` is made for this. `ids` has the prompt and the output, and `num_uncomputed` counts those that the cache
# lacks. So a preempted request looks like a new one with a longer prompt.
#
# `_preempt(sequence)` does five things. The sequence is the newest that runs.
#
# 1. It leaves `self.running`.
# 2. It enters `self.waiting`, a deque, **before** all others: it arrived before them.
# 3. It leaves `self._step`, the step that is being made, if it is in there.
# 4. `sequence.cache.free()` gives its blocks back and sets its length to 0.
# 5. `self.num_preemptions` counts it.
#
# Stuck? `today.hint()`.
#
# After a kernel restart, run the cells above first (Run → Run All Above Selected Cell).


# %%
def _preempt(self, sequence: Sequence) -> None:
    """Give the blocks of the newest request back. It waits before all others, and computes its
    tokens again later, those that it has generated included."""
    raise NotImplementedError("your turn")


today.check(_preempt)

# %% [markdown]
# The cell below holds the package's version; from here on this notebook uses it.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/engine/scheduler.py: Scheduler._preempt
class Scheduler(Scheduler):
    def _preempt(self, sequence: Sequence) -> None:
        """Give the blocks of the newest request back. It waits before all others, and computes
        its tokens again later, those that it has generated included."""
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)
        self._step.pop(sequence, None)
        sequence.cache.free()
        self.num_preemptions += 1


# %% [markdown]
# ## Your turn: `_reserve`
#
# A request needs blocks for `num_tokens` more tokens, and too few are free. **Whom** do you preempt? The request with
# most blocks would free most. The oldest has had its time. But with both rules an old request can lose its blocks
# again and again; you will see it below. The rule that works is: **the newest**, `self.running[-1]`. A request takes
# blocks only from requests that arrived after it.
#
# - Try `sequence.cache.table.grow(tokens in all)`. The table must hold `sequence.cache.seq_len + num_tokens` tokens.
#   If that works, return True.
# - If it raises `KVCacheExhausted` (then nothing has changed, Day 15), preempt the newest with `self._preempt`, and
#   try again. One preemption may not be enough.
# - If the newest is this request itself, return False. It skips the step, and keeps what it has.


# %%
def _reserve(self, sequence: Sequence, num_tokens: int) -> bool:
    """Take the blocks for num_tokens more tokens. While too few are free, preempt the newest
    request that runs. False if the newest is this request: then it skips the step."""
    raise NotImplementedError("your turn")


today.check(_reserve)


# %% jupyter={"source_hidden": true}
# lands in nanoserve/engine/scheduler.py: Scheduler._reserve
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


# %% [markdown]
# Here is the picture with numbers: a pool of 8 blocks of 4 slots, and three requests. The scheduler runs without a
# model, as yesterday. Each line is a step, with the blocks that each request holds.

# %%
pool = toy_pool(8, block_size=4)
scheduler = Scheduler(pool.allocator)
everyone = toy_requests(pool, [(7, 7), (7, 12), (7, 12)])
for sequence in everyone:
    scheduler.add(sequence)
while scheduler.running or scheduler.waiting:
    step = scheduler.schedule()
    told = " ".join(f"{s.request_id}:{n}" for s, n in step.items())
    held = {s.request_id: len(s.cache.table.blocks) for s in everyone}
    print(f"computes {told:12} holds {held} free {pool.allocator.num_free}")
    advance(scheduler, step)
print(scheduler.num_preemptions, "preemption;", [len(s.output_ids) for s in everyone], "tokens")
assert scheduler.num_preemptions == 1 and [len(s.output_ids) for s in everyone] == [7, 12, 12]

# %% [markdown]
# Three things to find. First C **skips** steps: it is the newest, it needs a block, and none is free. Then A and B
# each need one more, and C holds no block any more. When A has finished, C computes 9 tokens at once: the 7 of its
# prompt and the 2 of its output. No token of the output is chosen a second time: this step appends the next one.
#
# ## Nobody starves
#
# Can a request be preempted for ever? Look at the oldest request that runs. Nobody may preempt it, and it may preempt
# everybody. `add` has refused a request that is larger than the pool, so the oldest always gets its blocks, and
# finishes. Then another one is the oldest. So each request finishes in the end. The order of arrival is never
# broken: whoever is preempted waits before all that wait.
#
# Now the trap. Preempt the *oldest* other request instead. A has a prompt of 20 tokens, and a step has a budget of
# 4, so A needs several steps. In every third step a short request arrives:


# %%
class PreemptOldest(Scheduler):
    def _reserve(self, sequence, num_tokens):
        while True:
            try:
                sequence.cache.table.grow(sequence.cache.seq_len + num_tokens)
                return True
            except KVCacheExhausted:
                self._preempt(next(s for s in self.running if s is not sequence))


def serve(kind, steps=300):
    """A, then a short request in every third step: (tokens of A's answer, others finished)."""
    pool = toy_pool(6, block_size=4)
    scheduler = kind(pool.allocator, max_batch_tokens=4)
    first, *others = toy_requests(pool, [(20, 4)] + [(6, 6)] * (steps // 3))
    scheduler.add(first)
    for number in range(steps):
        if number % 3 == 1:
            scheduler.add(others[number // 3])
        advance(scheduler, scheduler.schedule())
    return len(first.output_ids), sum(len(other.output_ids) == 6 for other in others)


# %%
for kind in (PreemptOldest, Scheduler):
    tokens, finished = serve(kind)
    print(f"{kind.__name__:13} after 300 steps: A has {tokens} tokens, {finished} others finished")
assert serve(PreemptOldest)[0] == 0 and serve(Scheduler)[0] == 4

# %% [markdown]
# With the wrong rule, A **starves**. Each time its prompt is partly computed, a newcomer takes its blocks, and all that
# work is lost. Averages would not show it: dozens of other requests finish. The argument above says why the right
# rule cannot do this.
#
# ## Prove it: the same tokens, in a pool that is too small
#
# Five requests on SmolLM2's first two layers, in pools that hold all of them, then fewer, then barely one. Two requests
# are greedy and three are sampled, one of them with a penalty that depends on its own output. The reference is the
# loop for one sequence. Free slots hold NaN, so that a stale read would show.

# %%
from dataclasses import replace

from nanoserve import SamplingParams, load_model, load_tokenizer
from nanoserve.cache import KVPool
from nanoserve.engine import Engine
from nanoserve.generate import generate_tokens, new_cache
from nanoserve.model import Model

model, tokenizer = load_model("smollm2"), load_tokenizer("smollm2")
two_layers = Model(replace(model.config, num_layers=2), model.weights)
texts = [
    "The tide goes out",
    "A list of colours: red, green,",
    "Once",
    "def f(x):",
    "It rained and",
]
prompts = [tokenizer.encode(text) for text in texts]
params = [SamplingParams(max_tokens=20, temperature=t, seed=i) for i, t in enumerate((0, 0, 1, 1))]
params.append(SamplingParams(max_tokens=20, temperature=1, seed=5, frequency_penalty=1.0))


# %%
def alone(ids, each):
    cache = new_cache("naive", two_layers, 0)
    samples = generate_tokens(two_layers, ids, each, cache, two_layers.config.eos_ids)
    return [sample.token_id for sample in samples]


def together(num_blocks, kind=Scheduler):
    """The tokens of all requests from one pool, and the number of preemptions."""
    engine = Engine(two_layers, None, num_blocks, block_size=4)
    engine.pool = KVPool(two_layers.config, num_blocks, 4, poison=True)
    engine.scheduler = kind(engine.pool.allocator, max_batch_tokens=16)
    tokens = {engine.add(ids, each): [] for ids, each in zip(prompts, params)}
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id].append(output.token_id)
    assert engine.num_free_blocks == num_blocks
    return list(tokens.values()), engine.scheduler.num_preemptions


# %%
expected = [alone(ids, each) for ids, each in zip(prompts, params)]
for num_blocks in (40, 20, 14, 8):
    tokens, preemptions = together(num_blocks)
    print(f"{num_blocks:2} blocks: {preemptions:2} preemptions, same tokens: {tokens == expected}")
    assert tokens == expected and (preemptions > 0) == (num_blocks < 40)

# %% [markdown]
# A sampled request survives because its generator is part of the `Sequence`: one random number for each token, and
# none is drawn while a token is only computed again.
#
# A list of cases shows what its author thought of. So let chance choose: arrivals, lengths, budgets and pools. No model
# is needed for this. After each step: no block has two owners, requests that wait hold none, and the order is that of
# arrival. In the end, every request has all its tokens. (The package's tests do the same with a model, for thousands
# of steps.)

# %%
chance, preempted = random.Random(37), 0
for _ in range(60):
    size, budget = chance.randint(1, 5), chance.choice([1, 3, 8, 64])
    lengths = [(chance.randint(1, 20), chance.randint(1, 20)) for _ in range(chance.randint(1, 9))]
    pool = toy_pool(-(-max(map(sum, lengths)) // size) + chance.randint(0, 4), size)
    scheduler = Scheduler(pool.allocator, chance.randint(1, 6), budget)
    everyone = toy_requests(pool, lengths)
    arriving = list(everyone)
    while arriving or scheduler.running or scheduler.waiting:
        for _ in range(min(len(arriving), chance.randint(0, 2))):
            scheduler.add(arriving.pop(0))
        step = scheduler.schedule()
        live = [*scheduler.running, *scheduler.waiting]
        assert live == sorted(live, key=everyone.index) and (step or not live)
        assert sum(step.values()) <= budget and not any(
            s.cache.table.blocks for s in scheduler.waiting
        )
        owned = [block for s in scheduler.running for block in s.cache.table.blocks]
        assert sorted(owned + pool.allocator._free) == list(range(pool.allocator.num_blocks))
        advance(scheduler, step)
    assert [len(s.output_ids) for s in everyone] == [answer for _, answer in lengths]
    preempted += scheduler.num_preemptions
print("60 random runs finished, with", preempted, "preemptions")
assert preempted > 60

# %% [markdown]
# ## Your answer is the engine
#
# Inside `today.mine()` the package's scheduler runs with your `_preempt` and `_reserve`, if they have passed:

# %%
import nanoserve.engine.scheduler as engine_scheduler

with today.mine():
    tokens, preemptions = together(14, engine_scheduler.Scheduler)
print(preemptions, "preemptions, same tokens:", tokens == expected)
assert tokens == expected

# %% [markdown]
# ## Measure it: what a small pool costs
#
# The 32 requests from above, in pools from a sixth of all that they need to all of it. They arrive at once. Counted,
# not timed: the **steps** until all have finished, and the tokens that are **computed again**. The other line is
# Day 36's rule, which reserves all blocks at admission.

# %%
question = (
    "A pool with a quarter of the blocks: how many % more tokens are computed than necessary?"
)
today.predict("again", question, guess=None, low=0, high=1000)


# %%
def run(kind, num_blocks, lengths):
    """Run a scheduler without a model: (steps, tokens computed, preemptions)."""
    pool = toy_pool(num_blocks)
    scheduler = kind(pool.allocator)
    for sequence in toy_requests(pool, lengths):
        scheduler.add(sequence)
    steps = computed = 0
    while scheduler.running or scheduler.waiting:
        step = scheduler.schedule()
        steps, computed = steps + 1, computed + sum(step.values())
        advance(scheduler, step)
    return steps, computed, scheduler.num_preemptions


class ReserveAll(Scheduler):
    def _can_admit(self, sequence):
        slots = self._allocator.num_free * self._allocator.block_size
        return len(self.running) < self.max_num_seqs and sequence.most_tokens <= slots

    def _take(self, sequence):
        sequence.cache.table.grow(sequence.most_tokens)
        super()._take(sequence)


# %%
necessary = sum(prompt + answer - 1 for prompt, answer in requests)
SHARES = (1 / 6, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 5 / 6, 1)
steps, again = {ReserveAll: [], Scheduler: []}, []
for share in SHARES:
    for kind in steps:
        taken, computed, preemptions = run(kind, round(share * reserved), requests)
        steps[kind].append(taken)
    again.append(100 * (computed / necessary - 1))
    told = f"{steps[ReserveAll][-1]:,} steps reserved, {taken:,} on demand"
    print(
        f"{share:4.0%} of the blocks: {told}; {preemptions:2} preemptions, {again[-1]:2.0f}% again"
    )
print("your guess for a quarter:", today.guess_text("again"))
assert steps[Scheduler][-1] == steps[ReserveAll][-1] and again[-1] == 0
assert all(b < a for a, b in zip(steps[ReserveAll][:-1], steps[Scheduler][:-1]))

# %% jupyter={"source_hidden": true}
# Draws the plot: Steps and recomputed tokens against the pool's size
from nanoserve.course.plots import COLOURS, figure, label_line, prediction_marker

percent = [100 * share for share in SHARES]
fig, (left, right) = figure(
    panels=2, xlabel="pool, % of all that may be needed", title="A small pool, and its price"
)
for kind, label, colour, at, where in (
    (ReserveAll, "reserved", "contiguous", 2, "above right"),
    (Scheduler, "on demand", "engine", 4, "below"),
):
    left.plot(percent, steps[kind], color=COLOURS[colour], marker="o")
    label_line(left, percent[at], steps[kind][at], label, COLOURS[colour], where)
right.plot(percent, again, color=COLOURS["engine"], marker="o")
left.set_ylabel("steps until all have finished")
right.set_ylabel("tokens computed again, %")
prediction_marker(right, 25, today.guess("again"))
for ax in (left, right):
    ax.set(xlim=(10, 104), ylim=(-0.02 * ax.get_ylim()[1], None), xticks=range(20, 101, 20))
fig

# %% [markdown]
# On demand, the requests finish in fewer steps in every pool that is smaller than all they may need: more of them
# run at once. The price is in the right plot. In a small pool, many tokens are computed more than once.
#
# What this count does not show is time. A step with a prefill takes longer than a step of decodes, so the gain in
# time may be smaller than the gain in steps. But an output token that is computed again is cheaper than it was the
# first time: then it needed a step of its own, and now many come in one prefill. And in a real mix, answers stop
# before their `max_tokens`. Then the rule on demand gains more: it has never taken the blocks for the rest.
#
# ## What you learned
#
# 1. **Reserve less, and more requests run.** Blocks are taken when tokens come; the pool may be oversubscribed.
# 2. **Preempt the newest.** The oldest is then safe and finishes, so every request finishes, and the order of arrival
#    holds.
# 3. **A cache can be computed again; a request's state cannot.** Keep tokens, generator and text outside the pool, and
#    no reader sees that anything happened.

# %%
today.review()

# %% [markdown]
# ## Tomorrow
#
# Week 10 begins. Many requests start with the same text: a system prompt, a document, a conversation so far. Each of
# them computes it and holds blocks of its own for it. Day 38 computes it once, and lets them share the blocks.
#
# **In one paragraph.** A request that reserves all that it may need keeps memory empty, and others wait. We let it take
# blocks token by token. When none is free, the newest request that runs gives its blocks back, waits before all
# others, and later computes its tokens again in a prefill. Its tokens and its random numbers are kept, so its text
# is the same. In pools that are too small for all, the requests finish in fewer steps than with reservations, and pay
# with tokens that are computed twice.
