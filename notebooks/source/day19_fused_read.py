# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Day 19 · The fused read
#
# Week 5 · Phase 2, paged memory · you need: Day 18 (Freeze the target)
#
# **Today** the cache learns to attend. It is handed the query with the keys and values, and gives back
# the answer instead of the history. Attention grows one branch for it, the last it will ever need.

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

today = day(19)
today.picture("fused-read")

# %% [markdown]
# ## Why it matters
#
# Since Day 16 the engine could run on scattered blocks, in a roundabout way: `append` wrote the new keys
# into their slots, then copied **the whole history** out of the pool, in every layer of every step, so
# that attention could have it side by side. The blocks save memory, and the copy pays for it in time.
#
# A kernel that reads the blocks where they lie needs no copy. But it needs somebody to call it, and
# attention only knows `append`, which promises the history in one piece. So the interface has to change
# before the kernel can come: hand over the question, take the answer. We make that change now, with
# the reference behind it, while everything can still be compared bit for bit.

# %%
today.glossary("fused", "gather", "slot mapping", "byte-equal", "plumbing", "spy")

# %% [markdown]
# ## The cache attends
#
# One method, next to `append`. It writes this step's keys and values as `append` does (the same
# `_write`, Day 16), so the slots that come back include this step's own. Then, instead of gathering, it
# asks the reference:

# %%
import torch

from nanoserve.cache import BLOCK_SIZE, KVPool, NaiveKVCache, PagedKVCache
from nanoserve.kernels.reference import paged_attention_reference


