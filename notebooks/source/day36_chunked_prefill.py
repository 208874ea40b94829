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
#
# **Today** a step gets a budget of tokens. You write the function that splits a long prompt into chunks, so that
# the requests that run get their next tokens while the prompt is computed.

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
today.picture("chunked-prefill")

# %% [markdown]
# ## Why it matters
#
# Somebody reads an answer as it is written, token by token. Then another user sends a document of thousands of
# tokens. With Day 35's scheduler, the whole prompt runs in one step, together with one token of every request that
# runs. The step takes as long as all its tokens, so all these readers see their text stop.
#
# The average speed does not show this. The time between two tokens does, and it is what a reader notices. So
# serving engines split a long prompt over several steps (Agrawal et al. 2024, "Sarathi-Serve"); in vLLM this is
# the default.

# %%
today.glossary("chunk", "token budget", "chunked prefill", "inter-token latency")

# %% [markdown]
# ## The size of a step
#
# A scheduler decides with numbers alone, so it can run without a model. `toy_requests` makes requests from pairs:
# tokens of the prompt, tokens of the answer. `advance` does what a step does to them: the cache of each request
# gets the step's tokens, and a request without uncomputed tokens gets a new one.
#
# Three requests run. After two steps a prompt of 40 tokens arrives. The budget of the first line is so large that
# it never matters:

# %%
from nanoserve.course.exercises.day36 import advance, toy_pool, toy_requests
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence


def steps_of(kind, budget, lengths=((5, 30), (4, 30), (6, 30), (40, 9)), steps=8):
    """The steps of a scheduler: request: tokens. The last request arrives after two steps."""
    pool = toy_pool(40)
    scheduler = kind(pool.allocator, max_batch_tokens=budget)
    *early, late = toy_requests(pool, lengths)
    for sequence in early:
        scheduler.add(sequence)
    found = []
    for number in range(steps):
        if number == 2:
            scheduler.add(late)
        step = scheduler.schedule()
        found.append({sequence.request_id: n for sequence, n in step.items()})
        advance(scheduler, step)
    return found


whole = steps_of(Scheduler, budget=10_000)
for step in whole[:4]:
    print(f"{sum(step.values()):3} tokens: {step}")
assert sum(whole[2].values()) == 43

# %% [markdown]
# The third step has 43 tokens, of which 40 belong to one request. A, B and C wait for all of them, to get one token
# each. With a prompt of 4,000 tokens, they would wait for a hundred times as many.
#
# ## A budget of tokens
#
# So limit the tokens of a step: `max_batch_tokens`. Within this **token budget**, the step is filled in this order:
#
# 1. **Decodes**, one token each. So every request that writes gets its token in each step (if the budget is at
#    least the number of these requests).
# 2. **Prompts that run**, the oldest first. A prompt that does not fit gives the step a chunk: as many tokens as
#    are left. Its other tokens follow in later steps.
# 3. **New requests**, in order of arrival, while there are tokens, places and blocks.
#
# A chunk needs nothing new from the model. Day 11's continuation was one, and Day 28's batch holds chunks, prefills
# and decodes alike. Only the last chunk of a prompt gets logits: until then, `step_logits` returns none for it.
#
# One rule is missing. A long prompt takes all tokens that are left, step after step, and a short prompt behind it
# would wait until the long one is computed. So while other prompts wait, **one prompt gets at most half of the
# budget**.
#
# ## Your turn: `chunk`
#
# How many tokens of one request go into the step? Three limits hold at once:
#
# | limit | value |
# | --- | --- |
# | the request has no more | `num_uncomputed` |
# | the step has no more | `tokens_left` of its `budget`; it may be 0 |
# | only if `others_wait` | half of `budget`, rounded down, but at least 1 |
#
# With a budget of 16 and 3 decodes in the step, a prompt of 40 tokens gets 13, or 8 while others wait. A decode is
# a request with 1 uncomputed token: the same function serves it. Stuck? `today.hint()`.
#
# After a kernel restart, run the cells above first (Run → Run All Above Selected Cell).


# %%
def chunk(num_uncomputed: int, tokens_left: int, budget: int, others_wait: bool) -> int:
    """How many tokens of one request run in a step that has tokens_left of its budget left.
    A prompt gets at most half of the budget while others wait, but at least one token."""
    raise NotImplementedError("your turn")


today.check(chunk)

