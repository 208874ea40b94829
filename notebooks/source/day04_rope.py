# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Day 4 · RMSNorm and RoPE
#
# Week 1 · Phase 0, foundations · you need: Day 1 (the oracle), Day 2 (the config)
#
# **Today** you write the first two pieces of the model itself: the norm that stands before each of
# its parts, and the rotation that encodes a token's position. Both must agree with the oracle to
# one millionth.

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

today = day(4)
today.picture("rope")

# %% [markdown]
# ## Why it matters
#
# A token passes through the model as a vector of 576 numbers. Thirty layers read that vector and
# add to it. Each layer needs answers to two questions:
#
# - **How large is the vector?** Each layer adds to it, so it grows. A layer needs input that always
#   has the same size.
# - **Where is the token?** Attention, on Day 6, compares vectors, and the comparison of two vectors
#   does not depend on which came first. "Dog bites man" and "man bites dog" would be the same three
#   vectors.
#
# Both pieces are short, and neither raises an error when it is wrong. A norm with its small
# constant in the wrong place is nearly right. Positions kept in 16 bits are right for a page of
# text, and wrong for a book.
#
# ## The oracle's answers first
#
# Run a sentence through the oracle and keep what goes into each norm, and what comes out. There are
# 61: two in each layer, and one at the end.

# %%
import math

import torch

from nanoserve import load_tokenizer
from nanoserve.config import ModelConfig, load_config
from nanoserve.fetch import resolve
from nanoserve.oracle import load_oracle

oracle, tokenizer = load_oracle("smollm2"), load_tokenizer("smollm2")
config, weights = load_config(resolve("smollm2")), oracle.state_dict()
text = "The capital of France is Paris, and the river through it is the Seine."
ids = torch.tensor([tokenizer.encode(text)])
parts = ("input_layernorm", "post_attention_layernorm")
norms = [f"model.layers.{i}.{part}" for i in range(config.num_layers) for part in parts]
norms.append("model.norm")
seen = oracle.capture(ids, norms)
len(seen), list(seen["model.norm"].output.shape)

# %% [markdown]
# How large are those vectors? The measure is the **root mean square**: square the numbers, average,
# take the root. At the input of the first layer it is about 0.1. Guess how many times larger it is
# at the input of layer 15, for a token in the middle of the text.

# %%
ask = "How many times larger is a middle token's vector entering layer 15?"
today.predict("growth", ask, guess=None, low=0)

# %%
from nanoserve.course.plots import COLOURS, figure, label_line, prediction_marker

sizes = torch.stack([seen[n].input[0].square().mean(-1).sqrt() for n in norms[:-1:2]])
first, others = sizes[:, 0].tolist(), sizes[:, 1:].median(dim=1).values.tolist()
print(f"about {round(others[15] / others[0])} times for a token in the middle")
print(f"about {round(first[15] / first[0], -3):,.0f} times for the first token of the text")
largest = seen["model.layers.12.input_layernorm"].input[0, 0].abs().max()
print("a number of the first token, entering layer 12, is above 20,000:", bool(largest > 20_000))

# %% jupyter={"source_hidden": true}
# Draws the plot: the root mean square of what enters each layer
fig, ax = figure(height=3.2, xlabel="layer", ylabel="root mean square, entering it")
layers = list(range(config.num_layers))
for name, values, where in (("first token", first, "above"), ("other tokens", others, "below")):
    ax.plot(layers, values, color=COLOURS["oracle"], linestyle=(0, (5, 2.5)), marker="o")
    label_line(ax, 20, values[20], name, COLOURS["oracle"], where)
ax.set_yscale("log")
if guess := today.guess("growth"):
    prediction_marker(ax, 15, guess * others[0])
ax.axhline(1, color=COLOURS["engine"])
label_line(ax, 24, 1, "after the norm, before its weight", COLOURS["engine"], "below")
fig

