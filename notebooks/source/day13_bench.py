# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Day 13 · What the cache bought
#
# Week 3 · Phase 1, correct generation · you need: Day 12 (One loop for both)
#
# **Today** you measure. You build a benchmark that refuses to time a wrong answer, bend the curve of
# Day 1, and find out what holds the engine up now. Then you cut attention into tiles, so that prefill
# stops computing what its mask throws away, and make three products of a decode step one.

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

today = day(13)
today.picture("cache-bought")

# %% [markdown]
# ## Why it matters
#
# "Ten times faster" is easy to say. Than what? Doing the same work? On a machine that was doing
# something else at the time? Speed is the one property of an engine that everybody quotes and that is
# the easiest to get wrong, always in one's own favour.
#
# Three rules keep a benchmark honest, and today they become code:
#
# 1. **Correct first.** A path that gives other tokens gets no time at all.
# 2. **Take turns.** What is compared runs interleaved, so that a slow minute hurts all alike.
# 3. **Know the roof.** A time says little until it stands beside what the machine could do at best.

# %%
today.glossary(
    "warm-up", "interleaved", "bandwidth", "roof", "memory-bound", "compute-bound", "tile"
)

# %% [markdown]
# ## A clock you can script
#
# Three small functions. `median_times` lets runs take turns and gives medians. `token_times` stamps
# each token of a run. `read_bandwidth` measures the roof: how fast memory can be read.
#
# Their clock is an argument. That looks fussy, until you want to *test* a benchmark.

# %%
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from statistics import median

import torch


# %% jupyter={"source_hidden": true}
# lands in nanoserve/bench/timing.py: Clock, median_times, token_times, read_bandwidth
Clock = Callable[[], float]  # returns seconds; any origin will do


