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
# **Today** you write the MLP, two lines that use three quarters of a block's weights. Then you break
# it on purpose, and find out how few of its numbers carry the answer.

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
# A block has two parts. Attention, tomorrow, brings tokens together. The **MLP** works on each token
# alone: it widens the token's vector from 576 numbers to 1,536, bends them, and brings them back to
# 576. Much of what a model knows is kept here, and most of its weights are: count them by name.

# %%
from nanoserve import load_model, load_tokenizer

model, tokenizer = load_model("smollm2"), load_tokenizer("smollm2")
config, layer = model.config, model.layers[0]
total = sum(weight.numel() for weight in layer.values())
NAMES = ["mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"]
for name in NAMES:
    print(
        f"{name:22} {list(layer[name].shape)!s:13} {layer[name].numel() / total:.0%} of the block"
    )

# %% [markdown]
# ## The words of the day

# %%
today.glossary()

# %% [markdown]
# ## A gate
#
# Two matrices without anything between them are one matrix, since a product of matrices is a matrix.
# So something must bend. The MLPs of the first transformers bent every number with a ReLU, which
# cuts off below zero. A **gated** MLP (Dauphin et al. 2016) makes two vectors side by side, and lets
# one decide how much of the other passes. With SiLU as the activation function, the gated MLP is
# called **SwiGLU** (Shazeer 2020):
#
# $$\text{out} = W_\text{down}\,\big(\text{silu}(W_\text{gate}\,x) \odot W_\text{up}\,x\big)
# \qquad \text{silu}(z) = z \cdot \text{sigmoid}(z)$$
#
# where $\odot$ multiplies number by number. Shazeer tried many such pairs, this one did well, and
# about the reason he wrote: "We offer no explanation as to why these architectures seem to work; we
# attribute their success, as all else, to divine benevolence."
#
# What do real gates look like? Take the sentence below, and what goes into the MLP of layer 12.

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

# %%
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
# Most gates of this layer are nearly closed: the curve under the tall bars is close to zero. Nearly,
# though. Below zero, silu dips to −0.28 and comes back, and the model was trained with that dip.
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
# `torch.nn.functional` is there as `F`, and it has a `silu`. Or write $z \cdot \text{sigmoid}(z)$
# yourself. Stuck? `today.hint()` looks at the case that failed.


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
# Folded. It differs from the formula in two habits:
#
# - The two vectors of 1,536 are large beside the vector of 576, so SiLU and the product happen in
#   place, in a tensor that this function has just made and nobody else holds. `x` belongs to the
#   caller, and is left alone.
# - Every matrix of the engine is multiplied by `linear`. It is `F.linear` with one exception: when
#   `x` is a single row, as it will be for every token after the prompt, it calls `torch.mv`, a
#   matrix-vector product. The sum is the same. Which routine is faster in bfloat16 depends on the
#   processor: on one that multiplies bfloat16 numbers itself, `linear` stays with `F.linear`.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/layers.py: linear, _bfloat16_products, swiglu
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., in] times weight [out, in], plus bias [out] -> [..., out].

    A single row, as in a decode step, goes to torch.mv: the same sum by a matrix-vector routine.
    The exception is bfloat16 on a CPU with bfloat16 products, where F.linear is the faster one.
    """
    if x.numel() > x.shape[-1] or (x.dtype == torch.bfloat16 and _bfloat16_products()):
        return F.linear(x, weight, bias)
    out = torch.mv(weight, x.flatten())
    return (out if bias is None else out + bias).view(*x.shape[:-1], -1)


@cache
def _bfloat16_products() -> bool:
    """Whether this CPU multiplies bfloat16 without widening it first: avx512_bf16, or AMX.

    On such a CPU F.linear takes 0.6 to 0.9 of torch.mv's time for SmolLM2's shapes (torch 2.13;
    13.0 against 22.6 ms for all products of a decode step). With oneDNN held to AVX2 it takes 1.0
    to 1.15. In float32 and float16 the two take the same time.
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
# The oracle's hooks have kept what went into all thirty MLPs, and what came out. First layer 0, then
# all of them, each by its largest value.