# %% [markdown]
# When the first token enters layer 12, one of its numbers is above 20,000. Models of many families
# learn this: attention uses the first token as a place to look at when no other token matters (Sun
# et al. 2024, "Massive Activations"). The norm makes this harmless for the next layer: whatever
# comes in, its output has a root mean square of 1, before the weight.
#
# The plot shows one sentence. Another sentence gives other curves.
#
# ## Your turn: `rms_norm`
#
# $$\text{out}_i = \frac{x_i}{\sqrt{\frac{1}{n}\sum_j x_j^2 + \epsilon}} \cdot w_i$$
#
# | | shape | |
# | --- | --- | --- |
# | `x` | `[..., n]` | each vector along the last axis is normed by itself |
# | `weight` | `[n]` | learned, one per position in the vector |
# | `eps` | a number | keeps a vector of zeros from being divided by zero |
# | out | as `x`, in its dtype | |
#
# One more rule: **square in float32**, whatever comes in. The square of 20,000 is far beyond the
# range of float16. Stuck? `today.hint()` gives a hint about your mistake.
#
# After a kernel restart, run the cells above first (Run → Run All Above Selected Cell).


# %%
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., n], weight [n] -> [..., n] in x's dtype; the mean is taken in float32."""
    raise NotImplementedError("your turn")


today.check(rms_norm)

# %% [markdown]
# The cell below holds the package's version; from here on this notebook uses it. (The same holds
# for every folded solution today.)


# %% jupyter={"source_hidden": true}
# lands in nanoserve/layers.py: rms_norm
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide each vector by its root mean square, then scale (Zhang and Sennrich 2019, eq. 4).

    x [..., n], weight [n] -> [..., n] in x's dtype; the mean is taken in float32.
    """
    h = x.float()
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return h.to(x.dtype).mul_(weight)


# %% [markdown]
# **Prove it.** All 61 norms of the real model, on the vectors that went into them.


# %%
def gap(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference, as a share of the largest value (of 1, where all are smaller)."""
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1))


eps = config.norm_eps
gaps = [gap(rms_norm(seen[n].input, weights[f"{n}.weight"], eps), seen[n].output) for n in norms]
print(len(gaps), "norms; each within 1e-6 of the oracle:", max(gaps) < 1e-6)

# %% [markdown]
# ## A position is an angle
#
# The second piece is **RoPE**, rotary position embedding (Su et al. 2021). Take a head's 64 numbers
# as 32 pairs, and each pair as a point in the plane. For a token at position $p$, each point is
# turned around the origin, pair $i$ by the angle $p \cdot f_i$. The first pair is the fastest, a
# radian per token; the last needs hundreds of thousands of tokens for a full turn. It is like a
# clock: fast hands and slow hands together tell the time over a long day.
#
# Turn it yourself.

# %% tags=["nbval-ignore-output"]
today.widget("turn")

# %% [markdown]
# Turning a point $(a, b)$ by an angle $t$ needs the point itself and the same point a quarter turn
# further on:
#
# $$(a, b)\cos t + (-b, a)\sin t$$
#
# So you need the quarter turn of all pairs at once.
#
# ## Your turn: `rotate_half`
#
# Which two numbers make a pair? In the Hugging Face layout, a pair is number $i$ and number
# $i + d/2$, not two neighbours. Day 2 put the rows of q and k in this order. Each pair $(a, b)$
# becomes $(-b, a)$, and both numbers stay in the places of their pair. Return a new tensor:
#
# | | pair 0 | pair 1 | | |
# | --- | --- | --- | --- | --- |
# | in, $d = 4$ | `x[0], x[2]` | `x[1], x[3]` | `[1, 2, 3, 4]` | |
# | out | `-x[2], x[0]` | `-x[3], x[1]` | `[-3, -4, 1, 2]` | any axes before the last |


# %%
def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """Turn each pair (i, i + head_dim / 2) of the last axis by 90 degrees: (a, b) -> (-b, a)."""
    raise NotImplementedError("your turn")


today.check(rotate_half)

