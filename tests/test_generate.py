"""The loop: tokens equal transformers', text equals the decoding of all tokens at once."""

import json
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.cache import BLOCK_SIZE, KVPool, NaiveKVCache, PagedBatch, PagedKVCache
from nanoserve.generate import (
    CACHES,
    LLM,
    Completion,
    StopStrings,
    Stream,
    generate_tokens,
    new_cache,
    next_logits,
    single_sequence,
)
from nanoserve.kernels.dispatch import use_backend
from nanoserve.model import load_model
from nanoserve.sampling import Sample, SamplingParams, sample
from nanoserve.tokenizer import load_tokenizer
from tests.bounds import apart
from tests.checkpoints import KINDS, edit_json, random_model, save
from tests.folders import BOS, IM_END, IM_START, VOCABULARY, write_checkpoint

REFERENCE = json.loads((Path(__file__).parent / "data/smollm2_reference.json").read_text())[
    "greedy"
]
TOKENIZER = load_tokenizer()
END = 2  # SmolLM2's <|im_end|>
PROMPT = [104, 50, 61, 17]


@pytest.fixture(scope="module")
def smollm2() -> LLM:
    return LLM()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> LLM:
    """Random weights, a context of 64 tokens, and no end token."""
    return LLM(write_checkpoint(tmp_path_factory.mktemp("tiny"), eos=None))


def folder_that_ends(folder: Path, eos: int | list[int]) -> Path:
    """The weights of `tiny`, with end tokens."""
    return write_checkpoint(folder, eos=eos)


def ids_of(n: int) -> torch.Tensor:
    return torch.randint(0, 97, (1, n), generator=torch.Generator().manual_seed(2))


# the real model


@pytest.mark.slow
@pytest.mark.parametrize("name", REFERENCE)
def test_greedy_continuations_are_those_of_transformers(name, smollm2):
    case = REFERENCE[name]
    completion = smollm2.generate(case["prompt_ids"], SamplingParams(max_tokens=64))[0]
    assert completion.token_ids == case["greedy_ids"]
    ended = case["greedy_ids"][-1] == END
    assert completion.finish_reason == ("stop" if ended else "length")
    text = TOKENIZER.decode(case["greedy_ids"][:-1] if ended else case["greedy_ids"])
    assert completion.text == text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fact", "chat-moon", "chat-list"])
def test_without_a_cache_the_tokens_are_the_same(name, smollm2):
    case, params = REFERENCE[name], SamplingParams(max_tokens=15)
    samples = generate_tokens(smollm2.model, case["prompt_ids"], params, None, (END,))
    assert [s.token_id for s in samples] == case["greedy_ids"][:15]


SEEDED = SamplingParams(max_tokens=8, temperature=0.8, top_p=0.95, seed=7)


@pytest.mark.slow
@pytest.mark.parametrize(
    "params", [SamplingParams(max_tokens=16), SEEDED], ids=["greedy", "seeded"]
)
@pytest.mark.parametrize("name", REFERENCE)
def test_paged_memory_gives_the_text_of_contiguous_memory(name, params, smollm2):
    case, said = REFERENCE[name], {}
    for kind in CACHES:
        cache = new_cache(kind, smollm2.model, len(case["prompt_ids"]) + params.max_tokens)
        samples = generate_tokens(smollm2.model, case["prompt_ids"], params, cache, (END,))
        said[kind] = [sample.token_id for sample in samples]
    assert said["paged"] == said["naive"]
    assert (said["paged"] == case["greedy_ids"][: params.max_tokens]) or params is SEEDED


@pytest.mark.parametrize(("backend", "within"), [("reference", 0), ("tlsim", 1e-5)])
def test_the_real_models_paged_logits_are_the_naive_ones(backend, within, smollm2):
    """Equal in every bit with the reference backend; else within 1e-5 of the largest logit."""
    steps = [REFERENCE["chat-moon"]["prompt_ids"], [28], [339, 414, 5, 60, 17], [2]]
    naive, paged = (new_cache(kind, smollm2.model, 60) for kind in ("naive", "paged"))
    for ids in steps:
        with use_backend(backend):
            ours, theirs = (next_logits(smollm2.model, ids, cache) for cache in (paged, naive))
        assert apart(ours, theirs) <= within