def median_times(
    runs: Mapping[str, Callable[[], object]],
    rounds: int = 5,
    warmup: int = 1,
    clock: Clock = time.perf_counter,
) -> dict[str, float]:
    """Median seconds of each run. The runs take turns, so that a slower moment affects all."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(warmup + rounds):
        for name, run in runs.items():
            begin = clock()
            run()
            if turn >= warmup:
                seconds[name].append(clock() - begin)
    return {name: median(times) for name, times in seconds.items()}


def token_times(
    run: Callable[[Callable[[int], None]], object], clock: Clock = time.perf_counter
) -> list[float]:
    """Seconds between tokens, where run(on_token) calls on_token(token_id) for every token.

    The first number is the time to first token; the others are inter-token latencies.
    """
    stamps = [clock()]
    run(lambda _token: stamps.append(clock()))
    return [later - earlier for earlier, later in pairwise(stamps)]


def read_bandwidth(
    size: int = 1 << 29, clock: Clock = time.perf_counter, device: str | torch.device = "cpu"
) -> float:
    """Bytes per second at which a device reads its memory: the peak bandwidth of this machine.

    The best of five sums over `size` bytes, far more than a processor's cache holds. A GPU runs
    asynchronously, so it needs a clock that synchronises first (`device_clock` of runner.py).
    """
    buffer = torch.ones(size // 4, dtype=torch.float32, device=device)
    best = float("inf")
    for _ in range(5):
        begin = clock()
        buffer.sum()
        best = min(best, clock() - begin)
    return size / best


# %% [markdown]
# With a scripted clock, a run takes exactly as long as the script says. The prompt takes 5 seconds,
# then come two tokens:

# %%
now = 0.0


def pretend(on_token):
    global now
    for seconds in (5.0, 0.25, 0.5):
        now += seconds
        on_token(0)


token_times(pretend, clock=lambda: now)

# %% [markdown]
# ## Your turn: the bytes of a token
#
# The roof first. To make one token with a cache, what has to come from memory?
#
# - **every weight, once.** `expected_shapes(config)` (Day 2) has every tensor's shape by its name. It
#   lists one embedding. A step looks up a single row of it, but the head, which is as large whether it
#   is tied or not, is read whole. So count that table once.
# - **the history:** in each layer, a key and a value of each past token, for `n_kv` heads of `head_dim`.
#
# `dtype.itemsize` is the number of bytes of one number. The new token's own activations are a few
# kilobytes; leave them out.

# %%
import math
from collections.abc import Sequence
from dataclasses import dataclass

from nanoserve.config import ModelConfig
from nanoserve.weights import expected_shapes


# %%
def bytes_per_token(config: ModelConfig, context: int, dtype: torch.dtype) -> int:
    """What one cached decode step must read: every weight once, and the keys and values of
    `context` tokens."""
    raise NotImplementedError("your turn")


today.check(bytes_per_token)

# %% [markdown]
# ## The benchmark that lands
#
# A **path** is a way to run: `run(prompt_ids, max_tokens, on_token)` gives token ids, and calls
# `on_token` as each comes. Ours is Day 12's loop; the other is the oracle's own `generate`.
# `decode_benchmark` compares the tokens of all paths before it reads the clock, and that first run is
# the warm-up too.

# %%
from nanoserve.cache import NaiveKVCache
from nanoserve.generate import generate_tokens
from nanoserve.layers import Cache
from nanoserve.model import Model, load_model
from nanoserve.oracle import Oracle, load_oracle
from nanoserve.sampling import SamplingParams


# %%
# lands in nanoserve/bench/correctness.py: WrongAnswer
class WrongAnswer(RuntimeError):
    """A benchmarked variant gave another result than its reference, so no time is measured."""


# %% jupyter={"source_hidden": true}
# lands in nanoserve/bench/decode.py: DecodePath, DecodeRow, decode_benchmark and 3 more
# called with (prompt_ids, max_tokens, on_token); returns the token ids that it generated
DecodePath = Callable[[Sequence[int], int, Callable[[int], None]], list[int]]


@dataclass(frozen=True)
class DecodeRow:
    """One code path on one prompt: time to first token and time per output token, in seconds."""

    path: str
    context: int  # tokens in the prompt
    ttft: float
    tpot: float


def decode_benchmark(
    paths: dict[str, DecodePath],
    reference: str,
    prompts: Sequence[Sequence[int]],
    tokens: int = 8,
    rounds: int = 3,
    clock: Clock = time.perf_counter,
) -> list[DecodeRow]:
    """Time each code path on each prompt, in turns; the rows hold medians over rounds and tokens.

    `paths` maps a name to a DecodePath, and `reference` is one of the names. Raises WrongAnswer
    where a path's tokens differ from the reference's; this check is also the warm-up.
    """
    rows = []
    for prompt in prompts:
        expected = paths[reference](prompt, tokens, lambda _: None)
        for name, path in paths.items():
            if path(prompt, tokens, lambda _: None) != expected:
                raise WrongAnswer(f"{name} and {reference} differ after {len(prompt)} tokens")
        times: dict[str, list[list[float]]] = {name: [] for name in paths}
        for _ in range(rounds):
            for name, path in paths.items():
                run = lambda on_token, path=path: path(prompt, tokens, on_token)
                times[name].append(token_times(run, clock))
        for name, runs in times.items():
            first = median(run[0] for run in runs)
            steps = median(step for run in runs for step in run[1:])
            rows.append(DecodeRow(name, len(prompt), first, steps))
    return rows


def engine_path(model: Model, cached: bool) -> DecodePath:
    """Our own greedy loop with the contiguous cache, or without a cache."""
    return _loop(model, lambda _: NaiveKVCache(model.config) if cached else None)


def _loop(model: Model, empty_cache: Callable[[int], Cache | None]) -> DecodePath:
    def run(prompt: Sequence[int], tokens: int, on_token: Callable[[int], None]) -> list[int]:
        cache, ids = empty_cache(len(prompt) + tokens), []
        for chosen in generate_tokens(model, prompt, SamplingParams(max_tokens=tokens), cache):
            on_token(chosen.token_id)
            ids.append(chosen.token_id)
        return ids

    return run


def oracle_path(oracle: Oracle, cached: bool) -> DecodePath:
    """transformers' greedy generate, with its cache or without."""

    def run(prompt: Sequence[int], tokens: int, on_token: Callable[[int], None]) -> list[int]:
        return oracle.generate(prompt, tokens, cached, on_token, stop=False)

    return run


