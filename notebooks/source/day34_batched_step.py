# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Day 34 · One forward for many
#
# Week 9 · Phase 4, many requests · you need: Day 28 (Many sequences, one launch), Day 32 (Keep the four bits)
#
# **Today** several requests run through the model in one step, from one pool. You write the three small parts
# that this takes: the tokens of the step, their positions, and the row that gives each request its next token.

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

today = day(34)
today.picture("batched-step")

# %% [markdown]
# ## Why it matters
#
# A decode step reads every weight of the model to compute one token. Day 13 measured that this read takes most
# of the time. With several requests in one step, each weight is still read once, but it is used for several
# tokens. So the bytes per token fall:

# %%
import torch

from nanoserve import load_model, load_tokenizer
from nanoserve.bench.decode import bytes_per_token

model, tokenizer = load_model("smollm2"), load_tokenizer("smollm2")
config = model.config
weights = bytes_per_token(config, 0, torch.float32)
for size in (1, 4, 16, 64):
    print(f"{size:3} sequences: {weights / size / 1e6:6.1f} MB of weights for each token")

# %% [markdown]
# Week 7 prepared this step: a `PagedBatch` holds the tables of many sequences, and one launch computes their
# attention. What was missing is the model around it, and something that remembers each request.

# %%
today.glossary()

# %% [markdown]
# ## A request, while it runs
#
# Until now the state of a request lived in local variables of the loop `generate_tokens`. Many requests need one
# object each. A **Sequence** holds the tokens, the cache, the random generator, the detokeniser and the stop
# strings. It holds everything that decides the request's text, so nothing of a neighbour can change it.
#
# | member | meaning |
# | --- | --- |
# | `ids` | the prompt and the output so far |
# | `cache.seq_len` | how many of them are in the cache |
# | `num_uncomputed` | the difference: all of a new prompt, one token in a decode step |
# | `accept(sample)` | appends a chosen token; returns its text, and the reason if it is the last |
#
# Each seeded request has a generator of its own, on the CPU. So a request draws the same numbers alone and in any
# batch. The cell is for reading; `accept` does what Day 12's stream did.

# %%
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate


from nanoserve.cache import KVPool, PagedBatch, PagedKVCache
from nanoserve.layers import Cache, block, embedding, rms_norm
from nanoserve.model import Model
from nanoserve.sampling import Sample, SamplingParams, make_generator, sample
from nanoserve.tokenizer import Detokenizer, StopStrings, Tokenizer


# %% jupyter={"source_hidden": true}
# lands in nanoserve/engine/sequence.py: Output, Sequence
@dataclass(frozen=True)
class Output:
    """What one step gives to one request: a token, and the text that can now be shown.

    `finish_reason` is None until the last output: "stop" (an end token or a stop string), "length",
    or "abort", which comes without a token. `sample` has the token's logprobs.
    """

    request_id: str
    token_id: int | None
    sample: Sample | None
    text: str
    finish_reason: str | None = None


