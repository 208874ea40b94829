"""The kernel compiled for GPUs that this machine need not have: T4, A100, H100, B200."""

from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import mangle_type

from nanoserve.kernels.dequant_matvec import (
    dequant_matvec_kernel,
    dequant_rows_kernel,
    launch_matvec,
    matvec_launch,
)
from nanoserve.kernels.dispatch import launch, launch_batch
from nanoserve.kernels.paged_attention import paged_attention_kernel
from nanoserve.kernels.reference import PagedTables
from nanoserve.kernels.split_kv import (
    launch_of,
    merge_kernel,
    packed_kernel,
    split_kv_kernel,
)
from tests.attention_cases import AttentionCase, tensors

GPUS = (75, 80, 90, 100)  # T4, A100, H100, B200
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TYPES = [(cc, dtype) for cc in GPUS for dtype in DTYPES if cc >= 80 or dtype != torch.bfloat16]
KIB = 1024


class Recorder:
    """Replaces a kernel in a launch and stores the launch's arguments."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.given, self.options = kernel, None, {}

    def __getitem__(self, grid: tuple[int, ...]) -> "Recorder":
        return self

    def __call__(self, *args: Any, **meta: Any) -> None:
        names = [p.name for p in self.kernel.params]
        given = dict(zip(names, args, strict=False)) | meta
        self.given = {name: given[name] for name in names}
        known = ("num_warps", "num_stages")
        self.options = {name: x for name, x in meta.items() if name in known}

    def compiled(self, capability: int) -> Any:
        """The kernel as the launcher compiles it for the stored arguments."""
        given, parameters = self.given, self.kernel.params
        ones = {name for name, x in given.items() if type(x) is int and x == 1}  # made constants
        fixed = {p.name: given[p.name] for p in parameters if p.is_constexpr or p.name in ones}
        sixteens = [
            name not in fixed and (torch.is_tensor(x) or (type(x) is int and x % 16 == 0))
            for name, x in given.items()
        ]
        source = ASTSource(
            fn=self.kernel,
            signature={n: "constexpr" if n in fixed else mangle_type(x) for n, x in given.items()},
            constexprs=fixed,
            attrs={(i,): [["tt.divisibility", 16]] for i, yes in enumerate(sixteens) if yes},
        )
        target = GPUTarget("cuda", capability, 32)
        return triton.compile(source, target=target, options=self.options)


def compiled(case: AttentionCase, capability: int) -> tuple[Any, dict[str, Any]]:
    """Day 22's kernel as its launcher compiles it for one call, and the arguments of that call."""
    recorder = Recorder(paged_attention_kernel)
    launch(recorder, *tensors(case))
    return recorder.compiled(capability), recorder.given


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("capability", "dtype"), TYPES)
def test_it_compiles_for_every_gpu_and_fits_there(capability, dtype, head_dim):
    kernel, given = compiled(AttentionCase(32, 8, head_dim, 5, 37, dtype=dtype), capability)
    assert kernel.asm["cubin"]
    assert kernel.metadata.target.arch == capability
    assert kernel.metadata.shared <= 16 * KIB  # a T4 has 64 KiB for a block of threads
    # keys and values are loaded 16 bytes at a time, never as single numbers of a row
    pools = 2 * given["TILE"] * head_dim * dtype.itemsize
    threads = 32 * kernel.metadata.num_warps
    assert kernel.asm["ptx"].count("ld.global.v4.b32") >= pools // (16 * threads)
    assert kernel.asm["ptx"].count("ld.global.b16") <= 1  # the query


def test_every_integer_that_may_be_1_may_be_a_constant():
    kernel, given = compiled(AttentionCase(1, 1, 16, 1, 1), 75)
    ones = [name for name, x in given.items() if type(x) is int and x == 1]
    assert ones == ["query_len", "kv_len", "N_REP"]
    assert kernel.asm["cubin"]


# Bytes of shared memory that a block of threads may have: T4, A100, RTX 30 and 50, H100, B200.
SHARED = {75: 64, 80: 163, 86: 99, 90: 227, 100: 227, 120: 99}
SHARED = {capability: size * KIB for capability, size in SHARED.items()}


