# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Day 5 · SwiGLU
#
# Week 2 · Phase 0, foundations · you need: Day 1 (the oracle), Day 2 (weights by name)
#
# **Today** you write the MLP: two lines of code that use three quarters of a block's weights. Then
# you break it on purpose, and measure how many of its numbers the answer needs.

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

today = day(5)
today.picture("swiglu")

# %% [markdown]
# ## Why it matters
#
# A block has two parts. Attention, tomorrow, combines tokens. The **MLP** works on each token
# alone: it widens the token's vector from 576 numbers to 1,536, applies a curved function to them,
# and brings them back to 576. Much of what a model knows is thought to be stored here, and most of
# its weights are here: count them by name.

# %%
from math import prod

from nanoserve import load_model, load_tokenizer
from nanoserve.weights import expected_shapes

model, tokenizer = load_model("smollm2"), load_tokenizer("smollm2")
config, start = model.config, "model.layers.0."
shapes = {n.removeprefix(start): s for n, s in expected_shapes(config).items() if start in n}
NAMES = ["mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"]
of_block = {name: prod(shapes[name]) / sum(map(prod, shapes.values())) for name in NAMES}
for name, share in of_block.items():
    print(f"{name:22} {list(shapes[name])!s:13} {share:.0%} of the block")
assert 0.74 < sum(of_block.values()) < 0.76

# %% [markdown]
# ## The words of the day

# %%
today.glossary()

# %% [markdown]
# ## A gate
#
# A product of two matrices is a matrix, so two matrices with nothing between them are no better
# than one. A function that is not a straight line must stand between them: an **activation
# function**. The first transformers used ReLU, which gives 0 below zero. A **gated** MLP (Dauphin
# et al. 2016) makes two vectors side by side, and one decides how much of the other passes. With
# SiLU as the activation function, the gated MLP is called **SwiGLU** (Shazeer 2020):
#
# $$\text{out} = W_\text{down}\,\big(\text{silu}(W_\text{gate}\,x) \odot W_\text{up}\,x\big)
# \qquad \text{silu}(z) = z \cdot \text{sigmoid}(z)$$
#
# where $\odot$ multiplies number by number. Shazeer tried several activation functions, and SwiGLU
# did well. He wrote about the reason: "We offer no explanation as to why these architectures seem
# to work; we attribute their success, as all else, to divine benevolence."
#
# What do real gates look like? Take the text below, and what goes into the MLP of layer 12.

# %%
from functools import cache

import torch
import torch.nn.functional as F

from nanoserve.oracle import load_oracle

oracle = load_oracle("smollm2")
text = (
    "The tide comes in twice a day. When the moon stands over the ocean, its gravity pulls the "
    "water towards it, and a bulge of water follows the moon around the Earth. As the Earth turns, "
    "each coast passes through two bulges, and so most harbours see two high tides every day."
)
ids = torch.tensor([tokenizer.encode(text)])
mlps = [f"model.layers.{i}.mlp" for i in range(config.num_layers)]
seen = oracle.capture(ids, mlps)
x = seen[mlps[12]].input
z = F.linear(x, model.layers[12]["mlp.gate_proj.weight"])
print(list(x.shape), "->", list(z.shape))
print(f"share of gates between -0.3 and 0.3: {(F.silu(z).abs() < 0.3).float().mean():.1f}")

# %% jupyter={"source_hidden": true}
# Draws the plot: silu, and how often each z occurs
from nanoserve.course.plots import COLOURS, figure, label_line, prediction_marker

fig, ax = figure(xlabel="z, a number of gate x", ylabel="silu(z)")
counts, edges = torch.histogram(z.flatten(), bins=80, range=(-4.0, 4.0))
bars = 3 * counts / counts.max()
ax.bar(edges[:-1], bars, width=0.1, align="edge", color=COLOURS["oracle"], alpha=0.35)
grid = torch.linspace(-4, 4, 200)
ax.plot(grid, F.silu(grid), color=COLOURS["engine"])
label_line(ax, 2.6, float(F.silu(torch.tensor(2.6))), "silu", COLOURS["engine"], "left")
ax.text(-1.3, 2.2, "how often z occurs", color=COLOURS["oracle"], ha="right", fontweight="bold")
fig

# %% [markdown]
# Most gates of this layer are nearly closed: the curve is close to zero under the tall bars. It is
# not zero: below zero, silu dips to −0.28 and comes back, and the model was trained with that
# curve.
#
# ## Your turn: `swiglu`
#
# | | shape | |
# | --- | --- | --- |
# | `x` | `[..., hidden]` | any axes before the last |
# | `gate`, `up` | `[intermediate, hidden]` | a Linear's weight is `[out, in]`, so `F.linear(x, gate)` |
# | `down` | `[hidden, intermediate]` | the same |
# | out | `[..., hidden]` | |
#
# `torch.nn.functional` is imported as `F`, and it has a `silu`. Or write $z \cdot
# \text{sigmoid}(z)$ yourself. Leave `x` unchanged. Stuck? `today.hint()` gives a hint about your
# mistake.
#
# After a kernel restart, run the cells above first (Run → Run All Above Selected Cell).