class Sequence:
    """The state of one request. It survives a preemption, which only empties the cache.

    `ids` holds the prompt and the output so far; the cache holds the first cache.seq_len of them.
    """

    def __init__(
        self,
        request_id: str,
        prompt_ids: list[int],
        params: SamplingParams,
        cache: PagedKVCache,
        limit: int | None = None,
        eos_ids: Collection[int] = (),
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """limit: the most tokens to generate, by default params.max_tokens.

        Without a tokenizer the text is empty, and stop strings are not found.
        """
        self.request_id = request_id
        self.prompt_ids, self.output_ids = list(prompt_ids), []
        self.ids = list(prompt_ids)
        self.params = params
        self.cache = cache
        self.limit = params.max_tokens if limit is None else limit
        self.generator = make_generator(params.seed)  # on the CPU: the same numbers on any device
        self._eos_ids = eos_ids
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, prompt_ids)
        self._stop = StopStrings(params.stop)

    @property
    def num_uncomputed(self) -> int:
        """Tokens that are not in the cache: a prompt's at first, then one in each step."""
        return len(self.ids) - self.cache.seq_len

    @property
    def most_tokens(self) -> int:
        """The most tokens that the cache will hold. The last token of all is never computed."""
        return len(self.prompt_ids) + self.limit - 1

    def accept(self, chosen: Sample) -> Output:
        """Append a chosen token. The result says what text it completes and whether it is the last.

        An end token has no text. Text that may become a stop string is held back.
        """
        self.ids.append(chosen.token_id)
        self.output_ids.append(chosen.token_id)
        ended = chosen.token_id in self._eos_ids
        text = "" if ended else self._show(chosen.token_id)
        if not (ended or self._stop.found or len(self.output_ids) == self.limit):
            return Output(self.request_id, chosen.token_id, chosen, text)
        text += self._show(None)
        reason = "stop" if ended or self._stop.found else "length"
        return Output(self.request_id, chosen.token_id, chosen, text, reason)

    def _show(self, token_id: int | None) -> str:
        """The text that a token completes; for None, the text that is still held back."""
        if self._detokenizer is None:
            return ""
        if token_id is not None:
            return self._stop.add(self._detokenizer.add(token_id))
        return self._stop.add(self._detokenizer.finish()) + self._stop.finish()


# %%
pool = KVPool(config, num_blocks=24, poison=True)
ids = tokenizer.encode("The capital of France is")
a = Sequence("A", ids, SamplingParams(max_tokens=6), PagedKVCache(pool))
print(a.ids, "to compute:", a.num_uncomputed)
print(a.accept(Sample(token_id=7042)).finish_reason, a.ids[-2:], "to compute:", a.num_uncomputed)

# %% [markdown]
# ## Your turn: `pack`
#
# A step is a dictionary: for each sequence, how many of its tokens run. These are the next tokens that the cache
# does not hold. Return their ids in one flat list, one sequence after another, as in the picture's second line:
#
# - the tokens of a sequence begin at index `sequence.cache.seq_len` of `sequence.ids`;
# - `step[sequence]` of them run, and others may follow: Day 36 splits long prompts.
#
# Stuck? `today.hint()` looks at the case that failed.
#
# After a kernel restart, run the cells above first (Run → Run All Above Selected Cell).


# %%
def pack(step: Mapping[Sequence, int]) -> list[int]:
    """The token ids of a step: of each sequence, the next step[sequence] that its cache lacks."""
    raise NotImplementedError("your turn")


today.check(pack)

# %% [markdown]
# The cell below holds the package's version; from here on this notebook uses it.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/engine/engine.py: pack
def pack(step: Mapping[Sequence, int]) -> list[int]:
    """The token ids of a step: of each sequence, the next step[sequence] that its cache lacks.

    They lie one sequence after another, without padding.
    """
    ids = []
    for sequence, num_tokens in step.items():
        start = sequence.cache.seq_len
        ids += sequence.ids[start : start + num_tokens]
    return ids


# %% [markdown]
# ## Your turn: `_angles`
#
# Norms, products and the MLP compute each row by itself. Day 28 packed attention. One part of the model is left
# that depends on the sequence: RoPE rotates a row by the angle of its **position**. Day 8's `hidden` took the rows
# of the table from `cache.seq_len` on. In a packed step, neighbouring rows belong to different sequences.
#
# `_angles` is a method of `Model` that returns `cos` and `sin`, `[seq, head_dim]` each:
#
# - A `PagedBatch` has `cache.positions`, an int64 tensor with one position for each row. Take a table that is long
#   enough, `self._rope(0, cache.tables.max_kv_len)`, and index both parts with the positions.
# - Any other cache, and no cache, get what Day 8 gave them: `self._rope(start, start + seq)`.
#
# Write it as a function; the check puts it into the class.


# %%
def _angles(self, seq: int, cache: Cache | None) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin at the positions of this step's tokens: [seq, head_dim] each."""
    raise NotImplementedError("your turn")


today.check(_angles)

