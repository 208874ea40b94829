# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Day 35 · Continuous batching
#
# Week 9 · Phase 4, many requests · you need: Day 34 (One forward for many)
#
# **Today** requests come and go while the engine runs. You write the scheduler that admits them and retires them
# between steps. Then `LLM` runs on the engine: one pool, and one step for all that run.

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

today = day(35)
today.picture("continuous-batching")

# %% [markdown]
# ## Why it matters
#
# Day 34 ran a fixed list of requests until the last one had finished. This is **static batching**. Answers have
# different lengths, and nobody knows them in advance. A request that ends early leaves its place idle, and a
# request that arrives has to wait for the whole batch.
#
# A forward pass needs no fixed list. Each step is made anew from whatever runs, so a place can be filled **between
# any two steps**. Orca proposed this (Yu et al. 2022, "iteration-level scheduling"), and serving engines since then
# work this way.

# %%
today.glossary()

# %% [markdown]
# ## Count the idle slots
#
# Take requests whose answers have these numbers of tokens, and four places. A request that has its place takes one
# slot in each step. How many slots stay idle while a batch is static?

# %%
import random

draw = random.Random(35)
LENGTHS = [draw.choice((2, 3, 4, 6, 9, 20)) for _ in range(16)]
PLACES = 4


def static_steps(lengths, places):
    """Steps in all, if each group of `places` requests runs until its longest has ended."""
    groups = [lengths[i : i + places] for i in range(0, len(lengths), places)]
    return sum(max(group) for group in groups)


def continuous_steps(lengths, places):
    """Steps in all, if the next request takes a place as soon as it is free."""
    ends = [0] * places
    for length in lengths:
        ends[ends.index(min(ends))] += length
    return max(ends)


# %%
question = "Static batching: what percentage of the slots stays idle?"
today.predict("idle", question, guess=None, low=0, high=100)

# %%
counted = {
    "static": static_steps(LENGTHS, PLACES),
    "continuous": continuous_steps(LENGTHS, PLACES),
}
for name, steps in counted.items():
    idle = 1 - sum(LENGTHS) / (steps * PLACES)
    print(f"{name:10} {steps:3} steps, {idle:4.0%} of the slots idle")
print("your guess:", today.guess_text("idle"))
assert counted["static"] > 1.4 * counted["continuous"]

# %% [markdown]
# The tokens are the same in both. Only the number of steps differs, and each step costs about the same, because it
# reads the weights once.
#
# ## The scheduler
#
# The scheduler holds two queues: `running` and `waiting`, both in order of arrival. Before each step it answers one
# question: which requests run, and how many tokens of each?
#
# A request needs blocks. It may need `most_tokens` slots in all: its prompt and all tokens that may be generated,
# but for the last, which is never computed. Today a request takes **all** its blocks when it is admitted. So it can
# always run to its end. That is simple, and wasteful: an answer may stop early. Day 37 takes blocks as they are
# needed.
#
# In the constructor, `max_num_seqs` is the number of places. Skip `max_batch_tokens` and `_step` (Day 36 uses them)
# and `num_preemptions` (Day 37).

# %%
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from numbers import Integral
from pathlib import Path

import torch

from nanoserve.cache import BLOCK_SIZE, BlockAllocator, KVPool, PagedKVCache
from nanoserve.config import ModelConfig
from nanoserve.engine.engine import step_logits
from nanoserve.engine.sequence import Output, Sequence


