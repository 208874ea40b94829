"""Capture and replay: a recorded launch gives what the launch gives, with other arguments too."""

import gc
import weakref

import pytest
import torch

from nanoserve.kernels import tlsim
from nanoserve.kernels.reference import paged_attention_reference
from nanoserve.kernels.split_kv import packed_kernel
from nanoserve.kernels.tlsim import language as tl

REPLAY = {"checks": False, "replay": True}


@pytest.fixture
def launches(monkeypatch):
    """A kernel's launches that ran as statements, and so were not replayed."""
    scale_rows.recordings.known.cache_clear()
    PACKED.recordings.known.cache_clear()
    seen = []
    run = tlsim.launch.Kernel.run

    def counted(self, *args):
        seen.append(self.__name__)
        run(self, *args)

    monkeypatch.setattr(tlsim.launch.Kernel, "run", counted)
    return seen


@tlsim.jit
def scale_rows(x_ptr, lengths_ptr, out_ptr, by, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    n = tl.load(lengths_ptr + row)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + at, mask=at < n)
        tl.store(out_ptr + row * stride + at, x * by, mask=at < n)


def scaled(x, lengths, by):
    out = torch.full_like(x, -1.0)
    scale_rows[(len(x),)](x, lengths, out, by, x.stride(0), BLOCK=4)
    return out


def expected(x, lengths, by):
    held = torch.arange(x.shape[1]) < lengths[:, None]
    return torch.where(held, x * by, -1.0)


def test_a_launch_is_recorded_once_and_replayed_with_other_numbers_and_tensors(launches):
    with tlsim.options(**REPLAY):
        for by in (2.0, -0.5, 0.0, -0.0, float("inf"), 2.0):
            x, lengths = torch.randn(3, 16), torch.tensor([5, 8, 7])
            out = scaled(x, lengths, by)
            torch.testing.assert_close(out, expected(x, lengths, by), equal_nan=True)
            assert torch.equal(out.signbit(), expected(x, lengths, by).signbit())
    assert launches == ["scale_rows"]


def test_other_turns_of_a_loop_are_another_recording(launches):
    x = torch.randn(3, 16)
    with tlsim.options(**REPLAY):
        for _ in range(2):
            for lengths in ([5, 8, 7], [0, 3, 1], [16, 2, 9], [0, 0, 0]):
                lengths = torch.tensor(lengths)
                assert torch.equal(scaled(x, lengths, 3.0), expected(x, lengths, 3.0))
    assert len(launches) == 4


def test_what_depends_on_tables_is_prepared_again_when_they_change(launches):
    x, lengths = torch.randn(3, 16), torch.tensor([5, 8, 7])
    with tlsim.options(**REPLAY):
        scaled(x, lengths, 2.0)
        lengths[0] = 8
        assert torch.equal(scaled(x, lengths, 2.0), expected(x, lengths, 2.0))
        lengths.copy_(torch.tensor([6, 5, 7]))
        assert torch.equal(scaled(x, lengths, 2.0), expected(x, lengths, 2.0))
    assert launches == ["scale_rows"]


def test_an_integer_that_changes_becomes_an_input(launches):
    with tlsim.options(**REPLAY):
        for columns in (16, 17, 18, 32, 40, 41, 100):
            x, lengths = torch.randn(3, columns), torch.tensor([5, 8, 7])
            assert torch.equal(scaled(x, lengths, 2.0), expected(x, lengths, 2.0))
    assert len(launches) == 2  # with the first number, and with a number as an input


def test_an_integer_equal_to_1_is_another_kind_of_launch(launches):
    @tlsim.jit
    def kernel(out_ptr, n):
        tl.store(out_ptr + tl.arange(0, 4), tl.arange(0, 4) * n)

    with tlsim.options(**REPLAY):
        for n in (2, 1, 3, 1, 2**40, 5, -7, 2**31):
            out = torch.zeros(4, dtype=torch.int64)
            kernel[(1,)](out, n)
            assert out.tolist() == [0, n, 2 * n, 3 * n]
    assert len(launches) == 5  # 2, 1, 3 as an input; 64 bits, and 64 bits as an input