# %% [markdown]
# The cell below holds the package's version; from here on this notebook uses it. In `hidden` one line is new: it
# calls `_angles`. That is the only change of the model in this phase.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/model.py: Model._angles, Model.hidden
class Model(Model):
    def _angles(self, seq: int, cache: Cache | None) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin at the positions of this step's tokens: [seq, head_dim] each.

        A cache with `positions`, as PagedBatch has, names the position of each token. Otherwise the
        tokens follow those in the cache.
        """
        if hasattr(cache, "positions"):
            cos, sin = self._rope(0, cache.tables.max_kv_len)
            return cos[cache.positions], sin[cache.positions]
        start = 0 if cache is None else cache.seq_len
        return self._rope(start, start + seq)

    def hidden(self, ids: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        """The final norm's output: ids [batch, seq] -> [batch, seq, hidden]; errors as __call__."""
        self._check(ids)
        cos, sin = self._angles(ids.shape[1], cache)
        x = embedding(ids, self.weights["model.embed_tokens.weight"], self.dtype)
        for index, layer in enumerate(self.layers):
            x = block(x, layer, cos, sin, self.config, cache, index)
        return rms_norm(x, self.weights["model.norm.weight"], self.config.norm_eps)


# %% [markdown]
# ## Your turn: `last_rows`
#
# The model returns one row for each token of the step. The next token of a sequence comes from its **last** row:
# this row has seen all the others. `query_lens[i]` rows belong to sequence i. In the picture they are 4, 2 and 1,
# and the last rows are 3, 5 and 6. Return the row numbers as a list. `query_lens` is any iterable: `step_logits` passes
# the values of a dictionary.


# %%
def last_rows(query_lens: Iterable[int]) -> list[int]:
    """The row of each sequence's last token, where query_lens[i] rows belong to sequence i."""
    raise NotImplementedError("your turn")


today.check(last_rows)

# %% [markdown]
# The cell below holds the package's version; from here on this notebook uses it. `step_logits` joins the parts:
# it reserves the blocks, packs, runs the layers, advances the lengths, and runs the head for the last rows only. A
# sequence that still has tokens to compute gets no logits: its last row is not the end of its prompt.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/engine/engine.py: last_rows, step_logits
def last_rows(query_lens: Iterable[int]) -> list[int]:
    """The row of each sequence's last token, where query_lens[i] rows belong to sequence i."""
    return [end - 1 for end in accumulate(query_lens)]


def step_logits(model: Model, step: Mapping[Sequence, int]) -> dict[Sequence, torch.Tensor]:
    """One forward pass over the tokens of a step, which moves them into the caches.

    Returns the logits of the next token, float32 [vocab], for each sequence whose tokens are now
    all computed. The head runs for these rows only. Raises KVCacheExhausted if the pool has too few
    free blocks; then nothing has changed.
    """
    batch = PagedBatch([sequence.cache for sequence in step], list(step.values()))
    with torch.inference_mode():  # as in next_logits: small operations start faster
        hidden = model.hidden(torch.tensor([pack(step)], device=model.device), batch)
    batch.commit()
    rows = dict(zip(step, last_rows(step.values()), strict=True))
    rows = {sequence: row for sequence, row in rows.items() if sequence.num_uncomputed == 0}
    if not rows:
        return {}
    logits = model.head(hidden[0, list(rows.values())]).float()  # [len(rows), vocab]
    return dict(zip(rows, logits, strict=True))


# %% [markdown]
# ## Prove it: the same tokens as one by one
#
# The loop below runs a list of requests together until the last one has finished. Each step takes all tokens that
# each of them lacks: at first whole prompts, then one token each.

# %%
model.__class__ = Model  # the model, with the methods of this notebook