def bytes_per_token(config: ModelConfig, context: int, dtype: torch.dtype) -> int:
    """The bytes that one cached decode step must read: each weight once, and the cached K and V.

    `context` is the number of cached tokens. Of the embedding the step reads one row, which is not
    counted; the head, tied to the embedding or not, is counted whole.
    """
    weights = sum(map(math.prod, expected_shapes(config).values()))  # has the embedding or the head
    cached = config.num_layers * 2 * context * config.n_kv * config.head_dim
    return (weights + cached) * dtype.itemsize


# %% [markdown]
# A fast path that is wrong, to see rule 1 at work:


# %%
def honest(prompt, tokens, on_token):
    return list(range(tokens))


def hasty(prompt, tokens, on_token):
    return [0] * tokens


try:
    decode_benchmark({"honest": honest, "hasty": hasty}, "honest", [[1, 2, 3]])
except WrongAnswer as error:
    print(error)

# %% [markdown]
# And the count, checked on the real model: with an empty history it must be the size of its tensors.

# %%
model, oracle = load_model("smollm2"), load_oracle("smollm2")
config = model.config
tensors = {w.data_ptr(): w.nbytes for w in model.weights.values()}  # the tied head is one of them
print(sum(tensors.values()) == bytes_per_token(config, 0, torch.float32))
for context in (0, 512, 8_192):
    print(
        f"{context:5} tokens before: {bytes_per_token(config, context, torch.float32) / 1e6:4.0f} MB"
    )

# %% [markdown]
# More than half a gigabyte for one token. Keep that in mind.
#
# ## Predict, then measure
#
# After 512 tokens of text: how many times faster is a step with the cache than without?

# %%
today.predict(
    "speedup", "How many times faster is the token after 512, with the cache?", guess=None
)

# %% [markdown]
# Three paths on the same weights, in one run, taking turns: our loop with and without its cache, and
# `transformers` with its own. They are compared token for token before any is timed. (Three tokens
# and one round keep this short. Where you have a minute, give it 8 and 3.)

# %% tags=["nbval-ignore-output"]
from nanoserve import load_tokenizer

tokenizer = load_tokenizer("smollm2")
text = tokenizer.encode("One day at the harbour, the gulls and the boats. " * 60)
lengths = (16, 64, 512)
paths = {
    "transformers": oracle_path(oracle, cached=True),
    "no cache": engine_path(model, cached=False),
    "cache": engine_path(model, cached=True),
}
bandwidth = read_bandwidth()
rows = decode_benchmark(paths, "transformers", [text[:n] for n in lengths], tokens=3, rounds=1)
bandwidth = max(bandwidth, read_bandwidth())
for row in rows:
    print(
        f"{row.path:12} after {row.context:3} tokens: first {row.ttft * 1e3:5.0f} ms, "
        f"then {row.tpot * 1e3:5.0f} ms each"
    )

# %% tags=["nbval-ignore-output"]
decode = {name: [row.tpot * 1e3 for row in rows if row.path == name] for name in paths}
day1 = [row.ttft * 1e3 for row in rows if row.path == "transformers"]
speedup = [slow / fast for slow, fast in zip(decode["no cache"], decode["cache"])]
for length, times in zip(lengths, speedup):
    print(f"after {length:3} tokens the cache is {times:4.1f} times faster")
print("your guess for 512:", today.guess("speedup") or "none")
assert speedup[2] > speedup[0]
assert speedup[2] > 3

# %% [markdown]
# Now Day 1's plot again. Day 1 timed one token of `transformers` after each length, with nothing
# remembered. That is just what it does for the *first* token of a prompt today, so the curve can be
# drawn from this very run.

# %%
from nanoserve.course.plots import COLOURS, figure, label_line, line, log2_axis, prediction_marker

