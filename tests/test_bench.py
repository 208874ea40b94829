"""Timing with a scripted clock: exact figures, fair turns, and no figure for a wrong answer."""

import csv
import sys
from collections.abc import Iterable
from types import SimpleNamespace

import pytest
import torch

from nanoserve.bench import attention, timing
from nanoserve.bench.attention import LLAMA_1B, AttentionRow, attention_benchmark, scattered_cache
from nanoserve.bench.correctness import WrongAnswer
from nanoserve.bench.decode import (
    DecodeRow,
    bytes_per_token,
    decode_benchmark,
    engine_path,
    gguf_bytes,
    llama_path,
    near_greedy,
    oracle_path,
    paged_path,
    step_bytes,
)
from nanoserve.bench.timing import median_times, read_bandwidth, token_times
from nanoserve.cache import BLOCK_SIZE, PagedKVCache
from nanoserve.cli import main
from nanoserve.config import parse_config
from nanoserve.fetch import fetch, gguf_path
from nanoserve.kernels.dispatch import paged_attention_dispatch
from nanoserve.layers import sdpa
from nanoserve.model import load_model
from nanoserve.oracle import load_oracle
from tests.checkpoints import KINDS, SHAPES, random_model, save
from tests.folders import write_checkpoint


class ScriptedClock:
    """A clock that moves only when the measured work adds seconds to it."""

    def __init__(self) -> None:
        self.now, self.readings = 1000.0, 0

    def __call__(self) -> float:
        self.readings += 1
        return self.now

    def work(self, seconds: Iterable[float], log: list[str], name: str):
        """A run whose calls take these seconds, one after another."""
        left = iter(seconds)

        def run() -> None:
            log.append(name)
            self.now += next(left)

        return run


def test_the_median_leaves_out_the_warm_up_and_the_outlier():
    clock, log = ScriptedClock(), []
    runs = {
        "a": clock.work([90, 1, 2, 64], log, "a"),
        "b": clock.work([80, 8, 0.5, 4], log, "b"),
    }
    assert median_times(runs, rounds=3, warmup=1, clock=clock) == {"a": 2, "b": 4}


def test_the_variants_take_turns():
    clock, log = ScriptedClock(), []
    runs = {name: clock.work([1] * 5, log, name) for name in "abc"}
    median_times(runs, rounds=3, warmup=2, clock=clock)
    assert log == list("abc" * 5)


def test_without_warm_up_every_round_counts():
    clock, log = ScriptedClock(), []
    runs = {"a": clock.work([2, 4], log, "a")}
    assert median_times(runs, rounds=2, warmup=0, clock=clock) == {"a": 3}


def test_each_token_is_timed_from_the_one_before_and_the_first_from_the_start():
    clock = ScriptedClock()

    def run(on_token) -> None:
        for seconds in (5, 0.25, 0.5):
            clock.now += seconds
            on_token(7)
        clock.now += 100  # time after the last token belongs to no token

    assert token_times(run, clock) == [5, 0.25, 0.5]
    assert clock.readings == 4


def test_a_run_without_tokens_has_no_times():
    assert token_times(lambda on_token: None, ScriptedClock()) == []


def test_bandwidth_is_the_bytes_over_the_best_of_five_sums():
    stamps = iter([0, 4, 10, 12, 20, 28, 30, 38, 40, 48])
    assert read_bandwidth(size=4096, clock=lambda: next(stamps)) == 4096 / 2
    assert next(stamps, None) is None


def scripted_path(clock, name, log, prefill, decode, ids=(4, 5, 6, 7)):
    """A variant that generates these ids; its steps take longer in each run."""
    runs = iter(range(100))

    def path(prompt, tokens, on_token):
        turn = next(runs)
        log.append((name, len(prompt)))
        for i in ids[:tokens]:
            clock.now += (decode if i != ids[0] else prefill) * (1 + turn)
            on_token(i)
        return list(ids[:tokens])

    return path


def test_the_benchmark_gives_medians_after_a_check_that_is_the_warm_up():
    clock, log = ScriptedClock(), []
    paths = {
        "ours": scripted_path(clock, "ours", log, prefill=8, decode=1),
        "theirs": scripted_path(clock, "theirs", log, prefill=2, decode=4),
    }
    rows = decode_benchmark(paths, "theirs", [[1] * 5], tokens=4, rounds=3, clock=clock)
    # ours: run 0 is its check, runs 1 to 3 are timed; theirs: runs 0 and 1 are checks
    assert rows == [DecodeRow("ours", 5, 8 * 3, 3), DecodeRow("theirs", 5, 2 * 4, 4 * 4)]
    assert [name for name, _ in log][3:] == ["ours", "theirs"] * 3


