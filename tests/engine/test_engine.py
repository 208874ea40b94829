"""The engine: each request's tokens are those that it gets alone, whatever runs beside it."""

import gc
import json
import threading
from collections import Counter
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from nanoserve import LLM, SamplingParams
from nanoserve.cache import KVPool
from nanoserve.engine import Engine, Output
from nanoserve.engine import engine as module
from nanoserve.engine.engine import default_num_blocks, last_rows, pack, step_logits
from nanoserve.engine.sequence import Sequence
from nanoserve.generate import Stream, generate_tokens, new_cache, single_sequence
from nanoserve.model import Model, load_model
from nanoserve.tokenizer import load_tokenizer
from tests.checkpoints import KINDS, random_model, save
from tests.folders import IM_END, write_checkpoint

REFERENCE = json.loads(
    (Path(__file__).parents[1] / "data/smollm2_reference.json").read_text(encoding="utf-8")
)["greedy"]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Free slots hold NaN: a stale read gives a wrong token, or an error."""
    monkeypatch.setattr(module, "KVPool", partial(KVPool, poison=True))


@cache
def tiny(kind: str = "llama-gqa") -> Model:
    """A random model of a kind: 97 ids, a context of 64, the end token 2."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        model = load_model(save(random_model(kind), Path(folder)))
        model.weights = {name: weight.clone() for name, weight in model.weights.items()}
    return model


def prompt_of(n: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 97, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def alone(model: Model, prompt: list[int], params: SamplingParams) -> list[int]:
    """The tokens of a request by the loop of Days 9 to 12, with a cache of its own."""
    memory = new_cache("naive", model, 64)
    samples = generate_tokens(model, prompt, params, memory, model.config.eos_ids)
    return [sample.token_id for sample in samples]


def assert_same_tokens(model: Model, prompt: list[int], ours: list[int], theirs: list[int]) -> None:
    """Equal; or, where they first differ, both tokens' logits are within rounding of each other."""
    if ours == theirs:
        return
    at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + theirs[:at]]))[0, -1]
    gap = (logits[ours[at]] - logits[theirs[at]]).abs() / logits.abs().max()
    assert gap < 1e-5, f"token {at} is {ours[at]}, alone it is {theirs[at]}"


def finish(engine: Engine) -> dict[str, list[Output]]:
    """Step until no work is left; the outputs of each request. Checks the blocks after each."""
    outputs: dict[str, list[Output]] = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        check_blocks(engine)
    return outputs


def check_blocks(engine: Engine) -> None:
    """Free, cached and referenced blocks are all blocks; only a known block has two tables, and it
    is full; each table covers its tokens; requests that wait hold none; the order is that of
    arrival."""
    scheduler, allocator = engine.scheduler, engine.pool.allocator
    tables = Counter(b for s in scheduler.running for b in s.cache.table.blocks)
    cached = [] if engine.prefixes is None else list(engine.prefixes._cached)
    assert sorted([*tables, *cached, *allocator._free]) == list(range(engine.num_blocks))
    assert engine.num_free_blocks == engine.num_blocks - len(tables)
    assert allocator.num_free == engine.num_free_blocks - len(cached)
    check_known_blocks(engine, tables)
    for sequence in scheduler.running:
        assert sequence.cache.seq_len <= sequence.cache.table.capacity
        assert sequence.num_uncomputed > 0
        assert len(sequence.cache.table.blocks) * allocator.block_size < (
            sequence.most_tokens + allocator.block_size
        )
    for sequence in scheduler.waiting:
        assert not sequence.cache.table.blocks and sequence.cache.seq_len == 0
    assert len(scheduler.running) <= scheduler.max_num_seqs
    live = [*scheduler.running, *scheduler.waiting]
    order = list(engine._sequences.values())
    assert live == sorted(live, key=order.index) and len(live) == len(order)