# %% [markdown]
# The folded cell holds the quarter turn and the formula above. `cos` and `sin` will be tables with
# a row for each position. They are always float32, so a product with them is float32 too. Only the
# result returns to the dtype that came in.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/layers.py: rotate_half, apply_rope
def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """Rotate each pair (i, i + head_dim / 2) of the last axis by 90 degrees: (a, b) -> (-b, a)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads [..., seq, head_dim] by their positions' angles; cos, sin [seq, head_dim].

    The rotation is done in float32; the result has x's dtype.
    """
    h = x.float()
    return torch.addcmul(h * cos, rotate_half(h), sin).to(x.dtype)


# %% [markdown]
# ## How fast each pair turns
#
# Pair $i$ of a head of $d$ numbers turns by
#
# $$f_i = \theta^{-2i/d} \text{ radians per token}$$
#
# with $\theta$ from the config: `rope_theta`, 100,000 in SmolLM2.
#
# ## Your turn: `plain_frequencies`
#
# Use `config.head_dim` and `config.rope_theta`, and no other field: the width of a head need not be
# `hidden_size / n_q`. The result is float32, `[head_dim / 2]`.


# %%
def plain_frequencies(config: ModelConfig) -> torch.Tensor:
    """theta ** (-2i / head_dim): the angle per position of each pair, float32 [head_dim / 2]."""
    raise NotImplementedError("your turn")


today.check(plain_frequencies)


# %% jupyter={"source_hidden": true}
# lands in nanoserve/layers.py: plain_frequencies
def plain_frequencies(config: ModelConfig) -> torch.Tensor:
    """The angle per position of each rotated pair, in radians: float32 [head_dim / 2].

    theta ** (-2i / head_dim) (Su et al. 2021, section 3.2); `config.rope_scaling` is not applied.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    return 1.0 / config.rope_theta**exponents


# %% [markdown]
# ## Longer texts than in training (optional)
#
# **You may skip this section, with its exercise:** SmolLM2 does not use it, and the days to come do
# not need it. (Run its cells all the same; the day counts as done without it.)
#
# A model trained on 8,192 tokens has seen the fast pairs in every position of their circle, many
# times. It has never seen the slow pairs complete a turn. On a text of 100,000 tokens the slow
# pairs reach angles that never occurred in training. Llama 3.1 and later have an answer in their
# config, `rope_scaling`. Count how often a pair turns within the original context:
#
# $$\text{turns}_i = \text{original\_context} \cdot f_i \,/\, 2\pi$$
#
# | turns within the original context | new frequency |
# | --- | --- |
# | `high_freq_factor` or more | $f_i$, kept |
# | `low_freq_factor` or fewer | $f_i$ / `factor`, slowed |
# | between the two | a blend: share $s$ of $f_i$ and $1 - s$ of $f_i$ / `factor` |
#
# where $s$ = (turns − low) / (high − low), which is 0 at the lower end and 1 at the upper.
#
# ### Your turn, if you like: `rope_frequencies`
#
# If `config.rope_scaling` is None, return the plain frequencies. Otherwise it is an object with
# `factor`, `low_freq_factor`, `high_freq_factor` and `original_context`.


# %%
def rope_frequencies(config: ModelConfig) -> torch.Tensor:
    """The frequencies that the model uses: plain, or with Llama 3's scaling."""
    raise NotImplementedError("your turn")


today.check(rope_frequencies)


# %% jupyter={"source_hidden": true}
# lands in nanoserve/layers.py: rope_frequencies
def rope_frequencies(config: ModelConfig) -> torch.Tensor:
    """The angle per position that the model uses, in radians: float32 [head_dim / 2].

    Without scaling, these are the plain frequencies. Llama 3's scaling (transformers: rope_type
    "llama3") counts a pair's turns within the original context. A pair with high_freq_factor turns
    or more keeps its frequency. With low_freq_factor turns or fewer, the frequency is divided by
    `factor`. Between the two limits, both frequencies are blended.
    """
    frequencies = plain_frequencies(config)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_context * frequencies / (2 * math.pi)  # within the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