fig, ax = figure(
    height=4.4, xlabel="tokens of text", ylabel="ms for the next token", title="Day 1's curve, bent"
)
floor = [bytes_per_token(config, n, torch.float32) / bandwidth * 1e3 for n in lengths]
line(ax, lengths, day1, "Day 1's curve", COLOURS["oracle"], dashed=True)
line(ax, lengths, decode["no cache"], "", COLOURS["engine"])
label_line(ax, lengths[0], decode["no cache"][0], "no cache", COLOURS["engine"], "left")
line(
    ax, lengths, decode["transformers"], "transformers,\nwith its cache\n", COLOURS["oracle"], True
)
line(ax, lengths, decode["cache"], "", COLOURS["contiguous"])
label_line(ax, lengths[0], decode["cache"][0], "cache", COLOURS["contiguous"], "left")
ax.plot(lengths, floor, color=COLOURS["limit"], linewidth=1.5)
label_line(ax, 512, floor[-1], "reading\nthe bytes", COLOURS["limit"])
if guess := today.guess("speedup"):
    prediction_marker(ax, 512, decode["no cache"][-1] / guess)
log2_axis(ax), log2_axis(ax, "y")
ax.set(xlim=(7, 1_900), ylim=(0.6 * min(floor), None), xticks=lengths)
fig

# %% [markdown]
# The curve is bent. Without the cache, the longer the text, the nearer doubling it comes to doubling
# the time. With the cache the line is almost flat, and the gap, which is the speed-up, grows with every
# token. So "how many times faster" has no single answer: it depends on how long the text is, and a quoted number without a length says nothing.
#
# Beside it, the library that everybody uses, doing the same work. And below, in black, the floor: the
# time that reading the bytes takes, if nothing else cost anything.
#
# ## How near is the roof?
#
# The same measurement, asked the other way round: how many bytes per second did each path read, and
# how many can this machine read?

# %% tags=["nbval-ignore-output"]
read = {
    name: [
        bytes_per_token(config, n, torch.float32) / ms / 1e6 for n, ms in zip(lengths, decode[name])
    ]
    for name in ("transformers", "cache")
}
for name, values in read.items():
    print(f"{name:12} " + ", ".join(f"{v:.1f}" for v in values) + " GB/s")
print(
    f"the machine  {bandwidth / 1e9:.1f} GB/s, so the cache path reaches {read['cache'][0] / bandwidth * 1e9:.0%}"
)
assert all(0 < value < 2 * bandwidth / 1e9 for values in read.values() for value in values)

# %%
from nanoserve.course.plots import limit_line

fig, ax = figure(
    xlabel="tokens of text", ylabel="billion bytes per second", title="How near the roof"
)
line(ax, lengths, read["transformers"], "", COLOURS["oracle"], dashed=True)
line(ax, lengths, read["cache"], "", COLOURS["contiguous"])
ours_first = read["cache"][0] > read["transformers"][0]
above, below = ("above", "below") if ours_first else ("below", "above")
label_line(ax, lengths[0], read["cache"][0], "cache", COLOURS["contiguous"], above)
label_line(ax, lengths[0], read["transformers"][0], "transformers", COLOURS["oracle"], below)
limit_line(ax, bandwidth / 1e9, "what this machine can read")
log2_axis(ax)
ax.set(ylim=(0, 1.25 * max(bandwidth / 1e9, *read["cache"])), xlim=(11, 720), xticks=lengths)
fig

# %% [markdown]
# Decode is **memory-bound**. A weight is fetched, used for one multiplication, and dropped. A second
# arithmetic unit would wait beside the first. So from here on there are only three ways to make decode
# faster: read fewer bytes (smaller numbers), read them once for several sequences (batching), or get
# nearer to the roof. The course will do all three.
#
# Prefill is the other regime. It uses each weight for every token of the prompt, so arithmetic rules,
# and **arithmetic that nobody needs** is what to look for.
#
# ## Half of attention is thrown away
#
# Day 6's `sdpa` multiplies all queries with all keys, then masks the upper triangle away. For a prompt
# of 1,024 tokens those are a million scores in each head, and half of them are never used.
#
# So cut the queries into **tiles**. Queries 0 to 127 can see no key after 127: multiply them with 128
# keys. The next tile needs 256. Only on the last tile are all keys needed.
#
# ### Your turn: `keys_of_a_tile`
#
# | tile of 128 queries, no past | 0 to 127 | 128 to 255 | ... | 896 to 1,023 |
# | --- | --- | --- | --- | --- |
# | keys it must meet | 128 | 256 | ... | 1,024 |
#
# Mind two things: there may be a history before the first query, and the last tile may be short.


