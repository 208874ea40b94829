# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Day 18 · Freeze the target
#
# Week 5 · Phase 2, paged memory · you need: Day 6 (attention), Day 16 (Real keys in scattered blocks), Day 17 (Give it back)
#
# **Today** you write attention over scattered memory as plainly as possible, and then you promise never to
# change it again. This function is the oracle: every faster attention is compared with it. You also set the
# tolerance, how far a faster attention may differ from the oracle.

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

today = day(18)
today.picture("frozen-target")

# %% [markdown]
# ## Why it matters
#
# Soon you will write a kernel: attention that reads the blocks itself. The kernel adds the same numbers in
# another order, in tiles, and perhaps on a GPU. A wrong kernel need not crash. It can read another sequence's
# slot, or stop one key early, and return a vector that looks like any other vector.
#
# So the target comes before the kernel. If you write both at once, a mistake in one can hide a mistake in
# the other. First write down what attention **means** here, in the fewest lines. Prove that these lines are
# equal to the attention that you have trusted since Day 6, and freeze them.

# %%
today.glossary(
    "oracle", "slot mapping", "reference implementation", "tolerance", "byte-equal", "float16"
)

# %% [markdown]
# ## The arguments of paged attention
#
# All the work of Week 4 appears in these arguments:
#
# | argument | shape | meaning |
# | --- | --- | --- |
# | `q` | `[1, n_q, query_len, head_dim]` | this step's queries: the **last** `query_len` positions |
# | `k_pool`, `v_pool` | `[num_slots, n_kv, head_dim]` | one layer's memory, of all sequences |
# | `slot_mapping` | `[kv_len]` | the slot of each position, oldest first, this step's included |
# | `n_rep` | a number | `n_q // n_kv`: how many query heads share a KV head |
#
# One more argument, `scale`, has the default `head_dim ** -0.5`. There is no block table and no block size: a
# slot is `block_id * block_size + offset`, so it is an index into the pool already. Here is a small pool with
# blocks of 16 slots. A sequence of 37 tokens owns blocks 7, 2 and 5:

# %%
import torch

n_q, n_kv, head_dim, block_size = 9, 3, 64, 16  # SmolLM2's heads
generator = torch.Generator().manual_seed(18)
k_pool, v_pool = torch.randn(2, 10 * block_size, n_kv, head_dim, generator=generator)
slots = [block * block_size + offset for block in (7, 2, 5) for offset in range(block_size)]
slot_mapping = torch.tensor(slots[:37])
print("positions 0, 15, 16, 36 lie in slots", slot_mapping[[0, 15, 16, 36]].tolist())

# %% [markdown]
# One line of PyTorch fetches the keys, in the order of the text:

# %%
keys = k_pool[slot_mapping]
print(list(keys.shape), "position 16 is slot 32:", torch.equal(keys[16], k_pool[32]))

# %% [markdown]
# ## Your turn: `paged_attention_reference`
#
# Compute attention through the slot mapping. `sdpa` of Day 6 has the causal mask, the groups of heads and a
# softmax in float32 already. So:
#
# 1. If `n_q` is not `n_kv * n_rep`, raise a ValueError that names `n_rep`. A kernel will compute pointers from
#    `n_rep` and cannot check it, so this function checks it.
# 2. Gather keys and values by slot. Bring both to the shape `[1, n_kv, kv_len, head_dim]`, and make them
#    contiguous, as Day 11's strip is: then `sdpa` gets the same numbers in the same layout.
# 3. Call `sdpa`, and pass the scale on.
#
# Write it plainly. This function need not be fast, but a reader must be able to believe it. Stuck?
# `today.hint()` looks at the case that failed.
#
# After a kernel restart, run the cells above first (Run → Run All Above Selected Cell).

# %%
from nanoserve.layers import sdpa


# %%
def paged_attention_reference(q, k_pool, v_pool, slot_mapping, n_rep, scale=None):
    """Causal attention over keys and values that lie scattered in a pool.

    q [1, n_q, query_len, head_dim]; k_pool, v_pool [num_slots, n_kv, head_dim]; slot_mapping
    [kv_len] -> [1, n_q, query_len, head_dim].
    """
    raise NotImplementedError("your turn")


today.check(paged_attention_reference)

# %% [markdown]
# The cell below holds the package's version; from here on this notebook uses it. The cell begins with the
# tolerance, which this notebook needs soon.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/reference.py: ATOL, RTOL, tolerance, paged_attention_reference
ATOL, RTOL = 1e-5, 1e-4  # how far a float32 result may be from the oracle's