# %% [markdown]
# The cell below holds the package's version; from here on this notebook uses it.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/engine/scheduler.py: chunk
def chunk(num_uncomputed: int, tokens_left: int, budget: int, others_wait: bool) -> int:
    """How many tokens of one request run in a step that has tokens_left of its budget left.

    A prompt gets at most half of the budget while other prompts wait, but at least one token.
    """
    most = max(1, budget // 2) if others_wait else budget
    return min(num_uncomputed, tokens_left, most)


# %% [markdown]
# ## The scheduler fills a step
#
# `schedule` now has its final form: the three groups, one after another, each request through `_take`. Two small
# methods give `chunk` its arguments. For a prompt, `_others_wait` is true if a request waits, or if another prompt
# that runs has tokens that are not in the step yet.


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
        """Whether another prompt has tokens to compute that are not in the step yet. False for a
        decode, which no other request limits."""
        if sequence.num_uncomputed == 1:
            return False
        prompts = (s for s in self.running if s.num_uncomputed > 1 and s is not sequence)
        return bool(self.waiting) or any(s.num_uncomputed > self._step.get(s, 0) for s in prompts)


# %% [markdown]
# `_take` puts a request into the step, with the tokens that `chunk` allows. As on Day 35, it takes all blocks of the
# request when it comes first. Tomorrow it takes only those that the step needs.


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


# %% [markdown]
# The same four requests, with a budget of 16:

# %%
chunked = steps_of(Scheduler, budget=16)
for step in chunked[:7]:
    print(f"{sum(step.values()):3} tokens: {step}")
assert max(sum(step.values()) for step in chunked) == 16
assert [step["D"] for step in chunked[2:7]] == [13, 13, 13, 1, 1]
assert all(step["A"] == 1 for step in chunked[1:])

# %% [markdown]
# The prompt of D takes four steps, and A, B and C get a token in each. In the first step the prompts of A, B and C
# fit into the budget, so nothing is split. (Look at the step in which D has one token for the first time: it is
# the last of its prompt. The next is a decode.)
#
# What is the half for? Here a short prompt, C, waits behind a long one, B, and A decodes. With a scheduler that
# never halves, in which step does C get its first token?


# %%
class NeverHalf(Scheduler):
    def _others_wait(self, sequence):
        return False


lengths = ((4, 60), (150, 9), (6, 9))
first = {}
for kind in (NeverHalf, Scheduler):
    steps = steps_of(kind, 16, lengths, steps=30)
    first[kind] = next(number for number, step in enumerate(steps) if "C" in step)
    prompt = [step["B"] for step in steps if step.get("B", 1) > 1]
    print(f"{kind.__name__:9} C begins in step {first[kind]:2}; chunks of B: {prompt}")
assert first[Scheduler] == 2 < first[NeverHalf]

# %% [markdown]
# C arrived before step 2. With the half, it begins in that very step: B gets 8 tokens, and the rest of the budget is
# C's. The long prompt pays little for it: while nobody waits, it takes all that is left.
#
# ## Prove it: the same tokens for any chunk size
#
# A token's keys and values depend on the tokens before it, and these are in the cache, however they came there.
# So a chunk computes what a whole prefill computes, up to rounding. Try it with SmolLM2's first two layers: they
# write no sense, but they are quick. The loop for one sequence is the reference again.

# %%
from dataclasses import replace

from nanoserve import SamplingParams, load_model, load_tokenizer
from nanoserve.engine import Engine
from nanoserve.generate import generate_tokens, new_cache
from nanoserve.model import Model

model, tokenizer = load_model("smollm2"), load_tokenizer("smollm2")
two_layers = Model(replace(model.config, num_layers=2), model.weights)


def answers(model, prompts, params, budget, kind=Scheduler):
    """The tokens of each prompt, with this notebook's scheduler or another kind."""
    engine = Engine(model, None, num_blocks=64)
    engine.scheduler = kind(engine.pool.allocator, max_batch_tokens=budget)
    tokens = {engine.add(ids, params): [] for ids in prompts}
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id].append(output.token_id)
    return list(tokens.values())


def alone(model, ids, params):
    cache = new_cache("naive", model, 0)
    samples = generate_tokens(model, ids, params, cache, model.config.eos_ids)
    return [sample.token_id for sample in samples]


# %%
texts = ["The tide goes out and the boats lie down in the mud. " * 3, "A list of colours:", "Once"]
prompts, params = [tokenizer.encode(text) for text in texts], SamplingParams(max_tokens=8)
expected = [alone(two_layers, ids, params) for ids in prompts]
for budget in (1, 2, 3, 7, 16, 17, 1000):
    assert answers(two_layers, prompts, params, budget) == expected, f"budget {budget}"
print("prompts of", [len(ids) for ids in prompts], "tokens: the same tokens for seven budgets")

# %% [markdown]
# And the whole model, with a budget of 5, on a prompt whose continuation you can judge:

# %%
prompt = tokenizer.encode("A list of the days of the week: Monday, Tuesday, Wednesday, Thursday,")
(tokens,) = answers(model, [prompt], SamplingParams(max_tokens=4), budget=5)
print(len(prompt), "tokens of prompt in chunks of 5, then", repr(tokenizer.decode(tokens)))
assert tokens == alone(model, prompt, SamplingParams(max_tokens=4))

# %% [markdown]
# ## Your answer is the engine
#
# The package's scheduler calls `chunk` for each request in each step. Inside `today.mine()` this is your function,
# if it has passed its check.

# %%
import nanoserve.engine.scheduler as engine_scheduler

