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
# **Today** you measure. You build a benchmark that refuses to time a wrong answer, draw Day 1's curve
# again with a cache, and compare a step with the time that reading its bytes takes. A section at the
# end, which you can skip, makes two parts of the engine faster.

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
# "Ten times faster" is easy to say. Than what? With the same result? On a machine that was busy with
# something else? It is easy to measure speed wrongly, and the error is usually in one's own favour.
#
# Three rules keep a benchmark honest, and today they become code:
#
# 1. **Correct first.** A code path that gives other tokens is not timed.
# 2. **Take turns.** Run the variants in turns, so that a slow minute affects all of them.
# 3. **Know the limit.** Compare a time with the best that the machine could reach.

# %%
today.glossary(
    "warm-up", "interleaved", "bandwidth", "peak bandwidth", "memory-bound", "compute-bound"
)

# %% [markdown]
# ## A clock you can script
#
# Three small functions. `median_times` runs variants in turns and returns medians. `token_times` notes
# the time of each token of a run. `read_bandwidth` measures the peak bandwidth: how many bytes of
# memory the machine can read in a second.
#
# Their clock is an argument, so that a *test* of the benchmark can pass a clock of its own.

# %%
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from statistics import median

import torch


# %% jupyter={"source_hidden": true}
# lands in nanoserve/bench/timing.py: Clock, median_times, token_times, read_bandwidth
Clock = Callable[[], float]  # returns seconds since any fixed moment


def median_times(
    runs: Mapping[str, Callable[[], object]],
    rounds: int = 5,
    warmup: int = 1,
    clock: Clock = time.perf_counter,
) -> dict[str, float]:
    """Median seconds of each run, after `warmup` rounds.

    The runs take turns, so that a slow moment of the machine affects all of them.
    """
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

    Takes the best of five sums over `size` bytes, far more than a processor's cache holds. A GPU
    runs asynchronously, so its clock must synchronise first (`device_clock` of runner.py).
    """
    buffer = torch.ones(size // 4, dtype=torch.float32, device=device)
    best = float("inf")
    for _ in range(5):
        begin = clock()
        buffer.sum()
        best = min(best, clock() - begin)
    return size / best


# %% [markdown]
# With a scripted clock, a run takes exactly as long as the script says. Here the prompt takes 5 seconds,
# and two tokens follow:

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
# First the limit. Which bytes must a step read from memory to make one token with a cache?
#
# - **Every weight, once.** `expected_shapes(config)` (Day 2) has every tensor's shape by its name. It
#   lists one table of the size of the embedding. A step reads the whole head, which has the same
#   size, tied or not. So count that table once. A step also reads one row of the embedding: leave
#   that row out.
# - **The cached keys and values:** in each layer, a key and a value of each of the `context` cached
#   tokens, for `n_kv` heads of `head_dim` numbers.
#
# `dtype.itemsize` is the number of bytes of one number. The new token's own activations are a few
# kilobytes; leave them out.
#
# After a kernel restart, run the cells above first (Run → Run All Above Selected Cell).

# %%
import math
from collections.abc import Sequence
from dataclasses import dataclass

from nanoserve.config import ModelConfig
from nanoserve.weights import expected_shapes


# %%
def bytes_per_token(config: ModelConfig, context: int, dtype: torch.dtype) -> int:
    """The bytes that one cached decode step must read: every weight once, and the keys and values of
    `context` tokens."""
    raise NotImplementedError("your turn")


today.check(bytes_per_token)

# %% [markdown]
# ## The benchmark that lands
#
# A **code path** is a function `run(prompt_ids, max_tokens, on_token)`: it returns token ids, and calls
# `on_token` as each token comes. One code path is Day 12's loop, another is the oracle's own
# `generate`. `decode_benchmark` first compares the tokens of all code paths. That run is not timed, so
# it is the warm-up too.
#
# The second cell below also holds the package's `bytes_per_token`; from here on this notebook uses it.

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
    """A variant's result differs from its reference, so the benchmark measures no time."""