class SplitKV:
    """Recorders under the names of the kernels of split_kv."""

    def __init__(self) -> None:
        self.packed_kernel = Recorder(packed_kernel)
        self.split_kv_kernel = Recorder(split_kv_kernel)
        self.merge_kernel = Recorder(merge_kernel)


KINDS = ("split", "packed", "waves", "prefill")


def launched(kind: str, capability: int, head_dim: int, dtype: torch.dtype) -> SplitKV:
    """The kernels as a launch of a kind gives them their arguments."""
    query_len = 100 if kind == "prefill" else 1
    pool = torch.zeros(64, 8, head_dim, dtype=dtype)
    integers = {"dtype": torch.int32}
    tables = PagedTables(
        torch.zeros(3, 2, **integers), torch.full((3,), 30, **integers),
        torch.arange(4, **integers) * query_len, 16, query_len, 32,
    )  # fmt: skip
    q = torch.zeros(3 * query_len, 32, head_dim, dtype=dtype)
    kernels, found = SplitKV(), launch_of(kind, divmod(capability, 10), head_dim, dtype)
    launch_batch(kernels, q, pool, pool, tables, 4, None, found, 33 if kind == "split" else 0)
    return kernels


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("capability", "dtype"), TYPES)
def test_split_kv_compiles_for_every_gpu_and_fits_there(capability, dtype, kind):
    head_dim = 128 if dtype == torch.float16 else 64
    kernels = launched(kind, capability, head_dim, dtype)
    used = [x for x in vars(kernels).values() if x.given]
    assert len(used) == (2 if kind == "split" else 1)
    for recorder in used:
        kernel = recorder.compiled(capability)
        assert kernel.asm["cubin"]
        assert kernel.metadata.shared <= SHARED[capability]
    attention = kernels.split_kv_kernel if kind == "split" else kernels.packed_kernel
    ptx = attention.compiled(capability).asm["ptx"]
    wide = ptx.count("cp.async.cg.shared.global") + ptx.count(".v4.b32") + ptx.count(".v4.u32")
    assert wide >= 2  # keys and values move 16 bytes at a time


@pytest.mark.parametrize("kind", ["split", "prefill"])
@pytest.mark.parametrize(
    ("capability", "head_dim", "dtype"),
    [
        (75, 256, torch.float16),
        (75, 256, torch.float32),
        (86, 256, torch.bfloat16),
        (90, 256, torch.bfloat16),
        (120, 256, torch.bfloat16),
        (120, 128, torch.bfloat16),
    ],
)
def test_wide_heads_and_small_gpus_have_room(capability, head_dim, dtype, kind):
    for recorder in vars(launched(kind, capability, head_dim, dtype)).values():
        if recorder.given:
            assert recorder.compiled(capability).metadata.shared <= SHARED[capability]


class Matvec:
    """Recorders under the names of the kernels of dequant_matvec."""

    def __init__(self) -> None:
        self.dequant_matvec_kernel = Recorder(dequant_matvec_kernel)
        self.dequant_rows_kernel = Recorder(dequant_rows_kernel)


@pytest.mark.parametrize("width", [2048, 8192])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(("capability", "dtype"), TYPES)
def test_the_product_in_four_bits_compiles_for_every_gpu_and_fits_there(
    capability, dtype, rows, width
):
    num_out = 64
    scales = torch.zeros(num_out, width // 32, dtype=torch.bfloat16)
    numbers = torch.zeros(num_out, width // 2, dtype=torch.uint8)
    kernels, x = Matvec(), torch.zeros(rows, width, dtype=dtype)
    found = matvec_launch(rows, width, divmod(capability, 10))
    overlap = capability >= 90
    launch_matvec(kernels, x, numbers, scales, scales, found, 132, overlap)
    (recorder,) = (found for found in vars(kernels).values() if found.given)
    kernel = recorder.compiled(capability)
    assert kernel.asm["cubin"]
    assert kernel.metadata.shared <= SHARED[capability]
    if rows == 1:  # the weight goes from memory to registers: shared memory has only partial sums
        assert kernel.metadata.shared <= 4 * KIB
        assert "cvt.rn.f32.s32" not in kernel.asm["ptx"]  # no integer is converted
        assert ("griddepcontrol.wait" in kernel.asm["ptx"]) == overlap