# %%
def keys_of_a_tile(start: int, tile: int, query_len: int, kv_len: int) -> int:
    """How many keys, counted from key 0, the queries start to start + tile may see between them.

    The queries are the last query_len of kv_len positions; the last tile may be short.
    """
    raise NotImplementedError("your turn")


today.check(keys_of_a_tile)


# %% jupyter={"source_hidden": true}
# solution: keys_of_a_tile
def keys_of_a_tile(start: int, tile: int, query_len: int, kv_len: int) -> int:
    """How many keys, counted from key 0, the queries start to start + tile may see between them."""
    return kv_len - query_len + min(start + tile, query_len)


# %%
for tile in (1_024, 512, 128, 32):
    scores = sum(tile * keys_of_a_tile(s, tile, 1_024, 1_024) for s in range(0, 1_024, tile))
    print(f"tiles of {tile:5,}: {scores:9,} scores a head, {scores / 1_024**2:3.0%} of the square")

# %% [markdown]
# Smaller tiles waste less, and make more and smaller products, each of which costs something to start.
# 32 saves hardly more than 128. Which is the fastest depends on the machine; over a whole
# prompt of 1,024 tokens in float32, 96 and 128 were the best of those tried on ours.
#
# Here is `sdpa` in its final form. The sum is Day 6's, with four differences that change no more than
# the last digit:
#
# - Inside a tile, only the last square needs a mask; all keys before it are visible.
# - The scale is put on the queries, which are fewer than the scores: 64 numbers a query, not 1,024.
# - The scores of every tile go into one room, and their weights into the same place. Memory that is
#   asked for afresh has to be made ready page by page, and that takes time.
# - A single query, as in decode, has nothing to mask and does little more than read the keys and values.
#   It attends in float32, whatever they are stored in.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/layers.py: QUERY_TILE, sdpa, _attend
QUERY_TILE = 128  # queries that attend at once: enough to fill a matmul, few enough to skip keys


def sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """Causal attention as an explicit sum (Vaswani et al. 2017, eq. 1), in tiles of queries.

    q [batch, n_q, query_len, head_dim]; k, v [batch, n_kv, kv_len, head_dim]; the queries are the
    last query_len of kv_len positions -> [batch, n_q, query_len, head_dim]. Query head h reads KV
    head h // n_rep, by a view. `scale` defaults to head_dim ** -0.5. A tile skips the keys that
    none of its queries may see. A single query attends in float32 at least.
    """
    batch, n_q, query_len, head_dim = q.shape
    n_kv, kv_len = k.shape[1:3]
    scale = head_dim**-0.5 if scale is None else scale
    if query_len == 1:  # nothing to mask, and hardly more work than reading k and v
        wide = torch.promote_types(q.dtype, torch.float32)
        rows = q.to(wide).reshape(batch, n_kv, n_q // n_kv, head_dim) * scale
        weights = (rows @ k.to(wide).transpose(2, 3)).softmax(dim=-1)
        return (weights @ v.to(wide)).to(q.dtype).view(q.shape)
    q = q * scale  # fewer numbers to scale than scores
    q = q.reshape(
        batch * n_kv, n_q // n_kv, query_len, head_dim
    )  # the heads that share keys, together
    k, v = k.flatten(0, 1), v.flatten(0, 1)  # [batch * n_kv, kv_len, head_dim]
    out = torch.empty_like(q)
    # scores of one tile; every tile writes into the same memory, since fresh memory is slow
    workspace = q.new_empty(batch * n_q * min(query_len, QUERY_TILE) * kv_len)
    for start in range(0, query_len, QUERY_TILE):
        tile = slice(start, min(start + QUERY_TILE, query_len))
        keys = kv_len - query_len + tile.stop
        out[:, :, tile] = _attend(q[:, :, tile], k[:, :keys], v[:, :keys], workspace)
    return out.view(batch, n_q, query_len, head_dim)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, workspace: torch.Tensor
) -> torch.Tensor:
    """One tile: q [groups, n_rep, tile, head_dim], scaled; k, v [groups, keys, head_dim] -> as q.

    The scores are written into `workspace`, at least groups * n_rep * tile * keys numbers.
    """
    groups, n_rep, tile, _ = q.shape
    shape = (groups, n_rep * tile, k.shape[1])
    scores = workspace[: math.prod(shape)].view(shape)
    torch.bmm(q.flatten(1, 2), k.transpose(1, 2), out=scores)
    if tile > 1:
        future = torch.ones(tile, tile, dtype=torch.bool, device=q.device).triu_(1)
        scores.unflatten(1, (n_rep, tile))[..., -tile:].masked_fill_(future, -torch.inf)
    weights = torch.softmax(scores, dim=-1, out=scores)  # summed in float32, whatever the dtype
    return torch.bmm(weights, v).view(q.shape)