with today.mine():
    found = answers(two_layers, prompts, params, 16, engine_scheduler.Scheduler)
print("the same tokens with the package's scheduler:", found == expected)
assert found == expected

# %% [markdown]
# ## Measure it: the time between two tokens
#
# Three requests write with SmolLM2. After four steps a prompt of 256 tokens arrives. Each request that writes gets
# one token in each step, so the time between two of its tokens is the time of a step. Run this once with a budget
# that never matters, and once with a budget of 48.

# %%
question = "The longest time between two tokens: how many times shorter is it with a budget of 48?"
today.predict("shorter", question, guess=None, low=1, high=100)

# %%
from statistics import median
from time import perf_counter

ARRIVAL, STEPS = 4, 14
document = tokenizer.encode("The tide goes out and the boats lie down in the mud. " * 30)[:256]


def while_it_arrives(budget):
    """Seconds of each step, and the seconds from the document's arrival to its first token."""
    engine = Engine(model, None, num_blocks=64, max_batch_tokens=budget)
    for text in ("The tide", "A list of colours:", "Once upon a time"):
        engine.add(tokenizer.encode(text), SamplingParams(max_tokens=STEPS + 8))
    seconds, ttft = [], None
    for number in range(STEPS):
        if number == ARRIVAL:
            late = engine.add(document, SamplingParams(max_tokens=STEPS))
        started = perf_counter()
        outputs = engine.step()
        seconds.append(perf_counter() - started)
        if ttft is None and number >= ARRIVAL and any(o.request_id == late for o in outputs):
            ttft = sum(seconds[ARRIVAL:])
    return seconds, ttft


# %% tags=["nbval-ignore-output"]
measured = {name: while_it_arrives(budget) for name, budget in (("whole", 2048), ("chunks", 48))}
for name, (seconds, ttft) in measured.items():
    print(f"{name:7} longest step {1e3 * max(seconds[ARRIVAL:]):5.0f} ms, ", end="")
    print(f"first token of the document after {ttft:.2f} s")
longest = max(measured["whole"][0][ARRIVAL:])
shorter = longest / max(measured["chunks"][0][ARRIVAL:])
print(f"{shorter:.1f} times shorter; your guess: {today.guess_text('shorter')}")
assert longest > 1.5 * median(measured["chunks"][0][ARRIVAL : ARRIVAL + 6])

# %% jupyter={"source_hidden": true} tags=["nbval-ignore-output"]
# Draws the plot: While a long prompt arrives
from nanoserve.course.plots import COLOURS, figure, label_line, prediction_marker

fig, ax = figure(
    xlabel="token of a request that runs",
    ylabel="ms since the token before",
    title=f"A prompt of {len(document)} tokens arrives after token {ARRIVAL}",
)
for name, label, colour, at, where in (
    ("whole", "in one step", "contiguous", ARRIVAL + 1, "right"),
    ("chunks", "in chunks, budget 48", "engine", ARRIVAL + 5, "above right"),
):
    shown = [1e3 * second for second in measured[name][0]]
    ax.plot(range(2, STEPS + 1), shown[1:], color=COLOURS[colour], marker="o")
    label_line(ax, at, shown[at - 1], label, COLOURS[colour], where)
guess = today.guess("shorter")
prediction_marker(ax, ARRIVAL + 3, guess and 1e3 * longest / guess)
ax.set(xlim=(1, STEPS + 1), xticks=range(2, STEPS + 1, 2), ylim=(0, 1.12e3 * longest))
fig

# %% [markdown]
# The orange line has one high point: the step with the whole prompt. In chunks, the same work is spread over six
# steps. Each of them has at most 48 tokens, so nobody waits for more than that.
#
# Compare the two times to the document's first token as well (TTFT). If yours is longer with chunks, this is the price:
# six steps read all weights six times, and each step also computes a token of the others. So the budget is a
# choice. A small one gives short steps; a large one computes prompts with fewer reads of the weights. nanoserve's
# default is 2,048. With SmolLM2, that is about $5 \cdot 10^{11}$ operations: many for a CPU, few for a GPU.
#
# ## What you learned
#
# 1. **A step takes as long as all its tokens.** So limit them, and no reader waits long for the next token.
# 2. **Decodes first, then chunks.** A reader waits for each single token; a prompt waits only once.
# 3. **A chunk is a prefill that continues.** The cache holds what came before, so any split gives the same tokens.
#
# ## Tomorrow
#
# Each request still takes all blocks that it may ever need, and most of them are empty most of the time. Day 37
# takes blocks only when tokens come, and one day there is none left.
#
# **In one paragraph.** A whole prompt in one step makes every other request wait for it. We gave a step a budget of
# tokens, and filled it with decodes first and prompts after them, in chunks: the smallest of what the prompt has,
# what the step has left and, while others wait, half of the budget. Any split gives the same tokens. No reader waits
# for more than a budget of tokens, and the long prompt's own first token may come later.