def together(prompts, params, pool):
    """Run all prompts in shared steps; the output tokens of each."""
    caches = [PagedKVCache(pool) for _ in prompts]
    sequences = [
        Sequence(str(i), ids, params, cache, eos_ids=config.eos_ids)
        for i, (ids, cache) in enumerate(zip(prompts, caches))
    ]
    live = list(sequences)
    while live:
        step = {sequence: sequence.num_uncomputed for sequence in live}
        for sequence, logits in step_logits(model, step).items():
            chosen = sample(logits, params, sequence.generator, ids, sequence.output_ids)
            if sequence.accept(chosen).finish_reason is not None:
                live.remove(sequence)
                sequence.cache.free()
    return [sequence.output_ids for sequence in sequences]


# %% [markdown]
# Three prompts of different lengths, from one pool whose free slots are NaN. The reference is the loop of Day 12
# with a cache of its own for each prompt.

# %%
from nanoserve.generate import generate_tokens, new_cache

texts = ["The capital of France is", "One, two, three,", "Water boils at a temperature of about"]
prompts = [tokenizer.encode(text) for text in texts]
params = SamplingParams(max_tokens=8)


def alone(ids, params):
    """The tokens of one prompt by the loop for one sequence."""
    cache = new_cache("paged", model, len(ids) + params.max_tokens)
    return [s.token_id for s in generate_tokens(model, ids, params, cache, config.eos_ids)]


shared = together(prompts, params, pool)
for text, ids, tokens in zip(texts, prompts, shared):
    print(repr(text + tokenizer.decode(tokens)))
    assert tokens == alone(ids, params)
print("free blocks:", pool.allocator.num_free, "of", pool.allocator.num_blocks)
assert pool.allocator.num_free == pool.allocator.num_blocks

# %% [markdown]
# ## Measure it: tokens per second against batch size
#
# If a step took the same time for any number of sequences, 16 sequences would get 16 times the tokens per second.
# It does not take the same time: the products do 16 times the arithmetic, and each sequence's keys and values are
# read too. Guess first.

# %%
question = "16 sequences get how many times the tokens per second of one?"
today.predict("times", question, guess=None, low=1, high=16)

# %% tags=["nbval-ignore-output"]
from nanoserve.bench.timing import median_times, read_bandwidth

SIZES, PROMPT = (1, 2, 4, 8, 16), 64


def decode_step(size):
    """A function that runs one decode step of `size` sequences of PROMPT tokens each."""
    pool = KVPool(config, size * 6)
    ids = (prompts[2] * PROMPT)[:PROMPT]
    sequences = [Sequence(str(i), ids, params, PagedKVCache(pool)) for i in range(size)]
    step_logits(model, dict.fromkeys(sequences, PROMPT))

    def run():
        for sequence, logits in step_logits(model, dict.fromkeys(sequences, 1)).items():
            sequence.ids.append(int(logits.argmax()))

    for sequence in sequences:
        sequence.ids.append(7)
    return run


seconds = median_times({size: decode_step(size) for size in SIZES}, rounds=7, warmup=2)
rates = {size: size / seconds[size] for size in SIZES}
bandwidth = read_bandwidth()
for size, rate in rates.items():
    print(f"{size:3} sequences: {seconds[size] * 1e3:5.0f} ms a step, {rate:5.0f} tokens/s")
print(f"16 against 1: {rates[16] / rates[1]:.1f} times; your guess: {today.guess_text('times')}")
assert rates[8] > 1.5 * rates[1]

# %% [markdown]
# The black line is the memory roofline of a step: the time to read each weight once, and the keys and values of
# each sequence, at this machine's peak bandwidth.


# %%
def roofline(size):
    """The most tokens per second of `size` sequences, if only memory limits a step."""
    kv = bytes_per_token(config, PROMPT, torch.float32) - weights
    return size * bandwidth / (weights + size * kv)


# %% jupyter={"source_hidden": true} tags=["nbval-ignore-output"]
# Draws the plot: Tokens per second against batch size
from nanoserve.course.plots import COLOURS, figure, line, log2_axis, prediction_marker

fig, ax = figure(
    xlabel="sequences in a step",
    ylabel="tokens per second",
    title="More sequences in a step: more tokens per second",
)
line(ax, SIZES, [roofline(size) for size in SIZES], "memory roofline", COLOURS["limit"])
line(ax, SIZES, list(rates.values()), "measured", COLOURS["engine"])
if guess := today.guess("times"):
    prediction_marker(ax, 16, guess * rates[1], where="left")
