"""The paged attention kernel under tlsim: the oracle's results, memory checks, planted faults."""

import importlib.util
from pathlib import Path

import pytest
import torch

from nanoserve.kernels import paged_attention, tlsim
from nanoserve.kernels.dispatch import launch, paged_attention_tlsim
from tests.attention_cases import (
    ALL,
    LAYOUTS,
    SMALL,
    AttentionCase,
    assert_expected,
    expected,
    tensors,
)

SOURCE = Path(paged_attention.__file__)
KERNEL = tlsim.jit(paged_attention.paged_attention_kernel)


def of(cases: dict[str, AttentionCase]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases.values(), ids=cases)


@of(ALL)
def test_in_lockstep_no_lane_leaves_its_buffer_or_reads_a_slot_nobody_owns(case):
    with tlsim.options(poison=True):
        assert_expected(launch(KERNEL, *tensors(case), tile=case.tile), case)


@of(SMALL)
def test_one_program_after_another_in_any_order(case):
    for seed in range(2):
        with tlsim.options(order="serial", poison=True, seed=seed):
            assert_expected(launch(KERNEL, *tensors(case), tile=case.tile), case)


@of(ALL)
def test_the_shipped_kernel(case):
    assert_expected(paged_attention_tlsim(*tensors(case)), case)


@of(LAYOUTS)
def test_the_content_of_other_slots_changes_no_bit(case):
    outs = [paged_attention_tlsim(*tensors(case, empty=empty)) for empty in (torch.nan, 0.0, 1e30)]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_the_results_of_different_cases_differ():
    """Otherwise a comparison that compares nothing could pass."""
    case = AttentionCase(6, 2, 14, 5, 37)
    changed = [
        AttentionCase(6, 2, 14, 5, 37, scale=0.5),
        AttentionCase(6, 2, 14, 5, 37, drift=240.0),
    ]
    for other in changed:
        assert (expected(case) - expected(other)).abs().max() > 0.01
    with pytest.raises(AssertionError):
        assert_expected(expected(case) + 3e-4, case)


@pytest.fixture
def past_32_bits() -> tuple[torch.Tensor, torch.Tensor]:
    """k_pool and v_pool [4,194,404, 2, 128] side by side: 2**32 numbers, few of them used.

    Unused memory costs nothing: the operating system allocates a page at its first use.
    """
    both = torch.empty((1 << 22) + 100, 2, 2, 128, dtype=torch.float16)
    return both[:, 0], both[:, 1]


FAR = AttentionCase(6, 2, 128, 2, 37, dtype=torch.float16, integer=torch.int32)
FAR_SLOTS = (1 << 22) + torch.arange(100).flip(0)[:37]


def test_slots_beyond_what_32_bits_can_count(past_32_bits):
    inputs = tensors(FAR, pools=past_32_bits, slots=FAR_SLOTS)
    assert_expected(launch(KERNEL, *inputs), FAR)
    assert_expected(paged_attention_tlsim(*inputs), FAR)


FAULTS = {
    "the tail read as if it were there": ("held = position < kv_len", "held = position >= 0"),
    "the tail counted": ("tl.where(position < visible, score,", "tl.where(position >= 0, score,"),
    "a query that sees its successor": ("query + 1  #", "query + 2  #"),
    "a query blind to itself": ("query + 1  #", "query  #"),
    "the padding of head_dim read": ("in_head = dim < HEAD_DIM", "in_head = dim < BLOCK_D"),
    "l not shrunk": ("l = l * alpha + ", "l = l + "),
    "acc not shrunk": ("acc = acc * alpha + ", "acc = acc + "),
    "alpha upside down": ("tl.exp(m - m_new)", "tl.exp(m_new - m)"),
    "m not carried": ("        m = m_new\n", ""),
    "no maximum taken off": ("tl.maximum(m, tl.max(score, axis=0))", "tl.maximum(m, 0.0)"),
    "divided in every turn": (
        "acc = acc * alpha + tl.sum(p[:, None] * v.to(tl.float32), axis=0)",
        "acc = (acc * alpha + tl.sum(p[:, None] * v.to(tl.float32), axis=0)) / l",
    ),
    "never divided": ("acc / l", "acc"),
    "h % n_kv": ("head // N_REP", "head % (tl.num_programs(1) // N_REP)"),
    "h as it is": ("kv_head = head // N_REP", "kv_head = head"),
    "the slot without its stride": ("(slot * k_slot + ", "(slot + "),
    "v by k's strides": ("slot * v_slot + kv_head * v_head", "slot * k_slot + kv_head * k_head"),
    "the position for the slot": ("tl.load(slot_ptr + position, mask=held, other=0)", "position"),
    "q without its heads": ("q_ptr + head * q_head", "q_ptr + head * HEAD_DIM"),
    "all programs store to one place": ("out_ptr + head * out_head", "out_ptr"),
    "the scale forgotten": ("q.to(tl.float32) * scale", "q.to(tl.float32)"),
}  # fmt: skip


def faulty(tmp_path: Path, old: str, new: str) -> tlsim.launch.Kernel:
    """The kernel with a part of its source replaced."""
    source = SOURCE.read_text(encoding="utf-8")
    assert source.count(old) == 1, f"the kernel no longer says {old!r} once"
    file = tmp_path / "faulty.py"
    file.write_text(source.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("faulty", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return tlsim.jit(module.paged_attention_kernel)


def wrong(kernel: tlsim.launch.Kernel, case: AttentionCase) -> bool:
    """Whether a case shows that the kernel is wrong, by its result or by tlsim's checks."""
    try:
        with tlsim.options(poison=True):
            assert_expected(launch(kernel, *tensors(case), tile=case.tile), case)
    except AssertionError:
        return True
    except tlsim.KernelError as error:
        return any(deed in str(error) for deed in ("s outside", "loads a NaN", "stores where"))
    return False


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_fails_these_cases(fault, tmp_path):
    kernel = faulty(tmp_path, *FAULTS[fault])
    assert any(wrong(kernel, case) for case in SMALL.values())


def test_a_kernel_that_counts_slots_in_32_bits_is_caught(past_32_bits, tmp_path):
    kernel = faulty(tmp_path, "mask=held, other=0).to(tl.int64)", "mask=held, other=0)")
    assert not wrong(kernel, SMALL["prefill, all at once"])
    with pytest.raises(tlsim.KernelError, match=r"loads outside k_ptr\[-"):
        launch(kernel, *tensors(FAR, pools=past_32_bits, slots=FAR_SLOTS))


@pytest.mark.parametrize(
    ("fault", "says"),
    {
        "the tail read as if it were there": r"loads outside slot_ptr\[5\] of 5 elements",
        "the slot without its stride": "loads a NaN, so a slot without an owner",
        "the position for the slot": "loads a NaN, so a slot without an owner",
        "all programs store to one place": "stores where another program has stored",
    }.items(),
)
def test_tlsim_says_what_is_wrong(fault, says, tmp_path):
    case = SMALL["prefill, plain"]
    with pytest.raises(tlsim.KernelError, match=says), tlsim.options(poison=True):
        launch(faulty(tmp_path, *FAULTS[fault]), *tensors(case), tile=case.tile)