def test_a_chat_is_the_template_and_its_ids(smollm2):
    messages = [{"role": "user", "content": "Say hi. <|im_end|>"}]
    rendered = TOKENIZER.render_chat(messages)
    assert smollm2.chat_ids(messages) == TOKENIZER.encode(rendered, parse_special=True)
    params = SamplingParams(max_tokens=3)
    assert smollm2.chat(messages, params) == smollm2.generate(smollm2.chat_ids(messages), params)[0]


def test_smollm2_gets_no_bos_and_text_is_its_ids(smollm2):
    params = SamplingParams(max_tokens=2)
    ids = REFERENCE["fact"]["prompt_ids"]
    assert smollm2._prompt_ids(REFERENCE["fact"]["text"]) == ids
    assert smollm2.generate("The capital of France is", params) == smollm2.generate(ids, params)


# the cache changes nothing


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_then_decode_is_one_long_forward(kind, tmp_path):
    model = load_model(save(random_model(kind), tmp_path))
    cache, ids = NaiveKVCache(model.config, capacity=4), ids_of(23)
    with torch.no_grad():
        whole = model(ids)
        steps = [model(ids[:, :9], cache)]
        steps += [model(ids[:, i : i + 1], cache) for i in range(9, 23)]
    assert cache.seq_len == 23
    assert apart(torch.cat(steps, dim=1), whole) < 1e-5


@pytest.mark.parametrize("chunks", [(1, 22), (7, 7, 9), (20, 2, 1), (1,) * 23])
def test_appends_in_chunks_are_one_append(chunks, tmp_path):
    model = load_model(save(random_model(), tmp_path))
    one, many, ids = NaiveKVCache(model.config), NaiveKVCache(model.config), ids_of(23)
    with torch.no_grad():
        whole = model(ids, one)
        parts = torch.cat([model(part, many) for part in ids.split(chunks, dim=1)], dim=1)
        after = [model(torch.tensor([[3]]), cache) for cache in (one, many)]
    assert one.seq_len == many.seq_len == 24
    assert apart(parts, whole) < 1e-5
    assert apart(after[1], after[0]) < 1e-5


@pytest.mark.parametrize(("backend", "within"), [("reference", 0), ("tlsim", 1e-5)])
@pytest.mark.parametrize("kind", KINDS)
def test_paged_logits_are_the_naive_ones_whatever_the_model(kind, backend, within, tmp_path):
    model = load_model(save(random_model(kind), tmp_path))
    naive = NaiveKVCache(model.config, capacity=4)
    paged = PagedKVCache(KVPool(model.config, 8, 3, poison=True))
    with torch.no_grad(), use_backend(backend):
        for ids in ids_of(23).split((9, 1, 1, 6, 1, 4, 1), dim=1):
            assert apart(model(ids, paged), model(ids, naive)) <= within
    assert paged.seq_len == 23


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_equal_with_a_paged_cache_too(dtype, tmp_path):
    model = load_model(save(random_model(), tmp_path), dtype)
    naive, paged = (new_cache(kind, model, 23) for kind in ("naive", "paged"))
    assert paged.pool.k.dtype == dtype
    with torch.no_grad(), use_backend("reference"):  # a kernel keeps more digits than the oracle
        for ids in ids_of(23).split((9, 1, 1, 12), dim=1):
            assert torch.equal(model(ids, paged), model(ids, naive))


def test_two_texts_of_one_pool_are_written_in_turn(tiny):
    """As in a server: both sequences grow, one ends, and the other takes its blocks."""
    pool, params = KVPool(tiny.model.config, 12, 4, poison=True), SamplingParams(max_tokens=20)
    caches = [PagedKVCache(pool) for _ in range(2)]
    prompts = PROMPT, [8, 9, 10, 11, 12, 13, 14]
    alone = [tiny.generate(prompt, params)[0].token_ids for prompt in prompts]
    runs = [
        generate_tokens(tiny.model, prompt, params, cache)
        for prompt, cache in zip(prompts, caches, strict=True)
    ]
    said = [[], []]
    for _ in range(10):
        for ids, run in zip(said, runs, strict=True):
            ids.append(next(run).token_id)
    assert said == [alone[0][:10], alone[1][:10]]
    freed = set(caches[0].table.blocks)
    caches[0].free()
    said[1] += [chosen.token_id for chosen in runs[1]]
    assert said[1] == alone[1]
    assert set(caches[1].table.blocks) & freed


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_the_same_with_and_without_a_cache(temperature, kind, tiny):
    params = SamplingParams(max_tokens=30, temperature=temperature, seed=5)
    cache = new_cache(kind, tiny.model, 34)
    cached = [s.token_id for s in generate_tokens(tiny.model, PROMPT, params, cache)]
    bare = [s.token_id for s in generate_tokens(tiny.model, PROMPT, params)]
    assert cached == bare
    assert len(set(cached)) > 5
    assert cache.seq_len == len(PROMPT) + 29  # the last token was never fed