def test_dtypes_grids_and_constants_are_other_kinds_of_launches(launches):
    @tlsim.jit
    def kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out_ptr + at, tl.load(x_ptr + at) * BLOCK)

    with tlsim.options(**REPLAY):
        for _ in range(2):
            for dtype in (torch.float32, torch.float16):
                for grid, block in ((1, 8), (2, 4), (2, 2)):
                    x, out = torch.arange(8).to(dtype), torch.zeros(8)
                    kernel[(grid,)](x, out, BLOCK=block)
                    assert out[: grid * block].tolist() == [i * block for i in range(grid * block)]
    assert len(launches) == 6


def test_a_number_read_after_a_store_is_never_replayed(launches):
    @tlsim.jit
    def kernel(x_ptr):
        tl.store(x_ptr, tl.load(x_ptr) + 1)
        if tl.load(x_ptr) > 2:
            tl.store(x_ptr, 0)

    x = torch.zeros(1, dtype=torch.int32)
    seen = []
    with tlsim.options(**REPLAY):
        for _ in range(7):
            kernel[(1,)](x)
            seen.append(x.item())
    assert seen == [1, 2, 0, 1, 2, 0, 1]
    assert len(launches) == 7


def test_tables_that_the_kernel_itself_stores_to(launches):
    @tlsim.jit
    def count(x_ptr, out_ptr):
        n = tl.load(x_ptr)
        tl.store(out_ptr, n)
        tl.atomic_add(x_ptr, 1)
        tl.store(out_ptr + 1, tl.load(x_ptr))

    x, out = torch.zeros(1, dtype=torch.int32), torch.zeros(2)
    with tlsim.options(**REPLAY):
        for turn in range(4):
            count[(1,)](x, out)
            assert out.tolist() == [turn, turn + 1]
    assert launches == ["count"]


def test_a_table_too_short_for_a_row_and_a_view_with_gaps(launches):
    @tlsim.jit
    def first(table_ptr, x_ptr, out_ptr, n, stride):
        at = tl.arange(0, 8)
        slot = tl.load(table_ptr + at, mask=at < n, other=0)
        x = tl.load(x_ptr + slot * stride, mask=at < n, other=-1.0)
        tl.store(out_ptr + at, x)

    with tlsim.options(**REPLAY):
        for n in (3, 8, 5, 20, 2):
            table, x, out = torch.randperm(20)[:n], torch.randn(20, 2)[:, 1], torch.zeros(8)
            first[(1,)](table, x, out, min(n, 8), x.stride(0))
            assert torch.equal(out[:n], x[table][:8])
            assert (out[n:] == -1).all()
    assert len(launches) == 2


def test_a_kernel_that_is_defined_again_is_recorded_again():
    factor = tl.constexpr(2)

    @tlsim.jit
    def kernel(out_ptr):
        tl.store(out_ptr, factor)

    out = torch.zeros(1)
    with tlsim.options(**REPLAY):
        for factor in (tl.constexpr(2), tl.constexpr(5), tl.constexpr(7)):
            kernel[(1,)](out)
            assert out.item() == factor.value


def test_recordings_are_few_and_keep_no_large_tensor_alive():
    @tlsim.jit
    def kernel(x_ptr, out_ptr, n, SIZE: tl.constexpr):
        for i in range(n):
            tl.store(out_ptr + i, tl.load(x_ptr + i) * SIZE)

    with tlsim.options(**REPLAY):
        for n in range(2, 40):
            x, out = torch.randn(40), torch.zeros(40)
            kernel[(1,)](x, out, n, SIZE=2)
        assert torch.equal(out[:n], 2 * x[:n])
        alive = weakref.ref(x), weakref.ref(out)
        del x, out
        gc.collect()
        assert [ref() for ref in alive] == [None, None]


def test_a_trace_and_checks_see_every_launch(launches):
    x, lengths = torch.randn(3, 16), torch.tensor([5, 8, 7])
    with tlsim.options(**REPLAY):
        scaled(x, lengths, 2.0)
        with tlsim.trace() as trace:
            scaled(x, lengths, 2.0)
    assert trace.bytes("store") == 20 * 4
    with (
        pytest.raises(tlsim.KernelError, match="loads outside lengths_ptr"),
        tlsim.options(replay=True),
    ):
        scaled(x, lengths[:2], 2.0)
    assert len(launches) == 3


