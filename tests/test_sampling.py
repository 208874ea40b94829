"""Sampling: masks equal transformers', draws follow the distribution, seeds repeat them."""

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nanoserve.sampling import (
    Sample,
    SamplingParams,
    apply_penalties,
    apply_temperature,
    distribution,
    draw,
    make_generator,
    mask_min_p,
    mask_top_k,
    mask_top_p,
    sample,
)
from tests.bounds import assert_near

INF = math.inf
NO_IDS = torch.zeros(1, 0, dtype=torch.long)
GRID = st.integers(-16, 16).map(lambda n: n / 4)  # few values: ties, and sums that round nowhere
ANY = st.one_of(GRID, st.floats(width=32, allow_nan=False, allow_infinity=False), st.just(-INF))
PROBABILITIES = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 0.75, 0.9, 1.0]), st.floats(0, 1))


def logits_of(values: st.SearchStrategy[float]) -> st.SearchStrategy[torch.Tensor]:
    """[vocab] of 1 to 40 float32 logits, at least one of them finite."""
    lists = st.lists(values, min_size=1, max_size=40).filter(lambda row: max(row) > -INF)
    return lists.map(torch.tensor)


def theirs(processor, logits: torch.Tensor, ids: torch.Tensor = NO_IDS) -> torch.Tensor:
    """The result of transformers, which needs a batch and may write into it."""
    return processor(ids, logits.clone()[None])[0]


def kept(logits: torch.Tensor) -> list[int]:
    return torch.nonzero(logits > -INF).flatten().tolist()


class TestMasksAreTransformers:
    @settings(deadline=None)
    @given(logits_of(ANY), st.integers(1, 60))
    def test_top_k(self, logits: torch.Tensor, top_k: int) -> None:
        assert torch.equal(mask_top_k(logits, top_k), theirs(TopKLogitsWarper(top_k), logits))

    @settings(deadline=None)
    @given(logits_of(ANY), PROBABILITIES)
    def test_top_p(self, logits: torch.Tensor, top_p: float) -> None:
        assert torch.equal(mask_top_p(logits, top_p), theirs(TopPLogitsWarper(top_p), logits))

    @settings(deadline=None)
    @given(logits_of(ANY), PROBABILITIES)
    def test_min_p(self, logits: torch.Tensor, min_p: float) -> None:
        assert torch.equal(mask_min_p(logits, min_p), theirs(MinPLogitsWarper(min_p), logits))

    @settings(deadline=None)
    @given(logits_of(ANY), st.floats(0.1, 5), st.data())
    def test_repetition_penalty(
        self, logits: torch.Tensor, penalty: float, data: st.DataObject
    ) -> None:
        ids = st.lists(st.integers(0, len(logits) - 1), max_size=6)
        prompt, output = data.draw(ids), data.draw(ids)
        got = apply_penalties(logits, prompt, output, SamplingParams(repetition_penalty=penalty))
        seen = torch.tensor([prompt + output], dtype=torch.long)
        expected = theirs(RepetitionPenaltyLogitsProcessor(penalty), logits, seen)
        assert torch.equal(got, expected)

    @pytest.mark.parametrize("distinct", [3, 40, 5000])
    def test_masks_of_a_large_vocabulary_and_of_a_batch(self, distinct: int) -> None:
        rows = torch.randint(distinct, (3, 5003), generator=make_generator(distinct)) * 8 / distinct
        for ours, warper in (
            (mask_top_k(rows, 17), TopKLogitsWarper(17)),
            (mask_top_p(rows, 0.6), TopPLogitsWarper(0.6)),
            (mask_min_p(rows, 0.03), MinPLogitsWarper(0.03)),
        ):
            assert torch.equal(ours, warper(NO_IDS, rows.clone()))

    @settings(max_examples=300, deadline=None)
    @given(
        logits_of(st.one_of(GRID, st.just(-INF))),
        st.sampled_from([0.5, 1.0, 2.0, 4.0]),  # dividing by these rounds nothing, either way
        st.integers(0, 12),
        PROBABILITIES,
        PROBABILITIES,
        st.sampled_from([0.5, 1.0, 2.0]),
        st.data(),
    )
    def test_the_whole_chain_in_their_order(
        self, logits, temperature, top_k, top_p, min_p, penalty, data
    ) -> None:
        prompt = data.draw(st.lists(st.integers(0, len(logits) - 1), max_size=6))
        chain = [RepetitionPenaltyLogitsProcessor(penalty), TemperatureLogitsWarper(temperature)]
        chain += [TopKLogitsWarper(top_k)] if top_k else []
        chain += [TopPLogitsWarper(top_p)] if top_p < 1 else []
        chain += [MinPLogitsWarper(min_p)]
        seen = torch.tensor([prompt], dtype=torch.long)
        expected = theirs(LogitsProcessorList(chain), logits, seen).softmax(-1)
        params = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=penalty,
        )
        got = distribution(apply_penalties(logits, prompt, [], params), params)
        assert torch.equal(got > 0, expected > 0)
        assert_near(got, expected)


