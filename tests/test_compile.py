"""The kernel compiled for GPUs that this machine need not have: T4, A100, H100, B200."""

from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import mangle_type

from nanoserve.kernels.dispatch import launch
from nanoserve.kernels.paged_attention import paged_attention_kernel
from tests.attention_cases import AttentionCase, tensors

GPUS = (75, 80, 90, 100)  # T4, A100, H100, B200
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TYPES = [(cc, dtype) for cc in GPUS for dtype in DTYPES if cc >= 80 or dtype != torch.bfloat16]
KIB = 1024


class Recorder:
    """Replaces the kernel in a launch and stores the launch's arguments."""

    def __getitem__(self, grid: tuple[int, ...]) -> "Recorder":
        return self

    def __call__(self, *args: Any, **meta: Any) -> None:
        names = paged_attention_kernel.arg_names[: len(args)]
        self.given = dict(zip(names, args, strict=True)) | meta


def compiled(case: AttentionCase, capability: int) -> tuple[Any, dict[str, Any]]:
    """The kernel as the launcher compiles it for one call, and the arguments of that call."""
    recorder = Recorder()
    launch(recorder, *tensors(case))
    given, parameters = recorder.given, paged_attention_kernel.params
    assert list(given) == [p.name for p in parameters]
    ones = {name for name, x in given.items() if type(x) is int and x == 1}  # made constants
    fixed = {p.name: given[p.name] for p in parameters if p.is_constexpr or p.name in ones}
    sixteens = [
        name not in fixed and (torch.is_tensor(x) or (type(x) is int and x % 16 == 0))
        for name, x in given.items()
    ]
    source = ASTSource(
        fn=paged_attention_kernel,
        signature={n: "constexpr" if n in fixed else mangle_type(x) for n, x in given.items()},
        constexprs=fixed,
        attrs={(i,): [["tt.divisibility", 16]] for i, yes in enumerate(sixteens) if yes},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32)), given


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