# %% [markdown]
# Correct first. Against PyTorch's own attention, with a history and a short last tile; and one matmul
# (a tile as large as the prompt) against tiles.


# %%
def in_tiles_of(tile, q, k, v):
    """sdpa with another size of tile."""
    global QUERY_TILE
    usual, QUERY_TILE = QUERY_TILE, tile
    try:
        return sdpa(q, k, v)
    finally:
        QUERY_TILE = usual


generator = torch.Generator().manual_seed(13)
q = torch.randn(1, config.n_q, 1_024, config.head_dim, generator=generator)
k, v = torch.randn(2, 1, config.n_kv, 1_024, config.head_dim, generator=generator)
some = q[:, :, -300:]
hidden = torch.ones(300, 1_024, dtype=torch.bool).tril(1_024 - 300)
theirs = torch.nn.functional.scaled_dot_product_attention(some, k, v, hidden, enable_gqa=True)
print(
    "300 queries, 1,024 keys, as PyTorch's own:",
    torch.allclose(sdpa(some, k, v), theirs, atol=1e-5),
)
one = in_tiles_of(1_024, q, k, v)
for tile in (512, 128, 100, 32):
    assert torch.allclose(in_tiles_of(tile, q, k, v), one, atol=1e-5, rtol=1e-4)
print("any tile gives the sum of one matmul")

# %%
today.predict(
    "tiles", "At 1,024 tokens, how many times faster are tiles of 128 than one matmul?", guess=None
)

# %% tags=["nbval-ignore-output"]
sizes = (8, 32, 128, 512, 1_024)
took = median_times({n: lambda n=n: in_tiles_of(n, q, k, v) for n in sizes}, rounds=3)
print(f"one matmul {took[1_024] * 1e3:.0f} ms, tiles of 128 {took[128] * 1e3:.0f} ms")
print(f"{took[1_024] / took[128]:.1f} times faster; your guess: {today.guess('tiles') or 'none'}")
assert took[128] < took[1_024]

# %%
fig, ax = figure(
    xlabel="queries in a tile", ylabel="milliseconds", title="One layer's attention, 1,024 tokens"
)
line(ax, sizes, [took[n] * 1e3 for n in sizes], "", COLOURS["contiguous"])
label_line(ax, 1_024, took[1_024] * 1e3, "1,024:\none matmul", COLOURS["contiguous"])
if guess := today.guess("tiles"):
    prediction_marker(ax, 128, took[1_024] / guess * 1e3)
log2_axis(ax)
ax.set(ylim=(0, None), xlim=(6, 3_000), xticks=sizes)
fig

# %% [markdown]
# Nearly half of the scores are gone, and often more than half of the time: the scores of a tile are small
# enough to stay near the processor, while a million of them have to travel to memory and back. That is
# a lesson about bytes again. Too small a tile loses what it won; how small that is, your machine says.
#
# What it does not show: attention is one part of prefill, and at 1,024 tokens the matrix products of the
# MLP take longer. And a decode step has one query, so it has no half to leave out. Day 22 goes one step
# further, and tiles the keys as well.
#
# What does a single query gain by its own branch? Here is one in bfloat16 over 1,024 keys, which lie as
# a cache holds them, in a strip with room for more: as a tile of one, and as `sdpa` does it now.