def test_a_cached_step_feeds_one_token_and_an_uncached_one_everything(tiny, monkeypatch):
    fed, hidden = [], tiny.model.hidden

    def spy(ids, cache=None):
        fed.append(ids.shape[1])
        return hidden(ids, cache)

    monkeypatch.setattr(tiny.model, "hidden", spy)
    params = SamplingParams(max_tokens=4)
    list(generate_tokens(tiny.model, PROMPT, params, NaiveKVCache(tiny.model.config)))
    list(generate_tokens(tiny.model, PROMPT, params))
    assert fed == [4, 1, 1, 1, 4, 5, 6, 7]


def test_an_llm_without_a_cache_gives_the_same_text(tiny, tmp_path):
    bare = LLM(folder_that_ends(tmp_path, IM_END), cache=None)
    params = SamplingParams(max_tokens=12)
    assert bare.generate(PROMPT, params) == tiny.generate(PROMPT, params)


def caches_that_are_made(llm: LLM, monkeypatch) -> list:
    """Each cache that the model gets from now on."""
    seen, hidden = [], llm.model.hidden

    def spy(ids, cache=None):
        seen.append(cache)
        return hidden(ids, cache)

    monkeypatch.setattr(llm.model, "hidden", spy)
    return seen


def test_by_default_all_prompts_of_a_list_share_each_step(tiny, monkeypatch):
    seen = caches_that_are_made(tiny, monkeypatch)
    tiny.generate([PROMPT, PROMPT], SamplingParams(max_tokens=2))
    assert [type(cache) for cache in seen] == [PagedBatch] * 2
    assert [len(cache.tables.kv_lens) for cache in seen] == [2, 2]


def test_one_by_one_the_cache_is_paged_and_new_for_each_text(tiny, monkeypatch):
    seen = caches_that_are_made(tiny, monkeypatch)
    with single_sequence():
        tiny.generate([PROMPT, PROMPT], SamplingParams(max_tokens=2))
    assert [type(cache) for cache in seen] == [PagedKVCache] * 4
    assert seen[0] is seen[1] is not seen[2] is seen[3]


@pytest.mark.parametrize("kind", ["naive", "paged", None])
def test_each_kind_of_cache_is_the_requested_one_and_gives_the_same_text(
    kind, tiny, tmp_path, monkeypatch
):
    llm = LLM(folder_that_ends(tmp_path, None), cache=kind)
    seen = caches_that_are_made(llm, monkeypatch)
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=20, temperature=temperature, seed=3)
        assert llm.generate(PROMPT, params) == tiny.generate(PROMPT, params)
    kinds = {"naive": NaiveKVCache, "paged": PagedBatch, None: type(None)}
    assert {type(cache) for cache in seen} == {kinds[kind]}


@pytest.mark.parametrize(
    ("tokens", "blocks"),
    [(1, 1), (BLOCK_SIZE, 1), (BLOCK_SIZE + 1, 2), (5 * BLOCK_SIZE, 5), (64, 4)],
)
def test_a_new_paged_cache_has_just_enough_blocks(tokens, blocks, tiny):
    cache = new_cache("paged", tiny.model, tokens)
    assert (cache.pool.allocator.num_blocks, cache.pool.allocator.num_free) == (blocks, blocks)
    assert cache.pool.allocator.block_size == BLOCK_SIZE
    assert cache.pool.k.shape == (2, blocks * BLOCK_SIZE, 2, 8)
    assert cache.pool.k.dtype == torch.float32
    assert cache.seq_len == 0