def tolerance(dtype: torch.dtype) -> tuple[float, float]:
    """(atol, rtol) for a backend's output in `dtype`, compared with the oracle on the same inputs.

    In float16 and bfloat16, both are two units of the dtype's precision (eps). With several
    queries, the oracle rounds queries, scores and weights to the dtype; a kernel may keep float32.
    With a single query, the oracle computes in float32 too.
    """
    if dtype == torch.float32:
        return ATOL, RTOL
    return 2 * torch.finfo(dtype).eps, 2 * torch.finfo(dtype).eps


def paged_attention_reference(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    n_rep: int,
    scale: float | None = None,
) -> torch.Tensor:
    """Causal attention over keys and values in the slots of a pool.

    q [1, n_q, query_len, head_dim]; k_pool, v_pool [num_slots, n_kv, head_dim]; slot_mapping
    [kv_len], the slot of each position, oldest first; the queries are the last query_len positions;
    n_rep = n_q // n_kv; scale defaults to head_dim ** -0.5 -> [1, n_q, query_len, head_dim].
    The result is torch.equal to sdpa over contiguous copies. Raises ValueError for a wrong n_rep.
    """
    n_q, n_kv = q.shape[1], k_pool.shape[1]
    if n_q != n_kv * n_rep:
        raise ValueError(f"n_rep {n_rep} does not fit {n_q} query heads and {n_kv} KV heads")
    # [kv_len, n_kv, head_dim] -> [1, n_kv, kv_len, head_dim]
    k, v = (pool[slot_mapping].transpose(0, 1).contiguous()[None] for pool in (k_pool, v_pool))
    return sdpa(q, k, v, scale)


# %% [markdown]
# ## Prove it: equal, not close
#
# The test is strict: the result must be `torch.equal` to `sdpa`, which `gqa_attention` uses, over keys and
# values that lie side by side. A loop copies these keys and values token by token, so it is independent of the
# gather above.


# %%
def contiguous(pool, slots):
    """[num_slots, n_kv, d] -> [1, n_kv, kv_len, d], one token after another."""
    return torch.stack([pool[slot] for slot in slots.tolist()], dim=1)[None].contiguous()


def a_case(query_len, blocks, kv_len, n_q=9, n_kv=3, poison=False):
    """(q, k_pool, v_pool, slot_mapping, n_rep) at random, the tokens lying in these blocks."""
    slots = [block * block_size + offset for block in blocks for offset in range(block_size)]
    slots = torch.tensor(slots[:kv_len])
    q = torch.randn(1, n_q, query_len, head_dim, generator=generator)
    k_pool, v_pool = torch.randn(2, 10 * block_size, n_kv, head_dim, generator=generator)
    if poison:
        foreign = torch.ones(len(k_pool), dtype=torch.bool)
        foreign[slots] = False
        k_pool[foreign] = v_pool[foreign] = torch.nan
    return q, k_pool, v_pool, slots, n_q // n_kv


# %%
cases = {
    "decode, 1 query": a_case(1, (7, 2, 5), 37),
    "decode, the very first token": a_case(1, (4,), 1),
    "prefill, 37 queries": a_case(37, (7, 2, 5), 37),
    "continuation, 5 queries": a_case(5, (7, 2, 5), 37),
    "blocks descending": a_case(5, (9, 8, 7), 48),
    "a full last block": a_case(1, (3, 6), 32),
    "MQA, one KV head": a_case(5, (0, 9, 1), 40, n_kv=1),
    "MHA, nine KV heads": a_case(5, (0, 9, 1), 40, n_kv=9),
}
for name, (q, k_pool, v_pool, slots, n_rep) in cases.items():
    for scale in (None, 0.5):
        side_by_side = sdpa(q, contiguous(k_pool, slots), contiguous(v_pool, slots), scale)
        scattered = paged_attention_reference(q, k_pool, v_pool, slots, n_rep, scale)
        assert torch.equal(scattered, side_by_side)
    print(f"{name:30} equal to the last bit: {torch.equal(scattered, side_by_side)}")

# %% [markdown]
# Then use the poison of Day 17. Every slot that does not belong to this sequence holds NaN, also the slots
# behind its last token. NaN spreads through every sum that it enters, so one stale read shows in the whole
# output. The causal mask does not prevent this: it gives the slot a weight of 0 for earlier queries, and 0
# times NaN is NaN. So a kernel must mask the values too.

