# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Day 23 · The same source, compiled
#
# Week 6 · Phase 2, paged memory · you need: Day 22 (The streaming softmax)
#
# **Today** the kernel's source goes, unchanged, to three runtimes: tlsim, Triton's
# interpreter, and Triton's compiler for a GPU. You launch it, refuse wrong arguments before the launch, write
# the rule that chooses a backend, and compare all three with one oracle.

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

today = day(23)
today.picture("one-source")

# %% [markdown]
# ## Why it matters
#
# A kernel that only a GPU can run can be tested only by people who have one.
#
# So the kernel uses Triton's language and nothing else, and no line of it depends on the machine.
# The lines that do depend on it get a file of their own today. The file is small: it finds out
# what is installed, checks the arguments, launches, and chooses a backend. Every serving engine has these pieces; you
# find them in vLLM and SGLang. The second half of the day compares the three runtimes. It begins at "Three runtimes,
# one table": a good place for a pause.

# %%
today.glossary(
    "stride",
    "launch",
    "backend",
    "dispatch",
    "fallback",
    "override",
    "compute capability",
    "ahead of time",
    "PTX",
    "shared memory",
)

# %% [markdown]
# ## One source
#
# Here is the kernel of yesterday. Where Triton is installed, its decorator made an object of it that can
# be compiled. tlsim takes that very object, reads the same function, and puts its own `tl` in the place
# of Triton's.

# %%
import inspect

import torch

from nanoserve.kernels import tlsim
from nanoserve.kernels.paged_attention import paged_attention_kernel
from nanoserve.kernels.sizes import next_power_of_2

simulated = tlsim.jit(paged_attention_kernel)
print("the same function:", simulated.fn is paged_attention_kernel.fn)
source = inspect.getsource(simulated.fn)
print("names that only one runtime binds:", [x for x in ("torch", "tlsim", "cuda") if x in source])

# %% [markdown]
# Three runtimes run it:
#
# - **tlsim**, on any machine.
# - **Triton's compiler**. Triton is published for Linux alone. The compiled kernel needs an NVIDIA GPU of **compute
#   capability** 7.5 or newer: a T4 has it, and so do all later GPUs.
# - **Triton's interpreter**. With `TRITON_INTERPRET=1` set **before** Triton is imported, Triton compiles
#   nothing. It runs the kernel line by line in NumPy, slowly and on any processor.
#
# ## The launch: a grid and eight strides
#
# A kernel gets a pointer to the first element of each tensor, and no shape. All else that it needs
# to compute addresses is passed as numbers. Day 22's kernel begins like this:
#
#     query = tl.program_id(0)
#     head = tl.program_id(1)
#     q = tl.load(q_ptr + head * q_head + query * q_seq + dim, ...)
#
# - **The grid** says how many programs there are along axis 0 and axis 1: one for each query of each
#   query head.
# - **A stride** says how many elements apart two neighbours along an axis lie. It does not follow from the
#   shape. Attention makes its queries like this, and never copies them:

# %%
n_q, n_kv, head_dim, block_size = 9, 3, 64, 16  # SmolLM2's heads
generator = torch.Generator().manual_seed(23)
projected = torch.randn(1, 5, n_q * head_dim, generator=generator)  # [batch, seq, n_q * head_dim]
q = projected.view(1, 5, n_q, head_dim).transpose(1, 2)
for name, x in (("the view that attention makes", q), ("the same, copied", q.contiguous())):
    print(f"{name:30} {list(x.shape)} strides {x.stride()}")

# %% [markdown]
# The shape and the numbers are the same. A program that uses the wrong strides loads from another head.
#
# ## Your turn: `launch_arguments`
#
# Return, as two tuples, what a launch needs besides the tensors:
#
# | | what | of |
# | --- | --- | --- |
# | `grid` | two numbers, for axis 0 and axis 1 | see above |
# | `strides` | `q_head, q_seq, k_slot, k_head, v_slot, v_head, out_head, out_seq`, in elements | each tensor's own |
#
# with `q` and `out` `[1, n_q, query_len, head_dim]`, `k_pool` and `v_pool` `[num_slots, n_kv, head_dim]`.
# Channels must lie side by side, so no stride is needed for them. Stuck? `today.hint()` looks at the
# case that failed.
#
# After a kernel restart, run the cells above first (Run → Run All Above Selected Cell).


# %%
def launch_arguments(q, k_pool, v_pool, out):
    """(grid, strides) of paged_attention_kernel: two numbers, and eight, in its parameters' order."""
    raise NotImplementedError("your turn")


today.check(launch_arguments)


# %% [markdown]
# The launch that lands holds the solution: the grid and the strides are written out in the call. Its first argument is
# the kernel, as Triton or tlsim made it. It fixes two more things: `BLOCK_D` is head_dim rounded up to a power of two
# (Day 21), and `out` is always contiguous. The cell below holds the package's version; from here on this notebook uses it.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/dispatch.py: launch
def launch(
    kernel: object,
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    n_rep: int,
    scale: float | None = None,
    tile: int = 128,
) -> torch.Tensor:
    """Launch paged_attention_kernel, jitted by Triton or by tlsim: one program per query and head.

    Arguments and result as for paged_attention_reference. q and the pools may have any strides, but
    head_dim's must be 1. `tile` is the number of keys in one iteration of the kernel's loop, a
    power of two.
    """
    _, n_q, query_len, head_dim = q.shape
    # The kernel reads the mapping at stride 1. Copying a strided mapping moves 8 bytes per token; a
    # key and a value have hundreds. The engine's own mapping is contiguous, so it is not copied.
    slot_mapping = slot_mapping.contiguous()
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    kernel[(query_len, n_q)](
        q,
        k_pool,
        v_pool,
        slot_mapping,
        out,
        head_dim**-0.5 if scale is None else float(scale),
        query_len,
        len(slot_mapping),
        *q.stride()[1:3],
        *k_pool.stride()[:2],
        *v_pool.stride()[:2],
        *out.stride()[1:3],
        N_REP=n_rep,
        HEAD_DIM=head_dim,
        BLOCK_D=next_power_of_2(head_dim),
        TILE=tile,
    )
    return out