def test_the_other_kinds_of_new_cache(tiny):
    assert CACHES == ("paged", "naive")
    assert isinstance(new_cache("naive", tiny.model, 64), NaiveKVCache)
    assert new_cache(None, tiny.model, 64) is None


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "capacity"), [(4, 5, 9), (4, 1000, 64), (64, 1, 64)]
)
def test_a_cache_has_capacity_for_prompt_and_answer_and_at_most_for_the_context(
    prompt, max_tokens, capacity, tiny, monkeypatch
):
    asked = []
    monkeypatch.setattr(
        "nanoserve.generate.new_cache",
        lambda kind, model, tokens: asked.append((kind, tokens)) or new_cache(kind, model, tokens),
    )
    with single_sequence():
        tiny.generate([7] * prompt, SamplingParams(max_tokens=max_tokens))
    assert asked == [("paged", capacity)]


def test_a_learners_own_cache_will_do(tiny):
    class Joined:
        """The whole contract: seq_len, and append."""

        def __init__(self) -> None:
            self.seq_len, self.kv = 0, [None] * 2

        def append(self, layer, k, v):
            if self.kv[layer] is not None:
                k, v = (torch.cat(pair, dim=2) for pair in zip(self.kv[layer], (k, v), strict=True))
            self.kv[layer] = (k, v)
            if layer == 1:
                self.seq_len = k.shape[2]
            return k, v

    params = SamplingParams(max_tokens=20)
    ours = list(generate_tokens(tiny.model, PROMPT, params, Joined()))
    assert ours == list(generate_tokens(tiny.model, PROMPT, params))


def test_next_logits_are_the_last_position_in_float32(tmp_path):
    folder = save(random_model(), tmp_path)
    model, ids = load_model(folder), [5, 9, 33]
    logits = next_logits(model, ids)
    assert logits.shape == (97,)
    torch.testing.assert_close(logits, model(torch.tensor([ids]))[0, -1])
    assert not logits.requires_grad
    assert next_logits(load_model(folder, torch.bfloat16), ids).dtype == torch.float32


# no state is left over


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_same_call_twice_gives_the_same_text(temperature, tiny):
    params = SamplingParams(max_tokens=15, temperature=temperature, seed=3)
    assert tiny.generate("he said", params) == tiny.generate("he said", params)


def test_a_seed_repeats_and_others_differ(tiny):
    answers = {
        seed: tiny.generate(PROMPT, SamplingParams(max_tokens=12, temperature=1.0, seed=seed))
        for seed in (0, 1, 2, 3)
    }
    assert len({tuple(answer[0].token_ids) for answer in answers.values()}) == 4


def test_without_a_seed_torchs_own_is_used(tiny):
    params = SamplingParams(max_tokens=12, temperature=1.0)
    torch.manual_seed(11)
    first, second = (tiny.generate(PROMPT, params)[0].token_ids for _ in range(2))
    torch.manual_seed(11)
    assert tiny.generate(PROMPT, params)[0].token_ids == first
    assert first != second


def test_each_prompt_of_a_list_starts_from_the_seed_and_an_empty_cache(tiny):
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=4)
    together = tiny.generate([PROMPT, "hello", PROMPT], params)
    assert together == [tiny.generate(prompt, params)[0] for prompt in (PROMPT, "hello", PROMPT)]
    assert together[0] == together[2] != together[1]


def test_a_penalty_sees_the_prompt_and_the_output(tiny):
    plain = tiny.generate(PROMPT, SamplingParams(max_tokens=30))[0].token_ids
    params = SamplingParams(max_tokens=30, repetition_penalty=1e9)
    new = tiny.generate(PROMPT, params)[0].token_ids
    assert len(set(plain)) < 30
    assert len({*new, *PROMPT}) == 30 + len(PROMPT)  # none repeats, and none is of the prompt


@pytest.mark.parametrize("module", ["nanoserve.generate", "nanoserve.engine.engine"])
def test_penalties_are_told_the_prompt_from_the_output(module, tiny, monkeypatch):
    seen = []

    def spy(logits, params, generator, prompt_ids, output_ids):
        seen.append((list(prompt_ids), list(output_ids)))
        return sample(logits, params, generator, prompt_ids, output_ids)

    monkeypatch.setattr(f"{module}.sample", spy)
    with single_sequence() if module == "nanoserve.generate" else nullcontext():
        ids = tiny.generate(PROMPT, SamplingParams(max_tokens=4))[0].token_ids
    assert seen == [(PROMPT, ids[:n]) for n in range(4)]


# where it ends


def test_max_tokens_is_a_length(tiny):
    completion = tiny.generate(PROMPT, SamplingParams(max_tokens=7))[0]
    assert (len(completion.token_ids), completion.finish_reason) == (7, "length")


