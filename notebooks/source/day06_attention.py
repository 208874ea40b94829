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
# **Today** you write attention, the only part of the model where information passes from one token
# to another. Nine query heads share three heads of keys and values, and no token sees what comes
# after it.

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
# The MLP and the norms work on each position by itself. To find out what the word "it" refers to, a
# model has to bring information from other positions, and attention does that.
#
# The rest of this course is about attention. A cache keeps today's keys and values (Day 11), a pool
# stores them in blocks (Day 14), and a kernel reads them (Day 22). The number of KV heads decides
# how much memory a conversation takes.

# %%
today.glossary("query head", "KV head", "GQA", "softmax", "attention weight", "causal mask")

# %% [markdown]
# ## Three views of a token
#
# Attention makes three vectors from each token, in every head: a **query** (what this token looks
# for), a **key** (what it can be found by) and a **value** (what it passes on). Each comes from one
# matrix product, and the result is cut into heads.
#
# First get real data: the weights of layer 0 (Day 2), and input and output of the oracle's
# attention for one sentence (Day 1).

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
# The queries have 576 rows, nine heads of 64. Keys and values have 192 each, three heads of 64.

# %%
text = "The old lighthouse keeper climbed the stairs every evening and lit the lamp."
ids = torch.tensor([tokenizer.encode(text)])
oracle = load_oracle("smollm2")
seen = oracle.capture(ids, [f"model.layers.{i}.self_attn" for i in range(config.num_layers)])
x = seen["model.layers.0.self_attn"].input
x.shape

# %% [markdown]
# Two small helpers. `_linear` is a matrix product, plus the bias if there is one (Qwen2 has
# biases). `_heads` cuts the last axis into heads and moves them forward, without a copy.


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
# ## Which KV head for which query head
#
# There are nine query heads and three KV heads, so each KV head serves `n_rep` = 3 query heads.
# Training fixed which three share a KV head: neighbours.
#
# $$ \text{kv head of query head } h = h \;//\; n_{rep} $$
#
# Many programs copy K and V until there are nine of each. No copy is needed: group the *queries*,
# and multiply each group with its one KV head.
#
# ### Your turn: `group_queries`
#
# | | shape | axis 1 counts |
# | --- | --- | --- |
# | in | `[batch, n_q, seq, d]` | query heads 0, 1, 2, 3, 4, 5, ... |
# | out | `[batch, n_kv, n_rep, seq, d]` | KV heads; axis 2 counts the query heads that share one |
#
# The result shares `q`'s memory: it is a **view**. Stuck? `today.hint()` gives a hint about your
# mistake.
#
# After a kernel restart, run the cells above first (Run → Run All Above Selected Cell).


# %%
def group_queries(q: torch.Tensor, n_kv: int) -> torch.Tensor:
    """Sort query heads by the KV head they read:
    [batch, n_q, seq, d] -> [batch, n_kv, n_rep, seq, d], a view."""
    raise NotImplementedError("your turn")


today.check(group_queries)

