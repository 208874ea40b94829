"""Shared prefixes: equal tokens, one block; never a token that differs from a run without."""

from functools import partial

import pytest
import torch

from nanoserve import SamplingParams
from nanoserve import cache as cache_module
from nanoserve.cache import (
    BlockTable,
    KVCacheExhausted,
    KVPool,
    Prefix,
    PrefixCache,
    SharedKVCache,
    shareable_blocks,
)
from nanoserve.engine import Engine
from nanoserve.engine import engine as module
from nanoserve.model import load_model
from nanoserve.tokenizer import load_tokenizer
from tests.checkpoints import KINDS
from tests.engine.test_engine import (
    REFERENCE,
    alone,
    assert_same_tokens,
    check_blocks,
    finish,
    ids_of,
    prompt_of,
    tiny,
)

SIZE = 8
SYSTEM = prompt_of(20, 77)  # two whole blocks and a half
PROMPTS = [SYSTEM + prompt_of(n, seed) for seed, n in enumerate([5, 17, 1, 4, 12, 30, 9, 3])] + [
    SYSTEM[:16],
    SYSTEM[:17],
    SYSTEM[:8] + prompt_of(9, 5),
    SYSTEM + prompt_of(17, 1),
]
PARAMS = [SamplingParams(max_tokens=n) for n in (12, 3, 20, 9, 1, 14, 16, 7, 5, 6, 10, 8)]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Free slots hold NaN, those of an evicted block too."""
    monkeypatch.setattr(module, "KVPool", partial(KVPool, poison=True))


def computed(engine: Engine, monkeypatch) -> list[int]:
    """The number of tokens of each step, filled as the engine runs."""
    sizes, run = [], module.step_logits
    monkeypatch.setattr(
        module, "step_logits", lambda m, step: sizes.append(sum(step.values())) or run(m, step)
    )
    return sizes


def run_one(engine: Engine, prompt: list[int], max_tokens: int = 1) -> list[int]:
    name = engine.add(prompt, SamplingParams(max_tokens=max_tokens))
    return ids_of(finish(engine)[name])


# ---------------------------------------------------------------------------------------- equality


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sharing", [True, False])
def test_every_family_gets_the_tokens_that_each_prompt_gets_alone(kind, sharing):
    engine = Engine(tiny(kind), None, 14, SIZE, max_batch_tokens=20, prefix_sharing=sharing)
    names = [engine.add(p, params) for p, params in zip(PROMPTS, PARAMS, strict=True)]
    outputs = finish(engine)
    for name, prompt, params in zip(names, PROMPTS, PARAMS, strict=True):
        expected = alone(tiny(kind), prompt, params)
        assert_same_tokens(tiny(kind), prompt, ids_of(outputs[name]), expected)
    assert engine.num_free_blocks == engine.num_blocks
    assert (engine.pool.allocator.num_free < engine.num_blocks) == sharing


@pytest.mark.parametrize("order", [range(12), reversed(range(12)), (3, 0, 9, 6, 11, 1, 7, 8, 5, 2)])
@pytest.mark.parametrize(
    ("budget", "blocks", "seqs"), [(1, 8, 3), (7, 8, 64), (33, 40, 2), (2048, 9, 64), (64, 64, 64)]
)
def test_any_order_budget_and_pool_gives_the_same_tokens(order, budget, blocks, seqs):
    got = {}
    for sharing in (True, False):
        engine = Engine(tiny(), None, blocks, SIZE, seqs, budget, prefix_sharing=sharing)
        outputs, names = [], {}
        for i in order if isinstance(order, tuple) else list(order):
            names[engine.add(PROMPTS[i], PARAMS[i])] = i
            outputs += engine.step()  # arrivals between steps
            check_blocks(engine)
        outputs += [each for several in finish(engine).values() for each in several]
        for output in outputs:
            got.setdefault((sharing, names[output.request_id]), []).append(output.token_id)
        order = tuple(names.values())
    for i in order:
        expected = alone(tiny(), PROMPTS[i], PARAMS[i])
        for sharing in (True, False):
            assert_same_tokens(tiny(), PROMPTS[i], got[sharing, i], expected)


@pytest.mark.slow
def test_the_reference_prompts_twice_get_the_tokens_of_transformers():
    engine = Engine(load_model(), load_tokenizer(), 100, max_batch_tokens=100)
    for turn in range(2):
        for name, case in REFERENCE.items():
            engine.add(case["prompt_ids"], SamplingParams(max_tokens=64), f"{name} {turn}")
    outputs = finish(engine)
    for turn in range(2):
        for name, case in REFERENCE.items():
            assert ids_of(outputs[f"{name} {turn}"]) == case["greedy_ids"]


def test_seeded_requests_draw_the_same_tokens_with_a_warm_cache():
    params = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=15, seed=4)
    engine = Engine(tiny(), None, 12, SIZE)
    for _ in range(3):
        name = engine.add(PROMPTS[0], params)
        assert ids_of(finish(engine)[name]) == alone(tiny(), PROMPTS[0], params)


# ------------------------------------------------------------------------------ what is computed


def test_a_prefix_is_computed_once(monkeypatch):
    engine = Engine(tiny(), None, 40, SIZE)
    sizes = computed(engine, monkeypatch)
    run_one(engine, PROMPTS[0])
    assert sizes == [25]
    run_one(engine, PROMPTS[1])  # 37 tokens, of which two blocks are known
    assert sizes == [25, 21]
    for prompt in PROMPTS[3:6]:
        engine.add(prompt, SamplingParams(max_tokens=1))
    finish(engine)
    assert sizes[2:] == [sum(len(p) - 16 for p in PROMPTS[3:6])]


def test_without_sharing_everything_is_computed(monkeypatch):
    engine = Engine(tiny(), None, 40, SIZE, prefix_sharing=False)
    sizes = computed(engine, monkeypatch)
    for _ in range(2):
        run_one(engine, PROMPTS[0])
    assert sizes == [25, 25]


@pytest.mark.parametrize("n", [8, 16, 24])
def test_of_a_prompt_of_whole_blocks_cached_whole_the_last_block_is_computed_again(n, monkeypatch):
    engine = Engine(tiny(), None, 8, SIZE)
    sizes = computed(engine, monkeypatch)
    expected = alone(tiny(), prompt_of(n), SamplingParams(max_tokens=6))
    for _ in range(2):
        assert run_one(engine, prompt_of(n), 6) == expected
    assert sizes == [n, 1, 1, 1, 1, 1, 8, 1, 1, 1, 1, 1]


def test_generated_tokens_are_shared_too(monkeypatch):
    """The next turn of a conversation begins with the last turn and its answer."""
    engine = Engine(tiny(), None, 12, SIZE)
    answer = run_one(engine, SYSTEM, 15)
    sizes = computed(engine, monkeypatch)
    run_one(engine, [*SYSTEM, *answer, 5, 6, 7])
    full = (20 + len(answer) - 1) // SIZE  # the last token of an answer is never computed
    assert full > 2 and sizes == [20 + len(answer) + 3 - full * SIZE]


def test_one_different_token_in_front_shares_nothing(monkeypatch):
    engine = Engine(tiny(), None, 20, SIZE)
    run_one(engine, SYSTEM)
    sizes = computed(engine, monkeypatch)
    run_one(engine, [SYSTEM[0] ^ 1, *SYSTEM[1:]])
    assert sizes == [20]


def test_two_equal_prompts_in_one_step_are_both_computed_and_one_stays(monkeypatch):
    engine = Engine(tiny(), None, 12, SIZE)
    sizes = computed(engine, monkeypatch)
    names = [engine.add(PROMPTS[1], SamplingParams(max_tokens=5)) for _ in range(2)]
    engine.step()
    assert sizes == [74]  # a block can be shared after the step that filled it, not in it
    outputs = finish(engine)
    expected = alone(tiny(), PROMPTS[1], SamplingParams(5))
    assert [sequence_ids(outputs[name]) for name in names] == [expected[1:]] * 2
    assert engine.prefixes.num_cached == 5  # 41 tokens; the equal blocks of the second are free


def sequence_ids(outputs) -> list[int]:
    return [output.token_id for output in outputs]


def test_a_chunk_of_a_prompt_is_shared_while_the_rest_is_computed(monkeypatch):
    engine = Engine(tiny(), None, 20, SIZE, max_batch_tokens=16)
    engine.add(prompt_of(60), SamplingParams(max_tokens=1))
    engine.step()
    engine.add(prompt_of(60)[:30], SamplingParams(max_tokens=1), "second")
    engine.step()
    first, second = engine.scheduler.running
    assert second.cache.table.blocks[:2] == first.cache.table.blocks[:2]
    expected = alone(tiny(), prompt_of(60)[:30], SamplingParams(1))
    assert ids_of(finish(engine)["second"]) == expected


def test_memory_is_that_of_the_blocks_counted():
    """One prefix of 2 blocks for all, and what each request has behind it."""
    engine = Engine(tiny(), None, 60, SIZE)
    run_one(engine, SYSTEM)
    prompts = [SYSTEM + prompt_of(n, n) for n in (5, 9, 13, 21)]
    for prompt in prompts:
        engine.add(prompt, SamplingParams(max_tokens=4))
    engine.step()
    own = sum(-(-len(prompt) // SIZE) - 2 for prompt in prompts)
    assert engine.num_blocks - engine.num_free_blocks == 2 + own
    finish(engine)


def test_shared_blocks_let_more_requests_run_at_once():
    running = {}
    for sharing in (True, False):
        engine = Engine(tiny(), None, 9, SIZE, prefix_sharing=sharing)
        run_one(engine, SYSTEM)
        for seed in range(5):
            engine.add(SYSTEM + prompt_of(3, seed), SamplingParams(max_tokens=1))
        engine.scheduler.schedule()
        running[sharing] = len(engine.scheduler.running)
    assert running == {True: 5, False: 3}


# ---------------------------------------------------------------------------- eviction, preemption


def test_the_least_recently_used_blocks_are_evicted_first_and_a_prefixs_end_before_its_start():
    engine = Engine(tiny(), None, 6, SIZE)
    old, new = prompt_of(24, 1), prompt_of(16, 2)
    run_one(engine, old)
    run_one(engine, new)
    assert (engine.pool.allocator.num_free, engine.prefixes.num_cached) == (1, 5)
    run_one(engine, prompt_of(20, 3))  # 3 blocks: the free one, and two of the old prompt's
    assert len(engine.prefixes.find([*old, 0])) == 1
    assert len(engine.prefixes.find([*new, 0])) == 2
    run_one(engine, old[:10])  # uses the last of the old blocks again
    run_one(engine, prompt_of(25, 4))
    assert len(engine.prefixes.find([*old, 0])) == 1
    assert len(engine.prefixes.find([*new, 0])) < 2


def test_a_prefix_hit_right_after_a_preemption(monkeypatch):
    engine = Engine(tiny(), None, 5, SIZE)
    params, prompts = SamplingParams(max_tokens=14), [prompt_of(15, seed) for seed in (5, 6)]
    names = [engine.add(each, params) for each in prompts]
    outputs = []
    while not engine.scheduler.num_preemptions:
        outputs += engine.step()
    assert engine.prefixes.find(engine.scheduler.waiting[0].ids)  # not evicted all yet
    assert engine.abort(names[0])
    sizes = computed(engine, monkeypatch)
    outputs += engine.step()
    (resumed,) = engine.scheduler.running
    assert sizes[0] < len(resumed.ids) - 1  # the rest came from the cache
    outputs += [each for several in finish(engine).values() for each in several]
    mine = [o.token_id for o in outputs if o.request_id == names[1]]
    assert mine == alone(tiny(), prompts[1], params)


def test_a_preempted_request_gives_no_block_to_others_that_it_shares():
    """The newest request shares the blocks of the oldest: preempting it frees only its own."""
    engine = Engine(tiny(), None, 5, SIZE)
    params, prompts = SamplingParams(max_tokens=20), [[*SYSTEM[:16], last] for last in (6, 7)]
    names = [engine.add(prompts[0], params)]
    outputs = engine.step()
    names.append(engine.add(prompts[1], params))
    while engine.has_work:
        outputs += engine.step()
        check_blocks(engine)
    assert engine.scheduler.num_preemptions
    for name, prompt in zip(names, prompts, strict=True):
        mine = [o.token_id for o in outputs if o.request_id == name]
        assert mine == alone(tiny(), prompt, params)


@pytest.mark.parametrize("state", ["waiting", "in its prompt", "decoding", "preempted"])
def test_an_abort_in_every_state_leaves_the_shared_blocks_to_the_others(state):
    engine = Engine(tiny(), None, 6, SIZE, max_batch_tokens=10)
    params, prompts = SamplingParams(max_tokens=12), [SYSTEM[:9] + prompt_of(15, i) for i in (1, 2)]
    engine.add(prompts[0], params, "0")
    outputs = engine.step() + engine.step()
    engine.add(prompts[1], params, "1")
    for _ in range(60):
        sequence = engine._sequences["1"]
        if {
            "waiting": True,
            "in its prompt": sequence.cache.seq_len > 8 and sequence.num_uncomputed > 1,
            "decoding": bool(sequence.output_ids),
            "preempted": bool(engine.scheduler.num_preemptions),
        }[state]:
            break
        outputs += engine.step()
    else:
        raise AssertionError("the state was not reached")
    if state != "waiting":
        assert engine._sequences["0"].cache.table.blocks
    assert engine.abort("1")
    check_blocks(engine)
    outputs += [each for several in finish(engine).values() for each in several]
    assert ids_of([o for o in outputs if o.request_id == "0"]) == alone(tiny(), prompts[0], params)
    assert engine.num_free_blocks == 6


def test_a_step_that_fails_shares_none_of_its_blocks(monkeypatch):
    engine = Engine(tiny(), None, 8, SIZE)
    engine.add(SYSTEM, SamplingParams(max_tokens=5))
    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "hidden", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    check_blocks(engine)
    assert (engine.prefixes.num_cached, engine.pool.allocator.num_free) == (0, 8)


# ------------------------------------------------------------------------------- hash collisions


@pytest.mark.parametrize("bits", [0, 1])
def test_a_forced_collision_of_hashes_changes_nothing(bits, monkeypatch):
    original = cache_module.chained_hash
    monkeypatch.setattr(
        cache_module, "chained_hash", lambda before, tokens: original(before, tokens) & bits
    )
    engine = Engine(tiny(), None, 60, SIZE)
    sizes = computed(engine, monkeypatch)
    names = []
    for _ in range(2):
        names += [engine.add(p, params) for p, params in zip(PROMPTS, PARAMS, strict=True)]
        outputs = finish(engine)
        for name, prompt, params in zip(names[-12:], PROMPTS, PARAMS, strict=True):
            assert_same_tokens(tiny(), prompt, ids_of(outputs[name]), alone(tiny(), prompt, params))
    assert sum(sizes) < 2 * sum(len(p) for p in PROMPTS)  # and equal prefixes are still shared


def test_equal_tokens_after_different_prefixes_are_different_blocks():
    a, b = Prefix(None, [1, 2]), Prefix(None, [3, 4])
    assert Prefix(a, [5, 6]) == Prefix(Prefix(None, (1, 2)), [5, 6])
    assert Prefix(a, [5, 6]) != Prefix(b, [5, 6])
    assert Prefix(a, [5, 6]) != Prefix(None, [5, 6]) and Prefix(None, [5, 6]) != Prefix(a, [5, 6])
    assert a != (1, 2)
    assert Prefix(None, [1, 2]) != Prefix(None, [2, 1])


def test_a_prefix_compares_more_blocks_than_python_recurses():
    chains = [None, None]
    for i in range(5000):
        chains = [Prefix(chain, [i]) for chain in chains]
    assert chains[0] == chains[1]


# --------------------------------------------------------------------------------- the cache alone


def small(num_blocks: int = 4) -> PrefixCache:
    return PrefixCache(KVPool(tiny().config, num_blocks, SIZE, poison=True))


def held(prefixes: PrefixCache, ids: list[int]) -> SharedKVCache:
    """A cache that has computed ids."""
    cache = SharedKVCache(prefixes)
    cache.reuse([*ids, 0])
    cache.table.grow(len(ids))
    slots = [cache.table.slot(i) for i in range(cache.seq_len, len(ids))]
    prefixes.pool.k[:, slots] = prefixes.pool.v[:, slots] = 1.0
    cache.seq_len = len(ids)
    return cache


def test_references_are_counted_and_the_last_to_leave_makes_a_block_cached():
    prefixes = small()
    caches = [held(prefixes, SYSTEM[:16])]
    caches[0].share(SYSTEM[:16])
    caches.append(held(prefixes, SYSTEM[:16]))
    first, second = caches[0].table.blocks
    assert caches[1].table.blocks == [first, second]
    assert (prefixes.references(first), prefixes.num_free, prefixes.num_cached) == (2, 2, 0)
    caches[0].free()
    assert (prefixes.references(first), prefixes.num_free, prefixes.num_cached) == (1, 2, 0)
    caches[0].free()  # a second call does nothing
    caches[1].free()
    assert (prefixes.references(first), prefixes.num_free, prefixes.num_cached) == (0, 2, 2)
    assert (prefixes.pool.k[:, [first * SIZE, second * SIZE]] == 1).all()
    with pytest.raises(ValueError, match=f"block {first} is in no table"):
        prefixes.free(first)


def test_what_is_not_known_becomes_free_and_poisoned_at_once():
    prefixes = small()
    cache = held(prefixes, SYSTEM[:12])
    cache.share(SYSTEM)
    full, half = cache.table.blocks
    cache.free()
    assert (prefixes.num_free, prefixes.num_cached) == (3, 1)
    assert prefixes.pool.k[:, half * SIZE : (half + 1) * SIZE].isnan().all()
    assert not prefixes.pool.k[:, full * SIZE : (full + 1) * SIZE].isnan().any()
    with pytest.raises(ValueError, match=f"block {half} is free already"):
        prefixes.free(half)


def test_an_evicted_block_is_poisoned_and_no_longer_found():
    prefixes = small(2)
    cache = held(prefixes, SYSTEM[:16])
    cache.share(SYSTEM)
    cache.free()
    table = BlockTable(prefixes)
    table.grow(9)
    assert prefixes.pool.k.isnan().all() and prefixes.find(SYSTEM) == []


def test_too_few_blocks_evict_nothing():
    prefixes = small()
    cache = held(prefixes, SYSTEM[:16])
    cache.share(SYSTEM)
    cache.free()
    other = BlockTable(prefixes)
    other.grow(8)
    with pytest.raises(KVCacheExhausted, match="4 blocks are needed, 1 are free and 2 are cached"):
        other.grow(40)
    assert (prefixes.num_free, prefixes.num_cached, len(other.blocks)) == (1, 2, 1)
    other.grow(32)
    assert (prefixes.num_free, prefixes.num_cached) == (0, 0)


def test_a_block_is_found_again_after_the_blocks_before_it_were_evicted_and_computed_anew():
    """The second of two equal sequences shares a later block of its own; the first is evicted."""
    prefixes = small(6)
    first, second = held(prefixes, SYSTEM[:8]), held(prefixes, SYSTEM[:16])
    first.share(SYSTEM)
    second.share(SYSTEM)  # its first block is a copy, its second is the only one
    first.free()
    filler = BlockTable(prefixes)
    filler.grow(4 * SIZE)  # evicts the first block
    assert prefixes.find(SYSTEM) == []
    filler.free()
    third = held(prefixes, SYSTEM[:8])
    third.share(SYSTEM)
    assert prefixes.find(SYSTEM) == [third.table.blocks[0], second.table.blocks[1]]


def test_a_cache_that_holds_tokens_cannot_begin_with_others():
    prefixes = small()
    cache = held(prefixes, SYSTEM[:9])
    with pytest.raises(ValueError, match="the cache is not empty: it holds 9 tokens"):
        cache.reuse(SYSTEM)


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 0), (8, 0), (9, 1), (16, 1), (17, 2), (32, 3)])
def test_the_last_token_is_always_computed(tokens, blocks):
    assert shareable_blocks(tokens, SIZE) == blocks


def test_slots_and_keys_of_a_shared_prefix_are_those_of_its_first_owner():
    prefixes = small()
    first = held(prefixes, SYSTEM[:16])
    first.share(SYSTEM)
    second = SharedKVCache(prefixes)
    second.reuse(SYSTEM)
    assert second.seq_len == 16
    assert torch.equal(second.slot_mapping, first.slot_mapping)