def test_the_default_is_sixteen_greedy_tokens(tiny):
    assert tiny.generate(PROMPT) == tiny.generate(PROMPT, SamplingParams(max_tokens=16))


@pytest.mark.parametrize("at", [0, 5])
def test_each_of_several_end_tokens_stops_and_is_kept_but_not_shown(at, tiny, tmp_path):
    ids = tiny.generate(PROMPT, SamplingParams(max_tokens=20))[0].token_ids
    end = ids[at]
    llm = LLM(folder_that_ends(tmp_path, [BOS, end]))
    assert llm.model.config.eos_ids == (BOS, end)
    completion = llm.generate(PROMPT, SamplingParams(max_tokens=20))[0]
    upto = ids.index(end)
    assert completion.token_ids == ids[: upto + 1]
    assert completion.text == tiny.tokenizer.decode(ids[:upto], skip_special=True)
    assert completion.finish_reason == "stop"


def test_an_end_token_that_comes_last_is_still_a_stop(tiny, tmp_path):
    ids = tiny.generate(PROMPT, SamplingParams(max_tokens=6))[0].token_ids
    first = ids.index(ids[-1]) + 1
    llm = LLM(folder_that_ends(tmp_path, ids[-1]))
    completion = llm.generate(PROMPT, SamplingParams(max_tokens=first))[0]
    assert (len(completion.token_ids), completion.finish_reason) == (first, "stop")


@pytest.mark.parametrize("cache", ["paged", "naive", None])
def test_a_full_context_ends_the_text(cache, tmp_path):
    llm = LLM(write_checkpoint(tmp_path, eos=None), cache=cache)
    completion = llm.generate([7] * 60, SamplingParams(max_tokens=1000))[0]
    assert (len(completion.token_ids), completion.finish_reason) == (5, "length")
    completion = llm.generate([7] * 64, SamplingParams(max_tokens=1000))[0]
    assert (len(completion.token_ids), completion.finish_reason) == (1, "length")


# stop strings


def upto_first_stop(text: str, stops: list[str]) -> str:
    """The definition: add characters until the text ends with a stop string, then remove it."""
    for end in range(len(text) + 1):
        ended = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end - max(ended)]
    return text


@st.composite
def texts_in_pieces(draw) -> tuple[list[str], list[str]]:
    text = draw(st.text("abc", max_size=30))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    return pieces, draw(st.lists(st.text("abc", min_size=1, max_size=5), max_size=4))


@settings(max_examples=300, deadline=None)
@given(texts_in_pieces())
def test_text_ends_where_the_first_stop_string_begins_however_it_comes(case):
    pieces, stops = case
    text, stop = "".join(pieces), StopStrings(stops)
    shown, expected = "", upto_first_stop(text, stops)
    for i, piece in enumerate(pieces):
        shown += stop.add(piece)
        so_far = "".join(pieces[: i + 1])
        assert expected.startswith(shown)  # a part of a stop never leaks
        if not stop.found:  # and no more is held back than may still become a stop
            held = so_far[len(shown) :]
            assert so_far == shown + held
            assert not held or any(s.startswith(held) and s != held for s in stops)
    shown += stop.finish()
    assert shown == expected
    assert stop.found == any(s in text for s in stops)


def test_after_a_stop_string_nothing_more_comes():
    stop = StopStrings(["END"])
    assert [stop.add("so E"), stop.add("ND and"), stop.add("more END"), stop.finish()] == [
        "so ",
        "",
        "",
        "",
    ]


def test_what_was_held_back_comes_once():
    stop = StopStrings(["END"])
    assert [stop.add("the EN"), stop.finish(), stop.finish()] == ["the ", "EN", ""]


# the scripted model: its text is given


class Scripted:
    """A model that generates `script`, whatever its weights. It needs no cache."""

    device = torch.device("cpu")

    def __init__(self, prompt: list[int], script: list[int], eos_ids: tuple[int, ...] = ()) -> None:
        self.config = SimpleNamespace(
            context=len(prompt) + len(script), eos_ids=eos_ids, vocab_size=TOKENIZER.vocab_size
        )
        self._prompt, self._script = len(prompt), script

    def hidden(self, ids: torch.Tensor, cache: None) -> torch.Tensor:
        return torch.full((*ids.shape, 1), ids.shape[1] - self._prompt)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        token = torch.tensor(self._script[int(hidden)])
        return torch.nn.functional.one_hot(token, TOKENIZER.vocab_size).float()