class TestEdges:
    def test_a_kept_logit_is_unchanged_and_the_input_too(self) -> None:
        logits = torch.tensor([3.0, 1.0, 2.0, -INF, 0.5])
        before = logits.clone()
        expected = torch.tensor([3.0, -INF, 2.0, -INF, -INF])
        assert torch.equal(mask_top_k(logits, 2), expected)
        assert torch.equal(mask_top_p(logits, 0.8), expected)
        assert torch.equal(mask_min_p(logits, 0.3), expected)
        assert torch.equal(logits, before)

    def test_top_k_keeps_what_ties_with_the_last(self) -> None:
        assert kept(mask_top_k(torch.tensor([1.0, 2.0, 3.0, 2.0, 0.0]), 2)) == [1, 2, 3]

    @pytest.mark.parametrize("top_k", [0, 5, 6, 1000])
    def test_top_k_of_none_or_of_more_than_there_are_keeps_all(self, top_k: int) -> None:
        logits = torch.tensor([1.0, 2.0, 3.0, -5.0, 0.0])
        assert torch.equal(mask_top_k(logits, top_k), logits)

    def test_top_p_0_keeps_the_argmax(self) -> None:
        assert kept(mask_top_p(torch.tensor([1.0, 2.0, 5.0, -INF, 4.9]), 0.0)) == [2]

    def test_top_p_stops_at_the_token_that_reaches_it(self) -> None:
        logits = torch.tensor([0.5, 0.41, 0.09]).log()
        assert kept(mask_top_p(logits, 0.9)) == [0, 1]
        assert kept(mask_top_p(logits, 0.5 - 1e-3)) == [0]
        assert kept(mask_top_p(logits, 0.92)) == [0, 1, 2]

    def test_top_p_cuts_through_a_tie(self) -> None:
        assert len(kept(mask_top_p(torch.zeros(8), 0.5))) == 4

    def test_min_p_is_relative_to_the_best(self) -> None:
        logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
        assert kept(mask_min_p(logits, 0.29)) == [0, 1, 2]
        assert kept(mask_min_p(logits, 0.31)) == [0, 1]

    def test_min_p_1_keeps_the_best_and_its_ties(self) -> None:
        assert kept(mask_min_p(torch.tensor([2.0, 1.0, 2.0, 1.9]), 1.0)) == [0, 2]