# %% [markdown]
# Prove it with unusual strides: the view for `q`, both pools side by side in one tensor, and a
# head_dim of 80 that has to be padded.

# %%
from nanoserve.kernels.reference import ATOL, RTOL, paged_attention_reference, tolerance

crooked = torch.randn(1, 5, n_q, 80, generator=generator).transpose(1, 2)
both = torch.randn(10 * block_size, 2, n_kv, 80, generator=generator)
slots = [block * block_size + offset for block in (7, 2, 5) for offset in range(block_size)]
slots = torch.tensor(slots[:37])
read = (crooked, both[:, 0], both[:, 1], slots, n_q // n_kv)
print("k_pool's strides:", both[:, 0].stride())
out, oracle = launch(simulated, *read), paged_attention_reference(*read)
print("as the oracle:", torch.allclose(out, oracle, atol=ATOL, rtol=RTOL))
assert torch.allclose(out, oracle, atol=ATOL, rtol=RTOL)

# %% [markdown]
# ## What a wrong pointer does
#
# Now make a common mistake. Nine query heads share three KV heads, so `n_rep` is 3. Pass 2 instead. The
# kernel divides the head by `n_rep`, multiplies by a stride, and loads from there.

# %%
k_pool, v_pool = torch.randn(2, 10 * block_size, n_kv, head_dim, generator=generator)
right = paged_attention_reference(q, k_pool, v_pool, slots, 3)
wrong = launch(simulated, q, k_pool, v_pool, slots, 2)  # tlsim's sanitizer is on
print("finite:", bool(wrong.isfinite().all()))
print(f"typical size {float(wrong.std()):.1f}, the oracle's {float(right.std()):.1f}")
heads = [torch.allclose(wrong[:, h], right[:, h], atol=ATOL, rtol=RTOL) for h in range(n_q)]
print("heads that are right:", sum(heads), "of", n_q)

# %% [markdown]
# No error, and the sanitizer of Day 21 reports nothing either. Query head 8 computed KV head 4,
# and the KV heads are 0, 1 and 2. Its address is that of the **next slot's** KV head 1: inside the buffer, a real key.
# The result is a **plausible number**. A model generates fluent nonsense from it, and no error appears.
#
# The sanitizer checks only that an address lies in its buffer. Which key was *meant* follows from the arguments, so the
# host has to check them before the launch. tlsim does find a slot outside the pool. A GPU would load what lies there.

# %%
beyond = slots.clone()
beyond[36] = len(k_pool)
try:
    launch(simulated, q, k_pool, v_pool, beyond, 3)
except tlsim.KernelError as error:
    print(str(error).splitlines()[0].partition(": ")[2])

# %% [markdown]
# So the host checks, and each message names the argument and both numbers. The last lines check the **values** of
# the slots, on a CPU alone. On a GPU such a check would wait for all queued work, in every layer of every token.
# There it runs on request. All layers of a step pass the same mapping. So `_once` computes the range of its slots in the
# first layer, and returns the same two numbers in the others. Three helpers are outside `check_attention`, because Day
# 28's function calls them too.

# %%
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/dispatch.py: DTYPES, INTEGERS, check_attention
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int32, torch.int64)  # of slots and block ids


def check_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    n_rep: int,
    check_slots: bool | None = None,
) -> None:
    """Raise a ValueError that names the argument if a kernel would compute a wrong result.

    Arguments as for paged_attention_reference. Checks shapes, dtypes, devices and head_dim's
    stride. Checks the values in slot_mapping on a CPU only, because reading them on a GPU waits for
    the GPU. `check_slots=True`, or NANOSERVE_CHECK_SLOTS=1, checks them on a GPU too.
    """
    if q.dim() != 4 or q.shape[0] != 1:
        raise ValueError(f"q must be [1, n_q, query_len, head_dim], got {list(q.shape)}")
    _check_pools(q, k_pool, v_pool, n_rep)
    if slot_mapping.dim() != 1 or slot_mapping.dtype not in INTEGERS:
        raise ValueError(
            "slot_mapping must be integers [kv_len], got "
            f"{slot_mapping.dtype} {list(slot_mapping.shape)}"
        )
    query_len, kv_len = q.shape[2], len(slot_mapping)
    if not 1 <= query_len <= kv_len:
        raise ValueError(
            f"q has {query_len} positions, and must have 1 to slot_mapping's kv_len, {kv_len}"
        )
    _check_devices(q, k_pool=k_pool, v_pool=v_pool, slot_mapping=slot_mapping)
    if _reads_values(q, check_slots):
        low, high = _once(_slot_range, slot_mapping)
        if low < 0 or high >= len(k_pool):
            wrong = low if low < 0 else high
            raise ValueError(f"slot_mapping has slot {wrong}, but the pools have {len(k_pool)}")


