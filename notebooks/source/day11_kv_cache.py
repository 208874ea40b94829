# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Day 11 · Remember the keys
#
# Week 3 · Phase 1, correct generation · you need: Day 9 (Greedy, token for token)
#
# **Today** you write the cache: it keeps the keys and values of earlier tokens. The loop of Day 9 then
# computes one token per step instead of all of them.

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

today = day(11)
today.picture("kv-cache")

# %% [markdown]
# ## Why it matters
#
# Day 1 drew a curve: without a cache, every step computes all tokens before the new one again. So
# every engine has a cache. It takes about thirty lines.
#
# A mistake in a cache is hard to see. A cache that is off by one position raises no error. The text
# still reads well, but the model continues a past that is slightly wrong.

# %%
today.glossary(
    "KV cache",
    "key",
    "value",
    "prefill",
    "decode",
    "seq_len",
    "kv_len",
    "query_len",
    "capacity",
    "view",
)

# %% [markdown]
# ## What does not change
#
# Append a token to a text, and run the model again. What changes at the *earlier* positions? Day 6
# said: nothing, because no token sees a later one.
#
# Look for yourself. In every layer the model calls the `append` of its `cache` with the keys and values
# of the step. So pass it a cache that stores the keys for us and nothing else:

# %%
import torch

from nanoserve import load_model, load_tokenizer

model, tokenizer = load_model("smollm2"), load_tokenizer("smollm2")


class Recorder:
    """Stores each layer's keys for us, and returns to the model what it was given."""

    def __init__(self):
        self.seq_len, self.keys = 0, {}

    def append(self, layer, k, v):
        self.keys[layer] = k
        return k, v


def keys_of(ids):
    recorder = Recorder()
    with torch.no_grad():
        model.hidden(torch.tensor([ids]), recorder)
    return recorder.keys


# %%
text = tokenizer.encode("The tide goes out and the boats lie down in the mud.")
short, long = keys_of(text[:8]), keys_of(text)
print(len(long), "layers, keys of", list(short[0].shape), "and", list(long[0].shape))
off = max(float((short[i] - long[i][:, :, :8]).abs().max() / long[i].abs().max()) for i in long)
print("the first 8 tokens have the same keys in every layer, within 1e-5:", off < 1e-5)
assert off < 1e-5

# %% [markdown]
# With 8 tokens or with 13, the first 8 keys are the same, up to rounding. For the same reason the
# values are the same. So compute keys and values once and keep them. Old queries are not needed
# again: in a step, only the new tokens have queries.
#
# The cache gets the keys *after* RoPE. A key is rotated by its own position, and its position never
# changes. So the rotated key is kept.
#
# ## The steps of a generation
#
# | step | tokens in | they stand at positions | keys that attention sees |
# | --- | --- | --- | --- |
# | prefill | the prompt, say 5 | 0 to 4 | 5 |
# | decode | 1, the one just chosen | 5 | 6 |
# | decode | 1 | 6 | 7 |
# | continuation | a chunk of 3 | 7 to 9 | 10 |
#
# So a cache holds two things: the number of its tokens, and their keys and values. The model needs no
# more from any cache, from this one or from the paged one of Day 16:

# %%
from typing import Protocol

from nanoserve.config import ModelConfig


