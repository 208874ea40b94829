"""Day 22: the fold equals the softmax, and a learner's kernel replaces the engine's kernel."""

import inspect
import linecache
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.course import check, day
from nanoserve.course.answers import Answer, answer_path, installed
from nanoserve.course.exercises.day22 import KERNEL, a_read, fold
from nanoserve.kernels import paged_attention, tlsim
from nanoserve.kernels.dispatch import paged_attention_dispatch, use_backend, use_kernel
from nanoserve.kernels.reference import ATOL, RTOL, paged_attention_reference

SOURCE = inspect.getsource(tlsim.jit(paged_attention.paged_attention_kernel).fn)


def kernel_of(*edits: tuple[str, str]):
    """The package's kernel, edited, as a notebook's cell would define it."""
    source = "from nanoserve.kernels.paged_attention import tl, triton\n" + SOURCE
    for old, new in edits:
        assert source.count(old) == 1
        source = source.replace(old, new)
    file = f"<cell {len(linecache.cache)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    scope = {"__name__": "__main__"}
    exec(compile(source, file, "exec"), scope)
    return scope["paged_attention_kernel"]


@settings(max_examples=50, deadline=None)
@given(
    keys=st.integers(1, 40),
    tile=st.integers(1, 45),
    size=st.sampled_from([0.0, 1.0, 30.0, 1_000.0]),
    seed=st.integers(0, 2**16),
)
def test_the_fold_of_any_tiles_is_the_softmax_of_all_scores(keys, tile, size, seed):
    random = torch.Generator().manual_seed(seed)
    scores, values = (torch.randn(n, keys, generator=random) for n in (3, 8))
    scores, values = size * scores, values.T
    m, l, acc = torch.full((3,), -torch.inf), torch.zeros(3), torch.zeros(3, 8)  # noqa: E741
    for s, v in zip(scores.split(tile, dim=1), values.split(tile), strict=True):
        m, l, acc = fold(m, l, acc, s, v)  # noqa: E741
    truth = (scores.double().softmax(-1) @ values.double()).float()
    torch.testing.assert_close(acc / l[:, None], truth, atol=ATOL, rtol=RTOL)
    assert torch.equal(m, scores.amax(-1))


def test_a_kernel_of_one_tile_is_told_that_the_others_never_come():
    loop = ("for start in range(0, visible, TILE):", "if TILE > 0:")
    report = check.run(KERNEL, kernel_of(loop, ("start + tl.arange", "tl.arange")))
    assert [row.passed for row in report.rows[:3]] == [True, True, False]
    assert "there is no loop yet" in report.failed.message


def test_a_kernel_with_a_while_loop_is_an_attempt():
    loop = ("for start in range(0, visible, TILE):", "start = 0\n    while start < visible:")
    step = ("        m = m_new\n", "        m = m_new\n        start += TILE\n")
    report = check.run(KERNEL, kernel_of(loop, step))
    failed = [row for row in report.rows if not row.passed]
    assert 0 < len(failed) < len(report.rows)
    assert all("a `while` ends in all programs at once" in row.message for row in failed)


def test_a_kernel_that_passes_is_saved_as_source_and_runs_in_the_engine(capsys):
    today, read = day(22), a_read(3, 13)
    today.check(kernel_of(("m_new = tl.maximum(m, tl.max(score, axis=0))", LONGER)))
    assert today.last.status == "passed"
    assert today.last.note.startswith("Saved")
    assert "import triton" in answer_path(22, KERNEL.name).read_text(encoding="utf-8")
    with today.mine(), use_backend("tlsim"), tlsim.trace() as accesses:
        out = paged_attention_dispatch(*read)
    torch.testing.assert_close(out, paged_attention_reference(*read), atol=ATOL, rtol=RTOL)
    assert accesses.accesses
    assert "Running with your paged_attention_kernel" in capsys.readouterr().out


LONGER = "largest = tl.max(score, axis=0)\n        m_new = tl.maximum(m, largest)"


def test_whatever_kernel_is_installed_is_the_one_that_the_dispatcher_launches():
    read = a_read(2, 9)
    with use_backend("tlsim"), use_kernel("day22"):
        before = paged_attention_dispatch(*read)
        twice = kernel_of(("acc / l, mask", "2 * acc / l, mask"))
        with installed([Answer(22, KERNEL, twice)]):
            assert torch.equal(paged_attention_dispatch(*read), 2 * before)
        assert torch.equal(paged_attention_dispatch(*read), before)


def test_the_stub_without_a_loop_is_not_attempted():
    first, last = SOURCE.index("    kv_head ="), SOURCE.index("    out = out_ptr")
    stub = kernel_of((SOURCE[first:last], "    # your turn\n\n"))
    today = day(22)
    today.check(stub)
    assert today.last.status == "not attempted"


def test_the_stepper_draws_every_tile_and_step():
    from nanoserve.course.exercises.day22 import SCORES, _draw_stepper

    for scores in SCORES:
        for tiles, tile in ((0, 4), (1, 1), (2, 6), (5, 3), (12, 1)):
            figure = _draw_stepper(tiles, tile, scores)
            assert len(figure.axes) == 2
    assert "acc / l = 0.602" in _draw_stepper(3, 4, "as they come").axes[1].get_title("left")


@pytest.fixture(autouse=True)
def forgotten():
    """The modules that a loaded answer adds to sys.modules."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("nanoserve_answers"):
            del sys.modules[name]