def _check_pools(q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, n_rep: int) -> None:
    """Check the pools and n_rep against q [..., n_q, ..., head_dim], n_q being q's second axis."""
    n_q, head_dim = q.shape[1], q.shape[-1]
    for name, pool in (("k_pool", k_pool), ("v_pool", v_pool)):
        if pool.dim() != 3 or pool.shape[2] != head_dim:
            raise ValueError(
                f"{name} must be [num_slots, n_kv, {head_dim}] as q's head_dim is {head_dim}, got "
                f"{list(pool.shape)}"
            )
    if k_pool.shape != v_pool.shape:
        raise ValueError(
            f"k_pool and v_pool must have one shape, got {list(k_pool.shape)}, {list(v_pool.shape)}"
        )
    n_kv = k_pool.shape[1]
    if n_q != n_kv * n_rep:
        raise ValueError(f"n_rep {n_rep} does not fit {n_q} query heads and {n_kv} KV heads")
    if q.dtype not in DTYPES:
        raise ValueError(f"q must be float32, float16 or bfloat16, got {q.dtype}")
    for name, x in (("q", q), ("k_pool", k_pool), ("v_pool", v_pool)):
        if x.dtype != q.dtype:
            raise ValueError(f"{name} and q must have one dtype, got {x.dtype} and {q.dtype}")
        if x.stride(-1) != 1:
            raise ValueError(f"{name}'s head_dim must be contiguous, got stride {x.stride(-1)}")


def _check_devices(q: torch.Tensor, **tensors: torch.Tensor) -> None:
    for name, x in tensors.items():
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, but q is on {q.device}")


def _reads_values(q: torch.Tensor, asked: bool | None) -> bool:
    """Whether to read slots or tables on the host: on a CPU, or if the caller or the user asks."""
    if asked is not None:
        return asked
    return q.device.type == "cpu" or os.environ.get("NANOSERVE_CHECK_SLOTS") == "1"


def _once(compute: Callable, slot_mapping: torch.Tensor, *rest: int):
    """compute(slot_mapping, ...), once for all layers of a step: they pass the same tensor.

    A tensor counts its changes in place; a change makes the result new. A tensor made in
    torch.inference_mode counts none, so nothing is kept for it.
    """
    if slot_mapping.is_inference():
        return compute.__wrapped__(slot_mapping, 0, *rest)
    return compute(slot_mapping, slot_mapping._version, *rest)


@lru_cache(maxsize=16)
def _slot_range(slot_mapping: torch.Tensor, _version: int) -> tuple[int, int]:
    """The lowest and the highest slot."""
    low, high = (int(slot) for slot in slot_mapping.aminmax())
    return low, high


# %%
def refusal(*read):
    try:
        check_attention(*read)
    except ValueError as error:
        return str(error)
    return "accepted"


turned = k_pool.transpose(1, 2).contiguous().transpose(1, 2)  # the same shape, channels apart
print(refusal(q, k_pool, v_pool, slots, 3))
print(refusal(q, k_pool, v_pool, slots, 2))
print(refusal(q, k_pool, v_pool, beyond, 3))
print(refusal(q, k_pool, v_pool, slots[:4], 3))
print(refusal(q, turned, v_pool, slots, 3))
print(refusal(q, k_pool, v_pool.half(), slots, 3))

# %% [markdown]
# ## Two launchers
#
# Check, then launch: one function with Triton's kernel, one with tlsim's. The CPU path switches the
# sanitizer off, since `check_attention` has checked the arguments and the kernel is tested. It also chooses its own
# tile. On a GPU a tile must fit the registers of a program. In tlsim all programs run together and each torch call
# has a fixed cost, so few and large tiles are better.


# %% jupyter={"source_hidden": true}
# until day 31: lands in nanoserve/kernels/dispatch.py: paged_attention_triton and 2 more
def paged_attention_triton(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    n_rep: int,
    scale: float | None = None,
) -> torch.Tensor:
    """Paged attention by Triton: compiled, or interpreted if TRITON_INTERPRET=1 was set.

    Arguments and result as for paged_attention_reference; ValueError as for check_attention.
    """
    check_attention(q, k_pool, v_pool, slot_mapping, n_rep)
    with torch.cuda.device_of(q):
        return launch(paged_attention_kernel, q, k_pool, v_pool, slot_mapping, n_rep, scale)