# %% jupyter={"source_hidden": true}
# until day 25: lands in nanoserve/cache.py: PagedKVCache.paged_attention
class PagedKVCache(PagedKVCache):
    def paged_attention(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        q: torch.Tensor,
        n_rep: int,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Write this step's k and v, then let q [1, n_q, query_len, head_dim] attend in place.

        The history is read where it lies, through the slot mapping; errors as for append.
        """
        slots = self._write(layer, k, v)
        return paged_attention_reference(
            q, self.pool.k[layer], self.pool.v[layer], slots, n_rep, scale
        )


# %% [markdown]
# Look at what goes in, since Day 25 will change only the name of what is called:
#
# - `self.pool.k[layer]`, `self.pool.v[layer]`: **this layer's** pools, whole, other people's slots and
#   all. No copy: indexing with a number is a view.
# - `slots`: the mapping of the **whole** history, this step's tokens included.
# - `n_rep` and `scale` as they came, and its result goes back untouched.
#
# ## Your turn: one branch in `gqa_attention`
#
# Day 11 left attention with two ways: no cache, or `append` and then the sum. Now there are three:
#
# | the cache | what attention does |
# | --- | --- |
# | `None` | `sdpa` over this step's own q, k, v |
# | has a `paged_attention` | asks it: `(index, k, v, q, config.n_rep)`, the scale being the usual one |
# | any other | `append`, then `sdpa` over the history that comes back |
#
# Ask **what it can do**, not what class it has: `hasattr(cache, "paged_attention")`. A cache of next
# year, with quantised blocks, will then need no branch of its own. And ask for one thing only: both
# methods write, so calling both writes the step twice.
#
# The projections stand below already, through Day 13's `_qkv`: q, k and v come as heads of one tensor, and
# queries and keys turn together. Write what is missing. Stuck? `today.hint()` looks at the case
# that failed.

# %%
from nanoserve.config import ModelConfig
from nanoserve.layers import Cache, _heads, _linear, _qkv, apply_rope, rms_norm, sdpa


# %%
def gqa_attention(x, layer, cos, sin, config, cache=None, index=0):
    """x [batch, seq, hidden] -> [batch, seq, hidden]; the cache may gather, or attend itself."""
    heads = _heads(_qkv(x, layer), config.n_q + 2 * config.n_kv)  # of q, then of k, then of v
    qk, v = heads.split([config.n_q + config.n_kv, config.n_kv], dim=1)
    if config.qk_norm:  # Qwen3: each head's query and key are normalised before they turn
        q, k = qk.split([config.n_q, config.n_kv], dim=1)
        q = rms_norm(q, layer["self_attn.q_norm.weight"], config.norm_eps)
        k = rms_norm(k, layer["self_attn.k_norm.weight"], config.norm_eps)
        qk = torch.cat([q, k], dim=1)
    q, k = apply_rope(qk, cos, sin).split([config.n_q, config.n_kv], dim=1)
    raise NotImplementedError("your turn")  # out = ... of q, k, v: [batch, n_q, seq, head_dim]
    return _linear(out.transpose(1, 2).flatten(2), layer, "self_attn.o_proj")


today.check(gqa_attention)

# %% [markdown]
# This is the last form of a function that has been with you since Day 6. Nothing in it knows of blocks
# or slots, and nothing in it will know which kernel ran.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/layers.py: gqa_attention
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
    The cache stores this step's keys and values as those of layer `index`. Then the cache's own
    paged_attention attends, where the cache has one, and else sdpa over all K and V it returns.
    """
    heads = _heads(_qkv(x, layer), config.n_q + 2 * config.n_kv)  # of q, then of k, then of v
    qk, v = heads.split([config.n_q + config.n_kv, config.n_kv], dim=1)
    if config.qk_norm:  # Qwen3: normalise each head's query and key before RoPE
        q, k = qk.split([config.n_q, config.n_kv], dim=1)
        q = rms_norm(q, layer["self_attn.q_norm.weight"], config.norm_eps)
        k = rms_norm(k, layer["self_attn.k_norm.weight"], config.norm_eps)
        qk = torch.cat([q, k], dim=1)
    q, k = apply_rope(qk, cos, sin).split([config.n_q, config.n_kv], dim=1)
    if cache is None:
        out = sdpa(q, k, v)
    elif hasattr(cache, "paged_attention"):  # the cache attends over its own memory
        out = cache.paged_attention(index, k, v, q, config.n_rep)
    else:
        out = sdpa(q, *cache.append(index, k, v))
    return _linear(out.transpose(1, 2).flatten(2), layer, "self_attn.o_proj")


# %% [markdown]
# ## Prove it: the plumbing
#
# A method that computes nothing can still be wrong: the pools of another layer, a mapping without the
# newest token, a second call. Numbers show that late, if at all. So put a **spy** in the place of the
# reference. It notes what it was handed, and answers with a tensor that we can recognise.

# %%
from nanoserve import load_model

model = load_model("smollm2")
config = model.config
reference, calls = paged_attention_reference, []


def spy(q, k_pool, v_pool, slot_mapping, n_rep, scale=None):
    answer = torch.zeros_like(q)
    calls.append((k_pool, v_pool, slot_mapping.clone(), n_rep, scale, answer))
    return answer


pool = KVPool(config, num_blocks=8)
others = pool.allocator.allocate_for(3 * BLOCK_SIZE)
cache = PagedKVCache(pool)
random = torch.Generator().manual_seed(19)


def step(seq, layer):
    """One layer's share of a step of seq tokens."""
    k, v = torch.randn(2, 1, config.n_kv, seq, config.head_dim, generator=random)
    q = torch.randn(1, config.n_q, seq, config.head_dim, generator=random)
    return cache.paged_attention(layer, k, v, q, config.n_rep)


# %%
paged_attention_reference = spy  # the name that the cell above looks up
for seq in (20, 1):
    given = [step(seq, layer) for layer in range(config.num_layers)]
paged_attention_reference = reference

last = calls[config.num_layers :]  # the second step's
print("calls in a step:", len(last), "of", config.num_layers)
same = [k.data_ptr() == pool.k[i].data_ptr() for i, (k, *_) in enumerate(last)]
same += [v.data_ptr() == pool.v[i].data_ptr() for i, (_, v, *_) in enumerate(last)]
print("each with its own layer's pools:", all(same))
whole = [torch.equal(slots, cache.slot_mapping) for _, _, slots, *_ in last]
print("the mapping of all", cache.seq_len, "tokens:", all(whole))
print("n_rep and scale:", {(n_rep, scale) for *_, n_rep, scale, _ in last})
untouched = [got is answer for got, (*_, answer) in zip(given, last)]
print("the answer handed back untouched:", all(untouched))
assert len(last) == config.num_layers
assert all(same + whole + untouched)

# %% [markdown]
# Day 25 replaces one name in that method, and this test, hardly changed, will say whether the kernel
# really is on the path.
#
# ## Prove it: the model
#
# Now the numbers. Put today's `gqa_attention` into the engine's module, so that the whole model runs the
# cell above; then read a text by steps, into a strip and into blocks. The pool is poisoned, and a second
# sequence takes blocks in between, so that ours lie scattered.

# %%
import nanoserve.layers
from nanoserve import load_tokenizer

nanoserve.layers.gqa_attention = gqa_attention
tokenizer = load_tokenizer("smollm2")
text = tokenizer.encode(
    "The tide goes out and the boats lie down in the mud. Then it comes back, " * 3
)


@torch.no_grad()
def in_steps(ids, steps, cache, before=lambda: None):
    """The logits [seq, vocab] of a text that goes in by steps of these sizes."""
    rows = []
    for seq in steps:
        before()
        rows.append(model(torch.tensor([ids[cache.seq_len : cache.seq_len + seq]]), cache)[0])
    return torch.cat(rows)


# %%
pool = KVPool(config, num_blocks=12, poison=True)
cache, neighbour = PagedKVCache(pool), []
for name, steps in (("prefill, then decode", (14, *[1] * 6)), ("chunks", (7, 16, 1, 20))):
    naive = in_steps(text, steps, NaiveKVCache(config))
    paged = in_steps(text, steps, cache, lambda: neighbour.append(pool.allocator.allocate()))
    print(
        f"{name:21} blocks {cache.table.blocks}: equal to the last bit: {torch.equal(paged, naive)}"
    )
    assert torch.equal(paged, naive)
    cache.free()
    while neighbour:
        pool.allocator.free(neighbour.pop())

# %% [markdown]
# Not close: **byte-equal**. The reference gathers the very keys that the strip holds and does the very
# same sum, so no bit has a reason to differ. Remember this on Day 25, when a kernel adds in another order and the word
# has to become *close*: the equality belonged to the reference, not to paging.
#
# ## A paged engine
#
# One thing is left: somebody has to make the pool. `new_cache` does, with room for the prompt and all
# that may be written, and `LLM` takes the paged cache from now on unless it is told otherwise. One pool
# per sequence is modest. Sharing it between many is what blocks are for, and a later phase does that.

# %%
from collections.abc import Sequence
from pathlib import Path

from nanoserve.generate import LLM, Stream
from nanoserve.model import Model
from nanoserve.sampling import SamplingParams


# %% jupyter={"source_hidden": true}
# lands in nanoserve/generate.py: CACHES, new_cache, LLM.__init__, LLM.stream
CACHES = ("paged", "naive")


def new_cache(kind: str | None, model: Model, tokens: int) -> Cache | None:
    """An empty cache of a kind in CACHES with room for `tokens` tokens; None is no cache."""
    if kind is None:
        return None
    if kind == "naive":
        return NaiveKVCache(model.config)
    blocks = -(-tokens // BLOCK_SIZE)  # rounded up
    pool = KVPool(model.config, blocks, BLOCK_SIZE, model.dtype, model.device)
    return PagedKVCache(pool)


class LLM(LLM):
    def __init__(
        self,
        source: str | Path = "smollm2",
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        cache: str | None = "paged",
    ) -> None:
        """source as for load_model; cache "paged", "naive", or None to recompute every step."""
        if cache is not None and cache not in CACHES:
            known = ", ".join(map(repr, CACHES))
            raise ValueError(f"cache {cache!r} is not known; supported: {known}, None")
        self.model = load_model(source, dtype, device)
        self.tokenizer = load_tokenizer(source)
        self._cache = cache

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Stream:
        """Complete one prompt, giving pieces of text as they come; errors as for generate."""
        ids, params = self._prompt_ids(prompt), params or SamplingParams()
        tokens = min(len(ids) + params.max_tokens, self.model.config.context)
        cache = new_cache(self._cache, self.model, tokens)
        return Stream(self.model, self.tokenizer, ids, params, cache)


# %% [markdown]
# The tokens, then: nine of the oracle's recorded prompts, greedy, and one of them with dice.

# %%
paged, naive = LLM("smollm2"), LLM("smollm2", cache="naive")
recorded = today.data("reference_greedy")["greedy"]
equal = 0
for case in recorded.values():
    if len(case["prompt_ids"]) < 100:
        params = SamplingParams(max_tokens=6)
        (ours,) = paged.generate(case["prompt_ids"], params)
        (strip,) = naive.generate(case["prompt_ids"], params)
        assert ours.token_ids == strip.token_ids == case["greedy_ids"][:6]
        equal += 1
print(equal, "prompts, the same tokens as the contiguous cache and as the oracle")
dice = SamplingParams(max_tokens=8, temperature=0.9, top_p=0.95, seed=19)
(ours,), (strip,) = (
    llm.generate("The best thing about the sea is", dice) for llm in (paged, naive)
)
print("and with dice:", ours == strip)
assert ours == strip

# %% [markdown]
# ## Measure it
#
# What does a paged step cost, beside the strip? Per layer it writes through slots and gathers the history
# inside the reference; the strip hands out a view. Guess for a text of 1,024 tokens:

# %%
today.predict(
    "cost", "How many times longer does a step take with the paged cache, after 1,024?", guess=None
)

# %% [markdown]
# (The history is random numbers here. A clock does not care what a key says, and reading 1,024 tokens
# first would take longer than the measurement.)


# %%
def filled(kind, tokens):
    """A cache that holds so many tokens, with room for a few more."""
    cache = new_cache(kind, model, tokens + 32)
    for layer in range(config.num_layers):
        cache.append(layer, *torch.randn(2, 1, config.n_kv, tokens, config.head_dim))
    return cache


# %% tags=["nbval-ignore-output"]
from nanoserve.bench.timing import median_times
from nanoserve.generate import next_logits

lengths, ms = (64, 256, 1_024), {"naive": [], "paged": []}
for length in lengths:
    caches = {kind: filled(kind, length) for kind in ms}
    runs = {
        kind: lambda cache=cache: next_logits(model, [5], cache) for kind, cache in caches.items()
    }
    for kind, seconds in median_times(runs, rounds=9).items():
        ms[kind].append(seconds * 1e3)
    print(
        f"after {length:5} tokens: strip {ms['naive'][-1]:5.1f} ms, paged {ms['paged'][-1]:5.1f} ms"
    )
cost = ms["paged"][-1] / ms["naive"][-1]
print(f"{cost:.2f} times as long after 1,024; your guess: {today.guess('cost')}")
assert 0.3 < cost < 6

# %%
from nanoserve.course.plots import COLOURS, figure, line, log2_axis, prediction_marker

fig, ax = figure(
    xlabel="tokens of history", ylabel="milliseconds for a token", title="A step, by its cache"
)
line(ax, lengths, ms["naive"], "the strip", COLOURS["contiguous"])
line(ax, lengths, ms["paged"], "paged", COLOURS["engine"])
if guess := today.guess("cost"):
    prediction_marker(ax, 1_024, guess * ms["naive"][-1])
log2_axis(ax)
ax.set(ylim=(0, 1.15 * max(*ms["paged"], *ms["naive"])), xlim=(52, 1_700), xticks=lengths)
fig

# %% [markdown]
# Slower, on the machine where this ran. That is no slip of the measurement: a gather is a copy of the whole
# history in every layer, and it grows with the text, where the strip copies nothing. Paging bought memory (Day 14 counted how much),
# and for now it is paid for in time. The word *fused* is a promise today. It names what the method
# **may** do, since nobody outside it sees the history any more. Tomorrow this price gets a number of its
# own, and Week 6 brings the kernel that is to lower it.
#
# What the plot does not show: a step is mostly the reading of weights, which hides much of the
# difference; tomorrow's benchmark looks at the read alone. And the strip's own price, the memory that it
# reserves and never uses, stands in no plot of times.
#
# ## With your own code
#
# If your `gqa_attention` passed, it attends now in all 30 layers, with a paged cache.

# %%
with today.mine():
    (answer,) = paged.generate("The capital of France is", SamplingParams(max_tokens=6))
print(repr(answer.text))
assert answer.text.startswith(" Paris")

# %% [markdown]
# ## What you learned
#
# 1. **Hand over the question, not the data.** Who owns the memory decides how it is read.
# 2. **Plumbing is tested with a spy, numbers with an oracle.** One says what was passed, the other what
#    came out; each is blind to the other's faults.
# 3. **Change the interface while equality still holds.** Then the kernel will be the only new thing.
#
# ## Tomorrow
#
# The read is in its place, and it is slow. How slow, in bytes per second, at every length? Day 20 puts a
# number on the wall for the kernel to beat.
#
# **In one paragraph.** The paged cache got a method that takes the query and gives the answer, and
# attention got a branch that asks whether a cache can do that. A spy saw that every layer calls it once,
# with its own pools and the whole mapping; the logits are equal to the contiguous ones in every bit, and
# so are the tokens. It costs time, because the reference gathers. But the place where a kernel belongs is
# now one line wide.
