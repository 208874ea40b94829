"""The runner: the cache's own attention, checked by the oracle, timed with a scripted clock."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from nanoserve.bench import runner
from nanoserve.bench.attention import LLAMA_1B, AttentionRow, scattered_cache
from nanoserve.bench.correctness import WrongAnswer
from nanoserve.bench.machine import machine
from nanoserve.bench.runner import RecordedRun, Sweep, attention_paths, cache_benchmark, check_paths
from nanoserve.bench.scaling import fit_scaling
from nanoserve.cache import PagedKVCache
from nanoserve.cli import main
from nanoserve.config import parse_config
from nanoserve.kernels.reference import tolerance
from nanoserve.layers import sdpa
from tests.checkpoints import SHAPES
from tests.test_bench import ScriptedClock

SMALL = parse_config(SHAPES | {"model_type": "llama", "num_hidden_layers": 4})  # 6 heads, 2 KV


@pytest.fixture(autouse=True)
def few_layers(monkeypatch):
    """Rotate over few bytes: a cache of five layers, of which four are read."""
    monkeypatch.setattr(runner, "ROTATED", 1)


def contiguous(cache, layer, kv_len, x):
    """[1, n_kv, kv_len, d]: the content of a layer, oldest token first, this step's included."""
    pool, new = x
    held = [pool[layer, cache.table.slot(p)] for p in range(kv_len - 1)]
    return torch.stack([*held, new[0, :, 0]], dim=1)[None]