def check_known_blocks(engine: Engine, tables: Counter[int]) -> None:
    """References are counted; the tokens of a known block are those of every table that has it; no
    block is written that another table has, and cached blocks hold numbers, free ones poison."""
    known = {} if engine.prefixes is None else engine.prefixes._prefixes
    for block, count in tables.items():
        assert count == 1 or block in known
    for block in known:
        assert engine.prefixes.references(block) == tables[block]
    size = engine.pool.allocator.block_size
    for sequence in engine.scheduler.running:
        for i, block in enumerate(sequence.cache.table.blocks):
            if block in known:
                assert (i + 1) * size <= sequence.cache.seq_len
                assert known[block].tokens == tuple(sequence.ids[i * size : (i + 1) * size])
    blank = engine.pool.k[0, :, 0, 0].isnan().view(-1, size)
    assert not blank[list(known)].any()
    assert blank[engine.pool.allocator._free].all()


def ids_of(outputs: list[Output]) -> list[int]:
    return [output.token_id for output in outputs]


PROMPTS = [prompt_of(n, seed) for seed, n in enumerate([5, 17, 1, 40, 16, 23, 9, 32])]
PARAMS = [SamplingParams(max_tokens=n) for n in (12, 3, 20, 9, 1, 30, 16, 7)]


# ---------------------------------------------------------------------------------------- equality