log2_axis(ax)
log2_axis(ax, "y")
ax.set(xlim=(0.85, 40), xticks=SIZES)
fig

# %% [markdown]
# With one sequence, a step is a read of the weights with little arithmetic. Each further sequence adds arithmetic
# and uses the same read. Where your measured line bends away from the roofline, arithmetic limits the step, and no
# longer memory. A CPU bends early, because it does few operations for each byte that it reads. A GPU does a hundred
# times more, so it goes on much further: that is why a server needs many requests at a time.
#
# ## A neighbour changes the last bits
#
# Is the result of a request the same in every batch? The tokens above were. Look at the logits. A product of one
# row and a product of 16 rows are different routines, and they add the same numbers in another order. Day 18
# said what follows: the sums are close, and not equal.


# %% tags=["nbval-ignore-output"]
def logits_among(neighbours):
    """The logits after prompt 0, computed in a step with other prompts."""
    pool = KVPool(config, 40)
    step = [prompts[0], *neighbours]
    sequences = [Sequence(str(i), ids, params, PagedKVCache(pool)) for i, ids in enumerate(step)]
    return next(iter(step_logits(model, {s: s.num_uncomputed for s in sequences}).values()))


first = logits_among([])
for count in (1, 3, 7, 15):
    among = logits_among((prompts[1:] * count)[:count])
    apart = float((among - first).abs().max() / first.abs().max())
    print(f"{count:2} neighbours: the largest difference is {apart:.1e} of the largest logit")
    assert apart < 1e-5 and among.argmax() == first.argmax()

# %% [markdown]
# The differences are far too small to change a clear choice. If two tokens have logits that are nearer than this,
# the other one can be chosen, and from there on the text differs. In bfloat16 the differences are thousands of times
# larger, and this happens in practice: **the same request can give different texts when a server is busy.** It is
# not random. It depends on who else was in the batch.
#
# Kernels that give the same bits for every batch size exist; they are called **batch-invariant**. They use one order
# of additions for all sizes, and so they cannot split the work as suits each size best: they are slower (H. He and
# Thinking Machines Lab 2025, *Defeating Nondeterminism in LLM Inference*, measure by how much). Our
# engine makes the usual choice. Its tests compare tokens in float32, and where two tokens are nearer than rounding,
# they compare logits.
#
# ## With your own code
#
# `LLM.generate` runs a list of prompts in shared steps. Inside `today.mine()` these steps use your functions, if they
# have passed their checks.

# %%
from nanoserve import LLM

llm = LLM("smollm2")
with today.mine():
    answers = llm.generate(texts, SamplingParams(max_tokens=8))
for text, answer, tokens in zip(texts, answers, shared):
    print(repr(text + answer.text))
    assert answer.token_ids == tokens

# %% [markdown]
# ## What you learned
#
# 1. **A step reads the weights once, whoever is in it.** More sequences in a step mean fewer bytes for each token.
# 2. **Only positions, attention and the last rows depend on the sequence.** Everything else in the model computes
#    rows, and does not need to know whose.
# 3. **Batch size changes the order of additions.** So a request's logits depend on its neighbours in the last bits,
#    and only kernels made for it avoid this.
#
# ## Tomorrow
#
# The loop of today runs a fixed list until its longest answer has ended. Requests that finish early leave their
# places empty, and new ones have to wait. Day 35 fills an empty place in the very next step.
#
# **In one paragraph.** A decode step reads all weights for one token. We put the tokens of many requests into one
# step: pack the ids that no cache holds, rotate each row by its own position, take the last row of each sequence
# for the head. The tokens are those of each request alone, from one pool. The more requests share a step, the more
# tokens per second this machine computes, until arithmetic becomes the limit. And the logits differ in the last
# bits with the number of neighbours, because a sum of another shape adds in another order.