# %%
q, k_pool, v_pool, slots, n_rep = a_case(5, (7, 2, 5), 37, poison=True)
share = float(k_pool.isnan().float().mean())
out = paged_attention_reference(q, k_pool, v_pool, slots, n_rep)
print(f"{share:.0%} of the pool is NaN, in the output: {int(out.isnan().sum())} NaN")
one_more = torch.cat([slots, slots[-1:] + 1])  # a mapping that is one slot too long
stale = paged_attention_reference(q, k_pool, v_pool, one_more, n_rep)
print(f"one slot too far: {float(stale.isnan().float().mean()):.0%} NaN")
assert not out.isnan().any() and stale.isnan().all()

# %% [markdown]
# All this shows that the reference is equal to *our* `sdpa`. Is our `sdpa` right? Compare the reference with
# an independent implementation: PyTorch's own attention, in float64, where rounding hardly matters.

# %%
import torch.nn.functional as F


def torch_attention(q, k_pool, v_pool, slots):
    """PyTorch's attention over the same keys and values, in the dtype of its inputs."""
    k, v = contiguous(k_pool, slots), contiguous(v_pool, slots)
    visible = torch.ones(q.shape[2], len(slots), dtype=torch.bool).tril(len(slots) - q.shape[2])
    return F.scaled_dot_product_attention(q, k, v, visible, enable_gqa=True)


for name, (q, k_pool, v_pool, slots, n_rep) in cases.items():
    exact = torch_attention(q.double(), k_pool.double(), v_pool.double(), slots)
    ours = paged_attention_reference(q, k_pool, v_pool, slots, n_rep).double()
    assert torch.allclose(ours, exact, atol=ATOL, rtol=RTOL), name
print("all", len(cases), "cases within", ATOL, "+", RTOL, "of the value")

# %% [markdown]
# ## How far is right?
#
# A kernel adds in another order, so its last bits can differ, and `torch.equal` would refuse right kernels.
# The comparison needs a tolerance. If the tolerance is too small, right kernels fail on some machine. If it
# is too large, wrong kernels pass. The usual rule has two parts:
#
# $$ |\text{kernel} - \text{oracle}| \;\le\; \text{ATOL} + \text{RTOL} \cdot |\text{oracle}| $$
#
# - **RTOL** is for large values. A float32 has about 7 digits, and a sum of many terms can lose two or
#   three of them. With $10^{-4}$, about four digits must agree.
# - **ATOL** is for values near 0, where large terms cancel. There a relative bound would demand digits that
#   float32 does not have. The outputs are averages of values of size 1, so ATOL is $10^{-5}$.
# - **16 bits.** float16 has 3 to 4 digits, and bfloat16 has 2 to 3. One unit of precision, `eps`, is the
#   distance from 1 to the next number. With several queries, the oracle rounds queries, scores and weights
#   to the dtype; with a single query, it computes in float32. A kernel need not round any of these. So the
#   tolerance is two units, both absolute and relative.

# %%
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    print(f"{dtype!s:15} atol {tolerance(dtype)[0]:.6f}   rtol {tolerance(dtype)[1]:.6f}")

# %% [markdown]
# ATOL and RTOL are in one file, and the tests of kernels, caches and small models import them from there. If
# each test had a tolerance of its own, someone would raise it a little whenever the test failed.
#
# ## Measure it
#
# Is the tolerance larger than the noise, and smaller than the effect of a fault? PyTorch's own attention is a
# right answer that is computed in another order. A plausible fault is attention that misses its oldest key.
# Guess first.

# %%
question = "How far is PyTorch's float32 attention from ours? 10 to the minus ..."
today.predict("digits", question, guess=None, low=0, high=16)


# %%
def distances(kv_len):
    """The largest difference from the oracle: three right answers, and a fault."""
    q = torch.randn(1, n_q, 1, head_dim, generator=generator)
    k_pool, v_pool = torch.randn(2, 2 * kv_len, n_kv, head_dim, generator=generator)
    slots = torch.randperm(2 * kv_len, generator=generator)[:kv_len]
    found = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        inputs = [x.to(dtype) for x in (q, k_pool, v_pool)]
        oracle = paged_attention_reference(*inputs, slots, 3)
        theirs = torch_attention(*inputs, slots)
        atol, rtol = tolerance(dtype)
        assert torch.allclose(theirs, oracle, atol=atol, rtol=rtol)
        found[dtype] = float((theirs - oracle).abs().max())
    whole, short = (paged_attention_reference(q, k_pool, v_pool, s, 3) for s in (slots, slots[1:]))
    return found | {"fault": float((whole - short).abs().max())}