def said(script: list[int], prompt: list[int] = (0,), eos_ids=(), **options) -> Stream:
    params = SamplingParams(max_tokens=len(script), **options)
    return Stream(Scripted(prompt, script, eos_ids), TOKENIZER, list(prompt), params, None)


LETTERS = "the emoji 👩‍👩‍👧 🇫🇷 日本語 café é naïve 한국 and END of it"


@pytest.mark.parametrize("text", [LETTERS, "👩‍👩‍👧", "日本語のテキスト。", "é", "\U0001f600" * 5])
def test_pieces_are_whole_characters_and_join_to_the_text(text):
    ids = TOKENIZER.encode(text)
    stream = said(ids)
    pieces = list(stream)
    assert "".join(pieces) == text == stream.completion.text == stream.text
    assert all(pieces)
    assert "\ufffd" not in "".join(pieces)
    assert stream.token_ids == ids


def test_text_comes_as_soon_as_its_token():
    stream = iter(said(TOKENIZER.encode("one two three")))
    assert [next(stream), next(stream)] == ["one", " two"]


def test_a_text_that_ends_inside_a_character_says_so():
    ids = TOKENIZER.encode("🍕")
    assert len(ids) > 1
    assert said(ids[:-1]).completion.text == "\ufffd"


def test_a_character_that_the_prompt_began_is_finished_in_the_text():
    ids = TOKENIZER.encode("I love 🍕!")
    for cut in range(1, len(ids)):
        begun = TOKENIZER.decode(ids[:cut]).rstrip("\ufffd")
        assert said(ids[cut:], prompt=ids[:cut]).completion.text == "I love 🍕!"[len(begun) :]


def test_special_tokens_are_no_text_and_an_end_token_ends_it():
    ids = [1, *TOKENIZER.encode("hello"), 1, *TOKENIZER.encode(" there"), END]
    completion = said([*ids, *TOKENIZER.encode(" more")], eos_ids=(END,)).completion
    assert completion == Completion("hello there", ids, "stop")


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("END", LETTERS[: LETTERS.index("END")]),
        (["END", "日本語"], LETTERS[: LETTERS.index("日本語")]),
        ("본", LETTERS),  # begins with the bytes of another character
        ("한국 and", LETTERS[: LETTERS.index("한국")]),
        ("ji 👩", "the emo"),  # over the border of tokens, and inside a joined family
        ("the", ""),
        (["it!", "itch"], LETTERS),  # held back to the end, and then shown
    ],
)
def test_stop_strings_end_the_text_across_tokens(stop, text):
    stream = said(TOKENIZER.encode(LETTERS), stop=stop)
    assert "".join(stream) == text == stream.completion.text
    assert stream.completion.finish_reason == ("length" if text == LETTERS else "stop")


def test_a_stop_string_ends_the_work_too_and_its_tokens_are_kept():
    ids = TOKENIZER.encode("one two three four")
    completion = said(ids, stop=" two").completion
    assert completion == Completion("one", ids[:2], "stop")


def test_a_stop_string_that_the_last_broken_character_completes_counts():
    ids = TOKENIZER.encode("a 🍕")[:-1]
    assert said(ids, stop=" \ufffd").completion == Completion("a", ids, "stop")


def test_what_is_held_back_comes_when_an_end_token_does():
    ids = [*TOKENIZER.encode("the EN"), END]
    completion = said(ids, eos_ids=(END,), stop="END").completion
    assert completion == Completion("the EN", ids, "stop")


def test_a_stop_string_in_the_prompt_stops_nothing():
    prompt = TOKENIZER.encode("stop at EN")
    assert said(TOKENIZER.encode("D or not"), prompt=prompt, stop="END").completion.text == (
        "D or not"
    )


# streams


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 9}, {"stop": "h"}])
def test_a_stream_is_the_batch_in_pieces(options, tiny):
    params = SamplingParams(max_tokens=50, **options)
    stream = tiny.stream("he", params)
    pieces = list(stream)
    batch = tiny.generate("he", params)[0]
    assert "".join(pieces) == stream.text == batch.text
    assert stream.completion == batch
    shown = [i for i in batch.token_ids if i < BOS]
    decoded = tiny.tokenizer.decode(shown)
    assert batch.text == decoded.split("h")[0] if "stop" in options else batch.text == decoded