def paged_attention_tlsim(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    n_rep: int,
    scale: float | None = None,
) -> torch.Tensor:
    """Paged attention by the same kernel under tlsim, with tlsim's checks off for speed.

    Arguments and result as for paged_attention_reference; ValueError as for check_attention.
    """
    check_attention(q, k_pool, v_pool, slot_mapping, n_rep)
    programs = min(q.shape[1] * q.shape[2], 512)
    tile = next_power_of_2(min(len(slot_mapping), 512, LANES // programs))
    with tlsim.options(checks=False, wave=512):
        kernel = _simulated(paged_attention_kernel)
        return launch(kernel, q, k_pool, v_pool, slot_mapping, n_rep, scale, tile)


_simulated = cache(tlsim.jit)  # reads the source of a kernel once
LANES = 1 << 15  # keys per loop iteration, over all programs of a wave; they fit the CPU's cache

# %% [markdown]
# ## Your turn: `choose`
#
# Which backend runs? Write the rule as a plain function of four arguments. Then every line of its truth
# table can be tested without the machine:
#
# | device | Triton installed | capability | override | answer |
# | --- | --- | --- | --- | --- |
# | `"cuda"` | yes | at least (7, 5) | none | `"triton"` |
# | anything else | | | none | `"tlsim"` |
# | able to run Triton, as in the first line | | | `"triton"` | `"triton"` |
# | not able | | | `"triton"` | ValueError that names it |
# | any | | | `"tlsim"` or `"reference"` | as the override says |
# | any | | | another name | ValueError that names it |
#
# `capability` is a pair such as `(9, 0)`, and None where there is no GPU. The device of the tensors decides: they can
# lie on the CPU of a machine that has a GPU. The table makes two decisions. Without an override nothing
# is refused: the engine runs, if slowly. An override is never replaced by another backend: a user who asks for Triton
# and gets tlsim would measure the wrong backend without a sign of it.


# %%
def choose(device_type, has_triton, capability, override=None):
    """The backend for tensors on a device: "triton", "tlsim" or "reference"."""
    raise NotImplementedError("your turn")


today.check(choose)


# %% jupyter={"source_hidden": true}
# solution: choose
def choose(device_type, has_triton, capability, override=None):
    """The backend for tensors on a device: "triton", "tlsim" or "reference"."""
    able = device_type == "cuda" and has_triton and capability >= (7, 5)
    if override is None:
        return "triton" if able else "tlsim"
    if override not in ("triton", "tlsim", "reference"):
        raise ValueError(f"there is no backend {override!r}")
    if override == "triton" and not able:
        raise ValueError(f'"triton" cannot run on {device_type} here')
    return override


# %% [markdown]
# The package finds these facts out by itself. `why_not_triton` returns a reason instead of False, so that an error
# can show the reason. The override comes from `use_backend(...)`, for a few lines of a program, or from the
# environment variable `NANOSERVE_BACKEND`, for a whole run. Where a GPU is present and not used, `select_backend`
# warns once, with the reason.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/dispatch.py: BACKENDS, LEAST_CAPABILITY, has_triton and 3 more
BACKENDS = ("triton", "tlsim", "reference")
LEAST_CAPABILITY = (7, 5)  # that of a T4; Triton does not support older GPUs


def has_triton() -> bool:
    """Whether Triton can be imported. Triton is published for Linux only."""
    try:
        import triton
    except ImportError:
        return False
    return True


def why_not_triton(device: torch.device) -> str | None:
    """The reason why Triton cannot run on a device; None where it can."""
    if not has_triton():
        return "Triton cannot be imported"
    if type(paged_attention_kernel).__name__ == "InterpretedFunction":
        return None  # TRITON_INTERPRET=1 was set: Triton's interpreter runs anywhere
    if device.type != "cuda":
        return "it is not a CUDA GPU, and TRITON_INTERPRET=1 was not set before Triton was imported"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        has, needs = (".".join(map(str, pair)) for pair in (capability, LEAST_CAPABILITY))
        return f"its compute capability is {has}, and Triton needs {needs}"
    return None


def select_backend(device: torch.device | str) -> str:
    """The backend for tensors on a device: "triton" on a GPU that Triton supports, else "tlsim".

    use_backend and NANOSERVE_BACKEND override the choice, with any of BACKENDS. Raises ValueError
    for an override that is not in BACKENDS or cannot run on the device.
    """
    device = torch.device(device)
    override = _override.get() or os.environ.get("NANOSERVE_BACKEND")
    if override:
        _check_name(override)
        if override == "triton" and (reason := why_not_triton(device)):
            raise ValueError(f'the backend "triton" cannot run on {device}: {reason}')
        return override
    if device.type != "cuda":
        return "tlsim"
    reason = why_not_triton(device)
    if reason is None:
        return "triton"
    _warn_fallback(torch.cuda.get_device_name(device), reason)
    return "tlsim"


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run paged attention with one backend of BACKENDS inside a `with` block, for experiments.

    Raises ValueError for another name.
    """
    _check_name(name)
    token = _override.set(name)
    try:
        yield
    finally:
        _override.reset(token)


_override: ContextVar[str | None] = ContextVar("backend", default=None)


def _check_name(name: str) -> None:
    if name not in BACKENDS:
        raise ValueError(f"there is no backend {name!r}: the backends are {', '.join(BACKENDS)}")


@cache
def _warn_fallback(gpu: str, reason: str) -> None:
    """Warn once per GPU: @cache makes the function run once for the same arguments."""
    warnings.warn(f"paged attention falls back to tlsim on {gpu}: {reason}", stacklevel=3)


# %%
from unittest.mock import patch

os.environ.pop("NANOSERVE_BACKEND", None)
print("the CPU:", select_backend("cpu"))
with use_backend("reference"):
    print("within use_backend:", select_backend("cpu"))
os.environ["NANOSERVE_BACKEND"] = "reference"
print("by the environment:", select_backend("cpu"))
del os.environ["NANOSERVE_BACKEND"]
for name in ("cuda", "triton"):
    try:
        with use_backend(name), patch("__main__.paged_attention_kernel", object()):
            select_backend("cpu")  # the patch: as without TRITON_INTERPRET=1
    except ValueError as error:
        print(str(error).partition(":")[0])

# %% [markdown]
# Testing the rule needs no GPU. Replace the functions of `torch.cuda`, and compare
# `select_backend` with the plain function:


# %%
def on_a(gpu, capability, installed=True):
    """The result of select_backend for a simulated GPU, and its warnings."""
    with (
        patch("torch.cuda.get_device_name", lambda _: gpu),
        patch("torch.cuda.get_device_capability", lambda _: capability),
        patch("__main__.has_triton", lambda: installed),
        patch("__main__.paged_attention_kernel", object()),  # as without TRITON_INTERPRET=1
        warnings.catch_warnings(record=True) as told,
    ):
        _warn_fallback.cache_clear()
        answers = {select_backend("cuda") for _ in range(3)}
        assert answers == {choose("cuda", installed, capability)}
        return answers.pop(), [str(warning.message) for warning in told]


for gpu, capability in (("B200", (10, 0)), ("H200", (9, 0)), ("T4", (7, 5)), ("V100", (7, 0))):
    print(gpu, *on_a(gpu, capability))
print("H200", *on_a("H200", (9, 0), installed=False))

# %% [markdown]
# Three calls, one warning. (A small trap: as text, "10.0" is less than "7.5". A pair is compared number
# by number.)
#
# ## The dispatcher
#
# The rest is short. From Day 25 on, the cache calls it.


# %%
# lands in nanoserve/kernels/dispatch.py: paged_attention_dispatch
def paged_attention_dispatch(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    n_rep: int,
    scale: float | None = None,
) -> torch.Tensor:
    """Paged attention by the backend that select_backend chooses for q's device.

    Arguments and result as for paged_attention_reference; every backend's result is within
    `tolerance` of the reference's. Raises ValueError as check_attention and select_backend do.
    """
    backend = select_backend(q.device)
    if backend == "triton":
        return paged_attention_triton(q, k_pool, v_pool, slot_mapping, n_rep, scale)
    if backend == "tlsim":
        return paged_attention_tlsim(q, k_pool, v_pool, slot_mapping, n_rep, scale)
    check_attention(q, k_pool, v_pool, slot_mapping, n_rep)
    return paged_attention_reference(q, k_pool, v_pool, slot_mapping, n_rep, scale)


# %%
out = paged_attention_dispatch(q, k_pool, v_pool, slots, 3)
print("close to the oracle:", torch.allclose(out, right, atol=ATOL, rtol=RTOL))
with use_backend("reference"):
    out = paged_attention_dispatch(q, k_pool, v_pool, slots, 3)
print("the oracle itself:", torch.equal(out, right))
assert torch.equal(out, right)

# %% [markdown]
# ## The same three pieces elsewhere
#
# A kernel, a fallback, a selector. Two widely used engines have them too (file names as of 2026; files move):
#
# | | nanoserve | vLLM | SGLang |
# | --- | --- | --- | --- |
# | where | `nanoserve/kernels/` | `vllm/v1/attention/` | `python/sglang/srt/` |
# | kernel | `paged_attention.py` | `backends/flash_attn.py` and others | `layers/attention/`: `triton_backend.py` and others |
# | fallback | tlsim | on a CPU: `backends/cpu_attn.py` | `torch_native_backend.py`, beside them |
# | selector | `select_backend` | `get_attn_backend` in `selector.py` | `ATTENTION_BACKENDS` in `attention_registry.py` |
#
# - **vLLM** keeps a list of backends for each kind of GPU, in order of preference. Each backend
#   returns its reasons against running: the dtype, the head size, the capability. vLLM takes the first backend without
#   a reason. If a backend was chosen by name and has a reason, vLLM raises an error that lists it. That is
#   `why_not_triton` and the override in a larger form.
# - **SGLang** keeps names and constructors in a registry, and takes a default from the hardware and
#   the installed packages. Its `torch_native` gathers keys and values by slot, one sequence after another, and calls
#   PyTorch's attention. You wrote that on Day 18.
#
# There are two differences. Both engines choose once, when the server starts; nanoserve chooses at every call, so that
# one program may hold tensors on two devices. And their fallbacks are other implementations. nanoserve's fallback is
# the kernel's own source, which is why a laptop can test it.
#
# ## Three runtimes, one table
#
# Eight cases that kernels often get wrong: the first token, decode,
# prefill, continuation, one KV head, a KV head for each query head, a head_dim that is no power of two, more keys
# than a tile. The keys lie in scattered blocks, NaN in every other slot, and `q` is a view. In three
# dtypes every runtime is compared with the oracle, within `tolerance(dtype)`.
#
# `agreement`, in the middle of the next cell, is that comparison. The rest is for reading: `main` makes a program of
# it, so that another process or another machine can run it. It prints the rows as JSON, and with `--record` it writes
# them to a file. If a runtime does not agree, nothing is recorded.

# %%
import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from nanoserve.bench.machine import DATA, machine, save_run


# %% jupyter={"source_hidden": true}
# lands in nanoserve/bench/agreement.py: Runtime, BLOCK, AttentionShape, SHAPES and 5 more
Runtime = Callable[..., torch.Tensor]  # arguments and result of paged_attention_reference
BLOCK = 16  # tokens in a block of draw's pools


@dataclass(frozen=True)
class AttentionShape:
    """The shape of one attention call: heads, head_dim, queries, and keys (kv_len)."""

    name: str
    n_q: int
    n_kv: int
    head_dim: int
    query_len: int
    kv_len: int


SHAPES = (
    AttentionShape("the very first token", 9, 3, 64, 1, 1),
    AttentionShape("decode", 9, 3, 64, 1, 200),
    AttentionShape("prefill", 9, 3, 64, 7, 7),
    AttentionShape("continuation", 9, 3, 64, 3, 90),
    AttentionShape("one KV head", 4, 1, 32, 3, 70),
    AttentionShape("a KV head each", 3, 3, 16, 2, 50),
    AttentionShape("head_dim 80", 6, 2, 80, 1, 150),
    AttentionShape("head_dim 128, 700 tokens", 8, 2, 128, 1, 700),
)


@dataclass(frozen=True)
class AgreementRow:
    """One runtime on one shape in one dtype.

    `largest` is the largest absolute difference from the oracle. `used` is the largest ratio of a
    difference to tolerance(dtype): a runtime agrees if `used` is at most 1.
    """

    shape: str
    dtype: str
    runtime: str
    largest: float
    used: float

    @property
    def agrees(self) -> bool:
        """Whether every element is within the tolerance."""
        return self.used <= 1  # False for NaN


def agreement(
    runtimes: Mapping[str, Runtime],
    shapes: Sequence[AttentionShape] = SHAPES,
    dtypes: Sequence[torch.dtype] = DTYPES,
    device: torch.device | str = "cpu",
) -> list[AgreementRow]:
    """Run every runtime on every shape and dtype, on `device`; compare with the oracle on the CPU.

    The inputs are those of `draw`: scattered blocks, NaN in all slots outside the mapping, and q in
    the memory layout of gqa_attention (positions before heads).
    """
    rows = []
    for dtype in dtypes:
        atol, rtol = tolerance(dtype)
        for shape in shapes:
            tensors, n_rep = draw(shape, dtype), shape.n_q // shape.n_kv
            oracle = paged_attention_reference(*tensors, n_rep).float()
            on_device = [x.to(device) for x in tensors]
            for name, runtime in runtimes.items():
                error = (runtime(*on_device, n_rep).cpu().float() - oracle).abs()
                used = float((error / (atol + rtol * oracle.abs())).max())
                kind = str(dtype).removeprefix("torch.")
                rows.append(AgreementRow(shape.name, kind, name, float(error.max()), used))
    return rows


def draw(shape: AttentionShape, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Random (q, k_pool, v_pool, slot_mapping), as paged_attention_reference takes them.

    Every call returns the same numbers for a shape.
    """
    random = torch.Generator().manual_seed(shape.kv_len)
    q = torch.randn(1, shape.query_len, shape.n_q, shape.head_dim, generator=random)
    blocks = -(-shape.kv_len // BLOCK)
    pools = torch.full((2, 2 * blocks * BLOCK, shape.n_kv, shape.head_dim), torch.nan)
    starts = torch.randperm(2 * blocks, generator=random)[:blocks] * BLOCK
    slots = (starts[:, None] + torch.arange(BLOCK)).flatten()[: shape.kv_len]
    pools[:, slots] = torch.randn(pools[:, slots].shape, generator=random)
    k_pool, v_pool = pools.to(dtype)
    return q.transpose(1, 2).to(dtype), k_pool, v_pool, slots


def runtimes_of(device: torch.device) -> dict[str, Runtime]:
    """The runtimes that can run the kernel on a device in this process: {name: function}."""
    runtimes = {"tlsim": paged_attention_tlsim}
    if why_not_triton(device) is None:
        if os.environ.get("TRITON_INTERPRET") == "1":
            runtimes["interpreter"] = _interpreted
        else:
            runtimes["compiled"] = paged_attention_triton
    return runtimes


def _interpreted(
    q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, *rest: object
) -> torch.Tensor:
    """paged_attention_triton under Triton's interpreter, which multiplies blocks of bfloat16
    wrongly: they are made float32 first, and the result is rounded."""
    wide = [x.float() if x.dtype == torch.bfloat16 else x for x in (q, k_pool, v_pool)]
    return paged_attention_triton(*wide, *rest).to(q.dtype)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the machine and all rows as JSON; with --record, also write them to a file.

    If a row does not agree, print the row to stderr, record nothing and exit with code 1.
    """
    parser = argparse.ArgumentParser(prog="python -m nanoserve.bench.agreement")
    parser.add_argument("--record", nargs="?", const=DATA, type=Path, metavar="FOLDER")
    folder = parser.parse_args(arguments).record
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    command = "python -m nanoserve.bench.agreement" + (" --record" if folder else "")
    if os.environ.get("TRITON_INTERPRET") == "1":
        command = f"TRITON_INTERPRET=1 {command}"
    rows = agreement(runtimes_of(device), device=device)
    run = machine(device) | {"command": command, "rows": [asdict(row) for row in rows]}
    print(json.dumps(run))
    wrong = [row for row in rows if not row.agrees]
    for row in wrong:
        where = f"{row.shape}, {row.dtype}"
        print(f"{row.runtime} differs by {row.largest:.1e}: {where}", file=sys.stderr)
    if wrong:
        sys.exit(1)
    if folder:
        try:
            save_run(run, "agreement", folder)
        except ValueError as error:
            parser.error(str(error))


# %% [markdown]
# Before you run it: the three runtimes add the same numbers in different orders. How far apart are their
# results?

# %%
today.predict(
    "apart", "In float32, how far from the oracle is the worst? 10 to the minus ...", guess=None
)

# %% [markdown]
# First this process: tlsim, and Triton compiled if you have a GPU.

# %%
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
here = agreement(runtimes_of(device), device=device)
assert all(row.agrees for row in here)
print(len(SHAPES), "shapes,", len(DTYPES), "dtypes, all within the tolerance:", True)

# %% [markdown]
# Then the interpreter. `TRITON_INTERPRET=1` has to be set before Triton is imported, and in this
# process Triton is imported already. So the interpreter gets a process of its own. (Where there is no Triton, that
# process has tlsim alone, and the interpreter's column comes from a recorded run.) `use_kernel("day22")` asks for this
# kernel: from Day 31 on, the package launches another one.

# %%
program = """
from nanoserve.bench import agreement
from nanoserve.kernels.dispatch import use_kernel

with use_kernel("day22"):
    agreement.main([])
"""
environment = os.environ | {"TRITON_INTERPRET": "1"}
command = [sys.executable, "-c", program]
done = subprocess.run(command, env=environment, capture_output=True, text=True)
assert done.returncode == 0, done.stderr
there = [AgreementRow(**row) for row in json.loads(done.stdout)["rows"]]
interpreted = [row for row in there if row.runtime == "interpreter"]
if not interpreted:
    recorded = today.data("agreement_cpu")["rows"]
    interpreted = [AgreementRow(**row) for row in recorded if row["runtime"] == "interpreter"]
assert all(row.agrees for row in interpreted)
print(len(interpreted), "rows of Triton's interpreter, all within the tolerance:", True)

# %% [markdown]
# And a recorded run of the same command on a GPU, where the kernel was compiled:

# %%
run = today.data("agreement_h200")
rows = [AgreementRow(**row) for row in run["rows"]]
gpus = {run["device"]: [row for row in rows if row.runtime == "compiled"]}
print(*(run[key] for key in ("device", "driver", "platform", "date")), sep=", ")
versions = run["versions"]
print(f"torch {versions['torch']}, triton {versions['triton']}: {run['command']}")
assert all(row.agrees for row in rows)

# %% tags=["nbval-ignore-output"]
columns = {"tlsim": [row for row in here if row.runtime == "tlsim"], "interpreter": interpreted}
if own := [row for row in here if row.runtime == "compiled"]:
    columns["this GPU"] = own
columns |= gpus
print(f"{'largest difference, of all 8 cases':36}", *(f"{name:>12}" for name in columns))
for dtype in ("float32", "float16", "bfloat16"):
    worst = [max(r.largest for r in rows if r.dtype == dtype) for rows in columns.values()]
    print(f"{dtype:36}", *(f"{difference:12.1e}" for difference in worst))
    assert dtype != "float32" or 0 < max(worst) < ATOL
used = max(r.used for rows in columns.values() for r in rows if r.dtype == "float32")
print(f"in float32, at most {used:.3f} of what the tolerance allows is used")
if (guess := today.guess("apart")) is not None:
    print(f"your guess: 10 to the minus {guess}")
assert used < 0.2

# %% [markdown]
# All 24 rows, to look things up:

# %% tags=["nbval-ignore-output"]
print(f"{'largest difference from the oracle':36}", *(f"{name:>12}" for name in columns))
for cells in zip(*columns.values()):
    row = f"{cells[0].dtype:9} {cells[0].shape}"
    print(f"{row:36}", *(f"{cell.largest:12.1e}" for cell in cells))

# %% jupyter={"source_hidden": true}
# Draws the plot: Who ran the kernel
from nanoserve.course.plots import COLOURS, figure, label_line, prediction_marker

fig, ax = figure(
    height=5.8, xlabel="largest difference from the oracle, float32", title="Who ran the kernel"
)
names = [shape.name for shape in SHAPES]
shifts = torch.linspace(-0.33, 0.33, len(columns)).tolist()
looks = zip("osDv", ("tlsim", "triton", "triton", "triton"), shifts)
for (runtime, rows), (marker, colour, shift) in zip(columns.items(), looks):
    rows = [row for row in rows if row.dtype == "float32"]
    at = [names.index(row.shape) + shift for row in rows]
    fill = "white" if runtime == "interpreter" else COLOURS[colour]
    style = {"color": COLOURS[colour], "markerfacecolor": fill, "markeredgewidth": 1.5}
    ax.plot([max(row.largest, 3e-8) for row in rows], at, marker, **style)
    label_line(ax, rows[-1].largest, at[-1], runtime, COLOURS[colour])
ax.axvline(ATOL, color=COLOURS["limit"], linewidth=1.5)
label_line(ax, ATOL, 0, "allowed", COLOURS["limit"])
label_line(ax, 3e-8, 0, "no difference at all", COLOURS["muted"])
edges = [2e-8, 4e-5]
if guess := today.guess("apart"):
    prediction_marker(ax, 10.0**-guess, 1.5)
    edges += [10.0 ** -(guess + 0.5), 10.0 ** -(guess - 0.5)]
ax.set_xscale("log")
ax.set(xlim=(min(edges), max(edges)), ylim=(7.6, -0.7), yticks=range(len(names)), yticklabels=names)
fig

# %% [markdown]
# In float32 the runtimes add the same products in tiles of different sizes and in different orders. The line
# "in float32" above says how much of Day 18's tolerance that takes, at worst. The first token has one key and nothing
# to add: a difference of 0 there means equal bits.
#
# In 16 bits the formats have fewer digits, so expect larger differences. With a single query a
# difference can be anything from 0 to one unit of the format: a sum close to the middle between two neighbours may be
# rounded to either. Is the kernel off then, or the oracle? Compare both with the reference in float64.

# %% tags=["nbval-ignore-output"]
import math

for dtype in (torch.float16, torch.bfloat16):
    nearer = {"several queries": [], "a single query": []}
    equal = {"several queries": [], "a single query": []}
    for shape in SHAPES[1:]:
        tensors, n_rep = draw(shape, dtype), shape.n_q // shape.n_kv
        wide = [x.double() if x.is_floating_point() else x for x in tensors]
        exact = paged_attention_reference(*wide, n_rep)
        outs = (paged_attention_tlsim(*tensors, n_rep), paged_attention_reference(*tensors, n_rep))
        kernel, oracle = (float((out.double() - exact).abs().max()) for out in outs)
        which = "several queries" if shape.query_len > 1 else "a single query"
        equal[which].append(math.isclose(kernel, oracle, rel_tol=0.01))
        nearer[which].append(kernel < oracle and not equal[which][-1])
    for which in nearer:
        counts = f"nearer on {sum(nearer[which])}, equal on {sum(equal[which])}"
        print(f"{dtype!s:15} {which:16} the kernel is {counts} of {len(nearer[which])}")
    assert sum(nearer["several queries"]) > 2

# %% [markdown]
# Where the **kernel** is nearer, the reason is this: it sums in float32 and rounds once, at the end. For several
# queries the oracle rounds queries, scores and weights on the way. For a single query the oracle computes in float32
# too, and the two can tie. An oracle is what you compare with. It need not be the most precise sum.
#
# The plot leaves out time (Day 26 measures it) and the keys of a real model. Agreement on eight cases is not agreement
# on all: the tests under `tests/` try some hundred more.
#
# ## Compiled here, for another machine's GPU
#
# A compiler needs no GPU. Triton takes the kernel's source and the types of its arguments, and returns
# machine code for a named target: **ahead of time**. So any Linux machine can test whether the compiler accepts the
# kernel. The number to look at is the **shared memory** of a program: a T4 has 64
# KiB of it, and a kernel that needs more does not start there.


# %%
def compiled_for(capability):
    """The kernel in float32, compiled for a GPU: 75 is a T4, 80 an A100, 90 an H200, 100 a B200."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {"N_REP": 3, "HEAD_DIM": 64, "BLOCK_D": 64, "TILE": 128}
    types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), "*fp32")
    types |= {"slot_ptr": "*i64", "scale": "fp32"} | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "i32") for name in paged_attention_kernel.arg_names}
    source = ASTSource(paged_attention_kernel, signature, constants)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32))


