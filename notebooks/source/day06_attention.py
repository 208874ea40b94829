# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Day 6 · Attention, with fewer KV heads
#
# Week 2 · Phase 0, foundations · you need: Day 4 (RMSNorm and RoPE)
#
# **Today** you write attention, the only place in the model where tokens learn of each other. Nine
# query heads will share three heads of keys and values, and no token will see what comes after it.

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

today = day(6)
today.picture("gqa-heads")

# %% [markdown]
# ## Why it matters
#
# The MLP works on each position by itself. Norms do too. If "it" is to find out what it stands for,
# something has to carry information from one position to another, and that is attention.
#
# It is also what the rest of this course is about. The keys and values made today are what a cache
# keeps (Day 11), what is cut into blocks (Day 14), what the kernel reads (Day 22). How many KV heads
# there are decides how much memory a conversation takes.

# %%
today.glossary("query head", "KV head", "GQA", "softmax", "attention weight", "causal mask")

# %% [markdown]
# ## Three views of a token
#
# Attention makes three vectors from each token, in every head: a **query** (what I look for), a
# **key** (what I can be found by) and a **value** (what I hand over). Each comes from one matrix
# product, and the result is cut into heads.
#
# Fetch real material first: the weights of layer 0 (Day 2), and what the oracle's attention got and
# gave for one sentence (Day 1).

# %%
import torch
import torch.nn.functional as F

from nanoserve import load_tokenizer
from nanoserve.config import ModelConfig, load_config
from nanoserve.fetch import resolve
from nanoserve.layers import apply_rope, linear, rms_norm, rope_tables
from nanoserve.oracle import load_oracle
from nanoserve.weights import load_weights

config, tokenizer = load_config(resolve("smollm2")), load_tokenizer("smollm2")
weights = load_weights(resolve("smollm2"), config)


def layer_weights(i: int) -> dict[str, torch.Tensor]:
    start = f"model.layers.{i}."
    return {n.removeprefix(start): w for n, w in weights.items() if n.startswith(start)}


layer = layer_weights(0)
for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
    print(name, list(layer[f"self_attn.{name}.weight"].shape))

# %% [markdown]
# 576 rows for the queries, 192 for keys and for values: nine heads of 64, and three of 64.

# %%
text = "The old lighthouse keeper climbed the stairs every evening and lit the lamp."
ids = torch.tensor([tokenizer.encode(text)])
oracle = load_oracle("smollm2")
seen = oracle.capture(ids, [f"model.layers.{i}.self_attn" for i in range(config.num_layers)])
x = seen["model.layers.0.self_attn"].input
x.shape

# %% [markdown]
# Two small helpers. `_linear` is a matrix product, with the bias where there is one (Qwen2 has
# some). `_heads` cuts the last axis into heads and moves them forward, without a copy.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/layers.py: _heads, _linear
def _heads(x: torch.Tensor, n: int) -> torch.Tensor:
    """[batch, seq, n * head_dim] -> [batch, n, seq, head_dim], a view."""
    return x.unflatten(-1, (n, -1)).transpose(1, 2)