# %% [markdown]
# One line is enough. The cell below holds a solution; from here on this notebook uses it. (The same
# holds for every folded solution today.) In the package the line stands inside `sdpa`.


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
# `h % n_kv` would give groups of the same shapes: 0, 3, 6 and so on. Nothing would crash, but six
# of the nine heads would read keys that were not made for them.
#
# What does sharing save? A cache keeps a key and a value of every token, in every layer:

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
# would take about twice that. With three, it takes a third of the memory that nine would need.
#
# ## No token looks ahead
#
# The model learned to predict the next token. If position 3 could look at position 4, it could copy
# the answer. So query $i$ sees keys $0$ to $i$ and no more. Hidden keys get the score $-\infty$,
# which the softmax turns into 0.
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
# Now compute one head. A **score** is the product of a query with a key, divided by $\sqrt{64}$,
# because a sum of more products tends to be larger. After the mask, each row goes through the
# **softmax**, which makes positive numbers that add up to 1: the **attention weights**. Here is
# head 0 of layer 0 on the first five tokens. (RoPE, from Day 4, turns queries and keys first.)

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
# The first token can only look at itself. The upper right is zero because of the mask. The head's
# output at each position is the mixture of values with the weights of that row.
#
# ### Your turn: `sdpa`
#
# The same for all heads at once (Vaswani et al. 2017, equation 1):
#
# $$ \text{sdpa}(Q, K, V) = \text{softmax}\left(\text{scale} \cdot QK^T + \text{mask}\right) V $$
#
# 1. Group the queries: `[batch, n_kv, n_rep, query_len, d]`. `k.unsqueeze(2)` broadcasts with them.
# 2. Scores, times the scale: `head_dim ** -0.5`, unless the caller passes another scale.
# 3. Mask. K and V may be **longer** than q: the queries are then the last `query_len` positions.
#    From Day 11 on, there is often a single new query and many cached keys, and it may see them
#    all.
# 4. Softmax over the keys, with its sum in float32, and safe for large scores. `torch.softmax` does
#    both.
# 5. Mix the values, and flatten the groups to `[batch, n_q, query_len, d]`, in the dtype of q.


# %%
def sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """Causal attention: q [batch, n_q, query_len, head_dim]; k, v [batch, n_kv, kv_len, head_dim]
    -> [batch, n_q, query_len, head_dim]. The queries are the last query_len positions."""
    raise NotImplementedError("your turn")


today.check(sdpa)

# %% [markdown]
# Compare yours with this one. It stacks the queries of a group into one tall matrix, so that each
# KV head needs a single product and no copy. Day 13 cuts that matrix into tiles; the sum stays the
# same. (A cell that begins with `# until day` runs, and the package's own form replaces it on that
# day.)


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
# PyTorch has this function too, written by other people with other code. Does it give the same
# numbers?

# %%
theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
off = float((sdpa(q, k, v) - theirs).abs().max() / theirs.abs().max())
print("within 1e-5 of the largest value of torch's own:", off < 1e-5)

# %% [markdown]
# ## The whole of attention
#
# Before the sum come the projections for q, k and v, and RoPE on q and k (not on v: a value carries
# content and no position). After it, `o_proj` mixes the nine heads' outputs back into the hidden
# size. Qwen3 also norms each query and key before RoPE.
#
# The last two arguments are for Day 11, when a cache comes between k, v and the sum.


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
# Give your attention the input of the oracle's first attention, and compare the outputs.

# %%
ours = gqa_attention(x, layer, cos, sin, config)
reference = seen["model.layers.0.self_attn"].output
off = float((ours - reference).abs().max() / reference.abs().max())
print("within 1e-5 of the largest output:", off < 1e-5)
assert off < 1e-5

# %% [markdown]
# Would this proof notice the usual mistakes? Here the KV head of each query head is written out,
# right and wrong.

# %%
for name, kv_heads in (
    ("h // n_rep", [0, 0, 0, 1, 1, 1, 2, 2, 2]),
    ("h % n_kv", [0, 1, 2, 0, 1, 2, 0, 1, 2]),
    ("groups in another order", [1, 1, 1, 2, 2, 2, 0, 0, 0]),
):
    heads = sdpa(q, k[:, kv_heads], v[:, kv_heads])  # nine KV heads, so n_rep is 1
    out = _linear(heads.transpose(1, 2).flatten(2), layer, "self_attn.o_proj")
    off = float((out - reference).abs().max() / reference.abs().max())
    print(f"{name:24} off by {100 * off:3.0f} % of the largest output")
    assert off < 1e-5 if name == "h // n_rep" else off > 0.1

# %% [markdown]
# And no token sees what comes after it: another vector at position 9 changes nothing before it, to
# the last bit.

# %%
poked = x.clone()
poked[0, 9] += 100.0
after = gqa_attention(poked, layer, cos, sin, config)
print("positions 0 to 8 unchanged:", torch.equal(after[:, :9], ours[:, :9]))
print("positions from 9 on changed:", bool((after[:, 9:] != ours[:, 9:]).any(-1).all()))