def test_a_stream_works_as_it_is_read_and_no_further(tiny, monkeypatch):
    steps, hidden = [], tiny.model.hidden
    monkeypatch.setattr(tiny.model, "hidden", lambda *a: steps.append(1) or hidden(*a))
    stream = tiny.stream(PROMPT, SamplingParams(max_tokens=40))
    assert steps == []
    next(iter(stream))
    assert 1 <= len(steps) < 40
    assert len(stream.token_ids) == len(steps)


def test_a_completion_draws_what_a_reader_left(tiny):
    params = SamplingParams(max_tokens=20)
    stream = tiny.stream(PROMPT, params)
    for _ in stream:
        break
    assert stream.completion == tiny.generate(PROMPT, params)[0] == stream.completion


def test_a_stream_is_read_once(tiny):
    stream = tiny.stream(PROMPT, SamplingParams(max_tokens=5))
    assert list(stream)
    assert list(stream) == []


# logprobs


def test_logprobs_come_with_each_token_when_asked_for(tiny):
    completion = tiny.generate(PROMPT, SamplingParams(max_tokens=6, logprobs=3))[0]
    assert [s.token_id for s in completion.logprobs] == completion.token_ids
    ids = PROMPT + completion.token_ids
    with torch.no_grad():
        expected = tiny.model(torch.tensor([ids]))[0].log_softmax(-1)
    for i, one in enumerate(completion.logprobs):
        row = expected[len(PROMPT) - 1 + i]
        assert isinstance(one, Sample)
        assert one.logprob == pytest.approx(float(row[one.token_id]), abs=1e-4)
        assert list(one.top) == row.topk(3).indices.tolist()


def test_logprobs_cover_the_end_token_and_are_none_unasked(tiny, tmp_path):
    end = tiny.generate(PROMPT, SamplingParams(max_tokens=1))[0].token_ids[0]
    llm = LLM(folder_that_ends(tmp_path, end))
    completion = llm.generate(PROMPT, SamplingParams(logprobs=0))[0]
    assert (completion.text, completion.token_ids) == ("", [end])
    assert [(s.token_id, s.top) for s in completion.logprobs] == [(end, {})]
    assert llm.generate(PROMPT)[0].logprobs is None


# prompts


def test_prompts_are_text_or_ids_one_or_many(tiny):
    text, ids = "hello", tiny.tokenizer.encode("hello")
    one = tiny.generate(text)
    assert len(one) == 1
    for prompts in (ids, tuple(ids), [text], [ids], [tuple(ids)]):
        assert tiny.generate(prompts) == one
    other = tiny.generate("world")[0]
    assert tiny.generate([text, "world", ids]) == [one[0], other, one[0]]
    assert tiny.generate([]) == []


@pytest.mark.parametrize("prompt", ["", [""], [[]], ["good", ""], [[5], []]])
def test_an_empty_prompt_is_refused(prompt, tiny):
    with pytest.raises(ValueError, match="the prompt is empty"):
        tiny.generate(prompt)


def test_an_empty_list_of_ids_is_no_prompt_to_stream(tiny):
    with pytest.raises(ValueError, match="the prompt is empty"):
        tiny.stream([])


def test_a_prompt_longer_than_the_context_is_refused(tiny):
    message = "the prompt has 65 tokens, the model's context holds 64"
    for prompt in ([7] * 65, "x" * 65):
        with pytest.raises(ValueError, match=message):
            tiny.generate(prompt)


@pytest.mark.parametrize("bad", [VOCABULARY, -1, 10**12])
def test_an_id_outside_the_vocabulary_is_named(bad, tiny):
    with pytest.raises(ValueError, match=f"token id {bad} is outside the vocabulary of 261"):
        tiny.generate([5, bad, 6])


@pytest.mark.parametrize("prompt", [[5.0, 6], [5, 6.5], [True, 5], [[5, False]], [5, "a"]])
def test_ids_that_are_no_integers_are_refused(prompt, tiny):
    with pytest.raises(ValueError, match="a prompt must be text or integer token ids, got"):
        tiny.generate(prompt)


def test_a_bad_prompt_is_refused_before_any_work(tiny, monkeypatch):
    monkeypatch.setattr(tiny.model, "hidden", None)
    with pytest.raises(ValueError, match="token id 9999"):
        tiny.generate(["good", [9999]])
    with pytest.raises(ValueError, match="the prompt is empty"):
        tiny.stream("")