@pytest.mark.slow
def test_the_reference_prompts_in_one_batch_get_the_tokens_of_transformers():
    engine = Engine(load_model(), load_tokenizer(), max_batch_tokens=100)
    params = SamplingParams(max_tokens=64)
    for name, case in REFERENCE.items():
        engine.add(case["prompt_ids"], params, name)
    outputs = finish(engine)
    assert {name: ids_of(outputs[name]) for name in REFERENCE} == {
        name: case["greedy_ids"] for name, case in REFERENCE.items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_every_family_in_a_batch_gets_the_tokens_that_it_gets_alone(kind):
    engine = Engine(tiny(kind), None, num_blocks=12, block_size=8, max_batch_tokens=20)
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        engine.add(prompt, params)
    outputs = finish(engine)
    for prompt, params, got in zip(PROMPTS, PARAMS, outputs_in_order(outputs), strict=True):
        assert_same_tokens(tiny(kind), prompt, ids_of(got), alone(tiny(kind), prompt, params))
    assert engine.scheduler.num_preemptions
    assert engine.num_free_blocks == engine.num_blocks


def outputs_in_order(outputs: dict[str, list[Output]]) -> list[list[Output]]:
    return [outputs[name] for name in sorted(outputs, key=lambda name: int(name.split("-")[1]))]


@pytest.mark.parametrize("order", [range(8), reversed(range(8)), (3, 0, 6, 1, 7, 5, 2, 4)])
@pytest.mark.parametrize(
    ("budget", "blocks", "seqs"), [(1, 8, 3), (7, 8, 64), (33, 40, 2), (2048, 9, 64), (64, 64, 64)]
)
def test_any_order_budget_and_pool_gives_the_tokens_of_each_alone(order, budget, blocks, seqs):
    model = tiny()
    engine = Engine(model, None, blocks, 8, seqs, budget)
    names = {}
    for i in order:
        names[i] = engine.add(PROMPTS[i], PARAMS[i])
        engine.step()  # arrivals between steps
    outputs = {name: [] for name in names.values()}
    for sequence in engine._sequences.values():  # what came before `finish`
        outputs[sequence.request_id] += sequence.output_ids
    finished = finish(engine)
    for i, name in names.items():
        got = outputs[name] + ids_of(finished.get(name, []))
        if got:  # those that finished before the last arrival were checked by other cases
            assert_same_tokens(model, PROMPTS[i], got, alone(model, PROMPTS[i], PARAMS[i]))


@pytest.mark.parametrize("max_batch_tokens", [1, 3, 16, 2048])
def test_a_step_has_at_most_the_budget(max_batch_tokens, monkeypatch):
    engine = Engine(tiny(), None, 64, 8, max_batch_tokens=max_batch_tokens)
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        engine.add(prompt, params)
    sizes, run = [], step_logits
    monkeypatch.setattr(
        module, "step_logits", lambda m, step: sizes.append(sum(step.values())) or run(m, step)
    )
    finish(engine)
    assert max(sizes) <= max_batch_tokens


# ---------------------------------------------------------------------------------- random numbers


SEEDED = {"temperature": 0.9, "top_p": 0.95, "max_tokens": 20}


@pytest.mark.parametrize("num_blocks", [64, 9])
def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(num_blocks):
    model = tiny()
    engine = Engine(model, None, num_blocks, 8)
    params = [SamplingParams(seed=i, **SEEDED) for i in range(8)]
    for prompt, each in zip(PROMPTS, params, strict=True):
        engine.add(prompt, each)
    got = outputs_in_order(finish(engine))
    for prompt, each, outputs in zip(PROMPTS, params, got, strict=True):
        assert ids_of(outputs) == alone(model, prompt, each)
    assert (engine.scheduler.num_preemptions > 0) == (num_blocks == 9)


def test_a_request_draws_one_number_for_each_token():
    engine = Engine(tiny(), None, 9, 8)
    for i, prompt in enumerate(PROMPTS):
        engine.add(prompt, SamplingParams(seed=i, **SEEDED), str(i))
    sequences = dict(engine._sequences)
    outputs = finish(engine)
    for i, sequence in enumerate(sequences.values()):
        fresh = torch.Generator().manual_seed(i)
        for _ in outputs[str(i)]:
            torch.rand((), dtype=torch.float64, generator=fresh)
        assert torch.equal(fresh.get_state(), sequence.generator.get_state())


def test_penalties_and_logprobs_belong_to_their_request_and_survive_preemption():
    model = tiny()
    params = [
        SamplingParams(max_tokens=20, repetition_penalty=1.5, logprobs=2),
        SamplingParams(max_tokens=20, frequency_penalty=1.0),
        SamplingParams(max_tokens=20, presence_penalty=1.5, temperature=1.0, seed=3, logprobs=0),
        SamplingParams(max_tokens=20),
    ]
    prompts = [prompt_of(n, n) for n in (14, 17, 10, 15)]
    engine = Engine(model, None, 6, 8)
    for prompt, each in zip(prompts, params, strict=True):
        engine.add(prompt, each)
    got = outputs_in_order(finish(engine))
    assert engine.scheduler.num_preemptions
    for prompt, each, outputs in zip(prompts, params, got, strict=True):
        memory = new_cache("naive", model, 64)
        expected = list(generate_tokens(model, prompt, each, memory, model.config.eos_ids))
        assert ids_of(outputs) == [sample.token_id for sample in expected]
        for output, sample in zip(outputs, expected, strict=True):
            assert (output.sample.logprob is None) == (sample.logprob is None)
            if sample.logprob is not None:
                assert output.sample.logprob == pytest.approx(sample.logprob, abs=1e-4)
                assert list(output.sample.top) == list(sample.top)


# -------------------------------------------------------------------------------------------- text


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    """Random weights, a context of 64, an end token, and a byte-level tokenizer."""
    return LLM(write_checkpoint(tmp_path_factory.mktemp("tiny"), eos=IM_END))


@pytest.mark.parametrize("options", [{}, {"stop": ("h", "xy")}, {"temperature": 1.2, "seed": 4}])
def test_text_and_finish_reasons_are_those_of_a_stream_of_one_sequence(options, llm):
    engine = Engine(llm.model, llm.tokenizer, 9, 8)
    params = [SamplingParams(max_tokens=n, **options) for n in (30, 12, 1, 20)]
    prompts = [[i % 97 for i in prompt] for prompt in PROMPTS[:4]]
    for prompt, each in zip(prompts, params, strict=True):
        engine.add(prompt, each)
    got = outputs_in_order(finish(engine))
    for prompt, each, outputs in zip(prompts, params, got, strict=True):
        with single_sequence():
            expected = llm.stream(prompt, each)
        assert type(expected) is Stream
        expected = expected.completion
        assert ids_of(outputs) == expected.token_ids
        assert "".join(output.text for output in outputs) == expected.text
        assert outputs[-1].finish_reason == expected.finish_reason
        assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)


def test_without_a_tokenizer_there_is_no_text():
    engine = Engine(tiny(), None, 8)
    engine.add(PROMPTS[0], SamplingParams(max_tokens=3))
    (outputs,) = finish(engine).values()
    assert [output.text for output in outputs] == ["", "", ""]


# -------------------------------------------------------------------------------------- refusals


