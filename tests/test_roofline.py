"""The roofline: peak rates and attention paths, checked first, timed with a scripted clock."""

import json
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch

from nanoserve.bench import attention, roofline
from nanoserve.bench.attention import (
    DECODE,
    PREFILL,
    RAGGED,
    BatchShape,
    batch_paths,
    check_path,
    draw_inputs,
)
from nanoserve.bench.correctness import WrongAnswer
from nanoserve.bench.machine import machine
from nanoserve.bench.roofline import (
    RooflineRow,
    RooflineRun,
    attention_bytes,
    attention_flops,
    copy_bandwidth,
    peak_flops,
    read_bandwidth,
    read_kernel,
    roofline_seconds,
    time_shape,
)
from nanoserve.cli import main
from nanoserve.kernels import tlsim
from nanoserve.kernels.reference import paged_attention_batch_reference, tolerance
from tests.test_bench import ScriptedClock

BATCH = BatchShape(3, 37, 6, 2, 16)
UNEVEN = replace(BATCH, ragged=True)
PROMPT = BatchShape(1, 69, 6, 2, 16, query_len=69)
RECORDED = sorted((Path(__file__).parents[1] / "notebooks/data").glob("roofline_*.json"))


@pytest.fixture(autouse=True)
def few_copies(monkeypatch):
    monkeypatch.setattr(roofline, "ROTATED", 1)


# what must be read and computed


def test_the_bytes_are_those_of_the_tensors_of_keys_and_values():
    for dtype in (torch.float32, torch.bfloat16):
        lens = [37, 5, 128]
        held = [torch.empty(2, n, 3, 64, dtype=dtype) for n in lens]
        assert attention_bytes(lens, 3, 64, dtype) == sum(x.nbytes for x in held)
    assert attention_bytes([], 3, 64, torch.float32) == 0


def test_the_operations_are_those_of_the_visible_pairs():
    visible = torch.ones(7, 40, dtype=torch.bool).tril(40 - 7)
    pairs = int(visible.sum()) + 9  # and a decode of a sequence of 9 tokens
    assert attention_flops([40, 9], 6, 16, [7, 1]) == pairs * 6 * (2 * 16 + 2 * 16)


def test_the_longer_of_reading_and_computing_is_the_shortest_time():
    assert roofline_seconds(flops=100, bytes_read=10, peak_flops=50, bandwidth=10) == 2
    assert roofline_seconds(flops=100, bytes_read=30, peak_flops=50, bandwidth=10) == 3


# peak rates


def ticking(*seconds: float, warm_ups: int = 1):
    """A clock that is read once in each warm-up, then in pairs; pair k is seconds[k] apart."""
    stamps = iter([0.0] * warm_ups + [t for s in seconds for t in (100.0, 100.0 + s)])
    return lambda: next(stamps)


def test_the_peak_read_is_the_bytes_over_the_fastest_sums_median():
    turns = (8, 2, 6), (9, 4, 7), (64, 5, 5)  # sum, amax, dot
    clock = ticking(*(s for turn in turns for s in turn), warm_ups=3)
    assert read_bandwidth("cpu", 4096, rounds=3, clock=clock) == 4096 / 4


def test_a_copied_byte_is_read_and_written():
    assert copy_bandwidth("cpu", 4096, rounds=3, clock=ticking(8, 2, 1)) == 2 * 4096 / 2


def test_the_arithmetic_is_that_of_a_square_product():
    rate = peak_flops("cpu", torch.float32, 12, rounds=1, clock=ticking(4))
    assert rate == 2 * 12**3 / 4


def test_the_read_kernel_reads_each_element_once_and_sums_each_piece():
    x, sums = torch.arange(5 * 96.0), torch.full((5,), torch.nan)
    with tlsim.trace() as accesses:
        tlsim.jit(read_kernel)[(5,)](x, sums, PIECE=96, BLOCK=32)
    assert torch.equal(sums, x.view(5, 96).sum(1))
    assert accesses.bytes("load") == accesses.distinct_bytes("load", "x_ptr") == x.nbytes