def test_a_check_of_its_own_replaces_equality_with_the_reference():
    clock, log, seen = ScriptedClock(), [], []
    paths = {
        "exact": scripted_path(clock, "exact", log, 1, 1),
        "near": scripted_path(clock, "near", log, 1, 1, ids=(4, 5, 9, 7)),
    }

    def check(answer):
        return lambda prompt, ids: seen.append((prompt, ids)) or answer

    def run(checks):
        return decode_benchmark(paths, "exact", [[1] * 3], 4, 1, clock, checks)

    assert [row.path for row in run({"near": check(True)})] == ["exact", "near"]
    assert seen == [([1] * 3, [4, 5, 9, 7])]
    for checks in ({}, {"near": check(False)}):
        with pytest.raises(WrongAnswer, match="near and exact differ at prompt length 3"):
            run(checks)


def test_near_greedy_allows_what_rounding_can_change_and_no_more(tmp_path):
    model = load_model(write_checkpoint(tmp_path))
    prompt, ids = [5, 9, 3], []
    for _ in range(4):
        ids.append(int(model(torch.tensor([prompt + ids]))[0, -1].argmax()))
    assert near_greedy(model, 0.0)(prompt, ids)
    for i in range(4):
        logits = model(torch.tensor([prompt + ids[:i]]))[0, -1]
        second = logits.topk(2).indices[1]
        gap, other = float(logits.max() - logits[second]), [*ids[:i], int(second)]
        assert near_greedy(model, gap + 1e-3)(prompt, other)
        assert not near_greedy(model, gap - 1e-3)(prompt, other)


@pytest.mark.parametrize("tied", [True, False])
def test_the_bytes_of_a_step_are_counted_from_what_a_model_keeps(tied, tmp_path):
    sizes = {"hidden_size": 192, "intermediate_size": 96, "head_dim": 32, "vocab_size": 272}
    folder = write_checkpoint(tmp_path, **sizes, tie_word_embeddings=tied)
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(folder, dtype)
        assert step_bytes(model, 50) == bytes_per_token(model.config, 50, dtype)
    kept, config = load_model(folder, torch.bfloat16, quantization="q4"), model.config
    norms = 2 * 192 * (2 * config.num_layers + 1)
    of_four_bits = bytes_per_token(config, 0, torch.uint8) - norms // 2 - 272 * 192
    # 16 bytes of numbers and 4 of scale and minimum in 32; twice as many in eight bits
    expected = norms + (of_four_bits + 2 * 272 * 192) * 20 // 32
    assert step_bytes(kept, 0) == expected
    cached = 2 * config.num_layers * 2 * 50 * config.n_kv * 32
    assert step_bytes(kept, 50) == expected + cached


def test_llama_cpps_bytes_are_those_of_its_file():
    config = load_model("smollm2").config
    cached = 30 * 2 * 100 * 3 * 64 * 2
    assert gguf_bytes(gguf_path(), config, 100) - gguf_bytes(gguf_path(), config, 0) == cached
    assert 0.9 < gguf_bytes(gguf_path(), config, 0) / gguf_path().stat().st_size < 1


def test_llama_cpps_loop_passes_on_each_token_and_starts_anew(monkeypatch):
    """A stand-in for the package llama-cpp-python, with the calls that the code path makes."""

    class Llama:
        def __init__(self, path, **options):
            self.options = options

        def reset(self):
            log.append("reset")

        def generate(self, prompt, temp, repeat_penalty):
            assert (prompt, temp, repeat_penalty) == ([1, 2], 0.0, 1.0)
            yield from (7, 8, 9, 10)

    log, told = [], []
    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(Llama=Llama))
    path = llama_path(gguf_path(), 30)
    assert path((1, 2), 3, told.append) == [7, 8, 9] == told
    assert log == ["reset"]


def test_the_benchmark_goes_through_the_prompts_in_order():
    clock, log = ScriptedClock(), []
    paths = {name: scripted_path(clock, name, log, 1, 1) for name in ("a", "b")}
    rows = decode_benchmark(paths, "a", [[1] * 3, [1] * 9], tokens=2, rounds=1, clock=clock)
    assert [(row.path, row.context) for row in rows] == [("a", 3), ("b", 3), ("a", 9), ("b", 9)]