def refused(engine: Engine, match: str, *arguments) -> None:
    """add raises a ValueError, and a request that runs goes on as if nothing had happened."""
    running = engine.add(PROMPTS[0], SamplingParams(max_tokens=4), "running")
    engine.step()
    before = (engine.num_free_blocks, list(engine._sequences))
    with pytest.raises(ValueError, match=match):
        engine.add(*arguments)
    assert (engine.num_free_blocks, list(engine._sequences)) == before
    assert len(finish(engine)[running]) == 3


@pytest.mark.parametrize(
    ("match", "arguments"),
    [
        ("there is a request 'running' already", (PROMPTS[0], SamplingParams(), "running")),
        ("the prompt is empty", ([], SamplingParams())),
        ("the prompt has 65 tokens, the model's context holds 64", ([5] * 65, SamplingParams())),
        ("token id 97 is outside the vocabulary of 97", ([5, 97], SamplingParams())),
        ("integer token ids, got 1.5", ([1.5], SamplingParams())),
        ("the request may need 33 slots, and the pool has 32", ([5] * 20, SamplingParams(13))),
        ("the request may need 64 slots, and the pool has 32", ([5] * 64, SamplingParams(1))),
        ("params must be a SamplingParams, got None", ([5], None)),
        (r"stop strings \('a',\) need a tokenizer", ([5], SamplingParams(stop="a"))),
    ],
)
def test_a_request_that_cannot_run_is_refused_and_disturbs_nothing(match, arguments):
    refused(Engine(tiny(), None, 4, 8), match, *arguments)


