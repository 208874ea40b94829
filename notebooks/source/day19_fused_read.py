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
# **Today** the cache gets a method that computes attention. The method takes this step's queries, keys and
# values, and returns the output of attention instead of all K and V. `gqa_attention` gets one branch that
# calls this method, and that is its last change.

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
# Since Day 16 the engine can run on scattered blocks, but with a detour. `append` writes the new keys into
# their slots. Then it copies **all keys and values** out of the pool, in every layer of every step, because
# `sdpa` needs them side by side. The blocks save memory, and the copy costs time.
#
# A kernel that reads the blocks where they lie needs no copy. But attention only calls `append`, which
# returns K and V in one piece. So the interface has to change before you can use a kernel: attention passes
# the query to the cache, and the cache returns the output. We make this change now, with the reference in
# the place of the kernel, because now everything can still be compared bit for bit.

# %%
today.glossary("fused", "gather", "slot mapping", "byte-equal", "plumbing", "spy")

# %% [markdown]
# ## The cache attends
#
# The cache gets one more method, next to `append`. It calls Day 16's `_write`, as `append` does, so the slots
# of this step's tokens are among the returned slots. Then it calls the reference with these slots:

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
        """Write this step's k and v, then attend with q [1, n_q, query_len, head_dim].

        K and V are read through the slot mapping. Raises the errors of append.
        """
        slots = self._write(layer, k, v)
        return paged_attention_reference(
            q, self.pool.k[layer], self.pool.v[layer], slots, n_rep, scale
        )


# %% [markdown]
# Look at the arguments. Day 25 changes only the name of the called function:
#
# - `self.pool.k[layer]`, `self.pool.v[layer]`: the whole pools of **this layer**, with the slots of other
#   sequences. Nothing is copied here: indexing with a number gives a view.
# - `slots`: the slots of **all** tokens so far, this step's included.
# - `n_rep` and `scale` are passed on unchanged, and so is the result.
#
# ## Your turn: one branch in `gqa_attention`
#
# Since Day 11 `gqa_attention` has two branches: without a cache it calls `sdpa`, and with a cache it calls
# `append` and then `sdpa`. Now there are three branches:
#
# | the cache | attention |
# | --- | --- |
# | `None` | `sdpa` over this step's own q, k, v |
# | has a method `paged_attention` | calls this method with `(index, k, v, q, config.n_rep)`; the scale is the default. The result is the output of attention |
# | any other | `append`, then `sdpa` over the K and V that it returns |
#
# Test for the method, not for a class: `hasattr(cache, "paged_attention")`. Then a later cache, for example
# with quantised blocks, needs no branch of its own. Call only one of the two methods: both write, so if you
# call both, the step is written twice.
#
# The first part is given: `_qkv` computes the heads of q, k and v in one tensor, and RoPE rotates queries and
# keys together. Replace the `raise` by the three branches, which set `out`. Stuck? `today.hint()` looks at the
# case that failed.
#
# After a kernel restart, run the cells above first (Run → Run All Above Selected Cell).

# %%
from nanoserve.config import ModelConfig
from nanoserve.layers import Cache, _heads, _linear, _qkv, apply_rope, rms_norm, sdpa


# %%
def gqa_attention(x, layer, cos, sin, config, cache=None, index=0):
    """x [batch, seq, hidden] -> [batch, seq, hidden]; the cache gathers, or computes attention."""
    heads = _heads(_qkv(x, layer), config.n_q + 2 * config.n_kv)  # of q, then of k, then of v
    qk, v = heads.split([config.n_q + config.n_kv, config.n_kv], dim=1)
    if config.qk_norm:  # Qwen3: normalise each head's query and key before RoPE
        q, k = qk.split([config.n_q, config.n_kv], dim=1)
        q = rms_norm(q, layer["self_attn.q_norm.weight"], config.norm_eps)
        k = rms_norm(k, layer["self_attn.k_norm.weight"], config.norm_eps)
        qk = torch.cat([q, k], dim=1)
    q, k = apply_rope(qk, cos, sin).split([config.n_q, config.n_kv], dim=1)
    raise NotImplementedError("your turn")  # out = ... of q, k, v: [batch, n_q, seq, head_dim]
    return _linear(out.transpose(1, 2).flatten(2), layer, "self_attn.o_proj")


today.check(gqa_attention)