def _linear(x: torch.Tensor, layer: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    return linear(x, layer[f"{name}.weight"], layer.get(f"{name}.bias"))


# %%
q = _heads(_linear(x, layer, "self_attn.q_proj"), config.n_q)
k = _heads(_linear(x, layer, "self_attn.k_proj"), config.n_kv)
v = _heads(_linear(x, layer, "self_attn.v_proj"), config.n_kv)
print("q", list(q.shape), " k", list(k.shape), " v", list(v.shape))

# %% [markdown]
# ## Who reads whom
#
# Nine query heads, three KV heads, so each KV head serves `n_rep` = 3 query heads. Which three is
# not up to us: it was fixed when the model was trained. Neighbours share.
#
# $$ \text{kv head of query head } h = h \;//\; n_{rep} $$
#
# Many programs copy K and V until there are nine of each. No copy is needed: sort the *queries* by
# group, and let each group meet its one KV head.
#
# ### Your turn: `group_queries`
#
# | | shape | axis 1 counts |
# | --- | --- | --- |
# | in | `[batch, n_q, seq, d]` | query heads 0, 1, 2, 3, 4, 5, ... |
# | out | `[batch, n_kv, n_rep, seq, d]` | KV heads; axis 2 the query heads that read it |
#
# The result shares `q`'s memory: a **view**. Stuck? `today.hint()` looks at the case that failed.


# %%
def group_queries(q: torch.Tensor, n_kv: int) -> torch.Tensor:
    """Sort query heads by the KV head they read:
    [batch, n_q, seq, d] -> [batch, n_kv, n_rep, seq, d], a view."""
    raise NotImplementedError("your turn")


today.check(group_queries)

# %% [markdown]
# One line is enough. It lands inside `sdpa` below.


# %% jupyter={"source_hidden": true}
# solution: group_queries
def group_queries(q: torch.Tensor, n_kv: int) -> torch.Tensor:
    """Sort query heads by the KV head they read:
    [batch, n_q, seq, d] -> [batch, n_kv, n_rep, seq, d], a view."""
    return q.unflatten(1, (n_kv, -1))


# %%
numbers = torch.arange(config.n_q).view(1, 9, 1, 1)  # each query head is its own number
for kv_head, group in enumerate(group_queries(numbers, config.n_kv)[0]):
    print(f"KV head {kv_head} serves query heads {group.flatten().tolist()}")

# %% [markdown]
# `h % n_kv` would give groups of the same shapes, 0, 3, 6 and so on. Nothing would crash. Six of
# nine heads would look at keys that were never made for them.
#
# What does sharing save? Every token leaves a key and a value behind, in every layer:

# %%
for name, heads in (
    ("MHA, a KV head per query head", 9),
    ("GQA, as here", 3),
    ("MQA, one for all", 1),
):
    size = 2 * config.num_layers * heads * config.head_dim * 4  # K and V, 4 bytes a number
    print(
        f"{name:30} {size:>7,} bytes a token, {size * config.context / 2**20:>6,.0f} MiB at full context"
    )

# %% [markdown]
# The model itself takes 513 MiB in float32. With nine KV heads, one conversation of full length
# would take twice that.
#
# ## Who may not look ahead
#
# The model learned to predict the next token. If position 3 could look at position 4, it would look
# the answer up. So query $i$ sees keys $0$ to $i$ and no more. What it may not see gets the score
# $-\infty$, which the softmax turns into 0.
#
# ### Your turn: `causal_mask`
#
# A row for each query, a column for each key, True where the query **may not** look:
#
# | | key 0 | key 1 | key 2 |
# | --- | --- | --- | --- |
# | query 0 | False | True | True |
# | query 1 | False | False | True |
# | query 2 | False | False | False |


# %%
def causal_mask(seq: int) -> torch.Tensor:
    """True where query i may not see key j, that is where j > i: bool [seq, seq]."""
    raise NotImplementedError("your turn")


today.check(causal_mask)


# %% jupyter={"source_hidden": true}
# solution: causal_mask
def causal_mask(seq: int) -> torch.Tensor:
    """True where query i may not see key j, that is where j > i: bool [seq, seq]."""
    return torch.ones(seq, seq, dtype=torch.bool).triu(1)


# %% [markdown]
# ## One head by hand
#
# Everything is there for one head. A **score** is the product of a query with a key. Divided by
# $\sqrt{64}$, since a sum of 64 products grows with its length, and masked, each row goes through
# the **softmax**: positive numbers that add up to 1. Those are the **attention weights**. Here is
# head 0 of layer 0 on the first five tokens. (The turning by RoPE, Day 4, comes first.)

# %%
cos, sin = rope_tables(config, ids.shape[1])
q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)