# %% jupyter={"source_hidden": true}
# lands in nanoserve/bench/decode.py: DecodePath, TokenCheck, DecodeRow, decode_benchmark and 3 more
# called with (prompt_ids, max_tokens, on_token); returns the token ids that it generated
DecodePath = Callable[[Sequence[int], int, Callable[[int], None]], list[int]]
# called with (prompt_ids, generated ids); returns whether the generated ids are right
TokenCheck = Callable[[Sequence[int], Sequence[int]], bool]


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
    checks: Mapping[str, TokenCheck] | None = None,
) -> list[DecodeRow]:
    """Time each code path on each prompt, interleaved; rows hold medians over rounds and tokens.

    `paths` maps a name to a DecodePath, and `reference` is one of the names. Raises WrongAnswer if
    a code path's tokens differ from the reference's. A path with an entry in `checks` is checked by
    that function instead. The check is also the warm-up.
    """
    rows, checks = [], checks or {}
    for prompt in prompts:
        expected = paths[reference](prompt, tokens, lambda _: None)
        for name, path in paths.items():
            found = path(prompt, tokens, lambda _: None)
            right = checks[name](prompt, found) if name in checks else found == expected
            if not right:
                raise WrongAnswer(f"{name} and {reference} differ at prompt length {len(prompt)}")
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

    `context` is the number of cached tokens. The step reads all of the head, tied to the embedding
    or not, and one row of the embedding, which is not counted.
    """
    # expected_shapes has the embedding and no head; both have the same size
    weights = sum(map(math.prod, expected_shapes(config).values()))
    cached = config.num_layers * 2 * context * config.n_kv * config.head_dim
    return (weights + cached) * dtype.itemsize


# %% [markdown]
# `checks` is for a code path that rounds, such as one in 16 bits: it may choose other tokens and still
# be right. Day 32 uses it. Today all code paths compute in float32, and their tokens must be equal.
#
# Rule 1 at work, on a fast code path that is wrong:


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
# Check the byte count on the real model: with an empty cache it must be the size of the model's tensors.

# %%
model, oracle = load_model("smollm2"), load_oracle("smollm2")
config = model.config
tensors = {w.data_ptr(): w.nbytes for w in model.weights.values()}  # the tied head is one of them
same = sum(tensors.values()) == bytes_per_token(config, 0, torch.float32)
print("the size of the model's tensors:", same)
assert same
for context in (0, 512, 8_192):
    print(
        f"{context:5} tokens cached: {bytes_per_token(config, context, torch.float32) / 1e6:4.0f} MB"
    )

# %% [markdown]
# That is more than half a gigabyte for one token.
#
# ## Predict, then measure
#
# After 512 tokens of text: how many times faster is a step with the cache than without?

# %%
today.predict(
    "speedup",
    "How many times faster is the token after 512, with the cache?",
    guess=None,
    low=0.1,
    high=10_000,
)

# %% [markdown]
# Three code paths on the same weights, in turns: our loop with and without its cache, and `transformers`
# with its own cache. Their tokens are compared before any of them is timed. (Three tokens and one round
# keep this short. For better numbers, set `tokens=8` and `rounds=3`.)

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
print("your guess for 512:", today.guess_text("speedup"))
assert speedup[2] > speedup[0]
assert speedup[2] > 3

# %% [markdown]
# Now Day 1's plot again. Day 1 timed one token of `transformers` after each length, without a cache.
# `transformers` does the same today for the *first* token after a prompt, so this run gives that curve
# too.

# %% jupyter={"source_hidden": true}
# Draws the plot: Day 1's curve, and the cache
from nanoserve.course.plots import COLOURS, figure, label_line, line, log2_axis, prediction_marker

fig, ax = figure(
    height=4.4,
    xlabel="tokens of text",
    ylabel="ms for the next token",
    title="Day 1's curve, and the cache",
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
# Without the cache, a step computes the whole text, so its time grows with the length. With the cache a
# step computes one token, and its time grows far less. So the speed-up grows with the length: "how many
# times faster" has no single answer, and a quoted number without a length says nothing.
#
# `transformers` does the same work in the dashed lines. The black line is the limit: the time that
# reading the bytes takes, if nothing else took any time.
#
# ## How near is the limit?
#
# The same measurement in other units: how many bytes per second does each code path read, and how many
# can this machine read?

# %% tags=["nbval-ignore-output"]
read = {
    name: [
        bytes_per_token(config, n, torch.float32) / ms / 1e6 for n, ms in zip(lengths, decode[name])
    ]
    for name in ("transformers", "cache")
}
for name, values in read.items():
    print(f"{name:12} " + ", ".join(f"{v:.1f}" for v in values) + " GB/s")
share = read["cache"][0] * 1e9 / bandwidth
print(
    f"the machine  {bandwidth / 1e9:.1f} GB/s at its peak; with its cache our loop reaches {share:.0%}"
)
assert all(0 < value < 2 * bandwidth / 1e9 for values in read.values() for value in values)

# %% jupyter={"source_hidden": true}
# Draws the plot: How near the peak bandwidth
from nanoserve.course.plots import limit_line

fig, ax = figure(
    xlabel="tokens of text", ylabel="billion bytes per second", title="How near the peak bandwidth"
)
line(ax, lengths, read["transformers"], "", COLOURS["oracle"], dashed=True)
line(ax, lengths, read["cache"], "", COLOURS["contiguous"])
top = 1.25 * max(bandwidth / 1e9, *read["cache"])
(low, lower), (high, upper) = sorted((values[-1], name) for name, values in read.items())
apart = max(0.0, 0.1 * top - (high - low)) / 2  # so that the labels do not overlap
for name, height in ((lower, low - apart), (upper, high + apart)):
    colour = COLOURS["contiguous" if name == "cache" else "oracle"]
    label_line(ax, lengths[-1], height, name, colour)
limit_line(ax, bandwidth / 1e9, "what this machine can read")
log2_axis(ax)
ax.set(ylim=(0, top), xlim=(11, 1_400), xticks=lengths)
fig

# %% [markdown]
# Read your own share. The nearer it is to 100%, the more of a step's time is spent on reading weights, and
# the step is **memory-bound**: a processor with faster arithmetic would hardly help. If your share is
# well below a half, much of the time goes elsewhere: to the start of hundreds of small operations, to
# threads that wait for each other, to a product that does not read at full speed. On a GPU the same
# comparison decides what is worth doing.
#
# In both cases the bytes are the limit that no code can pass. So there are three ways to faster decode:
# read fewer bytes (smaller numbers), read them once for several sequences (batching), or get nearer to
# the peak bandwidth. The course takes all three.
#
# ## The other half: prefill
#
# Prefill uses each weight for every token of the prompt, so it does far more arithmetic for each byte.
# For prefill look for **arithmetic that is not needed**, and attention has some. Day 6's `sdpa`
# multiplies all queries with all keys, then the mask hides the upper triangle. For a prompt of 1,024
# tokens that is a million scores in each head, and nearly half of them are not used.
#
# So cut the queries into **tiles**. Queries 0 to 127 see no key after 127: multiply them with 128 keys.
# The next tile needs 256. Only the last tile needs all keys.
#
# ### Your turn: `keys_of_a_tile`
#
# | tile of 128 queries, empty cache | 0 to 127 | 128 to 255 | ... | 896 to 1,023 |
# | --- | --- | --- | --- | --- |
# | keys that it needs | 128 | 256 | ... | 1,024 |
#
# Two cases need care: there may be cached tokens before the first query, and the last tile may be short.
#
# After a kernel restart, run the cells above first.


# %%
def keys_of_a_tile(start: int, tile: int, query_len: int, kv_len: int) -> int:
    """How many keys, counted from key 0, a tile needs: the queries start to start + tile - 1.

    The queries are the last query_len of kv_len positions; the last tile may be short.
    """
    raise NotImplementedError("your turn")


today.check(keys_of_a_tile)


# %% jupyter={"source_hidden": true}
# solution: keys_of_a_tile
def keys_of_a_tile(start: int, tile: int, query_len: int, kv_len: int) -> int:
    """How many keys, counted from key 0, a tile needs: the queries start to start + tile - 1."""
    return kv_len - query_len + min(start + tile, query_len)


# %%
for tile in (1_024, 512, 128, 32):
    scores = sum(tile * keys_of_a_tile(s, tile, 1_024, 1_024) for s in range(0, 1_024, tile))
    print(f"tiles of {tile:5,}: {scores:9,} scores a head, {scores / 1_024**2:3.0%} of all")

# %% [markdown]
# Smaller tiles compute fewer scores, and need more and smaller products, each of which takes time to
# start. Tiles of 32 save little more than tiles of 128. The engine's `sdpa` works in tiles of 128
# queries; the last section shows the code and measures it.
#
# ## Your answer is the engine
#
# The command `nanoserve bench decode` prints the GB/s of each code path, and counts the bytes with
# `bytes_per_token`. Inside `today.mine()` that function is yours, if it has passed its check:

# %%
from nanoserve.bench import decode as package

with today.mine():
    step = package.bytes_per_token(config, 512, torch.float32)
    half = package.bytes_per_token(config, 512, torch.bfloat16)
print(f"a step after 512 tokens reads {step / 1e6:.0f} MB, in bfloat16 {half / 1e6:.0f} MB")
assert step == 2 * half

# %% [markdown]
# ## What you learned
#
# 1. **Give a time together with its correctness check, its length and the limit of the machine.**
# 2. **Without a cache the time of a step grows with the text; with one it grows far less.** The limit
#    below it is the time to read the weights and the cached keys and values.
# 3. **Measure what limits a step before you optimise it.** Decode does little arithmetic for each byte,
#    prefill does a lot.
#
# ## The week in questions
#
# Days 10 to 13. Answer before you unfold.

# %%
today.review()

# %% [markdown]
# ## Tomorrow
#
# The engine is correct, it has a cache, and you know how far a step is from the peak bandwidth, for
# **one** sequence. Its cache is a strip that is reserved before anybody knows how long the answer will
# be. Week 4 replaces the strip: on Day 14 memory is handed out in blocks.
#
# **In one paragraph.** We built a benchmark that compares tokens before it compares times, and runs the
# code paths in turns. Without a cache the time of a token grows with the text, as on Day 1; with a
# cache it grows far less. Below both lies the time to read half a gigabyte of weights for each token.
# Your share of the peak bandwidth shows how much of a step that reading explains.
#
# ## You can skip this: tiles, and one product for three
#
# The day ends here, and both exercises are above. This section takes 20 minutes more and shows how two
# parts of the engine became faster. If you skip it, you lose nothing that later days need: the results
# stay the same, and later notebooks use the finished functions.
#
# Here is `sdpa` in its final form. It computes Day 6's sum with four differences, which change no more
# than rounding:
#
# - It works in tiles of queries, and a tile skips the keys that none of its queries sees. Only the last
#   square of a tile needs a mask.
# - The scale is applied to the queries, which are fewer than the scores.
# - All tiles write their scores and weights to one workspace. New memory is slow to write the first
#   time, since the system must provide it page by page.
# - A single query, as in decode, needs no mask, and has a branch of its own. It computes in float32,
#   whatever the dtype of the keys and values.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/layers.py: QUERY_TILE, sdpa, _attend
QUERY_TILE = 128  # queries in one matrix product: enough for speed, few enough to skip future keys


def sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """Causal attention as an explicit sum (Vaswani et al. 2017, eq. 1), in tiles of queries.

    q [batch, n_q, query_len, head_dim]; k, v [batch, n_kv, kv_len, head_dim]; the queries are the
    last query_len of kv_len positions -> [batch, n_q, query_len, head_dim]. Query head h reads KV
    head h // n_rep; no head is copied. `scale` defaults to head_dim ** -0.5. A tile of queries
    skips the keys after its last query. A single query is computed in float32 or wider.
    """
    batch, n_q, query_len, head_dim = q.shape
    n_kv, kv_len = k.shape[1:3]
    scale = head_dim**-0.5 if scale is None else scale
    if query_len == 1:  # no mask, and reading k and v takes most of the time
        wide = torch.promote_types(q.dtype, torch.float32)
        rows = (q.to(wide) * scale).reshape(batch * n_kv, n_q // n_kv, head_dim)
        k, v = k.to(wide).flatten(0, 1), v.to(wide).flatten(0, 1)
        weights = torch.bmm(rows, k.transpose(1, 2)).softmax(dim=-1)
        return torch.bmm(weights, v).to(q.dtype).view(q.shape)
    q = q * scale  # q has fewer elements than the scores
    # the query heads of one KV head form a group
    q = q.reshape(batch * n_kv, n_q // n_kv, query_len, head_dim)
    k, v = k.flatten(0, 1), v.flatten(0, 1)  # [batch * n_kv, kv_len, head_dim]
    out = torch.empty_like(q)
    # scores of one tile; all tiles share this memory, because new memory for each tile is slow
    workspace = q.new_empty(batch * n_q * min(query_len, QUERY_TILE) * kv_len)
    for start in range(0, query_len, QUERY_TILE):
        tile = slice(start, min(start + QUERY_TILE, query_len))
        keys = kv_len - query_len + tile.stop
        out[:, :, tile] = _attend(q[:, :, tile], k[:, :keys], v[:, :keys], workspace)
    return out.view(batch, n_q, query_len, head_dim)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, workspace: torch.Tensor
) -> torch.Tensor:
    """Attention of one tile of queries: q [groups, n_rep, tile, head_dim], scaled already; k, v
    [groups, keys, head_dim] -> the shape of q.

    The scores are written to `workspace`, which has at least groups * n_rep * tile * keys elements.
    """
    groups, n_rep, tile, _ = q.shape
    shape = (groups, n_rep * tile, k.shape[1])
    scores = workspace[: math.prod(shape)].view(shape)
    torch.bmm(q.flatten(1, 2), k.transpose(1, 2), out=scores)
    if tile > 1:
        future = torch.ones(tile, tile, dtype=torch.bool, device=q.device).triu_(1)
        scores.unflatten(1, (n_rep, tile))[..., -tile:].masked_fill_(future, -torch.inf)
    weights = torch.softmax(scores, dim=-1, out=scores)  # torch sums in float32 for every dtype
    return torch.bmm(weights, v).view(q.shape)


# %% [markdown]
# Correct first. Compare with PyTorch's own attention, with cached tokens and a short last tile; and
# compare one matmul (a tile as large as the prompt) with smaller tiles.


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
off = float((sdpa(some, k, v) - theirs).abs().max() / theirs.abs().max())
print("300 queries, 1,024 keys, as PyTorch's own within 1e-5 of the largest:", off < 1e-5)
assert off < 1e-5
one = in_tiles_of(1_024, q, k, v)
for tile in (512, 128, 100, 32):
    assert (in_tiles_of(tile, q, k, v) - one).abs().max() < 1e-5 * one.abs().max()
print("each size of tile gives the result of one matmul")

# %%
today.predict(
    "tiles",
    "At 1,024 tokens, how many times faster are tiles of 128 than one matmul?",
    guess=None,
    low=0.1,
    high=100,
)

# %% tags=["nbval-ignore-output"]
sizes = (8, 32, 128, 512, 1_024)
took = median_times({n: lambda n=n: in_tiles_of(n, q, k, v) for n in sizes}, rounds=3)
print(f"one matmul {took[1_024] * 1e3:.0f} ms, tiles of 128 {took[128] * 1e3:.0f} ms")
print(f"{took[1_024] / took[128]:.1f} times faster; your guess: {today.guess_text('tiles')}")
assert took[128] < took[1_024]

# %% jupyter={"source_hidden": true}
# Draws the plot: One layer's attention, 1,024 tokens
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
# Tiles of 128 compute 56% of the scores. If they take less than 56% of the time in your run, memory may
# be a reason: the scores of a tile can stay in the processor's cache, and a million scores in each
# head may not. At the other end, many tiny products take time to start.
#
# The limits of this plot: attention is one part of prefill, and the matrix products of the MLP are
# another. A decode step has one query, so it has no half to leave out. Day 22 cuts the keys into tiles
# too.
#
# How fast is the branch for a single query? Here is one query in bfloat16 over 1,024 keys, stored as in
# a cache, in a strip that is longer: first as a tile of one query, then as `sdpa` does it.

# %% tags=["nbval-ignore-output"]
strip = torch.randn(2, 1, config.n_kv, 2_048, config.head_dim, generator=generator).bfloat16()
one, (keys, values) = q[:, :, -1:].bfloat16(), strip[:, :, :, :1_024]
scaled = (one * config.head_dim**-0.5).view(config.n_kv, config.n_rep, 1, config.head_dim)
workspace = scaled.new_empty(config.n_q * 1_024)
took = median_times(
    {
        "tile": lambda: _attend(scaled, keys[0], values[0], workspace),
        "float32": lambda: sdpa(one, keys, values),
    },
    rounds=50,
)
print(f"as a tile, in 16 bits: {took['tile'] * 1e6:.0f} µs")
print(f"as sdpa does it, in float32: {took['float32'] * 1e6:.0f} µs")

# %% [markdown]
# For float32 the keys and values are copied first, to twice their size. If float32 is faster all the
# same in your run, then PyTorch's product of 16-bit numbers is slow for so few rows on your processor.
# On other processors the tile can be faster. The float32 result is more exact in both cases.
#
# ### One product for three
#
# A decode step reads every weight once, and joining weights saves no bytes. But each product also takes
# time to start, and two of the products are small: k and v have 192 rows each, and q has 576. All
# three multiply the same `x`.
# So join their rows into one matrix, once, when a model is loaded, and multiply once in each step.
#
# A layer's dictionary gets one more name, `self_attn.qkv_proj.weight`, and the three old names become
# views of its rows. `_qkv` uses the new name; for a layer without it, it computes three products.

# %%
from pathlib import Path

from nanoserve.config import load_config
from nanoserve.fetch import resolve
from nanoserve.layers import _linear
from nanoserve.weights import load_weights


# %% jupyter={"source_hidden": true}
# lands in nanoserve/layers.py: _qkv
def _qkv(x: torch.Tensor, layer: dict[str, torch.Tensor]) -> torch.Tensor:
    """q, k and v of x, concatenated: [batch, seq, (n_q + 2 * n_kv) * head_dim].

    One product where the layer has the joined weight of `join_qkv`, else three.
    """
    if "self_attn.qkv_proj.weight" in layer:
        return _linear(x, layer, "self_attn.qkv_proj")
    return torch.cat([_linear(x, layer, f"self_attn.{letter}_proj") for letter in "qkv"], dim=-1)


# %% [markdown]
# `load_model` joins them at the end. It also checks its arguments before it reads a file: `as_dtype`
# accepts three dtypes or their names, and `as_device` a device that this machine has.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/model.py: DTYPES, as_dtype, as_device
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return a dtype of DTYPES, given as a dtype or by name. Raises ValueError for any other."""
    found = DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if found not in DTYPES.values():
        raise ValueError(f"dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}")
    return found