def test_gradients_are_no_concern_of_a_replay():
    x, lengths = torch.randn(3, 16, requires_grad=True), torch.tensor([5, 8, 7])
    with tlsim.options(**REPLAY):
        for _ in range(2):
            assert not scaled(x, lengths, 2.0).requires_grad


def test_a_graph_repeats_a_launch_with_other_tensors(launches):
    graph, lengths = tlsim.Graph("x_ptr", "out_ptr"), torch.tensor([5, 8, 7])
    with tlsim.options(checks=False, replay=graph):
        for _ in range(2):
            assert not graph.replay(torch.zeros(3, 16), torch.zeros(3, 16))
            scaled(torch.randn(3, 16), lengths, 2.0)
    for _ in range(3):
        x, out = torch.randn(3, 16, requires_grad=True), torch.full((3, 16), -1.0)
        assert graph.replay(x, out)
        assert torch.equal(out, expected(x.detach(), lengths, 2.0))
    with tlsim.trace():
        assert not graph.replay(x, out)
    with tlsim.options(order="serial"):
        assert not graph.replay(x, out)
    assert launches == ["scale_rows"]


def test_a_graph_keeps_no_tensor_that_it_replaces():
    graph, lengths = tlsim.Graph("x_ptr", "out_ptr"), torch.tensor([5, 8, 7])
    with tlsim.options(checks=False, replay=graph):
        for _ in range(2):
            x = torch.randn(3, 16)
            scaled(x, lengths, 2.0)
    alive = weakref.ref(x)
    del x
    gc.collect()
    assert graph.run is not None and alive() is None


@pytest.mark.parametrize("gap", [0, 8])
def test_rows_of_neighbouring_programs_are_loaded_as_one(gap, launches):
    @tlsim.jit
    def rows(x_ptr, at_ptr, out_ptr, step):
        i = tl.arange(0, 4)
        at = tl.load(at_ptr + i) + tl.program_id(0) * step
        x = tl.load(x_ptr + at[:, None] + tl.arange(0, 8)[None, :])
        tl.store(out_ptr + tl.program_id(0) * 32 + i[:, None] * 8 + tl.arange(0, 8)[None, :], x)

    with tlsim.options(**REPLAY):
        for at in ([0, 16, 48, 8], [3, 40, 3, 0]):
            x, out = torch.randn(48 + 3 * (8 + gap)), torch.zeros(3, 4, 8)
            rows[(3,)](x, torch.tensor(at), out, 8 + gap)
            for program in range(3):
                for i, start in enumerate(at):
                    first = start + program * (8 + gap)
                    assert torch.equal(out[program, i], x[first : first + 8])
    assert launches == ["rows"]


# ---- the attention kernel


def attention(q, k, v, slots, rows, tile):
    """paged_attention_reference's arguments and result, by packed_kernel; q [1, n_q, 1, dim]."""
    _, n_q, _, dim = q.shape
    tables = slots[None], torch.tensor([len(slots)]), torch.tensor([0, 1])
    q, out = q[0].transpose(0, 1).contiguous(), torch.empty(1, n_q, dim)
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], len(slots))
    PACKED[(k.shape[1], 1)](
        q, k, v, *tables, out, dim**-0.5 * 1.4426950408889634, 1, *strides,
        N_REP=n_q // k.shape[1], HEAD_DIM=dim, BLOCK_D=tlsim.next_power_of_2(dim), BLOCK_SIZE=1,
        ROWS=rows, TILE=tile, SEQS=1, LONG=True,
    )  # fmt: skip
    return out.transpose(0, 1)[None]


PACKED = tlsim.jit(packed_kernel)


@pytest.mark.parametrize("dim", [64, 80])
def test_decode_replays_for_every_layer_and_length(dim, launches):
    generator = torch.Generator().manual_seed(dim)
    pools = [torch.randn(64, 3, dim, generator=generator) for _ in range(4)]
    slots = torch.randperm(64, generator=generator)
    with tlsim.options(**REPLAY):
        for length in range(1, 60):
            for k, v in (pools[:2], pools[2:]):  # two layers
                q = torch.randn(1, 9, 1, dim, generator=generator)
                out = attention(q, k, v, slots[:length], 4, 16)
                expected = paged_attention_reference(q, k, v, slots[:length], 3)
                torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    assert len(launches) <= 8  # one for each number of tiles, and few until lengths are inputs