class TestPenalties:
    LOGITS = torch.tensor([2.0, -2.0, 1.0, 0.0, -1.0, 3.0])

    def test_repetition_divides_positive_and_multiplies_negative_once(self) -> None:
        params = SamplingParams(repetition_penalty=2.0)
        got = apply_penalties(self.LOGITS, [0, 1, 1], [4, 4, 0], params)
        assert got.tolist() == [1.0, -4.0, 1.0, 0.0, -2.0, 3.0]

    def test_presence_counts_the_output_once_and_the_prompt_never(self) -> None:
        params = SamplingParams(presence_penalty=0.5)
        got = apply_penalties(self.LOGITS, [0, 1], [5, 5, 4], params)
        assert got.tolist() == [2.0, -2.0, 1.0, 0.0, -1.5, 2.5]

    def test_frequency_counts_each_use_in_the_output(self) -> None:
        params = SamplingParams(frequency_penalty=0.5)
        got = apply_penalties(self.LOGITS, [0, 1], [5, 5, 4], params)
        assert got.tolist() == [2.0, -2.0, 1.0, 0.0, -1.5, 2.0]

    def test_all_three_add_up_repetition_first(self) -> None:
        params = SamplingParams(
            repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=-1.0
        )
        got = apply_penalties(self.LOGITS, [2], [5, 5, 1], params)
        assert got.tolist() == [2.0, -3.25, 0.5, 0.0, -1.0, 3.25]

    def test_without_penalties_the_logits_come_back_as_they_are(self) -> None:
        assert torch.equal(apply_penalties(self.LOGITS, [0], [1], SamplingParams()), self.LOGITS)

    def test_greedy_sees_them(self) -> None:
        assert sample(self.LOGITS, SamplingParams()).token_id == 5
        penalised = SamplingParams(repetition_penalty=2.0)
        assert sample(self.LOGITS, penalised, prompt_ids=[5]).token_id == 0
        assert sample(self.LOGITS, penalised, output_ids=[5]).token_id == 0


class TestTemperature:
    @settings(deadline=None)
    @given(logits_of(st.one_of(GRID, st.just(-INF))), st.floats(0.05, 20))
    def test_the_distribution_is_transformers(self, logits, temperature: float) -> None:
        expected = theirs(TemperatureLogitsWarper(temperature), logits).softmax(-1)
        got = apply_temperature(logits, temperature).softmax(-1)
        assert_near(got, expected, units=512)

    @settings(deadline=None)
    @given(logits_of(ANY), st.sampled_from([1e-5, 5e-324, 1e-50, 1e300]))
    def test_an_extreme_one_gives_a_distribution(self, logits, temperature: float) -> None:
        probs = distribution(logits, SamplingParams(temperature=temperature))
        assert probs.isfinite().all()
        assert probs.sum().item() == pytest.approx(1, rel=1e-5)

    def test_1e_minus_5_is_greedy_in_effect(self) -> None:
        logits = torch.tensor([3e38, 9.0, -INF, 3.1e38, -3e38])
        params = SamplingParams(temperature=1e-5, seed=0)
        assert sample(logits, params, make_generator(0)).token_id == 3

    @settings(deadline=None)
    @given(logits_of(ANY))
    @example(torch.tensor([1.0, 3.0, 3.0]))
    @example(torch.zeros(50_000))
    def test_0_takes_the_lowest_id_among_the_largest(self, logits: torch.Tensor) -> None:
        row = logits.tolist()
        assert sample(logits, SamplingParams()).token_id == row.index(max(row))