@pytest.mark.parametrize("wrong", [(4, 5, 9, 7), (4, 5, 6), (9, 5, 6, 7)])
def test_a_variant_with_other_tokens_is_named_and_never_timed(wrong):
    clock, log = ScriptedClock(), []
    paths = {
        "good": scripted_path(clock, "good", log, 1, 1),
        "bad": scripted_path(clock, "bad", log, 1, 1, ids=wrong),
    }
    with pytest.raises(WrongAnswer, match="bad and good differ at prompt length 6"):
        decode_benchmark(paths, "good", [[1] * 6], tokens=4, clock=clock)
    assert clock.readings == 0


@pytest.mark.parametrize("cached", [True, False])
def test_our_loop_and_the_oracles_agree_on_a_small_checkpoint(cached, tmp_path):
    folder = save(random_model(), tmp_path)
    paths = {
        "ours": engine_path(load_model(folder), cached),
        "theirs": oracle_path(load_oracle(folder), cached),
        "paged": paged_path(load_model(folder)),
    }
    rows = decode_benchmark(paths, "theirs", [[5, 9, 33], [7] * 11], tokens=6, rounds=1)
    assert [(row.path, row.context) for row in rows] == [
        (path, context) for context in (3, 11) for path in ("ours", "theirs", "paged")
    ]
    assert all(row.ttft > 0 and row.tpot > 0 for row in rows)


def test_a_fault_in_the_weights_stops_the_benchmark(tmp_path):
    folder = save(random_model(), tmp_path)
    model = load_model(folder)
    model.weights["lm_head.weight"] = model.weights["lm_head.weight"].flip(0)
    paths = {"ours": engine_path(model, True), "theirs": oracle_path(load_oracle(folder), True)}
    with pytest.raises(WrongAnswer, match="ours and theirs differ at prompt length 3"):
        decode_benchmark(paths, "theirs", [[5, 9, 33]], tokens=4)


@pytest.mark.parametrize("end", [2, 31])
def test_every_variant_generates_every_token_past_any_end_token(end, tmp_path):
    """All timed runs have the same number of tokens: an end token does not stop them."""
    folder = save(random_model(eos_token_id=list(range(97))), tmp_path)
    ours, theirs = [], []
    engine_path(load_model(folder), True)([end, 9], 8, ours.append)
    oracle_path(load_oracle(folder), True)([end, 9], 8, theirs.append)
    assert ours == theirs
    assert len(ours) == 8


def test_the_paged_variant_attends_through_the_dispatcher(tmp_path, monkeypatch):
    asked = []

    def spy(*args):
        asked.append(len(args[3]))
        return paged_attention_dispatch(*args)

    monkeypatch.setattr("nanoserve.cache.paged_attention_dispatch", spy)
    paged_path(load_model(save(random_model(), tmp_path)))([5, 9, 33], 3, lambda _: None)
    assert asked == [3, 3, 4, 4, 5, 5]  # both layers of each step, and kv_len


def count(model, dtype: torch.dtype) -> int:
    """The bytes of a model's tensors, the embedding left out where the head is another tensor."""
    embedding, head = (
        model.weights[name] for name in ("model.embed_tokens.weight", "lm_head.weight")
    )
    read = {w.data_ptr(): w for w in model.weights.values() if w is not embedding}
    assert head.data_ptr() in read or head is embedding
    read[head.data_ptr()] = head
    return sum(w.numel() for w in read.values()) * dtype.itemsize


def test_the_bytes_of_a_step_are_the_real_models_tensors_and_its_cache():
    model = load_model(fetch())
    weights = count(model, torch.float32)
    assert weights == 538_060_032  # 134,515,008 parameters
    assert bytes_per_token(model.config, 0, torch.float32) == weights
    cached = 30 * 2 * 1000 * 3 * 64 * 4  # layers, k and v, tokens, KV heads, head_dim, float32
    assert bytes_per_token(model.config, 1000, torch.float32) == weights + cached
    assert bytes_per_token(model.config, 1000, torch.bfloat16) == (weights + cached) / 2


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_a_step_are_counted_for_every_kind(kind, tmp_path):
    model = load_model(save(random_model(kind), tmp_path))
    assert bytes_per_token(model.config, 0, torch.float32) == count(model, torch.float32)


# attention


FOUR_LAYERS = parse_config(SHAPES | {"model_type": "llama", "num_hidden_layers": 4})