@pytest.mark.parametrize(
    "options", [{"num_blocks": 0}, {"block_size": 0}, {"max_num_seqs": 0}, {"max_batch_tokens": 0}]
)
def test_numbers_below_one_are_named(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be at least 1, got 0"):
        Engine(tiny(), None, **{"num_blocks": 4} | options)


# ------------------------------------------------------------------------------ the named cases


def test_a_prompt_of_exactly_the_context_gets_one_token():
    engine = Engine(tiny(), None, 8, 8)
    engine.add(prompt_of(64), SamplingParams(max_tokens=9))
    (outputs,) = finish(engine).values()
    assert ids_of(outputs) == alone(tiny(), prompt_of(64), SamplingParams(max_tokens=1))
    assert outputs[0].finish_reason == "length"


@pytest.mark.parametrize("n", [8, 16, 32])
def test_a_prompt_of_whole_blocks(n):
    engine = Engine(tiny(), None, 5, 8)
    engine.add(prompt_of(n), SamplingParams(max_tokens=8))
    (outputs,) = finish(engine).values()
    assert ids_of(outputs) == alone(tiny(), prompt_of(n), SamplingParams(max_tokens=8))


def test_a_request_that_fills_the_pool_to_the_last_slot_waits_and_then_runs():
    engine = Engine(tiny(), None, 4, 8)
    first = engine.add(prompt_of(9), SamplingParams(max_tokens=6))
    whole = engine.add(prompt_of(24, 1), SamplingParams(max_tokens=8))
    last = engine.add(prompt_of(3, 2), SamplingParams(max_tokens=2))
    outputs = finish(engine)
    assert [len(outputs[name]) for name in (first, whole, last)] == [6, 8, 2]


def test_max_tokens_of_one_holds_no_block_after_its_step():
    engine = Engine(tiny(), None, 4, 8)
    engine.add(PROMPTS[0], SamplingParams(max_tokens=1))
    (output,) = engine.step()
    assert output.finish_reason == "length"
    assert (engine.has_work, engine.num_free_blocks) == (False, 4)
    assert engine.step() == []


def test_two_equal_prompts_in_one_step():
    engine = Engine(tiny(), None, 8, 8)
    for _ in range(2):
        engine.add(PROMPTS[1], SamplingParams(max_tokens=5))
    first, second = outputs_in_order(finish(engine))
    assert ids_of(first) == ids_of(second) == alone(tiny(), PROMPTS[1], SamplingParams(5))


@pytest.mark.parametrize("prompt", [7, 8, 9, 15, 16])
def test_preemption_at_and_near_a_block_boundary(prompt):
    """Two requests that grow into a pool which holds only one of them whole."""
    engine = Engine(tiny(), None, 4, 8)
    params = SamplingParams(max_tokens=14)
    prompts = [prompt_of(prompt, seed) for seed in (5, 6)]
    for each in prompts:
        engine.add(each, params)
    got = outputs_in_order(finish(engine))
    assert engine.scheduler.num_preemptions
    assert [ids_of(outputs) for outputs in got] == [alone(tiny(), p, params) for p in prompts]


def test_preemption_in_the_middle_of_a_prompt():
    engine = Engine(tiny(), None, 6, 8, max_batch_tokens=9)
    prompts, params = [prompt_of(20, 1), prompt_of(30, 2)], SamplingParams(max_tokens=12)
    for each in prompts:
        engine.add(each, params)
    interrupted, preempt = [], engine.scheduler._preempt
    engine.scheduler._preempt = lambda s: (
        interrupted.append((s.num_uncomputed, s.cache.seq_len)) or preempt(s)
    )
    got = outputs_in_order(finish(engine))
    assert any(uncomputed > 1 and computed for uncomputed, computed in interrupted)
    assert [ids_of(outputs) for outputs in got] == [alone(tiny(), p, params) for p in prompts]


def test_the_newest_request_is_preempted_and_comes_back_before_all_that_wait():
    engine = Engine(tiny(), None, 5, 8)
    names = [engine.add(prompt_of(15, i), SamplingParams(max_tokens=12)) for i in range(3)]
    engine.step()  # two of them fit
    assert [s.request_id for s in engine.scheduler.running] == names[:2]
    while not engine.scheduler.num_preemptions:
        engine.step()
    assert [s.request_id for s in engine.scheduler.running] == names[:1]
    assert [s.request_id for s in engine.scheduler.waiting] == names[1:]
    assert engine.scheduler.waiting[0].output_ids  # kept
    finish(engine)


def test_others_that_wait_get_the_other_half_of_the_budget():
    engine = Engine(tiny(), None, 40, 8, max_batch_tokens=16)
    engine.add(prompt_of(60), SamplingParams(max_tokens=2))
    assert engine.step() == []  # alone: all 16
    (long,) = engine.scheduler.running
    assert long.cache.seq_len == 16
    engine.add(prompt_of(4, 1), SamplingParams(max_tokens=9), "short")
    outputs = engine.step()
    assert (long.cache.seq_len, [o.request_id for o in outputs]) == (24, ["short"])
    engine.step()  # one decode, and the rest for the prompt
    assert long.cache.seq_len == 39


def test_decodes_come_first():
    engine = Engine(tiny(), None, 40, 8, max_batch_tokens=2)
    for i in range(2):
        engine.add(prompt_of(1, i), SamplingParams(max_tokens=6), str(i))
    engine.step()
    engine.add(prompt_of(20, 9), SamplingParams(max_tokens=1), "prompt")
    while {"0", "1"} <= engine._sequences.keys():
        outputs = {output.request_id for output in engine.step()}
        assert outputs == {"0", "1"}
    assert len(finish(engine)["prompt"]) == 1


# ------------------------------------------------------------------------------------------ abort


@pytest.mark.parametrize("state", ["waiting", "in its prompt", "decoding", "preempted"])
def test_an_abort_in_every_state_gives_the_blocks_back(state):
    engine = Engine(tiny(), None, 5, 8, max_batch_tokens=10)
    params, prompts = SamplingParams(max_tokens=18), [prompt_of(14, i) for i in (1, 2)]
    for i, prompt in enumerate(prompts):
        engine.add(prompt, params, str(i))

    def reached() -> bool:
        scheduler, sequence = engine.scheduler, engine._sequences["1"]
        return {
            "waiting": True,
            "in its prompt": sequence.num_uncomputed > 1 and sequence.cache.seq_len > 0,
            "decoding": sequence.output_ids and sequence.num_uncomputed == 1,
            "preempted": bool(scheduler.num_preemptions),
        }[state]

    before = []
    while not reached():
        before += engine.step()
    before += engine.step() if state == "preempted" else []
    assert engine.abort("1") is True
    check_blocks(engine)
    assert engine.abort("1") is False
    outputs = before + [output for outputs in finish(engine).values() for output in outputs]
    mine = [output for output in outputs if output.request_id == "1"]
    assert (mine[-1].finish_reason, mine[-1].token_id) == ("abort", None)
    assert ids_of([o for o in outputs if o.request_id == "0"]) == alone(tiny(), prompts[0], params)
    assert engine.num_free_blocks == 5


def test_an_abort_of_a_finished_or_unknown_request_does_nothing():
    engine = Engine(tiny(), None, 6, 8)
    name = engine.add(PROMPTS[0], SamplingParams(max_tokens=1))
    finish(engine)
    assert (engine.abort(name), engine.abort("nobody"), engine.has_work) == (False, False, False)


def test_an_id_can_be_used_again_after_its_request():
    engine = Engine(tiny(), None, 6, 8)
    for _ in range(2):
        engine.add(PROMPTS[0], SamplingParams(max_tokens=1), "again")
        finish(engine)


def test_default_ids_never_meet_an_id_that_was_given():
    engine = Engine(tiny(), None, 6, 8)
    engine.add(PROMPTS[0], SamplingParams(), "request-1")
    assert [engine.add(PROMPTS[0], SamplingParams()) for _ in range(2)] == [
        "request-0",
        "request-2",
    ]


def test_a_step_that_fails_ends_its_requests_and_no_others(monkeypatch):
    engine = Engine(tiny(), None, 8, 8, max_num_seqs=1)
    engine.add(PROMPTS[0], SamplingParams(max_tokens=5), "lost")
    engine.add(PROMPTS[1], SamplingParams(max_tokens=5), "kept")
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "head", lambda hidden: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    check_blocks(engine)
    outputs = finish(engine)
    assert [output.finish_reason for output in outputs["lost"]] == ["abort"]
    assert ids_of(outputs["kept"]) == alone(tiny(), PROMPTS[1], SamplingParams(max_tokens=5))


# ------------------------------------------------------------------------------- parts of a step


def test_pack_takes_the_tokens_that_each_cache_lacks():
    pool = KVPool(tiny().config, 8, 8)
    a, b = (
        Sequence(name, ids, SamplingParams(), module.PagedKVCache(pool))
        for name, ids in (("a", [1, 2, 3, 4]), ("b", [5, 6, 7]))
    )
    a.cache.seq_len = 1
    assert pack({b: 2, a: 3}) == [5, 6, 2, 3, 4]
    assert last_rows([2, 3, 1]) == [1, 4, 5]


def test_a_chunk_inside_a_prompt_has_no_logits():
    pool = KVPool(tiny().config, 8, 8)
    sequence = Sequence("a", prompt_of(9), SamplingParams(), module.PagedKVCache(pool))
    assert step_logits(tiny(), {sequence: 5}) == {}
    assert (sequence.cache.seq_len, sequence.num_uncomputed) == (5, 4)
    logits = step_logits(tiny(), {sequence: 4})[sequence]
    expected = tiny()(torch.tensor([prompt_of(9)]))[0, -1]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("layers", "heads", "context", "blocks"), [(2, 2, 64, 16), (2, 2, 60, 16), (30, 3, 8192, 1456)]
)
def test_the_default_pool_holds_four_contexts_in_at_most_a_gibibyte(
    layers, heads, context, blocks, monkeypatch
):
    from dataclasses import replace

    model = tiny()
    config = replace(
        model.config, num_layers=layers, n_kv=heads, n_q=heads, context=context, head_dim=64
    )
    monkeypatch.setattr(model, "config", config)
    assert default_num_blocks(model) == blocks