# %% [markdown]
# This is the last form of a function that began on Day 6. It contains nothing about blocks or slots, and
# nothing about which kernel runs. The cell below holds the package's version; from here on this notebook
# uses it.


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
    """Grouped-query attention (Ainslie et al. 2023): n_q query heads share n_kv KV heads.

    x [batch, seq, hidden], cos and sin [seq, head_dim] of x's positions -> [batch, seq, hidden].
    A cache stores this step's keys and values under layer `index`. If the cache has a method
    paged_attention, that method computes attention; otherwise sdpa does, over the keys and values
    that the cache returns. Without a cache, sdpa attends to this step's keys and values.
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
# `paged_attention` computes nothing itself, but it can still be wrong. It can pass the pools of another layer,
# or a mapping without the newest token, or make a second call. A test of the output may not show such a
# mistake. So put a **spy** in the place of the reference. The spy records its arguments, and returns a tensor
# that we can recognise.

# %%
from nanoserve import load_model

model = load_model("smollm2")
config = model.config
reference, calls = paged_attention_reference, []


def spy(q, k_pool, v_pool, slot_mapping, n_rep, scale=None):
    output = torch.zeros_like(q)
    calls.append((k_pool, v_pool, slot_mapping.clone(), n_rep, scale, output))
    return output


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
paged_attention_reference = spy  # the name that paged_attention looks up
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
untouched = [got is output for got, (*_, output) in zip(given, last)]
print("the output returned untouched:", all(untouched))
assert len(last) == config.num_layers
assert all(same + whole + untouched)

# %% [markdown]
# Day 25 replaces one name in the method. Then nearly the same test shows that the method really calls the
# kernel.
#
# ## Prove it: the model
#
# Now test the numbers. Put today's `gqa_attention` into the engine's module, so that the whole model calls it.
# Then run a text in steps, with a strip and with blocks. The pool is poisoned. A second sequence takes a block
# before each step, so that our blocks lie scattered.

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
    """The logits [seq, vocab] of a text, run in steps of these sizes."""
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
# The logits are **byte-equal**, not only close. The reference gathers the same keys and values that the strip
# holds, and computes the same sum, so every bit is the same. Remember this on Day 25: there a kernel adds in
# another order, and the logits are only *close*. The equality is a property of the reference, not of paging.
#
# ## A paged engine
#
# One part is left: `LLM` has to make the pool. `new_cache` makes a pool with slots for the prompt and for all
# tokens that may be generated. From now on `LLM` uses the paged cache, unless you pass another `cache`. So
# far each sequence has a pool of its own. In a later phase many sequences share one pool, and that is the
# purpose of blocks.

# %%
from collections.abc import Sequence
from pathlib import Path

from nanoserve.generate import LLM, Completion, Stream
from nanoserve.model import Model
from nanoserve.sampling import SamplingParams


# %% jupyter={"source_hidden": true}
# lands in nanoserve/generate.py: CACHES, new_cache
CACHES = ("paged", "naive")


def new_cache(kind: str | None, model: Model, tokens: int) -> Cache | None:
    """Return an empty cache for `tokens` tokens, of a kind in CACHES; None if kind is None."""
    if kind is None:
        return None
    if kind == "naive":
        return NaiveKVCache(model.config)
    blocks = -(-tokens // BLOCK_SIZE)  # rounded up
    pool = KVPool(model.config, blocks, BLOCK_SIZE, model.dtype, model.device)
    return PagedKVCache(pool)


# %% jupyter={"source_hidden": true}
# until day 32: lands in nanoserve/generate.py: LLM.__init__
class LLM(LLM):
    def __init__(
        self,
        source: str | Path = "smollm2",
        dtype: str | torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        cache: str | None = "paged",
    ) -> None:
        """source, dtype, device as for load_model; cache "paged", "naive", or None for no cache."""
        if cache is not None and cache not in CACHES:
            known = ", ".join(map(repr, CACHES))
            raise ValueError(f"cache {cache!r} is not known; supported: {known}, None")
        self.model = load_model(source, dtype, device)
        self.tokenizer = load_tokenizer(source)
        self._cache = cache


# %% jupyter={"source_hidden": true}
# until day 35: lands in nanoserve/generate.py: LLM.generate, LLM.stream
class LLM(LLM):
    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        params: SamplingParams | None = None,
    ) -> list[Completion]:
        """Complete one prompt or several. A prompt is text, or token ids, which are used unchanged.

        Raises ValueError, before the model runs, for a prompt that is empty or longer than the
        model's context, and for an id outside the vocabulary.
        """
        if not isinstance(prompts, str) and not hasattr(prompts, "__len__"):
            raise ValueError(f"prompts must be text, token ids, or a list of them, got {prompts!r}")
        single = isinstance(prompts, str) or (len(prompts) and not isinstance(prompts[0], Sequence))
        checked = [self._prompt_ids(prompt) for prompt in ([prompts] if single else prompts)]
        return [self.stream(ids, params).completion for ids in checked]

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Stream:
        """Complete one prompt as a stream of pieces of text; errors as generate, at once."""
        ids, params = self._prompt_ids(prompt), SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be a SamplingParams, got {params!r}")
        tokens = min(len(ids) + params.max_tokens, self.model.config.context)
        cache = new_cache(self._cache, self.model, tokens)
        return Stream(self.model, self.tokenizer, ids, params, cache)


# %% [markdown]
# Now compare the tokens: first greedily, on the oracle's recorded prompts with fewer than 100 tokens, and then
# on one prompt with sampling.

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
sampled = SamplingParams(max_tokens=8, temperature=0.9, top_p=0.95, seed=19)
(ours,), (strip,) = (
    llm.generate("The best thing about the sea is", sampled) for llm in (paged, naive)
)
print("and with sampling:", ours == strip)
assert ours == strip

# %% [markdown]
# ## Measure it
#
# Compare the time of a decode step with the paged cache and with the strip. Guess for 1,024 tokens in the
# cache:

# %%
question = "After 1,024 tokens: time of a step with the paged cache, divided by the strip's?"
today.predict("cost", question, guess=None, low=0)

# %% [markdown]
# (K and V are random numbers here. Their values do not change the time. To run 1,024 tokens through the
# model first would take longer than the measurement.)


# %%
def filled(kind, tokens):
    """A cache that holds this many random tokens, with slots for a few more."""
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
print(f"{cost:.2f} times as long after 1,024; your guess: {today.guess_text('cost')}")
assert 0.3 < cost < 6

# %% jupyter={"source_hidden": true}
# Draws the plot: A step, by its cache
from nanoserve.course.plots import COLOURS, figure, line, log2_axis, prediction_marker

fig, ax = figure(
    xlabel="tokens in the cache", ylabel="milliseconds for a token", title="A step, by its cache"
)
line(ax, lengths, ms["naive"], "the strip", COLOURS["contiguous"])
line(ax, lengths, ms["paged"], "paged", COLOURS["engine"])
if guess := today.guess("cost"):
    prediction_marker(ax, 1_024, guess * ms["naive"][-1])
log2_axis(ax)
ax.set(ylim=(0, 1.15 * max(*ms["paged"], *ms["naive"])), xlim=(52, 1_700), xticks=lengths)
fig

# %% [markdown]
# On the machine of the stored run, the step with the paged cache takes longer after 1,024 tokens. The
# reference gathers: it copies all keys and values in every layer, and the strip copies nothing. Paging can
# save memory (Day 14 counted how much), and for now it costs time. The word *fused* is a promise today: no
# code outside the method uses the gathered K and V, so a kernel may read them in place. Day 20 measures
# attention alone, and in Week 6 you write the kernel.
#
# Both lines contain the same time for the weights, so the plot shows a smaller ratio than attention alone
# would. And the plot does not show memory: the strip reserves slots that it may never use.
#
# ## With your own code
#
# Inside `today.mine()` your `gqa_attention` runs in all 30 layers, with a paged cache, if it has passed its
# check.

# %%
with today.mine():
    (completion,) = paged.generate("The capital of France is", SamplingParams(max_tokens=6))
print(repr(completion.text))
assert completion.text.startswith(" Paris")

# %% [markdown]
# ## What you learned
#
# 1. **Pass the query to the memory, not the memory to the query.** The owner of the memory decides how the
#    memory is read.
# 2. **Test plumbing with a spy, and numbers with an oracle.** The spy checks the arguments, and the oracle
#    checks the results. Each can find a fault that the other misses.
# 3. **Change the interface while equality still holds.** Later, the kernel is then the only new part.
#
# ## Tomorrow
#
# Paged attention is in its place, and it still copies. How fast is it, in bytes per second, at every length?
# Day 20 measures the number that the kernel has to beat.
#
# **In one paragraph.** The paged cache got a method that takes the query and returns the output of attention.
# `gqa_attention` got a branch that calls this method if the cache has it. A spy showed that the method calls
# the reference once per layer, with the layer's own pools and the whole mapping. With both caches, the logits
# are equal in every bit, and the tokens are the same. The reference gathers, and gathering costs time. But now
# one changed line can put a kernel in its place.