@pytest.fixture
def reads(monkeypatch) -> tuple[ScriptedClock, list[tuple[str, int]]]:
    """A clock that only attention moves, by scripted seconds, and a log of (variant, layer)."""
    clock, log = ScriptedClock(), []
    append, fused = PagedKVCache.append, attention.attend_in_place
    slow = iter([100, 50, 50, 4, 6, 80])  # the check, two warm-ups, then the timed calls
    quick = iter([200, 70, 70, 3, 1, 2])

    def scripted_append(cache, layer, k, v):
        if k.shape[2] == 1 and cache.seq_len:  # not while the cache is filled
            clock.now += next(slow)
            log.append(("gather", layer))
        return append(cache, layer, k, v)

    def scripted_fused(cache, layer, *args):
        clock.now += next(quick)
        log.append(("fused", layer))
        return fused(cache, layer, *args)

    monkeypatch.setattr(PagedKVCache, "append", scripted_append)
    monkeypatch.setattr(attention, "attend_in_place", scripted_fused)
    return clock, log


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_attention_benchmark_gives_medians_and_the_bytes_of_one_layers_cache(dtype, reads):
    clock, _ = reads
    rows = attention_benchmark(FOUR_LAYERS, [37], dtype, rounds=3, clock=clock)
    moved = 2 * 37 * 2 * 8 * dtype.itemsize  # k and v, tokens, KV heads, head_dim
    assert rows == [AttentionRow("gather", 37, 6, moved), AttentionRow("fused", 37, 2, moved)]
    assert [row.bytes_per_second for row in rows] == [moved / 6, moved / 2]


def test_the_variants_take_turns_and_each_reads_the_next_layer_but_never_the_last(reads):
    clock, log = reads
    attention_benchmark(FOUR_LAYERS, [37], rounds=3, clock=clock)
    layers = {path: [layer for name, layer in log if name == path] for path in ("gather", "fused")}
    assert layers["gather"] == [1, 2, 0, 1, 2, 0]
    assert layers["fused"] == [1, 1, 2, 0, 1, 2]  # the check, then each layer in turn
    assert [name for name, _ in log][2:] == ["gather", "fused"] * 5


def test_the_lengths_are_measured_in_order_and_for_real():
    rows = attention_benchmark(FOUR_LAYERS, [1, 16, 17, 130], rounds=1)
    assert [(row.path, row.kv_len) for row in rows] == [
        (path, kv_len) for kv_len in (1, 16, 17, 130) for path in ("gather", "fused")
    ]
    assert all(row.seconds > 0 for row in rows)


def wrong_sum(cache, layer, k, v, q, n_rep):
    keys, values = cache.append(layer, k, v)
    return sdpa(q, keys, values) * (1 + 2**-20)


def wrong_order(cache, layer, k, v, q, n_rep):
    keys, values = cache.append(layer, k, v)
    return sdpa(q, keys, values.flip(2))


def without_writing(cache, layer, k, v, q, n_rep):
    cache.table.grow(cache.seq_len + 1)
    slots = [cache.table.slot(p) for p in range(cache.seq_len + 1)]
    keys, values = (x[layer, slots].transpose(0, 1)[None] for x in (cache.pool.k, cache.pool.v))
    return sdpa(q, keys, values)


@pytest.mark.parametrize("broken", [wrong_sum, wrong_order, without_writing])
def test_wrong_attention_is_never_timed(broken, monkeypatch):
    clock = ScriptedClock()
    monkeypatch.setattr(attention, "attend_in_place", broken)
    with pytest.raises(WrongAnswer, match="gather and fused differ at 37 tokens"):
        attention_benchmark(FOUR_LAYERS, [37, 64], clock=clock)
    assert clock.readings == 0


def test_the_two_code_paths_run_the_same_overhead(monkeypatch):
    """Neither calls the dispatcher, whose checks would be timed in only one of the two."""

    def dispatched(*args, **kwargs):
        raise AssertionError("the benchmark called the dispatcher")

    monkeypatch.setattr("nanoserve.cache.paged_attention_dispatch", dispatched)
    monkeypatch.setattr("nanoserve.kernels.dispatch.check_attention", dispatched)
    assert len(attention_benchmark(FOUR_LAYERS, [5], rounds=1)) == 2