class TestDraws:
    def test_draws_follow_the_distribution(self) -> None:
        logits = torch.tensor([1.0, -0.5, 0.25, -INF, 2.0, 0.0])
        weights = [math.exp(x / 0.7) for x in logits.tolist()]
        params = SamplingParams(temperature=0.7, seed=10)
        generator, n = make_generator(10), 10_000
        counts = Counter(sample(logits, params, generator).token_id for _ in range(n))
        assert counts[3] == 0
        chi_square = sum(
            (counts[i] - n * w / sum(weights)) ** 2 / (n * w / sum(weights))
            for i, w in enumerate(weights)
            if w > 0
        )
        assert chi_square < 18.47  # 4 degrees of freedom: exceeded once in 1,000

    def test_draws_follow_what_the_masks_left(self) -> None:
        logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
        params = SamplingParams(temperature=1.0, top_k=3, top_p=0.7, min_p=0.1, seed=3)
        generator, n = make_generator(3), 10_000
        counts = Counter(sample(logits, params, generator).token_id for _ in range(n))
        assert set(counts) == {0, 1}
        expected = n * 4 / 7
        chi_square = (counts[0] - expected) ** 2 * (1 / expected + 1 / (n - expected))
        assert chi_square < 10.83  # 1 degree of freedom: exceeded once in 1,000

    def test_a_seed_repeats_whatever_the_global_generator_does(self) -> None:
        logits = torch.zeros(1000)
        params = SamplingParams(temperature=1.0, seed=7)

        def ten(seed: int, global_seed: int) -> list[int]:
            torch.manual_seed(global_seed)
            generator = make_generator(seed)
            return [sample(logits, params, generator).token_id for _ in range(10)]

        assert ten(7, 0) == ten(7, 1)
        assert ten(7, 0) != ten(8, 0)
        assert len(set(ten(7, 0))) > 1

    def test_a_seeded_draw_leaves_the_global_generator_alone(self) -> None:
        before = torch.get_rng_state()
        draw(torch.ones(5) / 5, make_generator(1))
        assert torch.equal(torch.get_rng_state(), before)

    def test_without_a_seed_the_global_generator_draws(self) -> None:
        assert make_generator(None) is None
        params = SamplingParams(temperature=1.0)
        torch.manual_seed(4)
        first = [sample(torch.zeros(1000), params).token_id for _ in range(5)]
        torch.manual_seed(4)
        assert first == [sample(torch.zeros(1000), params).token_id for _ in range(5)]

    @pytest.mark.parametrize(("uniform", "expected"), [(0.0, 1), (0.5, 3), (1 - 2**-53, 3)])
    def test_an_id_of_probability_0_is_never_drawn(
        self, uniform: float, expected: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        number = torch.tensor(uniform, dtype=torch.float64)
        monkeypatch.setattr(torch, "rand", lambda *args, **kwargs: number)
        assert draw(torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0])) == expected

    def test_a_seed_without_a_generator_is_refused(self) -> None:
        with pytest.raises(ValueError, match="seed 7 needs a generator"):
            sample(torch.zeros(5), SamplingParams(temperature=1.0, seed=7))

    @pytest.mark.parametrize("bad", [[1.0, math.nan], [-INF, -INF], [0.0, INF]])
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_logits_without_a_finite_peak_are_refused(self, bad, temperature: float) -> None:
        with pytest.raises(ValueError, match=r"largest logit is (nan|-inf|inf)"):
            sample(torch.tensor(bad), SamplingParams(temperature=temperature))

    def test_a_batch_of_logits_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"logits must be \[vocab\], got shape \[1, 5\]"):
            sample(torch.zeros(1, 5), SamplingParams())


class TestLogprobs:
    LOGITS = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()

    def test_they_are_the_models_own_before_penalties_temperature_and_masks(self) -> None:
        params = SamplingParams(
            temperature=1e-5, top_k=1, repetition_penalty=50.0, logprobs=2, seed=0
        )
        got = sample(self.LOGITS + 4, params, make_generator(0), prompt_ids=[0])
        assert got.token_id == 1
        assert got.logprob == pytest.approx(math.log(0.3), rel=1e-5)
        assert list(got.top) == [0, 1]
        assert list(got.top.values()) == pytest.approx([math.log(0.5), math.log(0.3)], rel=1e-5)

    @pytest.mark.parametrize(("asked", "given_back"), [(0, 0), (3, 3), (20, 4)])
    def test_as_many_alternatives_as_asked_or_as_there_are(self, asked, given_back) -> None:
        got = sample(self.LOGITS, SamplingParams(logprobs=asked))
        assert len(got.top) == given_back
        assert got.logprob == pytest.approx(math.log(0.5), rel=1e-5)

    def test_none_unless_asked(self) -> None:
        assert sample(self.LOGITS, SamplingParams()) == Sample(0, None, None)

    def test_bfloat16_logits_are_sampled_in_float32(self) -> None:
        logits = torch.arange(400).bfloat16() / 64
        got = sample(logits, SamplingParams(logprobs=0))
        expected = logits.float().log_softmax(-1)[got.token_id].item()
        assert got.logprob == pytest.approx(expected, rel=1e-6)