@pytest.mark.parametrize("kv_len", [1, 2, 16, 17, 37, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_all_three_variants_attend_to_all_cached_tokens_and_the_new_token(kv_len, dtype):
    cache, step = scattered_cache(SMALL, kv_len, dtype)
    paths = attention_paths(cache, step, 3)
    assert list(paths) == ["dispatched", "gather", "reference"]
    atol, rtol = tolerance(dtype)
    for layer in (0, 2):
        k = contiguous(cache, layer, kv_len, (cache.pool.k, step["k"]))
        v = contiguous(cache, layer, kv_len, (cache.pool.v, step["v"]))
        for path, read in paths.items():
            out = read(layer)
            assert torch.allclose(out, sdpa(step["q"], k, v), atol=atol, rtol=rtol), path
    assert cache.seq_len == kv_len - 1  # the step can be repeated


@pytest.mark.parametrize("path", ["dispatched", "gather", "reference"])
def test_each_variant_writes_the_steps_keys_and_values_itself(path):
    cache, step = scattered_cache(SMALL, 37)
    attention_paths(cache, step, 3)[path](1)
    slot = cache.table.slot(36)
    assert torch.equal(cache.pool.k[1, slot], step["k"][0, :, 0])
    assert torch.equal(cache.pool.v[1, slot], step["v"][0, :, 0])
    assert not cache.pool.k[0, slot].any()


def test_the_dispatched_variant_is_one_call_of_the_caches_method_with_its_result(monkeypatch):
    cache, step = scattered_cache(SMALL, 37)
    paths, calls, answer = attention_paths(cache, step, 3), [], object()
    monkeypatch.setattr(PagedKVCache, "paged_attention", lambda *args: calls.append(args) or answer)
    assert paths["dispatched"](2) is answer
    [(self, layer, k, v, q, n_rep)] = calls
    assert (self, layer, n_rep) == (cache, 2, 3)
    assert (k is step["k"], v is step["v"], q is step["q"]) == (True, True, True)


def oldest_lost(cache, layer, k, v, q, n_rep):
    keys, values = cache.append(layer, k, v)
    return sdpa(q, keys[:, :, 1:], values[:, :, 1:])


def not_written(cache, layer, k, v, q, n_rep):
    keys, values = cache.append(layer, torch.zeros_like(k), torch.zeros_like(v))
    return sdpa(q, keys, values)


def always_layer_0(cache, layer, k, v, q, n_rep):
    return sdpa(q, *cache.append(0, k, v))


def beyond_the_tolerance(cache, layer, k, v, q, n_rep):
    return sdpa(q, *cache.append(layer, k, v)) + 3e-4


def another_shape(cache, layer, k, v, q, n_rep):
    return sdpa(q, *cache.append(layer, k, v))[0]


def another_dtype(cache, layer, k, v, q, n_rep):
    return sdpa(q, *cache.append(layer, k, v)).double()


def not_a_number(cache, layer, k, v, q, n_rep):
    return sdpa(q, *cache.append(layer, k, v)) * torch.nan


FAULTS = [
    oldest_lost, not_written, always_layer_0, beyond_the_tolerance, another_shape, another_dtype,
    not_a_number,
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_attention_that_differs_from_the_oracle_is_never_timed(fault, monkeypatch):
    clock = ScriptedClock()
    monkeypatch.setattr(PagedKVCache, "paged_attention", fault)
    with pytest.raises(WrongAnswer, match="dispatched differs from the reference at 37"):
        cache_benchmark(SMALL, [37], clock=clock)
    assert clock.readings == 0


def test_the_check_accepts_differences_within_the_tolerance_of_the_dtype():
    exact = torch.ones(1, 6, 1, 8)
    for dtype, off in ((torch.float32, 5e-5), (torch.float16, 1e-3)):
        read = {
            "near": lambda layer, d=dtype, o=off: (exact + o).to(d),
            "reference": lambda layer, d=dtype: exact.to(d),
        }
        check_paths(read, [0])
    with pytest.raises(WrongAnswer, match="near differs"):
        check_paths({"near": lambda i: exact + 1e-3, "reference": lambda i: exact}, [0])


@pytest.fixture
def reads(monkeypatch):
    """A clock that only dispatched attention moves, by scripted seconds; a log of its layers."""
    clock, log, honest = ScriptedClock(), [], PagedKVCache.paged_attention
    # the two layers of the check, two warm-ups, the timed calls
    seconds = iter([100, 100, 50, 50, 4, 6, 80])

    def scripted(cache, layer, *args):
        clock.now += next(seconds)
        log.append(layer)
        return honest(cache, layer, *args)

    monkeypatch.setattr(PagedKVCache, "paged_attention", scripted)
    return clock, log


def test_the_rows_are_medians_and_the_bytes_of_one_layers_cache(reads):
    clock, log = reads
    rows = cache_benchmark(SMALL, [37], torch.float16, rounds=3, clock=clock)
    moved = 2 * 37 * 2 * 8 * 2  # k and v, tokens, KV heads, head_dim, bytes
    assert rows[0] == AttentionRow("dispatched", 37, 6, moved)
    assert [(r.path, r.kv_len, r.bytes) for r in rows] == [
        (path, 37, moved) for path in ("dispatched", "gather", "reference")
    ]
    assert log == [0, 3, 0, 1, 2, 3, 0]  # the check: first and last layer; then each in turn


def test_as_many_layers_are_laid_out_as_fill_the_rotation(monkeypatch):
    monkeypatch.setattr(runner, "ROTATED", 10 * 2 * 37 * 2 * 8 * 4 - 5)
    held, honest = [], runner.attention_paths

    def watched(cache, *args):
        held.append(len(cache.pool.k))
        return honest(cache, *args)

    monkeypatch.setattr(runner, "attention_paths", watched)
    cache_benchmark(SMALL, [37], rounds=1)
    assert held == [11]  # and one that is never read: it would move seq_len


def test_a_burst_on_a_gpu_is_one_steps_attention_and_its_time_is_shared(monkeypatch):
    """Without a GPU: only the answer to 'which device' is changed."""
    real = torch.device
    monkeypatch.setattr(runner, "scattered_cache", lambda c, h, d, _: scattered_cache(c, h, d))
    monkeypatch.setattr(runner.torch, "device", lambda d: real("cuda") if d == "gpu" else real(d))
    clock, calls, honest = ScriptedClock(), [], PagedKVCache.paged_attention

    def scripted(cache, layer, *args):
        clock.now += 2
        calls.append(layer)
        return honest(cache, layer, *args)

    monkeypatch.setattr(PagedKVCache, "paged_attention", scripted)
    rows = cache_benchmark(SMALL, [37], device="gpu", rounds=1, clock=clock)
    assert rows[0].seconds == 2
    assert len(calls) == 2 + 3 * SMALL.num_layers  # the check_paths, two warm-ups, one round


def test_a_gpus_clock_waits_for_the_gpu(monkeypatch):
    waited = []
    monkeypatch.setattr(runner.torch.cuda, "synchronize", waited.append)
    clock = runner.device_clock("cuda:1")
    assert 0 < clock() <= clock()
    assert waited == ["cuda:1", "cuda:1"]
    assert runner.device_clock("cpu") is runner.time.perf_counter


def test_the_shapes_are_the_models_own(smollm2_config):
    ours = runner.MODELS["SmolLM2-135M"]
    for name in ("num_layers", "n_q", "n_kv", "head_dim"):
        assert getattr(ours, name) == getattr(smollm2_config, name)
    assert runner.MODELS["Llama-3.2-1B"] is LLAMA_1B
    assert runner.KV_LENS == (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@pytest.fixture
def smollm2_config():
    from nanoserve.config import load_config
    from nanoserve.fetch import resolve

    return load_config(resolve("smollm2"))


H200 = {
    "device": "NVIDIA H200", "driver": "580.1", "cuda": "13.0", "platform": "Linux x86_64",
    "threads": 8, "versions": {"torch": "2.11"}, "date": "2026-11-29",
}  # fmt: skip


def a_run(**changes) -> RecordedRun:
    rows = [
        AttentionRow(p, n, 1e-6 * n, 1000 * n)
        for n in (64, 128, 256)
        for p in ("dispatched", "gather")
    ]
    fit = fit_scaling([64, 128, 256], [64e-6, 128e-6, 256e-6])
    return replace(
        RecordedRun(
            H200, "a command", "triton", 4e12,
            [Sweep("Llama-3.2-1B", "float16", rows, {"dispatched": fit})],
        ),
        **changes,
    )  # fmt: skip


def test_a_record_can_be_read_back_whole(tmp_path):
    run = a_run()
    path = run.save(tmp_path)
    assert path == tmp_path / "attention_h200.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    [sweep] = found.pop("sweeps")
    assert found == H200 | {"command": "a command", "backend": "triton", "bandwidth": 4e12}
    assert [AttentionRow(**row) for row in sweep["rows"]] == run.sweeps[0].rows
    assert sweep["fits"]["dispatched"]["exponent"] == pytest.approx(1)


def test_there_is_nothing_to_record_into_outside_a_clone(tmp_path):
    with pytest.raises(ValueError, match=r"no folder .*/data here"):
        a_run().save(tmp_path / "data")


def test_each_line_has_the_time_the_rate_and_the_share_of_the_peak_bandwidth():
    lines = list(a_run().lines())
    assert lines[0] == "NVIDIA H200, Linux x86_64, driver 580.1, torch 2.11, 2026-11-29"
    on_a_cpu = a_run(machine=H200 | {"device": "CPU", "driver": None, "cuda": None})
    assert next(on_a_cpu.lines()) == "CPU, Linux x86_64, 8 threads, torch 2.11, 2026-11-29"
    assert "backend triton, peak bandwidth 4000.0 GB/s" in lines[1]
    words = [" ".join(line.split()) for line in (lines[2], lines[-1])]
    assert words == [
        "Llama-3.2-1B float16 64 tokens dispatched 64.0 µs 1.00 GB/s, 0.0% of peak",
        "dispatched linear, exponent 1.00, within a factor of 1.00; 1000.00 ns per token at the "
        "longest length",
    ]


def test_measure_takes_both_shapes_in_the_dtypes_asked_for(monkeypatch):
    monkeypatch.setattr(runner, "read_bandwidth", lambda *args: 2e9)
    monkeypatch.setattr(runner, "MODELS", {"a": SMALL, "b": SMALL})
    run = runner.measure("cpu", (16, 20, 37), (torch.float32, torch.float16), 1, "as asked")
    assert [(s.model, s.dtype) for s in run.sweeps] == [
        (model, dtype) for model in "ab" for dtype in ("float32", "float16")
    ]
    assert {(r.path, r.kv_len) for r in run.sweeps[0].rows} == {
        (path, n) for path in ("dispatched", "gather", "reference") for n in (16, 20, 37)
    }
    assert set(run.sweeps[0].fits) == {"dispatched", "gather", "reference"}
    assert (run.bandwidth, run.command, run.backend) == (2e9, "as asked", "tlsim")
    assert run.machine == machine("cpu")
    assert runner.measure("cpu", (16, 20), rounds=1).sweeps[0].fits == {}


@pytest.mark.parametrize("args", [("mps",), ("cpu", (64, 0)), ("cpu", (64,), (), 0)])
def test_measure_refuses_what_it_cannot_time(args):
    with pytest.raises(ValueError, match=r"cannot be timed|at least 1"):
        runner.measure(*args)


@pytest.fixture
def both(monkeypatch, capsys, tmp_path):
    """Run the benchmark by either command line on small shapes: exit code, stdout, stderr."""
    monkeypatch.setattr(runner, "read_bandwidth", lambda *args: 2e9)
    monkeypatch.setattr(runner, "MODELS", {"small": SMALL})
    monkeypatch.setattr(runner, "DATA", tmp_path)

    def command(way: str, *args: str) -> tuple[int, str, str]:
        try:
            if way == "typer":
                argv = ["nanoserve", "bench", "attention", "--cache", *args]
                monkeypatch.setattr(sys, "argv", argv)
                main()
            else:
                runner.main(args)
            code = 0
        except SystemExit as end:
            code = end.code or 0
        return (code, *capsys.readouterr())

    return command


@pytest.mark.parametrize("way", ["typer", "argparse"])
def test_both_command_lines_print_the_run_and_record_it(way, both, tmp_path):
    asked = ["--kv-len", "5", "--kv-len", "20", "--kv-len", "37", "--rounds", "1"]
    code, out, err = both(way, *asked, "--dtype", "float16", "--record")
    assert (code, err) == (0, "")
    assert out.count(" of peak") == 9
    assert f"recorded in {(tmp_path / 'attention_cpu.json').as_posix()}" in out
    found = json.loads((tmp_path / "attention_cpu.json").read_text(encoding="utf-8"))
    assert found["command"].endswith("--rounds 1 --dtype float16 --record")
    assert [sweep["dtype"] for sweep in found["sweeps"]] == ["float16"]


@pytest.mark.parametrize("way", ["typer", "argparse"])
def test_without_record_nothing_is_written(way, both, tmp_path):
    assert both(way, "--kv-len", "5", "--rounds", "1")[0] == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("way", ["typer", "argparse"])
@pytest.mark.parametrize(
    "args", [("--device", "nope"), ("--kv-len", "0"), ("--rounds", "0"), ("--dtype", "int8")]
)
def test_a_bad_option_is_refused_in_a_few_words(way, args, both):
    code, out, err = both(way, *args)
    assert (code, out) == (2, "")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "args",
    [
        ("--record",),
        ("--gather", "--device", "cuda"),
        ("--cache", "--csv", "x.csv"),
        ("--cache", "--path", "sdpa"),
    ],
)
def test_options_that_do_not_go_together_are_refused(args, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["nanoserve", "bench", "attention", *args])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "--cache" in capsys.readouterr().err