# %%
def swiglu(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """The gated MLP, down(silu(gate x) * up x), without biases."""
    raise NotImplementedError("your turn")


today.check(swiglu)

# %% [markdown]
# ## The MLP that lands
#
# The cell below holds the package's version; from here on this notebook uses it. It differs from
# the formula in two ways:
#
# - SiLU and the product happen in place, in a tensor that this function has just made and that
#   nothing else refers to. `x` belongs to the caller and stays unchanged.
# - The engine calls `linear` for every matrix. For several rows of `x`, that is `F.linear`. Every
#   token after the prompt is a single row, and for a single row PyTorch also has a matrix-vector
#   routine. Both compute the same sum. Which of them is faster depends on dtype and processor, and
#   `linear` chooses by both. (Day 32 gives `linear` one more kind of weight. A cell that begins with
#   `# until day` holds the form until that day.)


# %% jupyter={"source_hidden": true}
# until day 32: lands in nanoserve/layers.py: linear
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., in] times weight [out, in], plus bias [out] -> [..., out].

    A single row, as in a decode step, is multiplied by torch.mv, a matrix-vector routine. For
    bfloat16 on a CPU with bfloat16 products, F.linear is faster and is used instead.
    """
    if x.numel() > x.shape[-1] or (x.dtype == torch.bfloat16 and _bfloat16_products()):
        return F.linear(x, weight, bias)
    out = torch.mv(weight, x.flatten())
    return (out if bias is None else out + bias).view(*x.shape[:-1], -1)


# %% jupyter={"source_hidden": true}
# lands in nanoserve/layers.py: _bfloat16_products, swiglu
@cache
def _bfloat16_products() -> bool:
    """Whether this CPU has instructions for products of bfloat16: avx512_bf16 or AMX.

    On such a CPU, F.linear takes 0.6 to 0.9 times as long as torch.mv for SmolLM2's shapes (torch
    2.13; 13.0 and 22.6 ms for all products of a decode step). With oneDNN limited to AVX2, the
    ratio is 1.0 to 1.15. In float32 and float16, both take the same time.
    """
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)  # a CPU with AMX has it too
    return supported is not None and supported()


def swiglu(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """The gated MLP, down(silu(gate x) * up x) (Shazeer 2020, section 2).

    x [..., hidden]; gate, up [intermediate, hidden]; down [hidden, intermediate] -> [..., hidden].
    """
    h = F.silu(linear(x, gate), inplace=True)  # in place: nothing else refers to this tensor
    return linear(h.mul_(linear(x, up)), down)


# %% [markdown]
# ## Prove it
#
# The oracle's hooks have kept what went into all thirty MLPs, and what came out. Each difference is
# compared with the largest value of its layer.


# %%
def gap(i: int, mlp) -> float:
    """The largest difference from the oracle in layer i, as a share of its largest value."""
    theirs = seen[mlps[i]].output
    ours = mlp(seen[mlps[i]].input, *(model.layers[i][name] for name in NAMES))
    return float((ours - theirs).abs().max() / theirs.abs().max())


gaps = [gap(i, swiglu) for i in range(30)]
print("all 30 layers within 1e-5 of their largest value:", max(gaps) < 1e-5)
assert max(gaps) < 1e-5

# %% [markdown]
# ## Break it
#
# Would this proof notice a mistake? Here are two that raise no error, since every shape is right:
# gate and up swapped, and GELU instead of SiLU, whose curve is similar. (`patch` replaces a
# function of a module until its `with` block ends.)

# %%
from unittest.mock import patch

from nanoserve import LLM, SamplingParams


def swapped(x, gate, up, down):
    return swiglu(x, up, gate, down)


def geglu(x, gate, up, down):
    return F.linear(F.gelu(F.linear(x, gate)) * F.linear(x, up), down)


llm, prompts = LLM("smollm2"), ["The capital of France is", "Water boils at"]
for name, mlp in {"right": swiglu, "swapped": swapped, "gelu": geglu}.items():
    outside = sum(gap(i, mlp) > 1e-5 for i in range(30))
    print(f"{name:8} outside 1e-5 in {outside} of 30 layers")
    assert outside == (0 if name == "right" else 30)
    if name != "swapped":
        with patch("nanoserve.layers.swiglu", mlp):
            answers = llm.generate(prompts, SamplingParams(max_tokens=7))
        for prompt, answer in zip(prompts, answers, strict=True):
            print(f"         {prompt + answer.text!r}")

# %% [markdown]
# With gate and up swapped the model wrote nonsense when we tried it, and you would notice.
# With GELU it still says Paris, in good English, and gives a wrong temperature for boiling water.
# The comparison with the oracle finds both mistakes in every layer.
#
# ## Measure it: how many units carry the answer?
#
# A closed gate contributes almost nothing. So how many of the 1,536 **hidden units** does a token
# need? An experiment: in every layer, for every token, keep the units with the largest products and
# set the others to zero. Then compare the model's choice of the next token with its choice before.
#
# Guess for one case: half of the units are kept, the 768 largest of 1,536.

# %%
ask = "In what share of places is the next token still the same? (0 to 1)"
today.predict("same", ask, guess=None, low=0, high=1)


# %%
def thinned(share: float, largest: bool):
    """An MLP that keeps a share of its hidden units: the largest of each token, or any."""
    random = torch.Generator().manual_seed(0)

    def mlp(x, gate, up, down):
        h = F.silu(F.linear(x, gate)) * F.linear(x, up)
        rank = h.abs() if largest else torch.rand(h.shape, generator=random)
        kept = rank.topk(int(share * h.shape[-1]), dim=-1).indices
        return F.linear(torch.zeros_like(h).scatter(-1, kept, h.gather(-1, kept)), down)

    return mlp


def choices(mlp) -> torch.Tensor:
    """The most likely next token at each position, with this MLP in every layer."""
    with patch("nanoserve.layers.swiglu", mlp):
        return model(ids)[0].argmax(-1)


# %% tags=["nbval-ignore-output"]
shares = [3 / 4, 1 / 2, 1 / 4, 1 / 8]
right = choices(swiglu)
same = {
    largest: [float((choices(thinned(s, largest)) == right).float().mean()) for s in shares]
    for largest in (True, False)
}
print(f"half kept: {same[True][1]:.2f} the same with the largest, {same[False][1]:.2f} with any")
assert same[True][1] > 0.7 and same[False][1] < 0.3

# %%
fig, ax = figure(xlabel="share of the hidden units kept", ylabel="next tokens that stay the same")
ax.plot([1, *shares], [1, *same[True]], color=COLOURS["engine"], marker="o")
label_line(ax, 0.3, 0.6, "the largest of each token", COLOURS["engine"], "right")
ax.plot([1, *shares], [1, *same[False]], color=COLOURS["muted"], marker="o")
label_line(ax, shares[0], same[False][0], "any, at random", COLOURS["muted"], "right")
prediction_marker(ax, 0.5, today.guess("same"))
ax.set(xlim=(0, 1.05), ylim=(-0.03, 1.05))
fig

# %% [markdown]
# Without the smaller half of the units, most of the next tokens stay the same. Without a random
# half, most of them change.
#
# Can an engine skip half of the work, then? Not easily. To find the small products, it must first
# multiply with `gate` and with `up`. It could then leave out only a part of `down`, if skipping
# columns were cheap. There is research on predicting the small units beforehand (Liu et al. 2023,
# "Deja Vu"). It works best on ReLU models, where a closed gate is exactly zero. The plot shows one
# English text of 61 tokens. It does not show how much the changed tokens change the meaning.
#
# ## Your answer is the engine
#
# If your `swiglu` passed, the engine runs it here in all thirty layers; the last line says how
# often it was called.

# %% tags=["nbval-ignore-output"]
with today.mine() as calls:
    [answer] = llm.generate("Water boils at", SamplingParams(max_tokens=7))
print("Water boils at" + answer.text)
assert answer.text.startswith(" 100°C")
assert all(calls.values())  # yours was called, if it ran

# %% [markdown]
# ## What you learned
#
# 1. **Most weights are in the MLP.** Three matrices, three quarters of every block, one token at a
#    time.
# 2. **A gate multiplies.** One of two widened vectors decides how much of the other passes.
# 3. **A model with a wrong curve still says Paris.** A comparison of numbers finds the difference;
#    the text hardly does.
#
# ## Tomorrow
#
# So far every token was processed alone. Day 6 combines them: nine query heads, three KV heads, and
# a mask that hides the future.
#
# **In one paragraph.** The MLP makes two widened vectors from each token's vector, applies SiLU to
# one, multiplies it with the other, and brings the result back. That is two lines of code and three
# quarters of a block's weights. I matched the oracle in all thirty layers. With GELU instead of
# SiLU the model still knew Paris, but not the temperature at which water boils. And the larger half
# of the hidden units decides most of the next tokens, but only the finished products show which
# half that is.