# %% jupyter={"source_hidden": true}
# lands in nanoserve/engine/scheduler.py: Scheduler
class Scheduler:
    """The requests of an engine: those that run and those that wait, each in order of arrival.

    All requests that run arrived before all that wait. A request that waits holds no block.
    """

    def __init__(
        self, allocator: BlockAllocator, max_num_seqs: int = 64, max_batch_tokens: int = 2048
    ) -> None:
        """At most max_num_seqs requests run; a step has at most max_batch_tokens tokens.

        Raises ValueError if either is below 1.
        """
        for name, value in (("max_num_seqs", max_num_seqs), ("max_batch_tokens", max_batch_tokens)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.max_num_seqs, self.max_batch_tokens = max_num_seqs, max_batch_tokens
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.num_preemptions = 0
        self._allocator = allocator
        self._step: dict[Sequence, int] = {}  # the step that is being made

    def add(self, sequence: Sequence) -> None:
        """Put a new request behind all others."""
        self.waiting.append(sequence)


# %% [markdown]
# ## Your turn: `schedule`
#
# Choose the next step, in two parts:
#
# 1. **Admit.** While a request waits and `self._can_admit(self.waiting[0])`: take it out of `self.waiting` from the
#    left, take its blocks with `sequence.cache.table.grow(sequence.most_tokens)`, and append it to `self.running`.
#    `_can_admit` says whether a place and enough blocks are free. If the first one does not fit, all others wait
#    behind it: first come, first served.
# 2. **Choose.** Every request that runs is in the step, with all tokens that it lacks: a dictionary from the sequence
#    to `sequence.num_uncomputed`.
#
# The check is one call of `schedule` on a scheduler in the middle of its work. Stuck? `today.hint()`.
#
# After a kernel restart, run the cells above first (Run → Run All Above Selected Cell).


# %%
def schedule(self) -> dict[Sequence, int]:
    """Admit requests that wait, then choose the next step: all tokens that each request lacks."""
    raise NotImplementedError("your turn")


today.check(schedule)

# %% [markdown]
# The cell below holds the package's version as of today; from here on this notebook uses it. Days 36 and 37 replace
# both methods.


# %% jupyter={"source_hidden": true}
# until day 36: lands in nanoserve/engine/scheduler.py: Scheduler.schedule
class Scheduler(Scheduler):
    def schedule(self) -> dict[Sequence, int]:
        """Admit requests that wait, then choose the next step: all tokens that each request lacks.

        An admitted request takes all blocks that it may need.
        """
        while self.waiting and self._can_admit(self.waiting[0]):
            sequence = self.waiting.popleft()
            sequence.cache.table.grow(sequence.most_tokens)
            self.running.append(sequence)
        return {sequence: sequence.num_uncomputed for sequence in self.running}


# %%
# until day 37: lands in nanoserve/engine/scheduler.py: Scheduler._can_admit
class Scheduler(Scheduler):
    def _can_admit(self, sequence: Sequence) -> bool:
        """Whether one more request may run, and the free blocks hold all that it may need."""
        slots = self._allocator.num_free * self._allocator.block_size
        return len(self.running) < self.max_num_seqs and sequence.most_tokens <= slots


# %% [markdown]
# ## Your turn: `remove`
#
# A request ends: it got its last token, or somebody aborted it. Then it may run or still wait. Take it out of its
# queue, in place, and give its blocks back with `sequence.cache.free()`.


# %%
def remove(self, sequence: Sequence) -> None:
    """Take out a request, finished or not, and give its blocks back."""
    raise NotImplementedError("your turn")


today.check(remove)


# %% jupyter={"source_hidden": true}
# lands in nanoserve/engine/scheduler.py: Scheduler.remove
class Scheduler(Scheduler):
    def remove(self, sequence: Sequence) -> None:
        """Take out a request, finished or not, and give its blocks back."""
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        sequence.cache.free()


# %% [markdown]
# ## The engine
#
# Few parts are left. `Engine` makes the pool and joins the scheduler, Day 34's step and Day 10's `sample`:
#
# | member | what it does |
# | --- | --- |
# | `add(prompt_ids, params)` | checks a request and queues it; returns its id |
# | `step()` | runs one step; returns an `Output` for each request that got a token |
# | `abort(id)` | ends a request; its blocks are free at once |
# | `has_work` | whether `step` has anything to do |
#
# `add` refuses what could never run, before it disturbs anything: an empty prompt, an id outside the vocabulary, a
# request that is larger than the whole pool. Without the last check such a request would wait for ever, and all
# others behind it. `default_num_blocks` chooses the size of the pool. On a CPU it is at most a gibibyte, and memory
# that is never written costs nothing.

# %%
from nanoserve.model import Model, load_model
from nanoserve.sampling import Sample, SamplingParams, sample
from nanoserve.tokenizer import Tokenizer, load_tokenizer


# %% jupyter={"source_hidden": true}
# lands in nanoserve/engine/engine.py: CONTEXTS, CPU_BYTES, GPU_SHARE, default_num_blocks and 2 more
CONTEXTS, CPU_BYTES = 4, 1 << 30  # the default pool on a CPU: the smaller of the two

GPU_SHARE = 0.85  # of the memory that is free after loading


def default_num_blocks(model: Model, block_size: int = BLOCK_SIZE) -> int:
    """The number of blocks of an engine's pool: on a GPU, as many as GPU_SHARE of the free memory
    holds; elsewhere enough for CONTEXTS whole contexts, in at most CPU_BYTES."""
    config = model.config
    numbers = 2 * config.num_layers * config.n_kv * config.head_dim * block_size  # keys and values
    block_bytes = numbers * model.dtype.itemsize
    if model.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(model.device)
        return max(1, int(GPU_SHARE * free) // block_bytes)
    needed = CONTEXTS * -(-config.context // block_size)  # rounded up
    return max(1, min(needed, CPU_BYTES // block_bytes))


def check_prompt(prompt_ids: Iterable[int], config: ModelConfig) -> list[int]:
    """Return the prompt as a list of integers.

    Raises ValueError for an id that is no integer or is outside the vocabulary, and for a prompt
    that is empty or longer than the model's context.
    """
    ids = []
    for i in prompt_ids:
        if isinstance(i, bool) or not isinstance(i, Integral):
            raise ValueError(f"a prompt must be text or integer token ids, got {i!r}")
        ids.append(int(i))
    if not ids:
        raise ValueError("the prompt is empty")
    if len(ids) > config.context:
        raise ValueError(
            f"the prompt has {len(ids)} tokens, the model's context holds {config.context}"
        )
    for i in ids:
        if not 0 <= i < config.vocab_size:
            raise ValueError(f"token id {i} is outside the vocabulary of {config.vocab_size}")
    return ids


class Engine:
    """Runs many requests over one pool of blocks: add requests, then call step while has_work.

    An engine belongs to one thread.
    """

    @property
    def num_blocks(self) -> int:
        """The number of blocks in the pool."""
        return self.pool.allocator.num_blocks

    @property
    def has_work(self) -> bool:
        """Whether a step has anything to do or to return."""
        return bool(self._sequences or self._aborted)

    def check(self, prompt_ids: Iterable[int], params: SamplingParams) -> list[int]:
        """Return the prompt as a list of ids, or raise a ValueError for a request that cannot run.

        Raises for params of another type, stop strings without a tokenizer, the errors of
        check_prompt, and for a prompt that needs more blocks with its max_tokens than the pool has.
        """
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be a SamplingParams, got {params!r}")
        if params.stop and self.tokenizer is None:
            raise ValueError(f"stop strings {params.stop!r} need a tokenizer, and there is none")
        ids = check_prompt(prompt_ids, self.model.config)
        tokens = min(len(ids) + params.max_tokens, self.model.config.context)
        slots = self.num_blocks * self.pool.allocator.block_size
        if tokens > slots:
            raise ValueError(
                f"the prompt has {len(ids)} tokens and max_tokens is {params.max_tokens}: the "
                f"request may need {tokens} slots, and the pool has {slots} (num_blocks is "
                f"{self.num_blocks})"
            )
        return ids

    @torch.no_grad()
    def step(self) -> list[Output]:
        """Run one step. Returns an output for each request that got a token or was aborted.

        If a step raises an error, its requests are aborted.
        """
        step, outputs = self.scheduler.schedule(), []
        try:
            for sequence, logits in (step_logits(self.model, step) if step else {}).items():
                chosen = sample(
                    logits,
                    sequence.params,
                    sequence.generator,
                    sequence.prompt_ids,
                    sequence.output_ids,
                )
                outputs.append(sequence.accept(chosen))
        except BaseException:
            for sequence in step:
                self.abort(sequence.request_id)
            raise
        for output in outputs:
            if output.finish_reason is not None:
                self._end(self._sequences[output.request_id])
        aborted, self._aborted = self._aborted, []
        return aborted + outputs

    def abort(self, request_id: str) -> bool:
        """End a request: its blocks are free at once, and the next step returns its last output.

        Returns False, and does nothing, if no such request runs or waits.
        """
        if request_id not in self._sequences:
            return False
        self._end(self._sequences[request_id])
        self._aborted.append(Output(request_id, None, None, "", "abort"))
        return True

    def _end(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request_id]
        self.scheduler.remove(sequence)


# %% jupyter={"source_hidden": true}
# until day 38: lands in nanoserve/engine/engine.py: Engine.num_free_blocks, Engine.add
class Engine(Engine):
    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer | None,
        num_blocks: int | None = None,
        block_size: int = BLOCK_SIZE,
        max_num_seqs: int = 64,
        max_batch_tokens: int = 2048,
    ) -> None:
        """num_blocks: the size of the pool, by default that of default_num_blocks.

        At most max_num_seqs requests run at a time, and max_batch_tokens tokens in a step. Without
        a tokenizer, outputs have no text. Raises ValueError if a number is below 1.
        """
        if num_blocks is None:
            num_blocks = default_num_blocks(model, block_size)
        self.model, self.tokenizer = model, tokenizer
        self.pool = KVPool(model.config, num_blocks, block_size, model.dtype, model.device)
        self.scheduler = Scheduler(self.pool.allocator, max_num_seqs, max_batch_tokens)
        self._sequences: dict[str, Sequence] = {}
        self._aborted: list[Output] = []  # for the next step to return
        self._numbers = count()

    @property
    def num_free_blocks(self) -> int:
        """The number of blocks that no request holds."""
        return self.pool.allocator.num_free

    def add(
        self, prompt_ids: Iterable[int], params: SamplingParams, request_id: str | None = None
    ) -> str:
        """Queue a request and return its id, by default a new one.

        Raises ValueError, and changes nothing, for the id of a request that is not finished and for
        a request that `check` refuses.
        """
        ids = self.check(prompt_ids, params)
        if request_id is None:
            names = (f"request-{number}" for number in self._numbers)
            request_id = next(name for name in names if name not in self._sequences)
        if request_id in self._sequences:
            raise ValueError(f"there is a request {request_id!r} already")
        limit = min(params.max_tokens, self.model.config.context - len(ids) + 1)
        cache, eos_ids = PagedKVCache(self.pool), self.model.config.eos_ids
        sequence = Sequence(request_id, ids, params, cache, limit, eos_ids, self.tokenizer)
        self._sequences[request_id] = sequence
        self.scheduler.add(sequence)
        return request_id


# %% [markdown]
# Watch it work: three places, five requests, of which two arrive later. `Output.text` is what can be shown.

# %%
model, tokenizer = load_model("smollm2"), load_tokenizer("smollm2")
engine = Engine(model, tokenizer, num_blocks=20, max_num_seqs=3)
texts = ["The capital of France is", "One, two, three,", "Water boils at", "The opposite of hot is"]
for text, tokens in zip(texts[:3], (2, 8, 4)):
    engine.add(tokenizer.encode(text), SamplingParams(max_tokens=tokens))
said = {}
for number in range(8):
    if number == 1:
        engine.add(tokenizer.encode(texts[3]), SamplingParams(max_tokens=3))
    outputs = engine.step() if engine.has_work else []
    for output in outputs:
        said.setdefault(output.request_id, []).append(output)
    ran = ", ".join(output.request_id.removeprefix("request-") for output in outputs)
    print(f"step {number:2}: {ran:8} free blocks {engine.num_free_blocks}")

# %% [markdown]
# Request 3 arrived before step 1 and found no place. It ran in the step after request 0 had ended.
#
# ## Prove it: the same tokens in any order
#
# The loop for one sequence is the reference again. The order of arrival, the number of places and the size of the
# pool must change no token.

# %%
from nanoserve.generate import generate_tokens, new_cache


def alone(ids, params):
    """The tokens of one prompt by the loop for one sequence."""
    cache = new_cache("paged", model, len(ids) + params.max_tokens)
    return [s.token_id for s in generate_tokens(model, ids, params, cache, model.config.eos_ids)]


requests = [
    (tokenizer.encode(t), SamplingParams(max_tokens=n)) for t, n in zip(texts, (2, 8, 4, 3))
]
expected = [alone(*request) for request in requests]
for order, places, blocks in (((0, 1, 2, 3), 4, 20), ((3, 1, 0, 2), 2, 20), ((2, 0, 3, 1), 4, 2)):
    engine = Engine(model, tokenizer, blocks, max_num_seqs=places)
    tokens = {engine.add(*requests[i]): (i, []) for i in order}
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id][1].append(output.token_id)
    assert all(got == expected[i] for i, got in tokens.values())
    assert engine.num_free_blocks == blocks
    print(f"order {order}, {places} places, {blocks} blocks: the same tokens")

# %% [markdown]
# ## `LLM` on the engine
#
# `generate` with a list of prompts adds them all and runs until they have ended. A stream is an iterator, and two
# streams may be read in turns, or in two threads. So `SharedEngine` guards the engine with a lock: whichever stream
# needs a token runs a step, and keeps the tokens of the others for them.
#
# A reader may also stop reading. Then the request must end, or it would hold its blocks for ever. Python closes a
# generator that nothing refers to, and runs its `finally`: there the request is aborted. This may happen in the
# middle of a step, where the lock is taken; then the next call does it. The two cells are for reading.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/generate.py: SharedEngine
class SharedEngine:
    """An engine that several streams use, in one thread or in several: one step at a time.

    Whichever stream needs an output runs a step, and keeps the outputs of the other streams for
    them.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._lock = threading.Lock()
        self._outputs: dict[str, deque[Output]] = {}  # those that no stream has read yet
        self._dropped: deque[str] = deque()  # requests to abort

    def add(self, prompt_ids: list[int], params: SamplingParams) -> str:
        """Queue a request and return its id; errors as for Engine.add."""
        with self._lock:
            request_id = self.engine.add(prompt_ids, params)
            self._outputs[request_id] = deque()
            return request_id

    def run(self, prompt_ids: list[int], params: SamplingParams) -> Iterator[Output]:
        """Queue a request at the first iteration, then yield its outputs."""
        yield from self.outputs(self.add(prompt_ids, params))

    def outputs(self, request_id: str) -> Iterator[Output]:
        """Yield the outputs of a queued request. Closing the generator aborts the request."""
        try:
            finished = False
            while not finished:
                output = self._next(request_id)
                finished = output.finish_reason is not None
                yield output
        finally:
            self.drop(request_id)

    def drop(self, request_id: str) -> None:
        """Abort a request, unless it is finished, and forget its outputs.

        Python may call this during a step, when it collects a stream. The lock is taken then, and
        the next call that takes the lock aborts the request.
        """
        self._dropped.append(request_id)
        if self._lock.acquire(blocking=False):
            try:
                self._abort_dropped()
            finally:
                self._lock.release()

    def _next(self, request_id: str) -> Output:
        """The next output of a request; runs steps until there is one."""
        while True:
            with self._lock:
                self._abort_dropped()
                if self._outputs[request_id]:
                    return self._outputs[request_id].popleft()
                for output in self.engine.step():
                    if output.request_id in self._outputs:
                        self._outputs[output.request_id].append(output)

    def _abort_dropped(self) -> None:
        while self._dropped:
            request_id = self._dropped.popleft()
            self._outputs.pop(request_id, None)
            self.engine.abort(request_id)


# %%
from nanoserve.generate import CACHES, LLM, Completion, Prompt, Stream, prompts_of


# %% jupyter={"source_hidden": true}
# lands in nanoserve/generate.py: EngineStream, single_sequence, LLM.generate, LLM.stream
class EngineStream(Stream):
    """A stream whose tokens come from an engine, which may run other requests too."""

    def __init__(self, outputs: Iterator[Output], params: SamplingParams) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason = "length"
        self._logprobs: list[Sample] = []
        self._params = params
        self._pieces = outputs

    def __iter__(self) -> Iterator[str]:
        for output in self._pieces:
            if output.finish_reason == "abort":
                raise RuntimeError("the request has ended: a step of the engine failed")
            self.token_ids.append(output.token_id)
            self._logprobs.append(output.sample)
            self.finish_reason = output.finish_reason or "length"
            if output.text:
                self.text += output.text
                yield output.text


@contextmanager
def single_sequence() -> Iterator[None]:
    """Within the `with` block an LLM runs each prompt by itself, with a new cache: the loop of
    generate_tokens. For comparisons, and for the answers to the days before the engine."""
    token = _single_sequence.set(True)
    try:
        yield
    finally:
        _single_sequence.reset(token)


_single_sequence: ContextVar[bool] = ContextVar("single_sequence", default=False)


class LLM(LLM):
    def __init__(
        self,
        source: str | Path = "smollm2",
        dtype: str | torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        cache: str | None = "paged",
        quantization: str | None = None,
        num_blocks: int | None = None,
    ) -> None:
        """source, dtype, device, quantization as for load_model; cache "paged", "naive", or None
        for no cache.

        With "paged", all prompts share one pool of num_blocks blocks, by default as many as
        default_num_blocks says. Otherwise each prompt runs by itself.
        """
        if cache is not None and cache not in CACHES:
            known = ", ".join(map(repr, CACHES))
            raise ValueError(f"cache {cache!r} is not known; supported: {known}, None")
        self.model = load_model(source, dtype, device, quantization)
        self.tokenizer = load_tokenizer(source)
        self._cache = cache
        self._shared = None
        if cache == "paged":
            self._shared = SharedEngine(Engine(self.model, self.tokenizer, num_blocks))

    def generate(
        self,
        prompts: Prompt | list[Prompt],
        params: SamplingParams | None = None,
    ) -> list[Completion]:
        """Complete one prompt or several. A prompt is text, or token ids, which are used unchanged.

        Several prompts run together. Raises ValueError, before the model runs, for a prompt that is
        empty or longer than the model's context, for an id outside the vocabulary, and for a prompt
        and max_tokens that need more blocks than the pool has.
        """
        checked = [self._prompt_ids(prompt) for prompt in prompts_of(prompts)]
        shared = self._engine()
        if shared is None:
            return [self.stream(ids, params).completion for ids in checked]
        params = SamplingParams() if params is None else params
        requests: list[str] = []
        try:
            for ids in checked:
                requests.append(shared.add(ids, params))
            streams = [EngineStream(shared.outputs(each), params) for each in requests]
            return [stream.completion for stream in streams]
        finally:
            for each in requests:
                shared.drop(each)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """Complete one prompt as a stream of pieces of text; errors as generate, at once."""
        ids, params = self._prompt_ids(prompt), SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be a SamplingParams, got {params!r}")
        if (shared := self._engine()) is not None:
            shared.engine.check(ids, params)
            return EngineStream(shared.run(ids, params), params)
        tokens = min(len(ids) + params.max_tokens, self.model.config.context)
        cache = new_cache(self._cache, self.model, tokens)
        return Stream(self.model, self.tokenizer, ids, params, cache)

    def _engine(self) -> SharedEngine | None:
        """The engine that prompts share, a new one for a new `model`; None: each runs alone."""
        if self._shared is None or _single_sequence.get():
            return None
        if self._shared.engine.model is not self.model:
            num_blocks = self._shared.engine.num_blocks
            self._shared = SharedEngine(Engine(self.model, self.tokenizer, num_blocks))
        return self._shared

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            ids = self.tokenizer.prefix_ids + self.tokenizer.encode(prompt)
        else:
            ids = prompt
        return check_prompt(ids, self.model.config)


# %% [markdown]
# Two streams, read in turns; then one of them is dropped half-way:

# %%
llm = LLM("smollm2", num_blocks=40)
free = lambda: llm._shared.engine.num_free_blocks
streams = [llm.stream(text, SamplingParams(max_tokens=30)) for text in texts[:2]]
first, second = map(iter, streams)
for _ in range(4):
    print(repr(next(first)), repr(next(second)), "free blocks:", free())
del first, streams[0]
print("dropped one:", free())
assert free() == 37

# %% [markdown]
# With `cache="naive"` or `None`, an `LLM` keeps the loop for one sequence, as a baseline, and so it does inside
# `with single_sequence():`. Inside `today.mine()`, the engine retires requests with your `remove`, if it has passed
# its check. (Your `schedule` is saved, but Day 36 replaces it in the engine.)

# %%
import nanoserve

package = nanoserve.LLM("smollm2")
with today.mine():
    answers = package.generate(texts, SamplingParams(max_tokens=3))
print([answer.text for answer in answers])
assert [answer.token_ids[:2] for answer in answers] == [tokens[:2] for tokens in expected]

# %% [markdown]
# ## Measure it: static against continuous
#
# The 16 requests from above, on this notebook's engine with four places. The static run adds four requests and
# waits until all four have ended; the continuous run adds all 16 at once. (The model has no end token here, so
# that each answer has its drawn length.)

# %% tags=["nbval-ignore-output"]
import time
from dataclasses import replace

model.config = replace(model.config, eos_ids=())
prompt = tokenizer.encode("Once upon a time,")


def run(groups):
    """(steps, seconds) until all groups of answer lengths have run, one group after another."""
    engine = Engine(model, None, 60, max_num_seqs=PLACES)
    steps, begin = 0, time.perf_counter()
    for group in groups:
        for length in group:
            engine.add(prompt, SamplingParams(max_tokens=length))
        while engine.has_work:
            engine.step()
            steps += 1
    return steps, time.perf_counter() - begin


groups = [LENGTHS[i : i + PLACES] for i in range(0, len(LENGTHS), PLACES)]
run([[2] * PLACES])  # a warm-up
measured = {"static": run(groups), "continuous": run([LENGTHS])}
for name, (steps, seconds) in measured.items():
    print(f"{name:10} {steps:3} steps, {sum(LENGTHS) / seconds:5.1f} tokens/s")
assert {name: steps for name, (steps, _) in measured.items()} == counted

# %% jupyter={"source_hidden": true} tags=["nbval-ignore-output"]
# Draws the plot: Requests that run in each step
from nanoserve.course.plots import COLOURS, figure, label_line


def busy(groups):
    """The number of requests that compute, for each step."""
    found = []
    for group in groups:
        ends, spans = [0] * PLACES, []
        for length in group:
            place = ends.index(min(ends))
            spans.append((ends[place], ends[place] + length))
            ends[place] += length
        found += [sum(a <= step < b for a, b in spans) for step in range(max(ends))]
    return found


fig, panels = figure(
    panels=2,
    xlabel="step",
    ylabel="requests that run",
    title=f"The same {sum(LENGTHS)} tokens: coloured slots compute, white ones are idle",
)
plans = (("static", groups, "contiguous"), ("continuous", [LENGTHS], "engine"))
for ax, (name, plan, colour) in zip(panels, plans):
    running = busy(plan)
    edges = range(len(running) + 1)
    ax.fill_between(edges, [*running, running[-1]], step="post", color=COLOURS[colour], alpha=0.6)
    ax.step(edges, [PLACES] * len(edges), where="post", color=COLOURS["ink"], lw=1)
    label_line(
        ax, counted["static"] / 2, PLACES, f"{name}: {len(running)} steps", COLOURS[colour], "above"
    )
    ax.set(ylim=(0, PLACES + 0.8), xlim=(0, counted["static"] + 2), yticks=range(PLACES + 1))
fig

# %% [markdown]
# The engine took exactly as many steps as counted. Below the line at four, everything white is an idle slot: the
# static batch waits for its longest answer, again and again; the continuous one only at the end, when nobody waits. The gain in tokens per second can be smaller than the gain in steps, because a
# step with fewer sequences is cheaper (Day 34 measured how much). And the plot shows one mix: if all answers had
# the same length, both would be equal.
#
# ## What you learned
#
# 1. **A batch is not a list, but a decision before each step.** Nothing in the forward pass asks for the same
#    sequences twice.
# 2. **An idle place costs a whole step's share,** and static batching has them because answers have different
#    lengths.
# 3. **Refuse at the door what can never run.** Behind a request that waits for ever, everyone waits.
#
# ## Tomorrow
#
# A new prompt runs whole, in one step with everyone's decodes. If it has a thousand tokens, everyone waits for it.
# Day 36 gives a step a budget of tokens, and splits long prompts.
#
# **In one paragraph.** A static batch ends with its longest answer, and places stay idle meanwhile. We made each
# step anew: a scheduler with two queues admits requests while places and blocks are free, and retires them when
# they end. The counted steps are the engine's steps. `LLM` now runs on this engine: lists of prompts share their
# steps, streams interleave, and a stream that nobody reads any more gives its blocks back.