lengths = (16, 64, 256, 1_024, 4_096)
measured = {n: distances(n) for n in lengths}
assert all(row[torch.float32] < ATOL < 0.1 * row["fault"] for row in measured.values())
assert measured[4_096]["fault"] < tolerance(torch.bfloat16)[0]
print("float32 noise below ATOL, a missing key ten times above it, at every length")

# %% jupyter={"source_hidden": true}
# Draws the plot: Noise, faults, and the line between them
from nanoserve.course.plots import COLOURS, figure, label_line, line, log2_axis, prediction_marker

fig, ax = figure(
    height=5.0,
    xlabel="tokens in the cache",
    ylabel="largest difference from the oracle",
    title="Noise, faults, and the line between them",
)
for dtype, name, colour in (
    (torch.float32, "PyTorch,\nfloat32", "contiguous"),
    (torch.float16, "float16", "engine"),
    (torch.bfloat16, "bfloat16", "muted"),
    ("fault", "a key\nmissing", "fault"),
):
    line(ax, lengths, [measured[n][dtype] for n in lengths], name, COLOURS[colour])
for dtype, name in ((torch.float32, "allowed in float32"), (torch.bfloat16, "allowed in bfloat16")):
    ax.axhline(tolerance(dtype)[0], color=COLOURS["limit"], linewidth=1.2, linestyle="--")
    label_line(ax, 38, tolerance(dtype)[0], name, COLOURS["limit"], "above")
if guess := today.guess("digits"):
    prediction_marker(ax, 16, 10.0**-guess, where="right")
log2_axis(ax)
ax.set_yscale("log")
ax.set(xlim=(11, 13_000), xticks=lengths)
fig

# %% [markdown]
# Read the plot from the bottom. In float32, the difference between PyTorch's attention and ours is below
# ATOL at every length: both answers are right, and they add in different orders. The fault's difference is
# more than ten times ATOL. The cell above asserts both, so the lower dashed line separates right from wrong
# on your machine too.
#
# Now look at bfloat16. Its tolerance is 0.016, and at 4,096 tokens the fault is **below it**: one key of
# thousands changes the average less than the tolerance allows. A bfloat16 test with a long context could pass
# a kernel that loses a key. So tests look for faults in float32, with few tokens and with poison. The tests
# in 16 bits only check that the kernel can handle the dtype. (The plot leaves out float16's tolerance, 0.002.)
#
# The plot does not show a real model. The keys of a real model are not random numbers, and a few of them can
# get most of the weight. Then a missing key can matter much more, or not at all.
#
# ## With your own code
#
# The package's cache can call this function instead of a kernel, and tomorrow you see where.
# `use_backend("reference")` selects it. Inside `today.mine()` every layer of the model calls your function, if
# it has passed its check.

# %%
from nanoserve import LLM, SamplingParams
from nanoserve.kernels.dispatch import use_backend

with today.mine(), use_backend("reference"):
    (answer,) = LLM("smollm2", cache="paged").generate(
        "The capital of France is", SamplingParams(max_tokens=6)
    )
print(repr(answer.text))
assert answer.text.startswith(" Paris")

# %% [markdown]
# ## What you learned
#
# 1. **Write the target before the kernel that has to meet it,** in code so plain that you can believe it.
# 2. **Demand equality if the sum is the same, and closeness if only the order of the sum differs.** Equality
#    is the stronger test. Give it up only when you must, and write down the tolerance.
# 3. **A tolerance is a claim about faults:** the differences of right answers must be below it, and those of
#    wrong answers far above it. In bfloat16, the difference of a lost key can be below it.
#
# ## Tomorrow
#
# The target is frozen, but `gqa_attention` does not use it yet. Day 19 adds one branch to `gqa_attention`, and
# then the cache computes attention itself.
#
# **In one paragraph.** We wrote attention over scattered memory as plainly as possible: gather by slot, then
# the `sdpa` of Day 6. The result is byte-equal to `sdpa` over contiguous keys and values in all eight cases,
# and NaN in all other slots does not reach it. Then we measured how far right answers and a wrong answer are
# from this oracle. One tolerance, in one file, lies between them for every kernel that follows.
