"""Timing with a scripted clock: exact figures, fair turns, and no figure for a wrong answer."""

from collections.abc import Iterable

import pytest
import torch

from nanoserve.bench.decode import (
    DecodeRow,
    WrongAnswer,
    bytes_per_token,
    decode_benchmark,
    engine_path,
    oracle_path,
)
from nanoserve.bench.timing import median_times, read_bandwidth, token_times
from nanoserve.fetch import fetch
from nanoserve.model import load_model
from nanoserve.oracle import load_oracle
from tests.checkpoints import KINDS, random_model, save


class ScriptedClock:
    """A clock that stands still but for what the work itself adds to it."""

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


def test_what_is_compared_takes_turns():
    clock, log = ScriptedClock(), []
    runs = {name: clock.work([1] * 5, log, name) for name in "abc"}
    median_times(runs, rounds=3, warmup=2, clock=clock)
    assert log == list("abc" * 5)


def test_a_warm_up_of_none_counts_every_round():
    clock, log = ScriptedClock(), []
    runs = {"a": clock.work([2, 4], log, "a")}
    assert median_times(runs, rounds=2, warmup=0, clock=clock) == {"a": 3}


def test_each_token_is_timed_from_the_one_before_and_the_first_from_the_start():
    clock = ScriptedClock()

    def run(on_token) -> None:
        for seconds in (5, 0.25, 0.5):
            clock.now += seconds
            on_token(7)
        clock.now += 100  # what comes after the last token is no token's

    assert token_times(run, clock) == [5, 0.25, 0.5]
    assert clock.readings == 4


def test_a_run_without_tokens_has_no_times():
    assert token_times(lambda on_token: None, ScriptedClock()) == []


def test_bandwidth_is_the_bytes_over_the_best_of_five_sums():
    stamps = iter([0, 4, 10, 12, 20, 28, 30, 38, 40, 48])
    assert read_bandwidth(size=4096, clock=lambda: next(stamps)) == 4096 / 2
    assert next(stamps, None) is None


def scripted_path(clock, name, log, prefill, decode, ids=(4, 5, 6, 7)):
    """A path that gives these ids; its steps take longer from run to run."""
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


def test_the_benchmark_goes_through_the_prompts_in_order():
    clock, log = ScriptedClock(), []
    paths = {name: scripted_path(clock, name, log, 1, 1) for name in ("a", "b")}
    rows = decode_benchmark(paths, "a", [[1] * 3, [1] * 9], tokens=2, rounds=1, clock=clock)
    assert [(row.path, row.context) for row in rows] == [("a", 3), ("b", 3), ("a", 9), ("b", 9)]


@pytest.mark.parametrize("wrong", [(4, 5, 9, 7), (4, 5, 6), (9, 5, 6, 7)])
def test_a_path_with_other_tokens_is_named_and_never_timed(wrong):
    clock, log = ScriptedClock(), []
    paths = {
        "good": scripted_path(clock, "good", log, 1, 1),
        "bad": scripted_path(clock, "bad", log, 1, 1, ids=wrong),
    }
    with pytest.raises(WrongAnswer, match="bad and good differ after 6 tokens"):
        decode_benchmark(paths, "good", [[1] * 6], tokens=4, clock=clock)
    assert clock.readings == 0


@pytest.mark.parametrize("cached", [True, False])
def test_our_path_and_the_oracles_agree_on_a_small_checkpoint(cached, tmp_path):
    folder = save(random_model(), tmp_path)
    paths = {
        "ours": engine_path(load_model(folder), cached),
        "theirs": oracle_path(load_oracle(folder), cached),
    }
    rows = decode_benchmark(paths, "theirs", [[5, 9, 33], [7] * 11], tokens=6, rounds=1)
    assert [(row.path, row.context) for row in rows] == [
        ("ours", 3),
        ("theirs", 3),
        ("ours", 11),
        ("theirs", 11),
    ]
    assert all(row.prefill > 0 and row.decode > 0 for row in rows)


def test_a_fault_in_the_weights_stops_the_benchmark(tmp_path):
    folder = save(random_model(), tmp_path)
    model = load_model(folder)
    model.weights["lm_head.weight"] = model.weights["lm_head.weight"].flip(0)
    paths = {"ours": engine_path(model, True), "theirs": oracle_path(load_oracle(folder), True)}
    with pytest.raises(WrongAnswer, match="ours and theirs differ after 3 tokens"):
        decode_benchmark(paths, "theirs", [[5, 9, 33]], tokens=4)


@pytest.mark.parametrize("end", [2, 31])
def test_every_path_gives_every_token_whatever_ends_a_text(end, tmp_path):
    """Timed runs are all equally long: an end token ends nothing."""
    folder = save(random_model(eos_token_id=list(range(97))), tmp_path)
    ours, theirs = [], []
    engine_path(load_model(folder), True)([end, 9], 8, ours.append)
    oracle_path(load_oracle(folder), True)([end, 9], 8, theirs.append)
    assert ours == theirs
    assert len(ours) == 8


def count(model, dtype: torch.dtype) -> int:
    """The bytes of a model's tensors, the embedding left out where the head is another tensor."""
    embedding, head = (
        model.weights[name] for name in ("model.embed_tokens.weight", "lm_head.weight")
    )
    read = {w.data_ptr(): w for w in model.weights.values() if w is not embedding}
    assert head.data_ptr() in read or head is embedding
    read[head.data_ptr()] = head
    return sum(w.numel() for w in read.values()) * dtype.itemsize


def test_the_bytes_of_a_step_are_the_real_models_tensors_and_its_history():
    model = load_model(fetch())
    weights = count(model, torch.float32)
    assert weights == 538_060_032  # 134,515,008 parameters
    assert bytes_per_token(model.config, 0, torch.float32) == weights
    history = 30 * 2 * 1000 * 3 * 64 * 4  # layers, k and v, tokens, KV heads, head_dim, float32
    assert bytes_per_token(model.config, 1000, torch.float32) == weights + history
    assert bytes_per_token(model.config, 1000, torch.bfloat16) == (weights + history) / 2


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_a_step_are_counted_for_every_kind(kind, tmp_path):
    model = load_model(save(random_model(kind), tmp_path))
    assert bytes_per_token(model.config, 0, torch.float32) == count(model, torch.float32)