def test_a_default_pool_takes_no_memory_until_it_is_used():
    """A gibibyte is reserved for SmolLM2; the pages are taken when a block is first written."""
    from dataclasses import replace

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    if not Path("/proc/self/statm").exists():
        pytest.skip("only Linux counts the pages of a process here")
    config = replace(tiny().config, num_layers=30, n_kv=3, n_q=3, head_dim=64)
    before = resident()
    pool = KVPool(config, 1456)
    assert pool.k.nbytes + pool.v.nbytes > 1 << 29
    assert resident() - before < 50 << 20


# ------------------------------------------------------------------------------------ LLM, streams


def test_a_model_that_is_replaced_is_the_one_that_runs(llm):
    kept, [before] = llm.model, llm.generate([3, 1, 4], SamplingParams(max_tokens=8))
    weights = {name: weight.flip(0) for name, weight in kept.weights.items()}
    try:
        llm.model = Model(kept.config, weights)
        [after] = llm.generate([3, 1, 4], SamplingParams(max_tokens=8))
        with single_sequence():
            [alone] = llm.generate([3, 1, 4], SamplingParams(max_tokens=8))
    finally:
        llm.model = kept
    assert after.token_ids == alone.token_ids != before.token_ids
    assert llm.generate([3, 1, 4], SamplingParams(max_tokens=8)) == [before]