# %% jupyter={"source_hidden": true}
# lands in nanoserve/layers.py: Cache
class Cache(Protocol):
    """The interface of a cache of one sequence, as the model uses it.

    A cache may also have paged_attention(layer, k, v, q, n_rep); gqa_attention then calls that.
    """

    seq_len: int  # tokens held before this step: the position of the next token

    def append(
        self, layer: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store this step's k and v [1, n_kv, query_len, head_dim] of one layer. Return all keys
        and values of the layer, [1, n_kv, kv_len, head_dim]. The last layer advances seq_len."""
        ...


# %% [markdown]
# A `Protocol` is a description for readers and type checkers: any object with these two members is a
# cache.
#
# ## Your turn: the rectangular mask
#
# Day 6's mask is a square. In a continuation there are fewer queries than keys. Make a row for each
# query and a column for each key, True where the query **may not** see the key. The queries are the
# *last* `query_len` of `kv_len` positions:
#
# | 3 queries, 5 keys | key 0 | key 1 | key 2 | key 3 | key 4 |
# | --- | --- | --- | --- | --- | --- |
# | query 0, at position 2 | False | False | False | True | True |
# | query 1, at position 3 | False | False | False | False | True |
# | query 2, at position 4 | False | False | False | False | False |
#
# If you are stuck: `today.hint()`.
#
# After a kernel restart, run the cells above first (Run → Run All Above Selected Cell).


# %%
def causal_mask(query_len: int, kv_len: int) -> torch.Tensor:
    """True where query i may not see key j: bool [query_len, kv_len]. The queries are the last
    query_len of kv_len positions."""
    raise NotImplementedError("your turn")


today.check(causal_mask)


# %% jupyter={"source_hidden": true}
# solution: causal_mask
def causal_mask(query_len: int, kv_len: int) -> torch.Tensor:
    """True where query i may not see key j: bool [query_len, kv_len]. The queries are the last
    query_len of kv_len positions."""
    return torch.ones(query_len, kv_len, dtype=torch.bool).triu(1 + kv_len - query_len)


# %% [markdown]
# Day 6's `sdpa` applies this mask already, so it works with a cache as it is. With one query, as in
# decode, the mask hides nothing.
#
# ## A strip that doubles
#
# Where are the keys stored? The simplest way is `torch.cat([old, new])` at every step. That copies all
# cached keys to add one. Instead, reserve a strip of memory that is longer than needed:
#
# - `_k` and `_v` are `[num_layers, n_kv, capacity, head_dim]`, or None before the first token.
# - `_grow(needed, like)` makes strips for at least `needed` tokens and copies the cached tokens over.
#   The new strips have at least twice the old capacity, so growing is rare: 64, 128, 256.
#
# Here is the class without its main method.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/cache.py: NaiveKVCache
class NaiveKVCache:
    """The contiguous KV cache of one sequence: `capacity` tokens at first, doubled when full."""

    def __init__(self, config: ModelConfig, capacity: int = 64) -> None:
        self.seq_len = 0
        self._config = config
        self._capacity = capacity
        self._k: torch.Tensor | None = None  # [num_layers, n_kv, capacity, head_dim]
        self._v: torch.Tensor | None = None

    def _grow(self, needed: int, like: torch.Tensor) -> None:
        """Move K and V into memory at least twice as long, so that growth costs O(1) per token."""
        if self._k is not None:
            needed = max(needed, 2 * self._capacity)
        self._capacity = max(needed, self._capacity)
        shape = (self._config.num_layers, self._config.n_kv, self._capacity, self._config.head_dim)
        with torch.inference_mode(False):  # else only that mode could write to this memory
            k, v = like.new_empty(shape), like.new_empty(shape)
        if self._k is not None:
            k[:, :, : self.seq_len] = self._k[:, :, : self.seq_len]
            v[:, :, : self.seq_len] = self._v[:, :, : self.seq_len]
        self._k, self._v = k, v


# %% [markdown]
# ## Your turn: `append`
#
# The model calls it once per layer in each step, layer 0 first. `k` and `v` are this step's,
# `[1, n_kv, query_len, head_dim]`.
#
# 1. Before this step the cache holds `self.seq_len` tokens, after it `end = self.seq_len + query_len`.
# 2. Grow if `self._k` is None or `end` is larger than `self._capacity`, and only then.
# 3. Write this step's keys and values to positions `self.seq_len` to `end - 1` of this layer's strip.
# 4. Return the layer's keys and values of all `end` tokens, `[1, n_kv, end, head_dim]`: slices, no
#    copies.
# 5. **`seq_len` moves once per step**, when the last layer (`self._config.num_layers - 1`) has
#    written. Until then every layer starts from the same length.
# 6. A cache holds one sequence. For a batch of any other size, raise ValueError before you write or
#    move anything.
#
# It is a method, written here as a function; the check puts it into the class.
#
# After a kernel restart, run the cells above first.


# %%
def append(self, layer: int, k: torch.Tensor, v: torch.Tensor):
    """Write k, v [1, n_kv, query_len, head_dim] after the cached tokens'; return views of all."""
    raise NotImplementedError("your turn")


today.check(append)

# %% [markdown]
# The cell below holds the package's version; from here on this notebook uses it.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/cache.py: NaiveKVCache.append
class NaiveKVCache(NaiveKVCache):
    def append(
        self, layer: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write k, v [1, n_kv, query_len, head_dim] of one layer after the tokens held so far.

        Returns views of all K and V of the layer, [1, n_kv, kv_len, head_dim]. The last layer
        advances seq_len, so a step that fails in an earlier layer leaves seq_len unchanged. Raises
        ValueError for a batch of more than one sequence.
        """
        if k.shape[0] != 1:
            raise ValueError(f"a cache holds one sequence, got a batch of {k.shape[0]}")
        end = self.seq_len + k.shape[2]
        if self._k is None or end > self._capacity:
            self._grow(end, k)
        self._k[layer, :, self.seq_len : end] = k[0]
        self._v[layer, :, self.seq_len : end] = v[0]
        if layer == self._config.num_layers - 1:
            self.seq_len = end
        return self._k[layer : layer + 1, :, :end], self._v[layer : layer + 1, :, :end]


# %% [markdown]
# Rule 5 is easy to get wrong. If `seq_len` moved at layer 0, layers 1 to 29 would write one step too
# far, and attention would read a key that was never written. All shapes would still be right.
#
# ## Two lines in attention
#
# `gqa_attention` gets its final arguments: a cache, and the number of the layer. Today's two lines
# stand between RoPE and `sdpa`. Everything else is Day 6. (Day 19 adds one branch here, for a cache
# that computes attention itself.)

# %%
from nanoserve.layers import _heads, _linear, apply_rope, rms_norm, rope_tables, sdpa


# %% jupyter={"source_hidden": true}
# until day 19: lands in nanoserve/layers.py: gqa_attention
def gqa_attention(
    x: torch.Tensor,
    layer: dict[str, torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    config: ModelConfig,
    cache: Cache | None = None,
    index: int = 0,
) -> torch.Tensor:
    """Grouped-query attention (Ainslie et al. 2023): n_q query heads share n_kv keys and values.

    x [batch, seq, hidden], cos and sin [seq, head_dim] of x's positions -> [batch, seq, hidden].
    A cache takes this step's keys and values of layer `index`, and returns those of all its tokens.
    """
    q = _heads(_linear(x, layer, "self_attn.q_proj"), config.n_q)  # [batch, n_q, seq, head_dim]
    k = _heads(_linear(x, layer, "self_attn.k_proj"), config.n_kv)
    v = _heads(_linear(x, layer, "self_attn.v_proj"), config.n_kv)
    if config.qk_norm:  # Qwen3: each head's query and key are normalised before they turn
        q = rms_norm(q, layer["self_attn.q_norm.weight"], config.norm_eps)
        k = rms_norm(k, layer["self_attn.k_norm.weight"], config.norm_eps)
    q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
    if cache is not None:
        k, v = cache.append(index, k, v)
    out = sdpa(q, k, v)
    return _linear(out.transpose(1, 2).flatten(2), layer, "self_attn.o_proj")


# %% [markdown]
# The other half is in `Model.hidden` since Day 8: it takes cos and sin from position `cache.seq_len`
# on. A new token must not be rotated as if it stood at position 0.
#
# ## Prove it: one layer
#
# Send 13 tokens through layer 0 at once. Then send the same tokens through the same layer with a cache,
# in six steps of 5, 1, 4, 1, 1 and 1 tokens. The cache has one layer, so each call is a whole step.

# %%
from dataclasses import replace

config = model.config
embedded = model.weights["model.embed_tokens.weight"][text][None]
x = rms_norm(embedded, model.layers[0]["input_layernorm.weight"], config.norm_eps)
cos, sin = rope_tables(config, len(text))
whole = gqa_attention(x, model.layers[0], cos, sin, config)

cache, pieces = NaiveKVCache(replace(config, num_layers=1), capacity=8), []
for seq in (5, 1, 4, 1, 1, 1):
    here = slice(cache.seq_len, cache.seq_len + seq)
    pieces.append(gqa_attention(x[:, here], model.layers[0], cos[here], sin[here], config, cache))
off = float((torch.cat(pieces, dim=1) - whole).abs().max() / whole.abs().max())
print(f"{cache.seq_len} tokens cached, within 1e-5 of the largest number: {off < 1e-5}")
assert off < 1e-5

# %% [markdown]
# ## Prove it: the whole model
#
# First the logits: prefill and then decode must equal one forward pass over the whole text. Compare
# the logits of every position, relative to the largest.


# %%
@torch.no_grad()
def in_steps(ids, steps):
    """The logits [seq, vocab] of a text that goes in by steps of these sizes."""
    cache, rows = NaiveKVCache(config), []
    for seq in steps:
        rows.append(model(torch.tensor([ids[cache.seq_len : cache.seq_len + seq]]), cache)[0])
    return torch.cat(rows)


with torch.no_grad():
    whole = model(torch.tensor([text]))[0]
for name, steps in (("prefill 6, decode 7", (6, *[1] * 7)), ("chunks of 4, 4, 5", (4, 4, 5))):
    off = (in_steps(text, steps) - whole).abs().max() / whole.abs().max()
    print(f"{name}: within 1e-5 of the largest logit: {bool(off < 1e-5)}")
    assert off < 1e-5

# %% [markdown]
# Then the tokens. Day 9's loop needs one change: with a cache, a step passes only the tokens that are
# not cached yet. (On Day 12 this becomes the engine's own loop.)

# %%
from nanoserve.generate import next_logits


def greedy(prompt, max_tokens, cache=None):
    """The ids of a greedy continuation; `cache` must be empty, or None."""
    ids = list(prompt)
    step = ids
    for _ in range(max_tokens):
        best = int(next_logits(model, step, cache).argmax())
        ids.append(best)
        step = ids if cache is None else [best]
    return ids[len(prompt) :]


for prompt in ("The capital of France is", "1, 2, 4, 8, 16,", "Bonjour, je m'appelle"):
    ids = tokenizer.encode(prompt)
    without, cached = greedy(ids, 8), greedy(ids, 8, NaiveKVCache(config))
    print(f"{prompt!r} {tokenizer.decode(cached)!r}, same tokens: {without == cached}")
    assert without == cached

# %% [markdown]
# The tests of the package do this on all ten recorded prompts.
#
# ## A cache from another sequence
#
# One user writes "My name is Anna and I live in". Another writes "My name is". A new cache for each
# user is right. The next cell also tries the mistake: it uses the first user's cache for the second
# one. What will the model write?

# %%
first, second = (tokenizer.encode(t) for t in ("My name is Anna and I live in", "My name is"))
cache = NaiveKVCache(config)
greedy(first, 8, cache)
fresh = greedy(second, 8, NaiveKVCache(config))
stale = greedy(second, 8, cache)
print("a new cache:  ", repr(tokenizer.decode(fresh)))
print("the old cache:", repr(tokenizer.decode(stale)))
assert fresh != stale
assert fresh == greedy(second, 8, NaiveKVCache(config))

# %% [markdown]
# There is no error, and the English is good. But attention also read the first user's keys and values
# for the second user's answer. One cache belongs to one sequence. That is why `LLM` makes a new cache
# for every prompt.
#
# ## Measure it
#
# Take a prompt of 128 tokens, and generate six. The first needs the whole prompt, with a cache or
# without. How long do the later ones take?

# %%
today.predict(
    "second",
    "With the cache, how many times faster is a later token than token 1?",
    guess=None,
    low=0.1,
    high=1_000,
)

# %%
from statistics import median

from nanoserve.bench.timing import token_times

prompt = tokenizer.encode("One day at the harbour, the gulls and the boats. " * 20)[:128]


def timed(cached):
    """Seconds for each of six tokens; the first includes prefill."""

    def run(on_token):
        cache, step, ids = NaiveKVCache(config) if cached else None, prompt, list(prompt)
        for _ in range(6):
            on_token(best := int(next_logits(model, step, cache).argmax()))
            ids.append(best)
            step = [best] if cached else ids

    return token_times(run)


# %% tags=["nbval-ignore-output"]
timed(True)  # warm up
rounds = [(timed(False), timed(True)) for _ in range(2)]
without, cached = ([min(times) * 1e3 for times in zip(*runs)] for runs in zip(*rounds))
later = median(cached[1:])
faster = cached[0] / later
print(f"token 1: {cached[0]:.0f} ms, a later token (the median of five): {later:.0f} ms")
print(f"{faster:.1f} times faster; your guess: {today.guess_text('second')}")
assert 1.5 < faster < 100
assert median(without[1:]) > 1.5 * later

# %% jupyter={"source_hidden": true}
# Draws the plot: After 128 tokens of prompt
from nanoserve.course.plots import COLOURS, figure, line, prediction_marker

fig, ax = figure(xlabel="token written", ylabel="milliseconds", title="After 128 tokens of prompt")
numbers = range(1, 7)
line(ax, numbers, without, "no cache", COLOURS["engine"])
line(ax, numbers, cached, "cache", COLOURS["contiguous"])
if guess := today.guess("second"):
    prediction_marker(ax, 2, cached[0] / guess)
ax.set(ylim=(0, None), xlim=(0.7, 7.2), xticks=numbers)
fig

# %% [markdown]
# The first token is prefill, and both compute the same there. Without a cache, each later token computes
# the whole text again. With the cache it computes one position, so it takes less time. But it is far
# from 128 times less: a step still reads all weights, for one token as for 128. Day 13 counts these
# bytes, and measures how the gap grows with the length.
#
# ## What it costs
#
# The cache saves time and needs memory. How much?

# %%
per_token = 2 * config.num_layers * config.n_kv * config.head_dim * 4  # k and v, float32
model_bytes = sum({w.data_ptr(): w.nbytes for w in model.weights.values()}.values())
print(f"{per_token:,} bytes for each token")
print(f"the model's weights take as much as {model_bytes // per_token:,} tokens")

# %%
k = torch.zeros(1, config.n_kv, 1, config.head_dim)
cache = NaiveKVCache(config)
while cache.seq_len < 600:
    for layer in range(config.num_layers):
        cache.append(layer, k, k)
    capacity, held = cache._k.shape[2], cache.seq_len
    if held in (20, 64, 65, 256, 257, 600):
        print(f"{held:3} tokens cached, capacity {capacity:4}: {1 - held / capacity:3.0%} empty")
    assert held < 64 or held > capacity / 2

# %% [markdown]
# The strip is reserved before the tokens come, and nobody knows how many will come. A short sequence
# leaves most of the first 64 places empty. After that, up to half of the strip can be empty. Week 4
# reserves memory in small blocks instead.
#
# ## Your answer is the engine
#
# `LLM` with this cache. Inside `today.mine()` it runs your `append`, if it has passed its check.

# %%
from nanoserve import LLM, SamplingParams

llm = LLM("smollm2", cache="naive")
with today.mine():
    (completion,) = llm.generate("The capital of France is", SamplingParams(max_tokens=6))
print(repr(completion.text), completion.finish_reason)

# %% [markdown]
# ## What you learned
#
# 1. **The causal mask makes a cache possible.** No token sees a later one, so later tokens cannot change
#    its keys and values.
# 2. **A step has one `seq_len`.** Every layer starts from it, and it moves when the last layer has
#    written.
# 3. **A cache saves time and costs memory,** and the memory is reserved before its size is known.
#
# ## Tomorrow
#
# You now have greedy and sampled generation, with a cache and without. Day 12 puts all of it into one
# loop, streams the text, and stops before the reader sees a stop string.
#
# **In one paragraph.** A token's keys and values depend only on the tokens before it and on itself, so
# later tokens never change them. We kept them in a strip that doubles when it is full, and passed the
# model one new token per step. The logits and the tokens stayed the same. The later tokens became
# faster, since they no longer compute the whole prompt.