# %% [markdown]
# ## Measure it: where do heads look?
#
# The model has 30 layers of 9 heads each. What do these 270 heads look at? First a guess about the
# first token, which here is "The" and says little.

# %%
ask = "What share of all attention goes to the first token, on average? (0 to 1)"
today.predict("first", ask, guess=None, low=0, high=1)


# %% [markdown]
# `sdpa` does not return the weights, so compute them once more, for every layer. The oracle has
# recorded the input of each layer's attention.


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

# %% jupyter={"source_hidden": true}
# Draws the plot: Head 0 of layers 16 and 23
from nanoserve.course.exercises.day06 import draw_pattern
from nanoserve.course.plots import figure

assert attention[16, 0].diagonal(-1).mean() > 0.5  # the token just before
assert attention[23, 0, 1:, 0].mean() > 0.5  # the first token
words = [tokenizer.decode([int(i)]).strip() for i in ids[0]]
fig, (left, right) = figure(height=4.4, panels=2, title="Head 0 of layers 16 and 23")
draw_pattern(left, attention[16, 0], words)
draw_pattern(right, attention[23, 0], words)
left.set(xlabel="key", ylabel="query")
fig

# %% [markdown]
# A row is a query, a column a key, and black is 1. The left head mostly looks at the token just
# before. Nobody wrote that rule: RoPE makes it possible, and training found it. The right head
# mostly looks at "The". Browse the others:

# %% tags=["nbval-ignore-output"]
today.widget("pattern", weights=attention, words=words)

# %% [markdown]
# Now the share of the first token in every layer. (Its own row is left out, since it can only look
# at itself.)

# %% jupyter={"source_hidden": true}
# Draws the plot: The sink
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
print(f"on average {to_first.mean():.2f}; with even weights it would be {evenly:.2f}")
assert to_first.mean() > 0.5

# %% [markdown]
# More than half of all attention goes to a word that says little. The weights of a row must add up
# to 1, so a head that needs no other token has to put its weight somewhere, and the first token is
# always there: an **attention sink** (Xiao et al. 2023). Engines that drop old keys to save memory
# must keep the key of the first token. Day 4 showed how large the model makes the first token's
# vector.
#
# This is one sentence of 14 tokens and one small model. And a large weight does not mean a large
# effect: it multiplies a value, and a small value adds little.
#
# ## With your own code
#
# If your `sdpa` passed, it runs here in all 30 layers, in place of the package's. The cell asks for
# the naive cache of Day 11, because with it the engine calls `sdpa`. (The default cache uses an
# attention kernel instead, from Day 25 on.) The last line says how often yours was called.

# %% tags=["nbval-ignore-output"]
from nanoserve import LLM, SamplingParams

with today.mine() as calls:
    llm = LLM("smollm2", cache="naive")
    [answer] = llm.generate("The capital of France is", SamplingParams(max_tokens=6))
print(answer.text)
assert answer.text.startswith(" Paris")
assert all(calls.values())  # yours was called, if it ran

# %% [markdown]
# ## What you learned
#
# 1. **Attention is a mixture whose weights add up to one.** Scores decide, and the softmax turns
#    them into shares.
# 2. **Fewer KV heads need a view, not a copy.** Neighbouring query heads read one KV head, and a
#    conversation takes a third of the memory.
# 3. **The mask hides the answer.** Without it every token could copy the one after it.
#
# ## Tomorrow
#
# Norm, RoPE, MLP, attention: all parts are there. Day 7 joins them with two additions into the
# first block.
#
# **In one paragraph.** Each token has nine queries, three keys and three values. A view groups the
# queries; each group is scored against its keys, a mask hides the future, and the softmax makes
# weights that add up to one. The output is the mixture of values. It agrees with the oracle to 1e-5
# of the largest value, and the proof finds heads in a wrong order at once. More than half of the
# attention in my run went to the first word.