# %% tags=["nbval-ignore-output"]
strip = torch.randn(2, 1, config.n_kv, 2_048, config.head_dim, generator=generator).bfloat16()
one, (keys, values) = q[:, :, -1:].bfloat16(), strip[:, :, :, :1_024]
scaled = (one * config.head_dim**-0.5).view(config.n_kv, config.n_rep, 1, config.head_dim)
room = scaled.new_empty(config.n_q * 1_024)
took = median_times(
    {
        "tile": lambda: _attend(scaled, keys[0], values[0], room),
        "float32": lambda: sdpa(one, keys, values),
    },
    rounds=50,
)
print(f"in 16 bits {took['tile'] * 1e6:.0f} µs, in float32 {took['float32'] * 1e6:.0f} µs")

# %% [markdown]
# In float32 the keys and values are copied first, to twice their size, and still that was the faster way
# on our machine: PyTorch's product of 16-bit numbers is slow for so few rows. (Day 5's `linear` goes
# round the same thing.)
#
# ## One product for three
#
# A decode step reads every weight once, and joining saves no bytes. But each product also costs
# something to start, and k and v have only 192 rows each, beside q's 576. All three multiply the same
# `x`. So lay their rows one behind another, once, when a model is loaded, and multiply once.
#
# Weights stay just names. A layer's dictionary gets one more, `self_attn.qkv_proj.weight`, and the three
# old names become views of its rows. `_qkv` asks for the new name; a layer that does not have it gets three
# products.

# %%
from pathlib import Path

from nanoserve.config import load_config
from nanoserve.fetch import resolve
from nanoserve.layers import _linear
from nanoserve.weights import load_weights


# %% jupyter={"source_hidden": true}
# lands in nanoserve/layers.py: _qkv
def _qkv(x: torch.Tensor, layer: dict[str, torch.Tensor]) -> torch.Tensor:
    """q, k and v of x in a row, [batch, seq, (n_q + 2 * n_kv) * head_dim].

    One product where the layer has their weights joined (`join_qkv`), else three.
    """
    if "self_attn.qkv_proj.weight" in layer:
        return _linear(x, layer, "self_attn.qkv_proj")
    return torch.cat([_linear(x, layer, f"self_attn.{letter}_proj") for letter in "qkv"], dim=-1)


# %% [markdown]
# `load_model` joins them at the end. It also checks its arguments before it reads a file: `as_dtype`
# accepts three dtypes or their names, and `as_device` a device that this machine has.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/model.py: DTYPES, load_model, as_dtype, as_device, join_qkv
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    source: str | Path = "smollm2",
    dtype: str | torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Model:
    """Load "smollm2" (fetched on first use), a folder, a .gguf file or a hub id.

    dtype: float32, bfloat16 or float16, or its name. Raises ValueError for a dtype or device that
    cannot be used, and for a checkpoint that is broken or not supported.
    """
    dtype, device = as_dtype(dtype), as_device(device)
    path = resolve(source)
    config = load_config(path)
    model = Model(config, load_weights(path, config, dtype, device))
    join_qkv(model)
    return model


def as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """A dtype of DTYPES, given as it is or by its name. Raises ValueError for any other."""
    found = DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if found not in DTYPES.values():
        raise ValueError(f"dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}")
    return found


def as_device(device: str | torch.device) -> torch.device:
    """A device that holds tensors on this machine. Raises ValueError, with torch's reason."""
    try:
        found = torch.device(device)
        torch.empty(1, device=found).cpu()
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise ValueError(f"device {str(device)!r} cannot be used: {reason}") from None
    return found