# %% tags=["nbval-ignore-output"]
import re

able = has_triton() and os.environ.get("TRITON_INTERPRET") != "1"
most = 0
for capability in (75, 80, 90, 100) if able else ():
    binary = compiled_for(capability)
    shared, ptx = binary.metadata.shared, binary.asm["ptx"].splitlines()
    target = next(line for line in ptx if line.startswith(".target"))
    size = len(binary.asm["cubin"]) / 1024
    print(f"{target:15} {len(ptx):,} lines of PTX, {size:.0f} KiB of code, {shared} bytes shared")
    code = [line for line in ptx if re.match(r"\s+(@\S+\s+)?[a-z]", line)]
    parts = {
        "loads": r"\bld\.global",
        "float sums": r"\b(add|fma)\S*\.f32",
        "shuffles": r"\bshfl\.",
    }
    counts = {name: sum(bool(re.search(p, line)) for line in code) for name, p in parts.items()}
    print(f"{len(code):,} instructions,".rjust(35), counts)
    assert f"sm_{capability}" in target
    most = max(most, shared)
if able:
    print(f"at most {most} bytes of shared memory: {most / (64 * 1024):.1%} of a T4's 64 KiB")
    assert most <= 64 * 1024
else:
    print("To compile here, install Triton and unset TRITON_INTERPRET.")