# %% [markdown]
# Compare the function with transformers, with the figures of Llama 3.2. The plot shows what scaling
# does to each of the 32 pairs.

# %%
import json

from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from nanoserve.config import parse_config

llama = json.loads((resolve("smollm2") / "config.json").read_text())
llama["rope_theta"], llama["max_position_embeddings"] = 500_000.0, 131_072
llama["rope_scaling"] = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8_192,
}
scaled = rope_frequencies(parse_config(llama))
theirs = LlamaRotaryEmbedding(LlamaConfig(**llama)).inv_freq
print("within a millionth part:", float((scaled / theirs - 1).abs().max()) < 1e-6)

# %% jupyter={"source_hidden": true}
# Draws the plot: the frequencies after scaling, by wavelength
plain = 500_000.0 ** (-torch.arange(32) / 32)
waves, ratio = (2 * math.pi / plain).tolist(), (scaled / plain).tolist()
fig, ax = figure(height=3, xlabel="wavelength before scaling, in tokens", ylabel="new / old")
ax.plot(waves, ratio, color=COLOURS["engine"], marker="o")
ax.set_xscale("log")
for edge, name, side in ((8_192 / 4, "4 turns ", "right"), (8_192, " 1 turn", "left")):
    ax.axvline(edge, color=COLOURS["muted"], linewidth=1, linestyle=":")
    ax.text(edge, 0.5, name, color=COLOURS["muted"], ha=side)
label_line(ax, waves[5], 1, "kept", COLOURS["engine"], "below")
label_line(ax, waves[26], ratio[26], "32 times slower", COLOURS["engine"], "above")
fig