def as_device(device: str | torch.device) -> torch.device:
    """Return a device that can hold tensors here. Raises ValueError, with torch's reason."""
    try:
        found = torch.device(device)
        torch.empty(1, device=found).cpu()
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise ValueError(f"device {str(device)!r} cannot be used: {reason}") from None
    return found


# %% jupyter={"source_hidden": true}
# until day 32: lands in nanoserve/model.py: load_model, join_qkv
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


def join_qkv(model: Model) -> None:
    """Give each layer "self_attn.qkv_proj.weight", the joined rows of q, k and v; likewise a bias.

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
def both_variants(dtype: torch.dtype) -> dict[str, Model]:
    """The same weights twice: as they were loaded, and joined."""
    apart, joined = (
        Model(config, load_weights(resolve("smollm2"), config, dtype)) for _ in range(2)
    )
    join_qkv(joined)
    return {"apart": apart, "joined": joined}


apart, joined = both_variants(torch.float32).values()
held = [*joined.weights.values(), *(w for layer in joined.layers for w in layer.values())]
stored = {w.untyped_storage().data_ptr(): w.untyped_storage().nbytes() for w in held}
values_kept = all(torch.equal(joined.weights[name], w) for name, w in apart.weights.items())
print("every name keeps its values:", values_kept)
print("nothing is stored twice:", sum(stored.values()) == bytes_per_token(config, 0, torch.float32))
x = torch.randn(1, 1, config.hidden_size, generator=generator)
three, one = (_qkv(x, variant.layers[0]) for variant in (apart, joined))
same = float((one - three).abs().max() / three.abs().max()) < 1e-5
print("one product gives what three give, within 1e-5 of the largest:", same)
assert values_kept and same

# %% [markdown]
# Now time whole steps: one token, with no cache, through all 30 layers and the head.

# %% tags=["nbval-ignore-output"]
token = torch.tensor([[504]])
for dtype in (torch.float32, torch.bfloat16):
    steps = {
        name: lambda variant=variant: [variant(token) for _ in range(4)]
        for name, variant in both_variants(dtype).items()
    }
    took = median_times(steps, rounds=15)
    times = ", ".join(f"{seconds / 4 * 1e3:.1f} ms {name}" for name, seconds in took.items())
    print(f"{dtype}: a step takes {times}")

# %% [markdown]
# If the two differ by a few per cent only, run the cell again before you believe the order. `load_model`
# joins the weights in every dtype: a step then starts 60 products fewer. There is a second reason. q and
# k become heads of one tensor, so the final form of `gqa_attention`, on Day 19, rotates them in one
# call.
#
# One caution: the three old names are views. An in-place edit of one of them shows in the joined rows.
# If you put another tensor under an old name, the model still uses the joined rows.