# %% [markdown]
# A few lines of Python became many lines of PTX. Some of them are instructions, written out for each
# thread's share of a tile: loads, float sums, shuffles that pass sums between threads, addresses and masks. The rest
# are directives and labels. The last line says how much shared memory it takes: this kernel multiplies and sums in
# registers, with no `tl.dot`. Day 29 changes that, and then the limit counts.
#
# Compiled is not run. The table above says whether the code is *right*, on the GPU where it ran.
#
# ## What you learned
#
# 1. **Keep what differs between machines out of the kernel,** and one source can be tested everywhere.
# 2. **A wrong pointer is a plausible number:** what a kernel cannot check, its launcher must refuse, by
#    name.
# 3. **A default may fall back, an override may not.** A backend that is chosen by name runs, or raises
#    an error.
#
# ## Tomorrow
#
# The kernel runs. How does a time grow with `kv_len`? Day 24 fits a line on a log-log plot, and shows three
# ways to misread it.
#
# **In one paragraph.** We sent the kernel's source, with no line changed, to tlsim, to Triton's
# interpreter and to Triton's compiler, and measured how far each lies from the oracle. A
# small file checks the arguments, computes the grid and the
# strides, and chooses the backend, with a warning that gives the reason when it falls back. vLLM and SGLang have
# the same three pieces. In nanoserve the fallback runs the kernel too.
