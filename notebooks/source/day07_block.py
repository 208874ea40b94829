# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Day 7 · One block
#
# Week 2 · Phase 0, foundations · you need: Day 5 (SwiGLU), Day 6 (attention)
#
# **Today** you join norm, attention and MLP into one decoder block. It is four lines of code, and
# there are a dozen wrong ways to write them. Then you follow a sentence through all thirty blocks.

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

today = day(7)
today.picture("one-block")

# %% [markdown]
# ## Why it matters
#
# Parts that are each right can still be joined wrongly, and the result runs. A norm in another
# place, an addition to the wrong tensor: the shapes all fit. The model then speaks nonsense or,
# worse, speaks almost as well as before.
#
# The way the parts are joined is also why deep models can be trained at all. Look at the thick line
# in the picture: nothing stands on it but two additions.

# %%
today.glossary("residual stream", "decoder block", "pre-norm", "layer", "hook")

# %% [markdown]
# ## A stream and two readers
#
# A token enters as a vector of 576 numbers, and a vector of 576 numbers travels through the whole
# model: the **residual stream**. A block never replaces it. Attention reads it and adds something;
# the MLP reads the sum and adds something:
#
# $$ x \leftarrow x + \text{attention}(\text{norm}_1(x)) $$
# $$ x \leftarrow x + \text{MLP}(\text{norm}_2(x)) $$
#
# Three things to get right:
#
# - **The norm is for reading.** Each part gets a normed copy; the stream itself stays as it is. This
#   is called **pre-norm**. The Transformer of 2017 normed the sum instead (post-norm), and deep
#   stacks of it were hard to train.
# - **The MLP reads what attention has just added**, and adds to that.
# - **There are two norms, and one has a misleading name.** `post_attention_layernorm` stands after
#   attention, so it is the norm *before* the MLP.
#
# Fetch the material: the parts you have built, the real weights, and the oracle's first block with
# what went in and what came out.

# %%
import torch

from nanoserve import load_tokenizer
from nanoserve.config import ModelConfig, load_config
from nanoserve.fetch import resolve
from nanoserve.layers import Cache, gqa_attention, rms_norm, rope_tables, swiglu  # Cache: Day 11
from nanoserve.oracle import load_oracle
from nanoserve.weights import load_weights

config, tokenizer = load_config(resolve("smollm2")), load_tokenizer("smollm2")
weights = load_weights(resolve("smollm2"), config)


def layer_weights(i: int) -> dict[str, torch.Tensor]:
    start = f"model.layers.{i}."
    return {n.removeprefix(start): w for n, w in weights.items() if n.startswith(start)}


for name, weight in sorted(layer_weights(0).items()):
    print(f"{name:32} {list(weight.shape)}")

# %% [markdown]
# Nine tensors, 3.5 million numbers: that is a block.
#
# ## Your turn: `block`
#
# You have these, and they are all you need:
#
# | call | gives |
# | --- | --- |
# | `rms_norm(x, weight, config.norm_eps)` | a normed copy of x |
# | `gqa_attention(normed, layer, cos, sin, config, cache, index)` | what attention adds |
# | `swiglu(normed, gate, up, down)` | what the MLP adds |
#
# `layer` is the dictionary above. `cache` and `index` are handed on to attention and used on Day 11.
# Leave the caller's `x` unchanged: `x = x + ...`, not `x += ...`.


# %%
def block(x, layer, cos, sin, config, cache=None, index=0):
    """One decoder block: x [batch, seq, hidden] -> the same shape."""
    raise NotImplementedError("your turn")


today.check(block)