@pytest.mark.parametrize("capability", [75, 90, 100])
def test_the_read_kernel_compiles_to_wide_loads(capability):
    """16 bytes for each thread and load: four floats."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(
        fn=read_kernel,
        signature={
            "x_ptr": "*fp32",
            "sum_ptr": "*fp32",
            "PIECE": "constexpr",
            "BLOCK": "constexpr",
        },
        constexprs={"PIECE": 16_384, "BLOCK": 2_048},
        attrs={(i,): [["tt.divisibility", 16]] for i in (0, 1)},
    )
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": 8})
    assert "ld.global.v4" in compiled.asm["ptx"]


# shapes and inputs


def test_the_shapes_are_those_of_the_issue():
    names = [shape.name for shape in (*DECODE, *RAGGED, *PREFILL)]
    assert names == [
        "64 x 8,192, 32/8 x 128", "64 x 8,192, 32/8 x 64", "1 x 65,536, 32/8 x 128",
        "4 x 32,768, 32/8 x 128", "256 x 1,024, 32/8 x 128", "64 x 2,048, 9/3 x 64",
        "16 x 4,096, 32/32 x 128", "1 x 4,096, 32/8 x 64", "64 x 8,192, 32/8 x 128, ragged",
        "4 x 32,768, 32/8 x 128, ragged", "256 x 1,024, 32/8 x 128, ragged",
        "1 x 2,048, 32/8 x 128, prefill", "1 x 8,192, 32/8 x 128, prefill",
    ]  # fmt: skip
    assert {shape.kind for shape in PREFILL} == {"prefill"}
    assert BatchShape(64, 8_192, 32, 8, 128).smaller() == BatchShape(4, 512, 32, 8, 128)
    assert PREFILL[0].smaller() == BatchShape(1, 128, 32, 8, 128, query_len=128)


def test_ragged_lengths_are_uniform_and_the_same_each_time():
    lens = BatchShape(4_000, 100, 4, 2, 16, ragged=True).kv_lens
    assert (min(lens), max(lens), len(lens)) == (1, 100, 4_000)
    assert 48 < sum(lens) / 4_000 < 53
    assert lens == BatchShape(4_000, 100, 4, 2, 16, ragged=True).kv_lens
    assert BATCH.kv_lens == [37, 37, 37]


@pytest.mark.parametrize("shape", [BATCH, UNEVEN, PROMPT], ids=lambda shape: shape.kind)
def test_the_pools_are_scattered_and_poisoned_and_hold_the_contiguous_keys(shape):
    x = draw_inputs(shape, torch.float32)
    tokens = sum(shape.kv_lens)
    assert [len(slots) for slots in x.sequences()] == shape.kv_lens
    slots = torch.cat(x.sequences())
    assert len(slots.unique()) == tokens
    assert int(x.k_pool.isnan().sum()) == (len(x.k_pool) - tokens) * 2 * 16
    for i, n in enumerate(shape.kv_lens):
        assert torch.equal(x.tables.slot_mapping(i), x.sequences()[i])
        assert torch.equal(x.k[i, :, :n].transpose(0, 1), x.k_pool[x.sequences()[i]])
        assert torch.equal(x.v[i, :, :n].transpose(0, 1), x.v_pool[x.sequences()[i]])
    first = slots[::16].tolist()
    assert first != sorted(first)
    assert not torch.equal(x.q, draw_inputs(shape, torch.float32, seed=1).q)


# the code paths and their check


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [BATCH, UNEVEN, PROMPT], ids=lambda shape: shape.kind)
@pytest.mark.parametrize("name", ["split_kv", "day22", "gather", "sdpa"])
def test_every_path_equals_the_batch_reference(name, shape, dtype):
    x = draw_inputs(shape, dtype)
    out = batch_paths()[name](x)
    out = torch.cat(out) if isinstance(out, list) else out
    wide = (y.float() for y in (x.q, x.k_pool, x.v_pool))
    expected = paged_attention_batch_reference(*wide, x.tables, x.n_rep)
    atol, rtol = tolerance(dtype)
    assert out.dtype == dtype and torch.allclose(out.float(), expected, atol=atol, rtol=rtol)
    check_path(name, batch_paths()[name], x)


def test_the_paths_run_their_own_kernels(monkeypatch):
    ran = []
    monkeypatch.setattr(attention, "use_kernel", spy_on_kernels(ran))
    for name, path in batch_paths().items():
        ran.append(name)
        path(draw_inputs(BATCH, torch.float32))
    assert ran == ["split_kv", "(split_kv)", "day22", "(day22)", "gather", "sdpa"]


def spy_on_kernels(ran):
    from nanoserve.kernels.dispatch import use_kernel

    def spy(name):
        ran.append(f"({name})")
        return use_kernel(name)

    return spy


def test_on_a_gpu_the_packed_kernel_without_a_split_is_a_path_too(monkeypatch):
    """Without a GPU: the answers to questions about it, and the launch, are replaced."""
    launched = []
    monkeypatch.setattr(attention, "launch_batch", lambda *args, **more: launched.append(more))
    monkeypatch.setattr(attention, "why_not_triton", lambda device: None)
    assert "packed" not in batch_paths() or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    batch_paths()["packed"](draw_inputs(BATCH, torch.bfloat16))
    wanted = attention.split_kv.launch_of("packed", (9, 0), 16, torch.bfloat16)
    assert launched == [{"scale": None, "launch": wanted}]


def flash_stub(seen):
    """FlashAttention's arguments, computed by the batch reference."""

    def flash(q, k, v, *, cache_seqlens, causal, **table):
        ((name, blocks),) = table.items()
        seen.append((name, causal, list(q.shape), list(k.shape)))
        n, query_len, _, _ = q.shape
        starts = torch.arange(n + 1, dtype=torch.int32) * query_len
        tables = attention.PagedTables(blocks, cache_seqlens, starts, 16, query_len, 99)
        pools = (x.flatten(0, 1) for x in (k, v))
        out = paged_attention_batch_reference(q.flatten(0, 1), *pools, tables, 3)
        return out.unflatten(0, (n, query_len))

    return flash