def test_a_lone_surrogate_is_refused(tiny):
    with pytest.raises(ValueError, match="text is not valid Unicode"):
        tiny.generate("a\ud83d")


@pytest.mark.parametrize("cache", ["paged!", "", "Naive"])
def test_an_unknown_cache_is_named_before_anything_is_loaded(cache):
    known = "'paged', 'naive', None"
    with pytest.raises(ValueError, match=f"^cache '{cache}' is not known; supported: {known}$"):
        LLM("no such model", cache=cache)


@pytest.mark.parametrize("dtype", [torch.float64, "float64", "bf16", torch.int64, None, 16])
def test_a_dtype_that_is_not_supported_is_named_before_anything_is_loaded(dtype):
    said = rf"^dtype {re.escape(repr(dtype))} is not supported; supported: float32, bfloat16, fl"
    with pytest.raises(ValueError, match=said):
        LLM("no such model", dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_dtype_may_be_named(dtype, tmp_path):
    llm = LLM(write_checkpoint(tmp_path), dtype=dtype)
    assert llm.model.dtype == getattr(torch, dtype)
    assert len(llm.generate([PROMPT[:2]], SamplingParams(max_tokens=2))[0].token_ids) <= 2


NOT_HERE = ["tpu", "cuda:77", "meta", None, "", 77]
NOT_HERE += [] if torch.cuda.is_available() else ["cuda", torch.device("cuda"), 0]


@pytest.mark.parametrize("device", NOT_HERE)
def test_a_device_that_is_not_there_is_one_line_before_anything_is_loaded(device):
    said = rf"^device '{re.escape(str(device))}' cannot be used: [^\n]+$"
    with pytest.raises(ValueError, match=said):
        LLM("no such model", device=device)


@pytest.mark.parametrize("params", [{"max_tokens": 5}, 5, "greedy"])
def test_params_of_another_kind_are_named(params, tiny):
    with pytest.raises(ValueError, match=r"^params must be a SamplingParams, got "):
        tiny.generate("a", params)


@pytest.mark.parametrize("prompts", [5, None, 1.5])
def test_prompts_of_another_kind_are_named(prompts, tiny):
    with pytest.raises(ValueError, match=r"^prompts must be text, token ids, or a list"):
        tiny.generate(prompts)


@pytest.mark.parametrize("source", [None, 3, b"smollm2"])
def test_a_source_of_another_kind_is_named(source):
    with pytest.raises(ValueError, match=r"^a model must be a name or a path, got "):
        LLM(source)


def test_a_bos_stands_before_text_once_and_never_before_ids_or_a_chat(tmp_path, monkeypatch):
    llm = LLM(write_checkpoint(tmp_path, add_bos=True))
    fed, hidden = [], llm.model.hidden

    def spy(ids, cache=None):
        fed.append(ids[0].tolist())
        return hidden(ids, cache)

    monkeypatch.setattr(llm.model, "hidden", spy)
    once, text = SamplingParams(max_tokens=1), llm.tokenizer.encode("hi")
    llm.generate("hi", once)
    llm.generate(text, once)
    llm.chat([{"role": "user", "content": "hi"}], once)
    assert fed[:2] == [[BOS, *text], text]
    assert (fed[2][:2], fed[2].count(BOS)) == ([BOS, IM_START], 1)
    assert fed[2] == llm.chat_ids([{"role": "user", "content": "hi"}])


def test_special_tokens_in_plain_text_are_plain_characters(tiny):
    assert not {IM_START, IM_END} & set(tiny._prompt_ids("<|im_start|>hi<|im_end|>"))


def test_a_chat_without_a_template_says_so(tmp_path):
    write_checkpoint(tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", chat_template=...)
    with pytest.raises(ValueError, match="this checkpoint has no chat template"):
        LLM(tmp_path).chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("kind", ["naive", "paged"])
def test_a_cache_and_logits_of_next_logits_can_be_written_to_outside(kind, tmp_path):
    """next_logits runs the layers in inference mode, whose tensors nothing else may change."""
    model = load_model(write_checkpoint(tmp_path, max_position_embeddings=300))
    cache = new_cache(kind, model, 200)
    for _ in range(2):
        next_logits(model, [1, 2, 3], cache)[0] = -1.0
        with torch.no_grad():
            assert model(torch.tensor([[4] * 70]), cache).shape[1] == 70
    assert cache.seq_len == 146