class TestParams:
    @pytest.mark.parametrize(
        ("field", "value"),
        [
            (field, value)
            for field, values in {
                "max_tokens": [0, -1, 1.0, True, "16", None, math.nan],
                "temperature": [-0.1, math.nan, INF, "hot", True, None, 10**400],
                "top_k": [-1, 2.0, True, "all", None],
                "top_p": [-0.01, 1.01, math.nan, True, "0.9", None],
                "min_p": [-0.01, 1.01, math.nan, False, "0.1", None],
                "repetition_penalty": [0, 0.0, -1.0, math.nan, INF, True, "2", None],
                "presence_penalty": [-2.01, 2.01, math.nan, True, "1", None],
                "frequency_penalty": [-2.01, 2.01, math.nan, True, "1", None],
                "stop": ["", [""], ["a", ""], ["a", 1], 5, None, b"a", {"a"}],
                "seed": [-1, 2**64, 1.0, True, "7", math.nan],
                "logprobs": [-1, 21, 1.0, True, "5", math.nan],
            }.items()
            for value in values
        ],
    )
    def test_what_is_out_of_range_is_refused_by_name(self, field: str, value: object) -> None:
        with pytest.raises(ValueError, match=f"^{field} must be .+, got ") as refused:
            SamplingParams(**{field: value})
        assert str(refused.value).endswith(f"got {value!r}")

    @pytest.mark.parametrize(
        ("field", "values"),
        {
            "max_tokens": [1, 10**9],
            "temperature": [0, 1e-5, 1, 100.0],
            "top_k": [0, 1, 10**9],
            "top_p": [0, 0.0, 1, 1.0],
            "min_p": [0, 0.0, 1, 1.0],
            "repetition_penalty": [1e-3, 1, 2.5],
            "presence_penalty": [-2, 2.0],
            "frequency_penalty": [-2, 2.0],
            "seed": [None, 0, 2**64 - 1],
            "logprobs": [None, 0, 20],
        }.items(),
    )
    def test_the_ends_of_each_range_are_allowed(self, field: str, values: list) -> None:
        for value in values:
            assert getattr(SamplingParams(**{field: value}), field) == value

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("max_tokens", np.int64(5)),
            ("top_k", np.uint8(3)),
            ("seed", np.int32(7)),
            ("logprobs", np.int64(2)),
            ("temperature", np.float32(0.5)),
            ("temperature", Fraction(1, 2)),
            ("top_p", np.float16(0.5)),
            ("presence_penalty", np.int64(1)),
        ],
    )
    def test_numbers_of_other_libraries_are_stored_as_pythons(self, field, value) -> None:
        stored = getattr(SamplingParams(**{field: value}), field)
        assert stored == value
        assert type(stored) in (int, float)

    @pytest.mark.parametrize("value", [np.bool_(True), np.float64("nan"), np.float32(1.5), "1"])
    def test_what_is_no_integer_of_another_library_is_refused(self, value) -> None:
        with pytest.raises(ValueError, match=r"^top_k must be an integer"):
            SamplingParams(top_k=value)

    @pytest.mark.parametrize(
        ("stop", "kept"),
        [("END", ("END",)), (["a", "bc"], ("a", "bc")), (("a",), ("a",)), ((), ()), ([], ())],
    )
    def test_stop_becomes_a_tuple(self, stop: object, kept: tuple[str, ...]) -> None:
        assert SamplingParams(stop=stop).stop == kept

    def test_every_allowed_seed_makes_a_generator(self) -> None:
        for seed in (0, 2**64 - 1):
            assert isinstance(make_generator(seed), torch.Generator)