def test_flash_attention_is_a_path_where_it_can_be_imported(monkeypatch):
    seen = []
    for module in ("flash_attn", "flash_attn_interface"):
        stub = type(sys)(module)
        stub.flash_attn_with_kvcache = flash_stub(seen)
        monkeypatch.setitem(sys.modules, module, stub)
    assert list(batch_paths()) == ["split_kv", "day22", "gather", "sdpa", "flash3", "flash2"]
    x = draw_inputs(UNEVEN, torch.float32)
    for name in ("flash3", "flash2"):
        check_path(name, batch_paths()[name], x)
    heads = ([3, 1, 6, 16], [len(x.k_pool) // 16, 16, 2, 16])
    assert seen == [("page_table", True, *heads), ("block_table", True, *heads)]
    for module in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, module, None)  # cannot be imported
    assert list(batch_paths()) == ["split_kv", "day22", "gather", "sdpa"]


def reference(x):
    return paged_attention_batch_reference(x.q, x.k_pool, x.v_pool, x.tables, x.n_rep)


def last_key_lost(x):
    tables = replace(x.tables, kv_lens=x.tables.kv_lens - (x.tables.kv_lens > 1).int())
    return paged_attention_batch_reference(x.q, x.k_pool, x.v_pool, tables, x.n_rep)


def another_sequences_keys(x):
    tables = replace(x.tables, block_tables=x.tables.block_tables.roll(1, 0))
    return paged_attention_batch_reference(x.q, x.k_pool, x.v_pool, tables, x.n_rep)


def one_row_wrong(x):
    out = reference(x)
    out[-1, 5, 3] += 1e-2
    return out


def all_zeros(x):
    return torch.zeros_like(x.q)


def another_shape(x):
    return reference(x)[None]


@pytest.mark.parametrize(
    "fault", [last_key_lost, another_sequences_keys, one_row_wrong, all_zeros, another_shape]
)
def test_a_wrong_path_gets_no_time_and_the_others_do(fault):
    rows = time_shape(BATCH, {"bad": fault, "good": reference}, rounds=1)
    assert [row.seconds is None for row in rows] == [True, False]
    assert rows[0].note.startswith(("bad differs from the reference", "bad returns"))
    assert rows[1].note == ""


def test_the_check_sees_a_long_sequences_result_and_the_ends_of_a_long_prompt():
    x = draw_inputs(BatchShape(1, 20_000, 2, 1, 16), torch.bfloat16)
    with pytest.raises(WrongAnswer):
        check_path("zeros", all_zeros, x)  # of an average, zeros would pass in bfloat16
    x = draw_inputs(BatchShape(1, 600, 2, 1, 16, query_len=600), torch.float32)
    check_path("good", reference, x)
    for row in (0, 255, 344, 599):

        def bad(x, row=row):
            out = reference(x)
            out[row] = 0
            return out

        with pytest.raises(WrongAnswer, match="bad differs from the reference at 1 x 600"):
            check_path("bad", bad, x)


def test_a_path_that_cannot_run_is_noted():
    def refuses(x):
        raise NotImplementedError("blocks of 256 tokens only\nand more")

    (row,) = time_shape(BATCH, {"flash2": refuses}, rounds=1)
    assert row.seconds is None
    assert row.note == "cannot run: NotImplementedError: blocks of 256 tokens only"


# times


def test_the_rows_are_medians_of_turns_through_the_copies(monkeypatch):
    monkeypatch.setattr(roofline, "ROTATED", 3 * 2 * 111 * 2 * 16 * 4 - 5)  # three copies
    clock, log = ScriptedClock(), []
    seen = {}

    def path(name, seconds):
        left = iter(seconds)

        def run(x):
            clock.now += next(left)
            log.append((name, seen.setdefault(id(x), len(seen))))
            return reference(x)

        return run

    # the check, the warm-up, three rounds
    paths = {"a": path("a", [100, 90, 4, 6, 80]), "b": path("b", [100, 90, 3, 1, 2])}
    rows = time_shape(BATCH, paths, rounds=3, clock=clock)
    moved = 2 * 3 * 37 * 2 * 16 * 4
    flops = 4 * 6 * 16 * 3 * 37
    assert rows == [
        RooflineRow("3 x 37, 6/2 x 16", "decode", "a", moved, flops, 6),
        RooflineRow("3 x 37, 6/2 x 16", "decode", "b", moved, flops, 2),
    ]
    assert log[2:] == [(name, copy) for copy in (0, 1, 2, 0) for name in "ab"]


def test_a_burst_on_a_gpu_replays_a_graph_of_the_calls(monkeypatch):
    """Without a GPU: a capture is replaced by a plain loop."""
    clock, captured = ScriptedClock(), []

    def capture(calls, device):
        captured.append(len(calls))
        return lambda: [call() for call in calls]

    monkeypatch.setattr(roofline, "_captured", capture)
    gpu = torch.device("cuda")
    quick = clock.work([2**-17] * 100_000, [], "quick")
    run, calls = roofline._burst([quick] * 4, gpu, clock)
    assert captured == [4, 528]  # 31 µs first, then the first multiple of 4 above 4 ms
    assert calls == 5 * 528  # the first multiple of 4 ms above 20 ms
    before = clock.now
    run()
    assert clock.now - before == 5 * 528 * 2**-17

    slow = clock.work([0.5] * 100, [], "slow")
    run, calls = roofline._burst([slow] * 4, gpu, clock)
    assert (captured[2:], calls) == ([2], 2)


# a whole run

H200 = {
    "device": "NVIDIA H200", "driver": "580.1", "cuda": "13.0", "platform": "Linux x86_64",
    "threads": 8, "versions": {"torch": "2.11"}, "date": "2026-11-30",
}  # fmt: skip


def a_run(**changes) -> RooflineRun:
    rows = [
        RooflineRow("64 x 8,192, 32/8 x 128", "decode", "split_kv", 2 << 30, 9, 5e-4),
        RooflineRow("64 x 8,192, 32/8 x 128", "decode", "flash2", 2 << 30, 9, None, "cannot run"),
        RooflineRow("1 x 2,048, 32/8 x 128, prefill", "prefill", "split_kv", 9, 10**10, 4e-5),
        RooflineRow("1 x 2,048, 32/8 x 128, prefill", "prefill", "sdpa", 9, 10**10, 2e-5),
    ]
    run = RooflineRun(H200, "a command", "bfloat16", 4.5e12, 4.1e12, 8e14, rows)
    return replace(run, **changes)


def test_each_line_has_the_time_the_rate_and_the_share():
    run = a_run()
    assert list(run.head()) == [
        "NVIDIA H200, Linux x86_64, driver 580.1, torch 2.11, 2026-11-30",
        "reads 4500.0 GB/s, copies 4100.0 GB/s, multiplies 800.00 TFLOP/s in bfloat16",
    ]
    assert [" ".join(run.line(row).split()) for row in run.rows] == [
        "64 x 8,192, 32/8 x 128 split_kv 500.0 µs 4295.0 GB/s, 95.4% of peak",
        "64 x 8,192, 32/8 x 128 flash2 cannot run",
        "1 x 2,048, 32/8 x 128, prefill split_kv 40.0 µs 250.00 TFLOP/s, 31.2% of peak, "
        "0.50 of sdpa's speed",
        "1 x 2,048, 32/8 x 128, prefill sdpa 20.0 µs 500.00 TFLOP/s, 62.5% of peak, "
        "1.00 of sdpa's speed",
    ]


def test_a_run_is_whole_if_every_path_of_ours_has_a_time():
    assert a_run().whole
    wrong = RooflineRow("a shape", "decode", "day22", 1, 1, None, "day22 differs")
    assert not a_run(rows=[*a_run().rows, wrong]).whole


def test_a_record_can_be_read_back_whole(tmp_path):
    path = a_run().save(tmp_path)
    assert path == tmp_path / "roofline_h200.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    assert [RooflineRow(**row) for row in found.pop("rows")] == a_run().rows
    own = {"command": "a command", "dtype": "bfloat16"}
    assert found == H200 | own | {"read": 4.5e12, "copy": 4.1e12, "flops": 8e14}


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Small shapes, scripted peak rates, and a folder for records."""
    for name, shapes in (("DECODE", [BATCH]), ("RAGGED", [UNEVEN]), ("PREFILL", [PROMPT])):
        larger = [replace(s, num_seqs=16 * s.num_seqs, kv_len=16 * s.kv_len) for s in shapes]
        monkeypatch.setattr(roofline, name, larger)
    monkeypatch.setattr(roofline, "PREFILL", [replace(PROMPT, kv_len=16 * 69, query_len=16 * 69)])
    for name, rate in (("read_bandwidth", 2e9), ("copy_bandwidth", 1e9), ("peak_flops", 3e10)):
        monkeypatch.setattr(roofline, name, lambda *args, rate=rate: rate)
    monkeypatch.setattr(roofline, "DATA", tmp_path)
    return tmp_path


def test_measure_runs_all_paths_on_all_shapes_and_shows_each_line(small):
    shown = []
    run = roofline.measure("cpu", rounds=1, command="as asked", show=shown.append)
    paths = ("split_kv", "day22", "gather", "sdpa")
    assert [(row.shape, row.path) for row in run.rows if not row.path.startswith("flash")] == [
        (shape.name, path) for shape in (BATCH, UNEVEN, PROMPT) for path in paths
    ]
    assert run.whole
    assert (run.machine, run.command, run.dtype) == (machine("cpu"), "as asked", "float32")
    assert (run.read, run.copy, run.flops) == (2e9, 1e9, 3e10)
    assert shown == [*run.head(), *map(run.line, run.rows)]


@pytest.mark.parametrize("options", [{"device": "mps"}, {"rounds": 0}, {"paths": ("sdpa", "vllm")}])
def test_measure_refuses_what_it_cannot_time(options, small):
    with pytest.raises(ValueError, match=r"cannot be timed|at least 1|no path 'vllm' here"):
        roofline.measure(**{"device": "cpu", **options})


@pytest.fixture
def commands(small, monkeypatch, capsys):
    """Run the benchmark by a command line: exit code, stdout, stderr."""

    def command(way: str, *args: str) -> tuple[int, str, str]:
        try:
            if way == "argparse":
                roofline.main(args)
            else:
                monkeypatch.setattr(sys, "argv", ["nanoserve", "bench", way, *args])
                main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        return (code, *capsys.readouterr())

    return command


@pytest.mark.parametrize("way", ["roofline", "argparse", "attention"])
def test_the_command_lines_print_the_run(way, commands, tmp_path):
    asked = ("--device", "cpu", "--rounds", "1", "--dtype", "float16")
    code, out, err = commands(way, *asked, "--path", "sdpa", "--path", "gather")
    assert (code, err) == (0, "")
    assert out.count(" of peak") == 6
    assert "multiplies 0.03 TFLOP/s in float16" in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("way", ["roofline", "argparse"])
def test_a_run_is_recorded_where_asked(way, commands, tmp_path):
    asked = ("--device", "cpu", "--rounds", "1", "--path", "sdpa", "--record")
    code, out, err = commands(way, *asked)
    assert (code, err) == (0, "")
    path = tmp_path / "roofline_cpu.json"
    assert f"recorded in {path.as_posix()}" in out
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["command"].endswith("--rounds 1 --path sdpa --record")
    assert [row["path"] for row in found["rows"]] == ["sdpa"] * 3


@pytest.mark.parametrize("way", ["roofline", "argparse"])
def test_a_wrong_path_is_shown_and_makes_the_exit_code_1(way, commands, monkeypatch):
    monkeypatch.setattr(roofline, "batch_paths", lambda: {"ours": all_zeros, "sdpa": reference})
    code, out, err = commands(way, "--device", "cpu", "--rounds", "1")
    assert (code, err) == (1, "")
    assert out.count("ours differs from the reference") == 3
    assert out.count(" of peak") == 3


@pytest.mark.parametrize("way", ["roofline", "argparse", "attention"])
@pytest.mark.parametrize("args", [("--device", "mps"), ("--path", "x"), ("--rounds", "0")])
def test_a_bad_option_is_refused_in_a_few_words(way, args, commands):
    code, out, err = commands(way, *args)
    assert (code, out) == (2, "")
    assert "Traceback" not in err


def test_a_shape_that_does_not_fit_leaves_the_others(small, monkeypatch):
    turn = count()

    def no_memory_first(*args):
        if next(turn) == 0:
            raise torch.OutOfMemoryError
        return []

    shown = []
    monkeypatch.setattr(roofline, "time_shape", no_memory_first)
    assert roofline.measure("cpu", rounds=1, show=shown.append).rows == []
    assert [line for line in shown if "does not fit in the memory" in line] == [
        f"{BATCH.name:<30} does not fit in the memory of this GPU"
    ]


# recorded runs


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_recorded_run_is_whole(path):
    run = json.loads(path.read_text(encoding="utf-8"))
    rows = [RooflineRow(**row) for row in run["rows"]]
    assert {row.shape for row in rows} == {s.name for s in (*DECODE, *RAGGED, *PREFILL)}
    assert {row.path for row in rows} >= {"split_kv", "day22", "gather", "sdpa"}
    for row in rows:
        if row.seconds is not None:
            assert row.note == ""
            assert row.seconds > 0.95 * roofline_seconds(
                row.flops, row.bytes, run["flops"], run["read"]
            )
    assert run["driver"] and run["cuda"]
