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
# **Today** you join norm, attention and MLP into one decoder block. It takes four lines of code, and
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
# Right parts can be joined wrongly, and the result still runs. Put a norm in another place, or add
# to the wrong tensor: all shapes fit. The model then writes nonsense or, worse, almost the same
# text as before.
#
# The way the parts are joined is also one reason why deep models can be trained. Look at the thick
# line in the picture: there is nothing on it but two additions.

# %%
today.glossary("residual stream", "decoder block", "pre-norm", "layer", "hook")

# %% [markdown]
# ## A stream and two readers
#
# A token enters as a vector of 576 numbers, and a vector of 576 numbers runs through the whole
# model: the **residual stream**. A block never replaces it. Attention reads the stream and adds
# its result; then the MLP reads the sum and adds its own:
#
# $$ x \leftarrow x + \text{attention}(\text{norm}_1(x)) $$
# $$ x \leftarrow x + \text{MLP}(\text{norm}_2(x)) $$
#
# Three things to get right:
#
# - **Norm a copy.** Attention and the MLP each read a normed copy; the stream itself is not normed.
#   This is called **pre-norm**. The Transformer of 2017 normed the sum instead (post-norm), and deep
#   stacks of it were hard to train.
# - **The MLP reads the sum that attention has made**, and adds to that sum.
# - **There are two norms, and one has a misleading name.** `post_attention_layernorm` stands after
#   attention, so it is the norm *before* the MLP.
#
# Here is the material: the parts that you have built, and the real weights.

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
# Nine tensors, 3.5 million numbers: these are the weights of one block.
#
# ## Your turn: `block`
#
# These three calls are all you need:
#
# | call | returns |
# | --- | --- |
# | `rms_norm(x, weight, config.norm_eps)` | a normed copy of x |
# | `gqa_attention(normed, layer, cos, sin, config, cache, index)` | the result of attention, to be added |
# | `swiglu(normed, gate, up, down)` | the result of the MLP, to be added |
#
# `layer` is the dictionary above. Pass `cache` and `index` on to attention; Day 11 uses them.
# Leave the caller's `x` unchanged: `x = x + ...`, not `x += ...`.
#
# After a kernel restart, run the cells above first (Run → Run All Above Selected Cell).


# %%
def block(x, layer, cos, sin, config, cache=None, index=0):
    """One decoder block: x [batch, seq, hidden] -> the same shape."""
    raise NotImplementedError("your turn")


today.check(block)

# %% [markdown]
# If a case fails, `today.hint()` helps. In one case attention adds nothing and in one the MLP adds
# nothing, so you can see which half is wrong.
#
# The cell below holds the package's version; from here on this notebook uses it.


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
# First the oracle's layer 0: give our block the oracle's input, and compare the outputs. The lengths
# of the vectors differ widely, as you will see in a moment, so the measure is relative. For each
# token: the largest difference, as a share of the largest number in that token's vector.

# %%
text = "The old lighthouse keeper climbed the stairs every evening and lit the lamp."
ids = torch.tensor([tokenizer.encode(text)])
oracle = load_oracle("smollm2")
layers = [f"model.layers.{i}" for i in range(config.num_layers)]
parts = [f"{name}.{part}" for name in layers for part in ("self_attn", "mlp")]
seen = oracle.capture(ids, layers + parts)
cos, sin = rope_tables(config, ids.shape[1])


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference in a token's vector, as a share of its largest number."""
    return float(((ours - theirs).abs().amax(-1) / theirs.abs().amax(-1)).max())


first = seen["model.layers.0"]
off = apart(block(first.input, layer_weights(0), cos, sin, config), first.output)
print(f"layer 0, relative difference below 1e-5: {off < 1e-5}")
assert off < 1e-5

# %% [markdown]
# One block could agree by luck. Here are all thirty, each with the oracle's own input.

# %%
worst = 0.0
for i, name in enumerate(layers):
    ours = block(seen[name].input, layer_weights(i), cos, sin, config)
    worst = max(worst, apart(ours, seen[name].output))
print(f"{len(layers)} blocks, relative difference below 1e-5: {worst < 1e-5}")
assert worst < 1e-5

# %% [markdown]
# ### What a mistake would cost
#
# Would you notice a wrong block without an oracle? Here are three, each a plausible slip. Each one
# replaces the right block in **one** layer of thirty, and the model continues a sentence.


# %%
def side_by_side(x, layer, cos, sin, config, cache=None, index=0):
    """The MLP reads x from before attention."""
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
assert answers["side_by_side"].startswith(" Paris")
assert not any(answers[name].startswith(" Paris") for name in ("norms_swapped", "post_norm"))

# %% [markdown]
# Two of the mistakes are easy to see: the answer is no longer Paris. With `side_by_side` it still is.
# Here are the numbers of the same four blocks, compared with the oracle's:

# %%
name = "model.layers.15"
added = seen[name].output - seen[name].input
for candidate in (block, side_by_side, norms_swapped, post_norm):
    out = candidate(seen[name].input, layer_weights(15), cos, sin, config)
    off = float((out - seen[name].output)[0, 1:].norm() / added[0, 1:].norm())
    print(f"{candidate.__name__:14} off by {off:4.1f} times what the block adds")
    assert off < 1e-3 if candidate is block else off > 0.5

# %% [markdown]
# Even `side_by_side`, which still says Paris, is off by more than half of what a right block adds.
# That is why this course compares numbers, and does not judge by answers.
#
# ## Measure it: how the stream grows
#
# Thirty blocks, two additions each, and no norm on the stream itself. How long does a token's vector
# become? (The length of a vector is the root of the sum of its squares.)

# %%
today.predict(
    "growth",
    "How many times longer is a token's vector after block 30 than before block 1?",
    guess=None,
    low=0,
    high=100_000,
)

# %%
stream = torch.stack([first.input[0], *(seen[name].output[0] for name in layers)])  # [31, seq, 576]
lengths = stream.norm(dim=-1)
others = lengths[:, 1:].median(-1).values  # the median of all tokens but the first
growth = float(others[-1] / others[0])
print(f"tokens after the first: {growth:.0f} times as long")
assert 100 < growth < 1_000
assert others[1] / others[0] > 10 and (others[2:] / others[1:-1]).max() < 2
assert lengths[12, 0] > 100 * lengths[12, 1:].max()

# %% jupyter={"source_hidden": true}
# Draws the plot: The residual stream
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
# Look at "the others". Block 1 makes their vectors more than ten times as long, so a token's embedding
# is soon a small part of its stream. After that the length grows slowly: no later block makes it
# twice as long. To change the direction of a long vector, a late block must add a long one.
#
# The norms keep this under control. Attention and the MLP read a normed copy, so the length of the
# stream hardly matters to them, only its direction:

# %%
x, layer = seen["model.layers.15"].input, layer_weights(15)
once, hundredfold = (mlp(scale * x, layer, "post_attention") for scale in (1, 100))
same = float((once - hundredfold).abs().max() / once.abs().max()) < 1e-3
print("the MLP gives the same for x and for 100 x, to 0.1%:", same)
assert same

# %% [markdown]
# The other line is "The", the first token: Day 6's attention sink. Block 12 (layer 11, counted from 0)
# makes its vector more than a hundred times as long as any other. Which part did it, and where in the
# vector?

# %%
by_part = {
    part: seen[f"model.layers.11.{part}"].output[0, 0].norm() for part in ("self_attn", "mlp")
}
squares = stream[12, 0].square() / stream[12, 0].square().sum()
most = max(by_part, key=by_part.get)
print("added most:", most)
print(
    f"number {int(squares.argmax())} of 576 holds {100 * squares.max():.0f} % of the squared length"
)
drop = float(lengths[28, 0] / lengths[30, 0])
print(f"before the last two blocks that vector is {drop:.1f} times as long as after them")
assert most == "mlp" and squares.max() > 0.9 and drop > 2

# %% [markdown]
# One MLP adds one huge number to the stream of the first token, and the last two blocks remove more
# than half of it. After the norm such a vector is nearly the same whatever the text is: a fixed landmark that
# every later head can find. Such **massive activations** are known from much larger models too (Sun
# et al. 2024). They also explain why careless rounding to few bits ruins a model: this one number
# sets the scale, and all other numbers are rounded to 0.
#
# The limits of this plot: it shows one sentence and one small model. And length is not meaning; a
# short addition in the right direction can decide the next word.
#
# ## With your own code
#
# If your `block` passed its check, the engine runs it now, in all thirty layers:

# %% tags=["nbval-ignore-output"]
with today.mine():
    [answer] = llm.generate("The capital of France is", SamplingParams(max_tokens=6))
print(answer.text)
assert answer.text.startswith(" Paris")

# %% [markdown]
# ## What you learned
#
# 1. **A block adds and never replaces.** From the embedding to the head, only two additions a block
#    change the stream.
# 2. **Norm the copy, not the stream.** Attention and the MLP depend on the direction of the stream,
#    and hardly on its length.
# 3. **A wrong block can write perfect English.** Compare numbers to find it.
#
# ## Tomorrow
#
# Put an embedding before thirty blocks, and a norm and one large matrix after them: on Day 8 ids go
# in, logits come out, and the model is complete.
#
# **In one paragraph.** We joined the parts: norm, attention, add; norm, MLP, add. All thirty blocks
# agree with the oracle's. Then we joined them wrongly on purpose, and one of the wrong models still
# gave the right answer. We followed a sentence through the blocks: its vectors grew more than a
# hundredfold, and one block added an enormous number to the first token's.