# %% [markdown]
# ## The tables
#
# Position times frequency, then cosine and sine. Both numbers of a pair turn by the same angle, so
# each angle stands in two places.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/layers.py: rope_tables
def rope_tables(config: ModelConfig, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of position times frequency: float32 [length, head_dim] for every model dtype.

    Not computed in bfloat16, which would round positions: 15,962 to 15,936.
    """
    positions = torch.arange(length, dtype=torch.float32)
    angles = torch.outer(positions, rope_frequencies(config))  # [length, head_dim / 2]
    angles = torch.cat([angles, angles], dim=-1)  # both members of a pair turn by the same angle
    return angles.cos(), angles.sin()


# %% [markdown]
# **Prove it.** The oracle makes its tables in a part called `model.rotary_emb`; a hook on it gives
# the cosines. After that, the turned queries and keys of layer 0 are compared with those of
# transformers' own function.

# %%
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

cos, sin = rope_tables(config, ids.shape[1])
names = ["model.rotary_emb"] + [f"model.layers.0.self_attn.{p}_proj" for p in "qk"]
hooks = oracle.capture(ids, names)
q, k = (hooks[n].output.unflatten(-1, (-1, 64)).transpose(1, 2) for n in names[1:])
print("q", list(q.shape), " k", list(k.shape), " tables", list(cos.shape))
print("tables within 1e-6:", gap(cos, hooks[names[0]].output[0]) < 1e-6)
theirs = apply_rotary_pos_emb(q, k, cos[None], sin[None])
ours = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
print("q and k within 1e-6:", max(gap(a, b) for a, b in zip(ours, theirs, strict=True)) < 1e-6)

# %% [markdown]
# ## Only the distance is left
#
# Why turn a vector, rather than add a number for the position? Attention multiplies a query with a
# key. When both are turned, the turn that they share drops out of the product: a query at 9 and a
# key at 6 give the same score as a query at 509 and a key at 506. Take one query and one key of
# layer 0, and put them at every pair of positions up to 48, and then far into a text.

# %%
query, key = q[0, 4, 6], k[0, 1, 4]  # one head's vector of one token each, not turned yet
cos, sin = rope_tables(config, 16_384)


def score(i, j, cos=cos, sin=sin) -> torch.Tensor:
    """The product of the query at positions i and the key at positions j, both turned."""
    turned = apply_rope(query.expand(len(i), -1), cos[i], sin[i])
    # 8 is the root of head_dim; attention divides by it (Day 6)
    return (turned * apply_rope(key.expand(len(j), -1), cos[j], sin[j])).sum(-1) / 8


grid = torch.arange(48)
table = torch.stack([score(grid, torch.full((48,), j)) for j in range(48)])  # [key, query]
distance = torch.arange(64)
starts = {start: score(start + distance, torch.full((64,), start)) for start in (0, 500, 8_000)}
spread = max(float((line_ - starts[0]).abs().max()) for line_ in starts.values())
size = float(starts[0].abs().max())
print("the same at every start, to a thousandth of the largest:", spread < 1e-3 * size)
print("this query and key score highest at distance", int(starts[0].argmax()))
other = apply_rope(q[0, 6, 6].expand(64, -1), cos[distance], sin[distance]) @ k[0, 2, 4]
print("query head 6 of the same token scores highest at distance", int(other.argmax()))

# %% jupyter={"source_hidden": true}
# Draws the plot: score of every pair of positions
fig, (left, right) = figure(height=3.4, panels=2)
left.imshow(table, origin="lower", cmap="cividis")
left.set(xlabel="position of the query", ylabel="position of the key")
left.set_title("score of every pair of positions")
left.grid(False)
right.plot(distance, starts[0], color=COLOURS["engine"])
for start, marker in ((500, "o"), (8_000, "x")):
    right.plot(distance[::3], starts[start][::3], marker, color=COLOURS["ink"], fillstyle="none")
right.set(xlabel="distance of query and key")
right.set_title("line: key at 0; ○ at 500; × at 8,000")
fig

# %% [markdown]
# Every diagonal on the left has one colour: the score depends on the distance alone. On the right
# the three runs give the same curve. This query and this key score highest when they are near each
# other. RoPE does not force that: the numbers in q and k, which training found, decide at which
# distances the score is high. The last line above shows another head, which scores highest far
# away.
#
# ## Measure it: a table in 16 bits
#
# The engine can run its weights in **bfloat16**, two bytes instead of four. Why not the tables? A
# bfloat16 keeps 8 significant bits. Up to 256 it can hold every whole number. And above 256?

# %%
ask = "How far off is position 15,962, once rounded to bfloat16?"
today.predict("off", ask, guess=None, low=0)

# %%
position = 15_962
rounded = int(torch.tensor(position).bfloat16())
print(f"{position:,} becomes {rounded:,}: off by {position - rounded}")

# %% [markdown]
# The cell below makes a table from such positions. Then it takes the same query and key as before:
# the query at 15,962, and the key up to 127 tokens before it.

# %%
everywhere = torch.arange(16_384)
angles = torch.outer(everywhere.bfloat16(), rope_frequencies(config).bfloat16())
angles = torch.cat([angles, angles], dim=-1)
cos16, sin16 = angles.cos(), angles.sin()

distance = torch.arange(128)
here = torch.full((128,), position)
right_scores = score(here, here - distance)
wrong_scores = score(here, here - distance, cos16.float(), sin16.float())
print("different scores among 128 keys, float32 tables:", right_scores.unique().numel() > 100)
print("with bfloat16 tables:", wrong_scores.unique().numel())

# %% jupyter={"source_hidden": true}
# Draws the plot: how far bfloat16 moves a position
from itertools import pairwise

fig, (left, right) = figure(height=3.4, panels=2)
off = (everywhere - everywhere.bfloat16().long()).abs()
edges = [256 * 2**i for i in range(7)]  # where bfloat16's steps double: most off is half a step
left.stairs([int(off[a:b].max()) for a, b in pairwise(edges)], edges, color=COLOURS["fault"])
left.plot([position], [position - rounded], marker="o", color=COLOURS["ink"])
label_line(left, position, position - rounded, "15,962", COLOURS["ink"], "left")
prediction_marker(left, position, today.guess("off"), where="left")
left.set(xlabel="position", ylabel="positions off, at most")
right.plot(distance, right_scores, color=COLOURS["engine"])
right.plot(distance, wrong_scores, color=COLOURS["fault"])
right.set(xlabel="distance of query and key", ylabel="score")
label_line(right, 42, 5.24, "bfloat16 tables", COLOURS["fault"], "above")
label_line(right, 29, 3.85, "float32 tables", COLOURS["engine"], "below")
fig

# %% [markdown]
# The bfloat16 line on the right is a staircase with three steps. From 8,192 on, a bfloat16 counts
# in steps of 64, so 64 neighbours stand at one position, and the model cannot tell their order. A
# short prompt does not show it: up to position 256 the rounded positions are exact.
#
# So the tables are float32, whatever the dtype of the model. They are still right at position
# 15,962:

# %%
exact = position * config.rope_theta ** (-torch.arange(32, dtype=torch.float64) / 32)
for name, (c, s) in {"float32": (cos, sin), "bfloat16": (cos16, sin16)}.items():
    ends = (
        (c[position, :32] - exact.cos()).abs().max(),
        (s[position, :32] - exact.sin()).abs().max(),
    )
    print(f"{name:8} tables right to 0.01 at {position:,}: {bool(max(ends) < 0.01)}")

x = query.bfloat16()  # a model in bfloat16, float32 tables
turned = apply_rope(x, cos[position], sin[position])
wide = apply_rope(x.float(), cos[position], sin[position])
print(turned.dtype, "and as near as bfloat16 can be:", torch.equal(turned, wide.bfloat16()))

# %% [markdown]
# Two remarks. SmolLM2 was made for 8,192 positions, so 15,962 is past its end; models with longer
# contexts are common. And rounding the *finished* cosines to bfloat16, as transformers does,
# matters much less: that error is at most 1 in 250 and does not grow with the position. But never
# round the angle.
#
# ## Your answer is the engine
#
# Inside `today.mine()` the model runs with your answers that passed, and the last line says how
# often each was called. (If you wrote `rope_frequencies` too, the engine calls only that function:
# it brings its own copy of `plain_frequencies` along.)

# %% tags=["nbval-ignore-output"]
from nanoserve import LLM, SamplingParams

with today.mine() as calls:
    llm = LLM("smollm2")
    [answer] = llm.generate("One, two, three, four, five,", SamplingParams(max_tokens=6))
print(answer.text)
assert answer.text == " six, seven, eight,"
if "rope_frequencies" in calls:
    calls.pop("plain_frequencies", None)
assert all(calls.values())  # every answer of yours that ran was called

# %% [markdown]
# ## The words of the day

# %%
today.glossary()

# %% [markdown]
# ## Week 1 in questions
#
# The first week ends here. Answer each question in your head, or aloud, before you unfold it.

# %%
today.review()

# %% [markdown]
# ## What you learned
#
# 1. **A norm lets many layers add to one vector.** Its output always has the same size, even where
#    the vector has grown by a factor of ten thousand.
# 2. **A position is an angle, and the product of two turned vectors depends only on the
#    difference.** Positions 509 and 506 give the same score as 9 and 6.
# 3. **Count positions in float32.** A bfloat16 is precise enough for a weight, but not for a
#    position.
#
# ## Tomorrow
#
# Size and position are settled. Day 5 builds the part that holds most of the model's weights: the
# MLP, in which one half gates the other.
#
# **In one paragraph.** Vectors grow as they pass through a model, so before each part they are
# divided by their root mean square; the squares must be taken in float32. Attention alone cannot
# tell which token came first, so queries and keys are turned, pair by pair, by an angle that grows
# with the position. Then only distances matter. I wrote both, matched the oracle to a millionth,
# and saw how a table of positions in 16 bits puts 64 tokens in one place.
