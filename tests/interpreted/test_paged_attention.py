"""The paged attention kernel under Triton: interpreted on the CPU, or compiled on a card."""

import os

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from nanoserve.kernels.dispatch import launch, paged_attention_triton
from nanoserve.kernels.paged_attention import paged_attention_kernel
from tests.attention_cases import ALL, SMALL, Read, assert_answers, tensors

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
READS = SMALL if INTERPRETED else SMALL | ALL


def of(reads: dict[str, Read]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("read", reads.values(), ids=reads)


def test_the_engine_is_the_one_that_this_process_is_for():
    assert type(paged_attention_kernel) is (InterpretedFunction if INTERPRETED else JITFunction)


@of(READS)
def test_the_kernel(read):
    assert_answers(launch(paged_attention_kernel, *tensors(read, DEVICE), tile=read.tile), read)


@of({name: read for name, read in READS.items() if read.query_len == 1})
def test_the_shipped_read(read):
    assert_answers(paged_attention_triton(*tensors(read, DEVICE)), read)


@of({name: read for name, read in SMALL.items() if read.dtype != torch.float32})
def test_half_precision_is_rounded_once_when_it_is_stored(read):
    """Everything before is float32. The interpreter cuts bfloat16 where a card rounds it."""
    q, k_pool, v_pool, *rest = tensors(read, DEVICE)
    wide = (x.float() for x in (q, k_pool, v_pool))
    exact = launch(paged_attention_kernel, *wide, *rest, tile=read.tile)
    out = launch(paged_attention_kernel, q, k_pool, v_pool, *rest, tile=read.tile)
    unit = 1.01 * torch.finfo(read.dtype).eps * exact.abs() + 1e-7
    cut = INTERPRETED and read.dtype == torch.bfloat16
    assert ((out - exact).abs() <= (unit if cut else unit / 2)).all()


@of({name: read for name, read in READS.items() if "all at" in name})
def test_what_lies_in_other_slots_changes_no_bit(read):
    outs = [
        launch(paged_attention_kernel, *tensors(read, DEVICE, empty=empty), tile=read.tile)
        for empty in (torch.nan, 0.0)
    ]
    assert torch.equal(*outs)