def test_a_list_of_prompts_runs_in_shared_steps_and_gives_what_each_gives_alone(llm):
    params = SamplingParams(max_tokens=15)
    prompts = ["hello", [5, 6, 7], "a longer prompt, this one"]
    together = llm.generate(prompts, params)
    with single_sequence():
        assert together == [llm.generate(prompt, params)[0] for prompt in prompts]
    assert llm._shared.engine.num_free_blocks == llm._shared.engine.num_blocks


def test_two_streams_at_once_interleave(llm, monkeypatch):
    params = SamplingParams(max_tokens=8)
    expected = [completion.text for completion in llm.generate(["ab", "cd"], params)]
    steps, step = [], llm._shared.engine.step
    monkeypatch.setattr(llm._shared.engine, "step", lambda: steps.append(1) or step())
    first, second = llm.stream("ab", params), llm.stream("cd", params)
    one, two = iter(first), iter(second)
    pieces = [[], []]
    for _ in range(30):
        for mine, it in zip(pieces, (one, two), strict=True):
            mine.append(next(it, ""))
    assert ["".join(mine) for mine in pieces] == expected
    assert len(steps) <= 9  # 8 of the first, and one more for the second


@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_stream_that_ends_half_way_gives_its_blocks_back(how, llm):
    engine = llm._shared.engine
    stream = llm.stream("hello", SamplingParams(max_tokens=40))
    pieces = iter(stream)
    next(pieces)
    assert engine.num_free_blocks < engine.num_blocks
    if how == "close":
        stream.close()
        assert list(pieces) == []
    else:
        gc.disable()  # without the cycle collector: nothing refers to the stream
        del stream, pieces
        gc.enable()
    assert engine.num_free_blocks == engine.num_blocks
    assert not engine._sequences


def test_a_stream_that_was_never_read_is_never_queued(llm):
    stream = llm.stream("hello", SamplingParams(max_tokens=40))
    assert not llm._shared.engine._sequences
    stream.close()
    assert list(stream) == []


def test_a_stream_dropped_during_a_step_is_aborted_by_the_next(llm, monkeypatch):
    """Python's collector may run anywhere, also inside a step."""
    engine, params = llm._shared.engine, SamplingParams(max_tokens=10)
    dropped = [llm.stream("hello", params)]
    pieces = iter(dropped[0])
    next(pieces)
    hidden = llm.model.hidden

    def collecting(ids, cache=None):
        nonlocal pieces
        dropped.clear()
        pieces = None
        return hidden(ids, cache)

    monkeypatch.setattr(llm.model, "hidden", collecting)
    assert llm.generate("ab", params)
    assert engine.num_free_blocks == engine.num_blocks and not engine._sequences


def test_threads_may_share_an_llm(llm):
    params, results = SamplingParams(max_tokens=12), {}
    prompts = ["one", "two", "three", "four"]
    expected = [llm.generate(prompt, params)[0] for prompt in prompts]

    def work(prompt: str) -> None:
        results[prompt] = llm.generate(prompt, params)[0]

    threads = [threading.Thread(target=work, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[prompt] for prompt in prompts] == expected
    assert not llm._shared._outputs


def test_a_bad_prompt_in_a_list_leaves_nothing_behind(llm):
    with pytest.raises(ValueError, match="the prompt is empty"):
        llm.generate(["good", ""])
    small = LLM.__new__(LLM)
    small.__dict__.update(llm.__dict__)
    with pytest.raises(ValueError, match="params must be"):
        llm.generate(["good"], "greedy")
    assert not llm._shared.engine._sequences and not llm._shared._outputs


def test_an_llms_pool_has_the_size_that_was_asked_for(tmp_path):
    small = LLM(write_checkpoint(tmp_path), num_blocks=2)
    assert small._shared.engine.num_blocks == 2
    with pytest.raises(ValueError, match="may need 33 slots, and the pool has 32"):
        small.stream([5] * 20, SamplingParams(max_tokens=13))