@pytest.mark.parametrize("kv_len", [1, 2, 16, 17, 100])
def test_a_scattered_cache_lies_in_every_second_block_in_descending_order(kv_len):
    cache, step = scattered_cache(FOUR_LAYERS, kv_len)
    assert cache.seq_len == kv_len - 1
    assert {name: x.shape for name, x in step.items()} == {
        "q": (1, 6, 1, 8),
        "k": (1, 2, 1, 8),
        "v": (1, 2, 1, 8),
    }
    cache.paged_attention(0, step["k"], step["v"], step["q"], 3)
    blocks = -(-kv_len // BLOCK_SIZE)
    assert cache.table.blocks == list(range(2 * blocks - 1, 0, -2))
    assert cache.pool.allocator.num_free == 0
    assert cache.seq_len == kv_len - 1  # so that attention can be repeated


def test_a_scattered_cache_holds_other_numbers_in_each_layer_and_the_same_each_time():
    (ours, _), (again, _) = (scattered_cache(FOUR_LAYERS, 40) for _ in range(2))
    assert torch.equal(ours.pool.k, again.pool.k)
    assert torch.equal(ours.pool.v, again.pool.v)
    rows = torch.cat([x[:, ours.slot_mapping].flatten(0, 2) for x in (ours.pool.k, ours.pool.v)])
    assert len(rows.unique(dim=0)) == 2 * 4 * 39 * 2  # k and v, layers, tokens, KV heads
    assert rows.std() == pytest.approx(1, abs=0.05)
    assert scattered_cache(FOUR_LAYERS, 40, torch.float16)[1]["q"].dtype == torch.float16


def test_llamas_shape_is_the_published_one():
    c = LLAMA_1B
    assert (c.num_layers, c.n_q, c.n_kv, c.head_dim, c.n_rep) == (16, 32, 8, 64, 4)
    assert bytes_per_token(c, 0, torch.bfloat16) == 2 * 1_235_814_400  # its parameters


@pytest.fixture
def bench_read(monkeypatch, capsys):
    """Run `nanoserve bench attention` on small shapes: exit code, stdout, stderr."""
    monkeypatch.setattr(timing, "read_bandwidth", lambda: 2e9)
    monkeypatch.setattr(attention, "LLAMA_1B", FOUR_LAYERS)
    monkeypatch.setattr("nanoserve.config.load_config", lambda path: FOUR_LAYERS)

    def command(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["nanoserve", "bench", "attention", *args])
        with pytest.raises(SystemExit) as end:
            main()
        return (end.value.code or 0, *capsys.readouterr())

    return command


def test_bench_attention_shows_each_row_and_writes_it(bench_read, tmp_path):
    path = tmp_path / "read.csv"
    code, out, err = bench_read(
        "--kv-len",
        "5",
        "--kv-len",
        "20",
        "--rounds",
        "2",
        "--dtype",
        "bfloat16",
        "--csv",
        str(path),
    )
    assert (code, err) == (0, "")
    assert out.startswith("bfloat16, ")
    assert "peak bandwidth 2.0 GB/s" in out
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(r["model"], int(r["kv_len"]), r["path"], int(r["bytes"])) for r in rows] == [
        (model, kv_len, name, 2 * kv_len * 2 * 8 * 2)
        for model in ("SmolLM2-135M", "Llama-3.2-1B")
        for kv_len in (5, 20)
        for name in ("gather", "fused")
    ]
    for row, line in zip(rows, out.splitlines()[1:], strict=True):
        seconds, rate = float(row["seconds"]), int(row["bytes"]) / float(row["seconds"])
        assert line.startswith(row["model"])
        for text in (f" {row['kv_len']} tokens", f" {row['path']} "):
            assert text in line
        shown = float(line.split(" µs")[0].split()[-1])
        assert shown == pytest.approx(seconds * 1e6, abs=0.06)  # the file has nanoseconds
        assert f"{rate / 2e9:.0%} of peak" in line


def test_bench_attention_measures_the_five_lengths_of_the_course_and_needs_no_file(
    bench_read, monkeypatch, tmp_path
):
    asked = []
    monkeypatch.setattr(attention, "attention_benchmark", lambda *args: asked.append(args) or [])
    monkeypatch.chdir(tmp_path)
    assert bench_read("--gather")[0] == 0
    assert asked == [(FOUR_LAYERS, (16, 64, 256, 1024, 4096), torch.float32, 20)] * 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("args", [("--kv-len", "0"), ("--rounds", "0"), ("--dtype", "int8")])
def test_bench_attention_refuses_a_bad_option_in_one_line(args, bench_read):
    code, out, err = bench_read(*args)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert args[0] in err


def test_bench_attention_says_in_one_line_that_attention_was_wrong(bench_read, monkeypatch):
    monkeypatch.setattr(attention, "attend_in_place", wrong_order)
    code, _, err = bench_read("--kv-len", "20")
    assert (code, err) == (2, "nanoserve: gather and fused differ at 20 tokens\n")