# %% [markdown]
# If a case fails, `today.hint()` looks at that one. Attention and the MLP are each switched off once,
# so that you can see which half is at fault.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/layers.py: block
def block(
    x: torch.Tensor,
    layer: dict[str, torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    config: ModelConfig,
    cache: Cache | None = None,
    index: int = 0,
) -> torch.Tensor:
    """One decoder block: x + attention(norm(x)), then x + MLP(norm(x)).

    x [batch, seq, hidden] -> the same shape; the other arguments are gqa_attention's.
    """
    normed = rms_norm(x, layer["input_layernorm.weight"], config.norm_eps)
    x = x + gqa_attention(normed, layer, cos, sin, config, cache, index)
    normed = rms_norm(x, layer["post_attention_layernorm.weight"], config.norm_eps)
    names = ("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")
    return x + swiglu(normed, *(layer[name] for name in names))


# %% [markdown]
# ## Prove it
#
# The gate: the oracle's layer 0, from what went in to what came out.

# %%
text = "The old lighthouse keeper climbed the stairs every evening and lit the lamp."
ids = torch.tensor([tokenizer.encode(text)])
oracle = load_oracle("smollm2")
layers = [f"model.layers.{i}" for i in range(config.num_layers)]
parts = [f"{name}.{part}" for name in layers for part in ("self_attn", "mlp")]
seen = oracle.capture(ids, layers + parts)
cos, sin = rope_tables(config, ids.shape[1])

first = seen["model.layers.0"]
difference = (block(first.input, layer_weights(0), cos, sin, config) - first.output).abs().max()
share = float(difference / first.output.abs().max())
print(f"largest difference below 1e-5 of the largest number: {share < 1e-5}")
assert share < 1e-5

# %% [markdown]
# One block may agree by luck. Here are all thirty, each fed with the oracle's own input. The stream
# grows on its way, as you will see in a moment, so the measure stays relative.

# %%
worst = 0.0
for i, name in enumerate(layers):
    ours = block(seen[name].input, layer_weights(i), cos, sin, config)
    apart = (ours - seen[name].output).abs().max() / seen[name].output.abs().max()
    worst = max(worst, float(apart))
print(f"{len(layers)} blocks, largest relative difference below 1e-5: {worst < 1e-5}")

# %% [markdown]
# ### What a mistake would cost
#
# Would you notice without an oracle? Here are three wrong blocks, each a plausible slip. They take
# the place of the right one in **one** layer of thirty, and the model finishes a sentence.


# %%
def side_by_side(x, layer, cos, sin, config, cache=None, index=0):
    """The MLP reads x as it was before attention."""
    return (
        x
        + attention(x, layer, "input", cos, sin, config, cache, index)
        + mlp(x, layer, "post_attention")
    )


def norms_swapped(x, layer, cos, sin, config, cache=None, index=0):
    x = x + attention(x, layer, "post_attention", cos, sin, config, cache, index)
    return x + mlp(x, layer, "input")


def post_norm(x, layer, cos, sin, config, cache=None, index=0):
    x = x + attention(x, layer, None, cos, sin, config, cache, index)
    x = rms_norm(x, layer["input_layernorm.weight"], config.norm_eps)
    x = x + mlp(x, layer, None)
    return rms_norm(x, layer["post_attention_layernorm.weight"], config.norm_eps)


def normed(x, layer, norm):
    return rms_norm(x, layer[f"{norm}_layernorm.weight"], config.norm_eps) if norm else x


def attention(x, layer, norm, *rest):
    return gqa_attention(normed(x, layer, norm), layer, *rest)


def mlp(x, layer, norm):
    names = ("gate", "up", "down")
    return swiglu(normed(x, layer, norm), *(layer[f"mlp.{name}_proj.weight"] for name in names))


# %% tags=["nbval-ignore-output"]
from unittest.mock import patch

from nanoserve import LLM, SamplingParams

llm, answers = LLM("smollm2"), {}
for wrong in (block, side_by_side, norms_swapped, post_norm):

    def mixed(x, layer, cos, sin, config, cache=None, index=0, wrong=wrong):
        chosen = wrong if index == 15 else block
        return chosen(x, layer, cos, sin, config, cache, index)

    with patch("nanoserve.model.block", mixed):
        [answer] = llm.generate("The capital of France is", SamplingParams(max_tokens=8))
    answers[wrong.__name__] = answer.text
    print(f"{wrong.__name__:14}{answer.text!r}")
assert answers["side_by_side"].startswith(" Paris") and answers["post_norm"] != answers["block"]

# %% [markdown]
# Two of them are loud. `side_by_side` is silent: a wrong block, and the same sentence. What would the
# gate have said to it?

# %%
name = "model.layers.15"
for candidate in (block, side_by_side, norms_swapped, post_norm):
    out = candidate(seen[name].input, layer_weights(15), cos, sin, config)
    added = seen[name].output - seen[name].input
    off = float((out - seen[name].output)[0, 1:].norm() / added[0, 1:].norm())
    print(f"{candidate.__name__:14} off by {off:4.1f} times what the block adds")

# %% [markdown]
# That is why this course compares numbers and does not read answers.
#
# ## Measure it: how the stream grows
#
# Thirty blocks, two additions each, and no norm on the stream itself. How long does a token's vector
# get? (The length of a vector is the root of the sum of its squares.)

# %%
today.predict(
    "growth",
    "How many times longer is a token's vector after block 30 than before block 1?",
    guess=None,
)

# %%
stream = torch.stack([first.input[0], *(seen[name].output[0] for name in layers)])  # [31, seq, 576]
lengths = stream.norm(dim=-1)
others = lengths[:, 1:].median(-1).values  # the median of all tokens but the first
growth = float(others[-1] / others[0])
print(f"tokens after the first: {growth:.0f} times as long")

# %%
from nanoserve.course.plots import COLOURS, figure, line, prediction_marker

fig, ax = figure(xlabel="blocks passed", ylabel="length of the vector", title="The residual stream")
ax.set(yscale="log", xlim=(-1, 37), xticks=range(0, 31, 5))
line(ax, range(31), others.tolist(), "the others", COLOURS["engine"])
line(
    ax, range(31), lengths[:, 0].tolist(), f'"{tokenizer.decode([int(ids[0, 0])])}"', COLOURS["ink"]
)
if guess := today.guess("growth"):
    prediction_marker(ax, 30, guess * float(others[0]), where="below")
fig

# %% [markdown]
# The pink line: block 1 makes the vector some twenty times longer, which is to say that a token's
# embedding is soon only a small part of the stream. Then it grows steadily, as each block adds to what
# it finds. A late block has to speak louder to be heard.
#
# The norms make this bearable. A part reads a normed copy, so it never sees how long the stream is,
# only where it points:

# %%
x, layer = seen["model.layers.15"].input, layer_weights(15)
once, hundredfold = (mlp(scale * x, layer, "post_attention") for scale in (1, 100))
print(
    "the MLP says the same of x and of 100 x:",
    float((once - hundredfold).abs().max() / once.abs().max()) < 1e-3,
)

# %% [markdown]
# And the black line? That is "The", the first token, on which yesterday's attention came to rest.
# Block 12 (layer 11, counted from 0) makes its vector more than a hundred times as long as any other.
# Who did that, and where?

# %%
by_part = {
    part: seen[f"model.layers.11.{part}"].output[0, 0].norm() for part in ("self_attn", "mlp")
}
squares = stream[12, 0].square() / stream[12, 0].square().sum()
print("added most:", max(by_part, key=by_part.get))
print(
    f"number {int(squares.argmax())} of 576 holds {100 * squares.max():.0f} % of the squared length"
)

# %% [markdown]
# One MLP writes one huge number into the stream of the first token, and the last two blocks take most
# of it out. After the norm such a vector is the same whatever the text says: a fixed landmark, easy
# for every later head to find. (Compare yesterday's plot: where the black line dips, in layers 10
# and 11, the sink is gone too.) Such **massive activations** are known from much larger models
# too (Sun et al. 2024). They are also why careless rounding to few bits ruins a model: this one
# number sets the scale, and the rest is rounded away.
#
# What the plot does not show: one sentence, one small model. Length says nothing about meaning; a
# short addition in the right direction can decide the next word.
#
# ## With your own code
#
# Your block, if it passed, thirty times over:

# %% tags=["nbval-ignore-output"]
with today.mine():
    [answer] = llm.generate("The capital of France is", SamplingParams(max_tokens=6))
print(answer.text)
assert answer.text.startswith(" Paris")

# %% [markdown]
# ## What you learned
#
# 1. **A block adds, it never replaces.** The stream runs from the embedding to the head untouched
#    but for two additions a block.
# 2. **Norm the copy, not the stream.** Parts see where the stream points and not how long it is.
# 3. **A wrong block can speak perfect English.** Only numbers, compared one by one, can tell.
#
# ## Tomorrow
#
# Thirty blocks in a row, an embedding before them, a norm and one large matrix behind: on Day 8 ids
# go in and logits come out, and the model is whole.
#
# **In one paragraph.** We joined the parts: norm, attention, add; norm, MLP, add. All thirty blocks
# agree with the oracle's. Then we joined them wrongly on purpose, and one of the wrong models went on
# talking as if nothing had happened. Following a sentence through the blocks we saw its vectors grow
# several hundredfold, and one block write an enormous number into the first token, on which
# attention likes to rest.