scores = q[0, 0, :5] @ k[0, 0, :5].T / config.head_dim**0.5
shares = scores.masked_fill(causal_mask(5), -torch.inf).softmax(-1)
for token, row in zip(ids[0], shares):
    print(
        f"{tokenizer.decode([int(token)]):>10}", "  ".join(f"{share:.2f}" for share in row.tolist())
    )

# %% [markdown]
# The first token can only look at itself. The lower left triangle is what attention decided; the
# upper right is what the mask forbids. The head's output is each row's mixture of values.
#
# ### Your turn: `sdpa`
#
# The same for all heads at once (Vaswani et al. 2017, equation 1):
#
# $$ \text{sdpa}(Q, K, V) = \text{softmax}\left(\text{scale} \cdot QK^T + \text{mask}\right) V $$
#
# 1. Group the queries: `[batch, n_kv, n_rep, query_len, d]`. `k.unsqueeze(2)` fits beside them.
# 2. Scores, times the scale: `head_dim ** -0.5`, unless one is handed in.
# 3. Mask. K and V may be **longer** than q: the queries are then the last `query_len` positions. From
#    Day 11 on a single new query meets many remembered keys, and it may see them all.
# 4. Softmax over the keys, its sum **in float32** whatever came in. `torch.softmax` sees to that.
# 5. Mix the values, and flatten the groups to `[batch, n_q, query_len, d]`.


# %%
def sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """Causal attention: q [batch, n_q, query_len, head_dim]; k, v [batch, n_kv, kv_len, head_dim]
    -> [batch, n_q, query_len, head_dim]. The queries are the last query_len positions."""
    raise NotImplementedError("your turn")


today.check(sdpa)

# %% [markdown]
# Compare yours with this one. It saves one more thing: the queries of a group are stacked into one
# tall matrix, so that a KV head is met by a single product and never copied. Day 13 cuts that matrix
# into tiles; the sum stays the same. (A cell that begins `# until day` runs, and is replaced by the
# package's own form on the day it names.)


# %% jupyter={"source_hidden": true}
# until day 13: lands in nanoserve/layers.py: sdpa
def sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """Causal attention as an explicit sum (Vaswani et al. 2017, eq. 1).

    q [batch, n_q, query_len, head_dim]; k, v [batch, n_kv, kv_len, head_dim], the queries being the
    last query_len of kv_len positions -> [batch, n_q, query_len, head_dim]. Query head h reads KV head
    h // n_rep, by a view. `scale` defaults to head_dim ** -0.5.
    """
    n_q, query_len, head_dim = q.shape[1:]
    n_kv, kv_len = k.shape[1:3]
    n_rep = n_q // n_kv
    scale = head_dim**-0.5 if scale is None else scale
    q = q.unflatten(1, (n_kv, n_rep)).flatten(2, 3)  # [batch, n_kv, n_rep * query_len, head_dim]
    scores = (q @ k.transpose(-1, -2) * scale).unflatten(2, (n_rep, query_len))
    future = torch.ones(query_len, kv_len, dtype=torch.bool, device=q.device)
    scores = scores.masked_fill(future.triu(1 + kv_len - query_len), -torch.inf)
    weights = torch.softmax(scores, dim=-1)  # summed in float32, whatever the dtype
    return (weights.flatten(2, 3) @ v).unflatten(2, (n_rep, query_len)).flatten(1, 2)


# %% [markdown]
# PyTorch has this function too, written by other people in another way. The same numbers?

# %%
theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
print("close to torch's own:", torch.allclose(sdpa(q, k, v), theirs, atol=1e-5))

# %% [markdown]
# ## The whole of attention
#
# Around the sum stand the projections: q, k and v before it, RoPE on q and k (never on v: a value
# says *what*, not *where*), and `o_proj`, which mixes the nine heads' outputs back into the hidden
# size. Qwen3 also norms each query and key before they turn.
#
# The last two arguments are kept free for Day 11, when a cache comes between k, v and the sum.


