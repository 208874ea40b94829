"""Days 0 to 6: second mistakes, and answers from before an exercise was split."""

from itertools import pairwise

import pytest
import torch

from nanoserve import layers
from nanoserve.course import answers, check, day, store
from nanoserve.course.exercises import day02, day03, day04, day06, exercises_of

OLD = """# Day 4, rope_frequencies: your answer, saved when it passed its check.

import math
import torch

def rope_frequencies(config):
    plain = config.rope_theta ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    turns = scaling.original_context * plain / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * plain + (1 - keep) * plain / scaling.factor
"""


def messages(exercise, answer):
    return " / ".join(row.message for row in check.run(exercise, answer).rows)


def exercise_of(module, name):
    return next(each for each in module.EXERCISES if each.name == name)


def test_sdpa_diagnoses_a_wrong_kv_head_beside_an_ignored_scale():
    def sdpa(q, k, v, scale=None):
        heads = [h % k.shape[1] for h in range(q.shape[1])]
        return layers.sdpa(q, k[:, heads], v[:, heads])

    told = messages(exercise_of(day06, "sdpa"), sdpa)
    assert "h % n_kv" in told
    assert "scale that is handed in is ignored" in told


def test_sdpa_diagnoses_a_missing_root_beside_a_missing_mask():
    def sdpa(q, k, v, scale=None):
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        scores = q @ k.mT * (1 / q.shape[-1] if scale is None else scale)
        return scores.softmax(-1) @ v

    told = messages(exercise_of(day06, "sdpa"), sdpa)
    assert "divided by head_dim" in told
    assert "Nothing is hidden" in told


def test_dequantize_diagnoses_neighbours_beside_a_subtracted_minimum():
    def dequantize_q4_1(blocks):
        scale, minimum = blocks[:, :4].contiguous().view(torch.float16).float().split(1, dim=1)
        packed = blocks[:, 4:]
        return scale * torch.stack([packed & 0xF, packed >> 4], dim=2).flatten(1) - minimum

    told = messages(exercise_of(day02, "dequantize_q4_1"), dequantize_q4_1)
    assert "16 places apart" in told
    assert "minimum is subtracted" in told


def test_rms_norm_diagnoses_a_forgotten_weight_eps_and_dtype():
    def rms_norm(x, weight, eps):
        return x / x.square().mean(-1, keepdim=True).sqrt()

    told = messages(exercise_of(day04, "rms_norm"), rms_norm)
    assert "weight is forgotten" in told
    assert "eps is left out" in told


def test_sdpa_with_a_mask_in_the_upper_left_gets_the_hints_about_the_newest_queries():
    def sdpa(q, k, v, scale=None):
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale
        )

    exercise = exercise_of(day06, "sdpa")
    row = check.run(exercise, sdpa).diagnosed
    assert "one query, 2 heads of 12" in row.what
    assert exercise.ladder(row.kind, row.mistake) == exercise.hints["newest"]


def test_merge_step_by_alphabet_is_not_called_the_order_of_the_dictionary():
    def merge_step(pieces, ranks):
        best = min((p for p in pairwise(pieces) if p in ranks), default=None)
        return day03._join(pieces, best)

    told = messages(exercise_of(day03, "merge_step"), merge_step)
    assert "first in the alphabet" in told
    assert "dictionary" not in told


def test_a_changed_argument_gets_hints_about_copies():
    def rms_norm(x, weight, eps):
        x *= torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        return x * weight

    exercise = exercise_of(day04, "rms_norm")
    row = check.run(exercise, rms_norm).diagnosed
    assert "clone" in exercise.ladder(row.kind, row.mistake)[2]


def saved(work, name, text):
    path = work / "answers" / f"day04_{name}.py"
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")


def test_an_answer_from_before_the_split_counts_for_both_parts(work):
    saved(work, "rope_frequencies", OLD)
    [row] = [row for row in store.status() if row.info.number == 4]
    assert row.passed == ("plain_frequencies",)
    found = answers.saved_answers(4, exercises_of(4))
    assert [(each.exercise.name, each.trouble) for each in found] == [
        ("plain_frequencies", ""),
        ("rope_frequencies", ""),
    ]


def test_a_former_name_of_another_exercise_finds_the_right_one(work, capsys):
    today = day(4)
    today.check(layers.rope_frequencies)
    assert today.last.name == "rope_frequencies"


@pytest.mark.parametrize("config", [day04.PLAIN, day04.LLAMA3, day04.SHORT])
def test_an_answer_from_before_the_split_scales_once(work, config):
    saved(work, "rope_frequencies", OLD)
    right = layers.rope_tables(config, 40)
    with answers.installed(answers.saved_answers(4, exercises_of(4))):
        ours = layers.rope_tables(config, 40)
    torch.testing.assert_close(ours, right, rtol=0, atol=1e-5)


def test_a_day_is_done_without_its_optional_exercise(work):
    progress = store.Progress.load()
    for name in ("rms_norm", "rotate_half", "plain_frequencies"):
        progress.add_passed(4, name)
    progress.save()
    [row] = [row for row in store.status() if row.info.number == 4]
    assert (row.words, row.count) == ("done", "3 of 3")


def test_the_hints_of_a_day_are_about_the_mistake():
    def sdpa(q, k, v, scale=None):
        return layers.sdpa(q, k, v)

    exercise = exercise_of(day06, "sdpa")
    report = check.run(exercise, sdpa)
    assert "scale" in exercise.ladder(report.failed.kind, report.failed.mistake)[0]
