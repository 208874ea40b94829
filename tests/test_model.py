"""From token ids to logits, compared with transformers on the same weights."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from nanoserve.config import load_config
from nanoserve.fetch import fetch
from nanoserve.model import Model, join_qkv, load_model
from nanoserve.weights import load_weights
from tests.bounds import apart, assert_near
from tests.checkpoints import KINDS, LLAMA3, edit_json, random_model, reference_logits, save

REFERENCE = json.loads((Path(__file__).parent / "data/smollm2_reference.json").read_text())
# Logits may differ by this share of the largest logit.
TOLERANCE = 1e-5


def ids_of(batch: int, seq: int) -> torch.Tensor:
    return torch.randint(0, 97, (batch, seq), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_checkpoint_of_every_kind_equals_transformers(kind, tmp_path):
    theirs = random_model(kind)
    ours, ids = load_model(save(theirs, tmp_path)), ids_of(3, 29)
    with torch.no_grad():
        logits = ours(ids)
    assert (logits.shape, logits.dtype) == ((3, 29, 97), torch.float32)
    assert apart(logits, reference_logits(theirs, ids)) < TOLERANCE


def test_a_sharded_checkpoint_equals_transformers(tmp_path):
    theirs = random_model("qwen3", tie_word_embeddings=True)
    save(theirs, tmp_path, max_shard_size="30KB")
    assert not (tmp_path / "model.safetensors").exists()
    with torch.no_grad():
        assert (
            apart(load_model(tmp_path)(ids_of(2, 7)), reference_logits(theirs, ids_of(2, 7)))
            < TOLERANCE
        )


def test_a_config_in_the_older_spelling_equals_transformers(tmp_path):
    theirs = random_model("llama-llama3-rope")
    save(theirs, tmp_path)
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    edit_json(
        tmp_path / "config.json",
        rope_parameters=...,
        rope_theta=LLAMA3["rope_theta"],
        rope_scaling=scaling,
    )
    with torch.no_grad():
        logits = load_model(tmp_path)(ids_of(1, 60))
    assert apart(logits, reference_logits(theirs, ids_of(1, 60))) < TOLERANCE


@pytest.mark.slow
def test_the_real_model_equals_transformers_on_the_reference_prompts():
    ours = load_model()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        fetch(), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    assert len(REFERENCE["greedy"]) == 10
    for name, case in REFERENCE["greedy"].items():
        ids = torch.tensor([case["prompt_ids"]])
        with torch.no_grad():
            logits = ours(ids)
        assert apart(logits, reference_logits(theirs, ids)) < TOLERANCE, name
        if case["smallest_gap"] > 1e-3:
            assert int(logits[0, -1].argmax()) == case["greedy_ids"][0], name


def plain_and_joined(kind: str, folder: Path) -> tuple[Model, Model]:
    """A model of a checkpoint as it was saved, and one with its q, k and v weights joined."""
    path = save(random_model(kind), folder)
    config = load_config(path)
    plain, joined = (Model(config, load_weights(path, config)) for _ in range(2))
    join_qkv(joined)
    return plain, joined


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_load_model_joins_q_k_and_v(dtype, tmp_path):
    model = load_model(save(random_model("llama-gqa"), tmp_path), dtype)
    assert all("self_attn.qkv_proj.weight" in layer for layer in model.layers)


@pytest.mark.parametrize("kind", KINDS)
def test_joined_weights_give_the_logits_of_weights_apart(kind, tmp_path):
    plain, joined = plain_and_joined(kind, tmp_path)
    ids = ids_of(1, 9)
    assert_near(joined(ids), plain(ids))
    assert_near(joined(ids[:, :1]), plain(ids[:, :1]))


@pytest.mark.parametrize("kind", KINDS)
def test_joined_weights_keep_every_name_and_value_and_take_no_more_memory(kind, tmp_path):
    plain, joined = plain_and_joined(kind, tmp_path)
    assert list(joined.weights) == list(plain.weights)
    assert all(torch.equal(joined.weights[name], w) for name, w in plain.weights.items())
    held = [*joined.weights.values(), *(w for layer in joined.layers for w in layer.values())]
    storages = {w.untyped_storage().data_ptr(): w.untyped_storage().nbytes() for w in held}
    distinct = {w.data_ptr(): w.nbytes for w in plain.weights.values()}  # a tied head is one
    assert sum(storages.values()) == sum(distinct.values())


@pytest.mark.parametrize("kind", ["llama-gqa", "llama-bias", "qwen3-bias"])
def test_joined_rows_are_those_of_q_then_k_then_v(kind, tmp_path):
    _, model = plain_and_joined(kind, tmp_path)
    for layer in model.layers:
        for part in ("weight", "bias") if model.config.qkv_bias else ("weight",):
            rows = torch.cat([layer[f"self_attn.{letter}_proj.{part}"] for letter in "qkv"])
            assert torch.equal(layer[f"self_attn.qkv_proj.{part}"], rows)
        assert ("self_attn.qkv_proj.bias" in layer) == model.config.qkv_bias


def test_what_is_written_into_a_part_is_seen_by_the_whole(tmp_path):
    plain, joined = plain_and_joined("llama-gqa", tmp_path)
    for model in (plain, joined):
        model.weights["model.layers.0.self_attn.k_proj.weight"].mul_(2)
        model.layers[1]["self_attn.v_proj.weight"].zero_()
    assert_near(joined(ids_of(1, 9)), plain(ids_of(1, 9)))


def test_a_layer_whose_weights_are_joined_reads_no_other_projection(tmp_path):
    _, model = plain_and_joined("llama-gqa", tmp_path)
    expected = model(ids_of(1, 5))
    for layer in model.layers:
        for letter in "qkv":
            del layer[f"self_attn.{letter}_proj.weight"]
    assert torch.equal(model(ids_of(1, 5)), expected)


def test_hidden_and_head_make_the_logits(tmp_path):
    model = load_model(save(random_model(), tmp_path))
    hidden = model.hidden(ids_of(2, 5))
    assert hidden.shape == (2, 5, 48)
    assert torch.equal(model.head(hidden), model(ids_of(2, 5)))
    assert_near(model.head(hidden[:, -1]), model(ids_of(2, 5))[:, -1])


def test_a_changed_future_token_changes_no_logit_before_it(tmp_path):
    model, ids = load_model(save(random_model(), tmp_path)), ids_of(1, 40)
    poked = ids.clone()
    poked[0, 21] = (poked[0, 21] + 1) % 97
    before, after = model(ids), model(poked)
    assert torch.equal(before[:, :21], after[:, :21])
    assert not torch.equal(before[:, 21], after[:, 21])
    assert not torch.equal(before[:, 39], after[:, 39])


def test_rows_of_a_batch_do_not_mix(tmp_path):
    model, ids = load_model(save(random_model(), tmp_path)), ids_of(3, 11)
    together = model(ids)
    for row in range(3):
        assert_near(together[row], model(ids[row : row + 1])[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_another_dtype_comes_near_float32(dtype, tmp_path):
    folder = save(random_model(), tmp_path)
    full, half = load_model(folder), load_model(folder, dtype=dtype)
    assert (half.dtype, half.device) == (dtype, torch.device("cpu"))
    logits = half(ids_of(1, 9))
    assert logits.dtype == dtype
    assert apart(logits.float(), full(ids_of(1, 9))) < (0.05 if dtype == torch.bfloat16 else 0.01)


def test_bfloat16_at_a_far_position_sees_the_distance_that_float32_sees(tmp_path):
    """With positions rounded to bfloat16, tokens 15,936 to 15,999 would have the same angle."""
    folder = save(random_model(max_position_embeddings=16_384), tmp_path)
    model = load_model(folder, dtype=torch.bfloat16)
    cos, sin = model._rope(0, 15_963)
    assert cos.dtype == torch.float32
    angle = torch.tensor(15_962.0, dtype=torch.float64)
    rounding = float(angle) * torch.finfo(torch.float32).eps  # of the angle, in float32
    torch.testing.assert_close(cos[15_962, 0].double(), angle.cos(), atol=rounding, rtol=0)
    torch.testing.assert_close(sin[15_962, 0].double(), angle.sin(), atol=rounding, rtol=0)


def test_the_whole_context_may_be_used_and_not_one_position_more(tmp_path):
    theirs = random_model()
    model = load_model(save(theirs, tmp_path))
    with torch.no_grad():
        assert apart(model(ids_of(1, 64)), reference_logits(theirs, ids_of(1, 64))) < TOLERANCE
    with pytest.raises(ValueError, match=r"position 64 is past the model's context of 64"):
        model(ids_of(1, 65))


@pytest.mark.parametrize(
    "ids",
    [
        torch.zeros(5, dtype=torch.long),
        torch.zeros(1, 2, 3, dtype=torch.long),
        torch.zeros(1, 0, dtype=torch.long),
        torch.zeros(1, 3),
    ],
    ids=["one axis", "three axes", "empty", "floats"],
)
def test_ids_of_another_shape_or_type_are_refused(ids, tmp_path):
    model = load_model(save(random_model(), tmp_path))
    with pytest.raises(ValueError, match=r"ids must be integers \[batch, seq\], got torch\."):
        model(ids)


@pytest.mark.parametrize("bad", [97, -1, 10**9])
def test_an_id_outside_the_vocabulary_is_named(bad, tmp_path):
    model = load_model(save(random_model(), tmp_path))
    with pytest.raises(ValueError, match=str(bad)):
        model(torch.tensor([[3, bad, 5]]))


def test_int32_ids_do_too(tmp_path):
    model = load_model(save(random_model(), tmp_path))
    assert torch.equal(model(ids_of(1, 5)), model(ids_of(1, 5).int()))


def test_a_second_load_of_the_real_model_takes_less_than_a_second_after_import():
    fetch()
    script = (
        "import time; from nanoserve.model import load_model; start = time.perf_counter();"
        "load_model(); print(time.perf_counter() - start)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(run.stdout) < 1