# %% jupyter={"source_hidden": true}
# until day 11: lands in nanoserve/layers.py: gqa_attention
def gqa_attention(
    x: torch.Tensor,
    layer: dict[str, torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    config: ModelConfig,
    cache: None = None,
    index: int = 0,
) -> torch.Tensor:
    """Grouped-query attention (Ainslie et al. 2023): n_q query heads share n_kv keys and values.

    x [batch, seq, hidden], cos and sin [seq, head_dim] of x's positions -> [batch, seq, hidden].
    `cache` and `index` are for Day 11: nothing is remembered yet.
    """
    q = _heads(_linear(x, layer, "self_attn.q_proj"), config.n_q)  # [batch, n_q, seq, head_dim]
    k = _heads(_linear(x, layer, "self_attn.k_proj"), config.n_kv)
    v = _heads(_linear(x, layer, "self_attn.v_proj"), config.n_kv)
    if config.qk_norm:  # Qwen3: each head's query and key are normalised before they turn
        q = rms_norm(q, layer["self_attn.q_norm.weight"], config.norm_eps)
        k = rms_norm(k, layer["self_attn.k_norm.weight"], config.norm_eps)
    q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
    out = sdpa(q, k, v)
    return _linear(out.transpose(1, 2).flatten(2), layer, "self_attn.o_proj")


# %% [markdown]
# ## Prove it
#
# The gate: what the oracle's first attention gave, from what it got.

# %%
ours = gqa_attention(x, layer, cos, sin, config)
difference = (ours - seen["model.layers.0.self_attn"].output).abs().max()
print(f"largest difference below 1e-5: {bool(difference < 1e-5)}")
assert difference < 1e-5

# %% [markdown]
# A gate is worth something only if it stays shut for the mistakes people make. Here the KV head of
# each query head is written out, so that it can be written wrong.

# %%
reference = seen["model.layers.0.self_attn"].output
for name, kv_heads in (
    ("h // n_rep", [0, 0, 0, 1, 1, 1, 2, 2, 2]),
    ("h % n_kv", [0, 1, 2, 0, 1, 2, 0, 1, 2]),
    ("groups in another order", [1, 1, 1, 2, 2, 2, 0, 0, 0]),
):
    heads = sdpa(q, k[:, kv_heads], v[:, kv_heads])  # nine KV heads, so n_rep is 1
    out = _linear(heads.transpose(1, 2).flatten(2), layer, "self_attn.o_proj")
    off = float((out - reference).abs().max() / reference.abs().max())
    print(f"{name:24} off by {100 * off:3.0f} % of the largest output")

# %% [markdown]
# And nobody looks ahead: another token at position 9 changes nothing before it, to the last bit.

# %%
poked = x.clone()
poked[0, 9] += 100.0
after = gqa_attention(poked, layer, cos, sin, config)
print("positions 0 to 8 unchanged:", torch.equal(after[:, :9], ours[:, :9]))
print("positions from 9 on changed:", bool((after[:, 9:] != ours[:, 9:]).any(-1).all()))

# %% [markdown]
# ## Measure it: where do heads look?
#
# 30 layers, 9 heads each. What do 270 heads look at? First a guess about one place. The first token
# of a text rarely matters much: here it is "The".

# %%
today.predict(
    "first", "What share of all attention goes to the first token, on average? (0 to 1)", guess=None
)


# %% [markdown]
# The weights never leave `sdpa`, so compute them once more, for every layer. The oracle has recorded
# what each layer's attention was given.


# %%
@torch.no_grad()
def weights_of(i: int) -> torch.Tensor:
    """The attention weights of layer i: [n_q, seq, seq]."""
    x, layer = seen[f"model.layers.{i}.self_attn"].input, layer_weights(i)
    q = apply_rope(_heads(_linear(x, layer, "self_attn.q_proj"), config.n_q), cos, sin)
    k = apply_rope(_heads(_linear(x, layer, "self_attn.k_proj"), config.n_kv), cos, sin)
    scores = group_queries(q, config.n_kv) @ k.unsqueeze(2).mT * config.head_dim**-0.5
    return scores.masked_fill(causal_mask(x.shape[1]), -torch.inf).softmax(-1).flatten(1, 2)[0]


attention = torch.stack([weights_of(i) for i in range(config.num_layers)])
print(
    list(attention.shape),
    "every row adds up to 1:",
    torch.allclose(attention.sum(-1), torch.ones(1)),
)

# %%
from nanoserve.course.exercises.day06 import draw_pattern
from nanoserve.course.plots import figure

words = [tokenizer.decode([int(i)]).strip() for i in ids[0]]
fig, (left, right) = figure(height=4.4, panels=2, title="Head 0 of layers 16 and 23")
draw_pattern(left, attention[16, 0], words)
draw_pattern(right, attention[23, 0], words)
left.set(xlabel="key", ylabel="query")
fig

# %% [markdown]
# Rows look, columns are looked at, black is 1. The left head looks at the token just before: nobody
# wrote that rule, RoPE made it possible and training found it. The right one looks at "The", from
# everywhere. Browse the others:

# %% tags=["nbval-ignore-output"]
today.widget("pattern", weights=attention, words=words)

# %% [markdown]
# Now the count. (The first token itself is left out: it has no choice.)

# %%
from nanoserve.course.plots import COLOURS, label_line, prediction_marker

to_first = attention[:, :, 1:, 0].mean((1, 2))
fig, ax = figure(xlabel="layer", ylabel="share of attention on the first token", title="The sink")
ax.bar(range(config.num_layers), to_first.tolist(), color=COLOURS["engine"])
ax.set(ylim=(0, 1), xlim=(-1, 35), xticks=range(0, 30, 5))
evenly = float((1 / torch.arange(2, len(words) + 1)).mean())
ax.axhline(evenly, xmax=0.86, color=COLOURS["limit"], linewidth=1.5, linestyle="--")
label_line(ax, 31.2, evenly, "even", COLOURS["limit"], "below")
prediction_marker(ax, 30.5, today.guess("first"), where="right")
fig

# %%
print(f"on average {to_first.mean():.2f}; if everybody looked everywhere alike, {evenly:.2f}")

# %% [markdown]
# More than half of all attention falls on a word that says nothing. The weights of a row must add up to
# 1, so a head that has nothing to look for needs a place to put them, and the first token is always
# there: an **attention sink** (Xiao et al. 2023). Engines that throw away old keys to save memory
# have learned to keep that one. Tomorrow you see what the model does to the first token to make it
# so attractive.
#
# What the plot does not show: this is one sentence of 14 tokens and one small model. And a weight is
# not yet an influence: it multiplies a value, and a short value adds little, however large its weight.
#
# ## With your own code
#
# If your `sdpa` passed, it generates text now, in 30 layers, in the place of the package's.

# %% tags=["nbval-ignore-output"]
from nanoserve import LLM, SamplingParams

with today.mine():
    [answer] = LLM("smollm2").generate("The capital of France is", SamplingParams(max_tokens=6))
print(answer.text)
assert answer.text.startswith(" Paris")

# %% [markdown]
# ## What you learned
#
# 1. **Attention is a mixture whose weights add up to one.** Scores decide, the softmax shares out.
# 2. **Fewer KV heads are a view, not a copy.** Neighbouring query heads read one KV head, and a
#    conversation takes a third of the memory.
# 3. **The mask is what makes a language model.** Without it every token would copy its successor.
#
# ## Tomorrow
#
# Norm, RoPE, MLP, attention: all the parts lie on the table. Day 7 joins them with two additions,
# and the first block is whole.
#
# **In one paragraph.** Each token asks with nine queries and offers three keys and three values.
# Queries are sorted into groups by a view, scored against the keys of their group, forbidden to look
# ahead, and turned into weights that add up to one; the output is the mixture of values. It agrees
# with the oracle to 1e-5, a scrambled head is caught at once, and much of the attention of a real
# model rests on the first word, because it has to rest somewhere.