# %%
def gap(i: int, mlp) -> float:
    """The largest difference from the oracle in layer i, as a share of its largest value."""
    theirs = seen[mlps[i]].output
    ours = mlp(seen[mlps[i]].input, *(model.layers[i][name] for name in NAMES))
    return float((ours - theirs).abs().max() / theirs.abs().max())


largest = float(seen[mlps[0]].output.abs().max())
print("layer 0, largest difference below 1e-5:", gap(0, swiglu) * largest < 1e-5)
print("all 30, below 1e-5 of the largest value:", max(gap(i, swiglu) for i in range(30)) < 1e-5)

# %% [markdown]
# ## Break it
#
# A gate is only as good as the test that can tell it from a wrong one. Two mistakes that raise
# nothing, since every shape is right: gate and up in each other's place, and GELU for SiLU, whose
# curve looks the same from a distance. (`patch` puts another function in a module's place for as long
# as its `with` lasts.)

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
    if name != "swapped":
        with patch("nanoserve.layers.swiglu", mlp):
            answers = llm.generate(prompts, SamplingParams(max_tokens=7))
        for prompt, answer in zip(prompts, answers, strict=True):
            print(f"         {prompt + answer.text!r}")

# %% [markdown]
# Swapped, the model writes rubbish (let it, if you like), and you would notice. With GELU it says
# Paris, in good English, and then tells you the temperature at which water boils. The gate says so
# at once, in numbers.
#
# ## Measure it: how many units carry the answer?
#
# A closed gate contributes nothing. So how many of the 1,536 **hidden units** does a token need? An
# experiment: in every layer, for every token, keep the units with the largest products and set the
# others to zero. Then see whether the model's choice of the next token is still the same.
#
# Guess for the middle case: half of the units are kept, 768 of 1,536, the largest ones.

# %%
today.predict(
    "same", "In what share of places is the next token still the same? (0 to 1)", guess=None
)


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
assert same[True][1] > 0.7 and same[False][1] < 0.4

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
# The half that is dropped was not idle, but it was quiet. Drop any half instead, and nearly nothing
# is left.
#
# Can an engine then skip half of the work? Not so fast. To know which products are small, both
# matrices have been multiplied already; only `down` could be spared, if its columns could be skipped
# cheaply. There is research on guessing the quiet units beforehand (Liu et al. 2023, "Deja Vu"), and
# it works best on ReLU models, where closed means zero. And the plot shows one English text of some
# sixty tokens. It says nothing about what the changed tokens cost the meaning.
#
# ## Your answer is the engine
#
# With your MLP in all thirty layers:

# %% tags=["nbval-ignore-output"]
with today.mine():
    [answer] = llm.generate("Water boils at", SamplingParams(max_tokens=7))
print("Water boils at" + answer.text)
assert answer.text.startswith(" 100°C")

# %% [markdown]
# ## What you learned
#
# 1. **The MLP is where the weights are.** Three matrices, three quarters of every block, one token
#    at a time.
# 2. **A gate multiplies.** One of two widened vectors decides how much of the other passes.
# 3. **A wrong curve still says Paris.** What looks the same from a distance is told apart by a
#    number, and by hardly anything else.
#
# ## Tomorrow
#
# So far no token has seen another. Day 6 lets them look: nine heads that ask, three that are asked,
# and a mask that hides the future.
#
# **In one paragraph.** The MLP makes two widened vectors of each token's, bends one with SiLU,
# multiplies it with the other, and brings the result back. That is two lines of code and three
# quarters of a block's weights. I matched the oracle in all thirty layers, then put in GELU for SiLU
# and got a model that knows Paris and boils its water at 211 degrees below zero. And I found that the louder
# half of the hidden units settles most of the next tokens, though one only knows which half once
# the work is done.