def join_qkv(model: Model) -> None:
    """Give each layer "self_attn.qkv_proj.weight", the rows of q, k and v joined; a bias likewise.

    The weights of q, k and v become views of those rows, so no value is stored twice. In-place
    edits show in qkv_proj; rebinding a name does not.
    """
    for i, layer in enumerate(model.layers):
        for kind in ("weight", "bias") if model.config.qkv_bias else ("weight",):
            names = [f"self_attn.{letter}_proj.{kind}" for letter in "qkv"]
            joined = torch.cat([layer[name] for name in names])
            views = joined.split([len(layer[name]) for name in names])
            for name, view in zip(names, views, strict=True):
                layer[name] = model.weights[f"model.layers.{i}.{name}"] = view
            layer[f"self_attn.qkv_proj.{kind}"] = joined


# %%
def both_ways(dtype: torch.dtype) -> dict[str, Model]:
    """The same weights twice: as they were loaded, and joined."""
    apart, joined = (
        Model(config, load_weights(resolve("smollm2"), config, dtype)) for _ in range(2)
    )
    join_qkv(joined)
    return {"apart": apart, "joined": joined}


apart, joined = both_ways(torch.float32).values()
held = [*joined.weights.values(), *(w for layer in joined.layers for w in layer.values())]
stored = {w.untyped_storage().data_ptr(): w.untyped_storage().nbytes() for w in held}
values_kept = all(torch.equal(joined.weights[name], w) for name, w in apart.weights.items())
print("every name keeps its values:", values_kept)
print("nothing is stored twice:", sum(stored.values()) == bytes_per_token(config, 0, torch.float32))
x = torch.randn(1, 1, config.hidden_size, generator=generator)
three, one = (_qkv(x, way.layers[0]) for way in (apart, joined))
print("one product gives what three give:", torch.allclose(one, three, atol=1e-4))

# %% [markdown]
# Now the time, of whole steps: one token, with no history, through all 30 layers and the head.

# %% tags=["nbval-ignore-output"]
token = torch.tensor([[504]])
for dtype in (torch.float32, torch.bfloat16):
    ways = both_ways(dtype).items()
    steps = {name: lambda way=way: [way(token) for _ in range(4)] for name, way in ways}
    took = median_times(steps, rounds=15)
    times = ", ".join(f"{seconds / 4 * 1e3:.1f} ms {name}" for name, seconds in took.items())
    print(f"{dtype}: a step takes {times}")

# %% [markdown]
# In bfloat16 the joined step is the faster one. In float32 the two differ by a few per cent, and on our
# machine it changed from run to run which was ahead. `load_model` joins in both.
#
# There is a second gain. Queries and keys now stand side by side as heads of one tensor, and the last form
# of `gqa_attention`, on Day 19, turns them in one call, with nothing to be laid together first. And there
# is a price: the three old names are views. Write into one, and the joined rows change with it; put another
# tensor under its name, and the model goes on with the old rows.
#
# ## Your answer is the engine
#
# The roof as your own count has it: inside `today.mine()` the package's benchmark uses your
# `bytes_per_token`, once it has passed.

# %%
from nanoserve.bench import decode as package

with today.mine():
    step = package.bytes_per_token(config, 512, torch.float32)
print(f"a token after 512 reads {step / 1e6:.0f} MB; in bfloat16 it would be half")

# %% [markdown]
# ## What you learned
#
# 1. **A time without its correctness, its length and its roof is not a measurement.**
# 2. **The cache turns a slope into a line that is almost flat.** The floor below it is the time that
#    it takes to read the model.
# 3. **Prefill computes, decode reads.** Ask which of the two you are in before you optimise anything.
#
# ## The week in questions
#
# Days 10 to 13. Answer before you unfold.

# %%
today.review()

# %% [markdown]
# ## Tomorrow
#
# The engine is correct, it remembers, and you know how far it is from the roof, for **one** sequence.
# Its cache is a strip that must be reserved before anybody knows how long the answer will
# be. Week 4 takes the strip apart: Day 14 hands memory out in blocks.
#
# **In one paragraph.** We built a benchmark that compares tokens before it compares times, and lets the
# rivals take turns. The cache bends Day 1's curve into a line that hardly rises, and the floor
# below it is the time to read half a gigabyte of weights for each token. Then we stopped computing most of
# what attention's mask throws away, and prefill got its share too.
