"""The accepted contents of a config.json, for every family, and the errors that name a field."""

import json

import pytest
import transformers

from nanoserve.config import (
    FAMILIES,
    Llama3Scaling,
    ModelConfig,
    UnsupportedModel,
    load_config,
    parse_config,
)
from nanoserve.fetch import fetch
from nanoserve.model import load_model
from tests.checkpoints import LLAMA3, SHAPES, edit_json, random_model, save

# the keys of each family beyond the shared shapes
FAMILY_KEYS = {
    "llama": {"model_type": "llama"},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 131_072},
    "qwen3": {"model_type": "qwen3", "head_dim": 14, "use_sliding_window": False},
}


def raw(family: str = "llama", **changes) -> dict:
    config = SHAPES | {"hidden_act": "silu"} | FAMILY_KEYS[family] | changes
    return {key: value for key, value in config.items() if value is not ...}


def test_every_field_of_a_llama():
    config = parse_config(raw(rms_norm_eps=1e-5, rope_theta=5e5, tie_word_embeddings=True))
    assert config == ModelConfig(
        family="llama",
        vocab_size=97,
        hidden_size=48,
        intermediate_size=80,
        num_layers=2,
        n_q=6,
        n_kv=2,
        head_dim=8,
        context=64,
        norm_eps=1e-5,
        rope_theta=500_000.0,
        rope_scaling=None,
        qkv_bias=False,
        o_bias=False,
        qk_norm=False,
        tied_head=True,
        eos_ids=(2,),
        bos_id=1,
    )
    assert config.n_rep == 3


def test_each_family_has_its_own_biases_norms_and_head_dim():
    configs = {family: parse_config(raw(family)) for family in FAMILIES}
    traits = {f: (c.qkv_bias, c.o_bias, c.qk_norm, c.head_dim) for f, c in configs.items()}
    assert traits == {
        "llama": (False, False, False, 8),
        "mistral": (False, False, False, 8),
        "qwen2": (True, False, False, 8),  # biases that no key announces
        "qwen3": (False, False, True, 14),
    }


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_attention_bias_covers_the_output_projection_too(family):
    config = parse_config(raw(family, attention_bias=True))
    assert (config.qkv_bias, config.o_bias) == (True, True)


def test_heads_without_a_kv_count_are_each_their_own():
    for absent in (..., None):
        assert parse_config(raw(num_key_value_heads=absent)).n_kv == 6


def test_rope_in_the_older_and_the_newer_spelling():
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    older = parse_config(raw(rope_theta=500_000.0, rope_scaling=scaling))
    oldest = {**scaling, "type": scaling["rope_type"]}
    del oldest["rope_type"]
    newer = parse_config(raw(rope_parameters=LLAMA3))
    assert older == newer == parse_config(raw(rope_theta=500_000.0, rope_scaling=oldest))
    assert newer.rope_theta == 500_000.0
    assert newer.rope_scaling == Llama3Scaling(4.0, 1.0, 4.0, 16)


def test_rope_without_scaling():
    assert parse_config(raw()).rope_theta == 10_000.0
    newer = parse_config(raw(rope_parameters={"rope_type": "default", "rope_theta": 1e6}))
    older = parse_config(raw(rope_theta=1e6, rope_scaling=None))
    assert newer == older
    assert newer.rope_theta == 1e6
    assert newer.rope_scaling is None


@pytest.mark.parametrize(
    "absent", ["factor", "low_freq_factor", "original_max_position_embeddings"]
)
def test_llama3_scaling_that_lacks_a_number_names_it(absent):
    rope = {key: value for key, value in LLAMA3.items() if key != absent}
    with pytest.raises(ValueError, match=absent):
        parse_config(raw(rope_parameters=rope))


REFUSED = {
    "model_type 'gemma2'": raw(model_type="gemma2"),
    "model_type None": raw(model_type=...),
    "hidden_act 'gelu'": raw(hidden_act="gelu"),
    "mlp_bias": raw(mlp_bias=True),
    r"quantization_config \{.*gptq": raw(quantization_config={"quant_method": "gptq", "bits": 4}),
    "quantization_config": raw(quantization_config={"bits": 4}),
    "sliding_window 4096": raw("mistral", sliding_window=4096),
    "sliding_window 32": raw(
        "qwen2", use_sliding_window=True, sliding_window=32, max_window_layers=1
    ),
    "sliding_window 33": raw(
        "qwen3", use_sliding_window=True, sliding_window=33, max_window_layers=0
    ),
    "sliding_window 34": raw("llama", sliding_window=34),  # transformers' KV cache applies it
    "sliding_window 35": raw("mistral", sliding_window=35, use_sliding_window=False),
    "sliding_window 36": raw("mistral", sliding_window=36, use_sliding_window=None),
    "layer_types .*'sliding_attention'": raw(
        "qwen3", layer_types=["full_attention", "sliding_attention"]
    ),
    "rope_scaling.rope_type 'yarn'": raw(rope_scaling={"rope_type": "yarn", "factor": 4.0}),
    "rope_scaling.rope_type 'linear'": raw(rope_scaling={"type": "linear", "factor": 2.0}),
    "rope_parameters.rope_type 'dynamic'": raw(
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4}
    ),
    "partial_rotary_factor 0.5": raw(partial_rotary_factor=0.5),
    "partial_rotary_factor 0.25": raw(
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    ),
}


@pytest.mark.parametrize("named", REFUSED)
def test_an_option_that_would_change_the_model_is_refused_before_any_weight_is_read(
    named, tmp_path
):
    (tmp_path / "config.json").write_text(json.dumps(REFUSED[named]))
    # were it read, this would be another error
    (tmp_path / "model.safetensors").write_bytes(b"no safetensors file")
    with pytest.raises(UnsupportedModel, match=named):
        load_model(tmp_path)


@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_a_window_left_out_is_the_one_that_transformers_assumes(family):
    """MistralConfig's and Qwen2Config's default is a window of 4,096 where it is switched on."""
    config = raw(family, sliding_window=..., use_sliding_window=...)
    if family == "qwen2":
        parse_config(config)  # switched off by default
        config |= {"use_sliding_window": True, "max_window_layers": 0}
    assert transformers.AutoConfig.for_model(**config).sliding_window == 4096
    with pytest.raises(UnsupportedModel, match="sliding_window 4096"):
        parse_config(config)


def test_a_window_that_is_switched_off_is_no_window():
    assert parse_config(raw("qwen2", sliding_window=32, use_sliding_window=False)).family == "qwen2"
    assert parse_config(raw("qwen3", layer_types=["full_attention"] * 2)).family == "qwen3"


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    ],
)
@pytest.mark.parametrize("value", [..., None, 0, -3, 2.5, True, "48"])
def test_a_size_that_is_missing_or_no_positive_integer_is_named(key, value):
    with pytest.raises(ValueError, match=rf"{key} must be a positive integer"):
        parse_config(raw(**{key: value}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_key_value_heads": 4}, "num_key_value_heads must divide .* 6, got 4"),
        ({"num_key_value_heads": 12}, "num_key_value_heads must divide .* 6, got 12"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"hidden_size": 50}, "hidden_size 50 .* num_attention_heads 6"),
        ({"head_dim": 7}, "head_dim must be even .* 7"),
        ({"head_dim": 0}, "head_dim must be a positive integer"),
    ],
)
def test_sizes_that_contradict_each_other_are_named(changes, said):
    with pytest.raises(ValueError, match=said):
        parse_config(raw(**changes))


def test_eos_ids_come_from_the_generation_config_first():
    assert parse_config(raw(), {"eos_token_id": [2, 5, 7]}).eos_ids == (2, 5, 7)
    assert parse_config(raw(eos_token_id=[3, 4])).eos_ids == (3, 4)
    assert parse_config(raw(), {"eos_token_id": 9}).eos_ids == (9,)
    assert parse_config(raw(), {"temperature": 0.6}).eos_ids == (2,)
    assert parse_config(raw(eos_token_id=None)).eos_ids == ()
    assert parse_config(raw(), {"eos_token_id": None}).eos_ids == (2,)


def test_eos_ids_of_a_folder(tmp_path):
    save(random_model(), tmp_path)
    edit_json(tmp_path / "generation_config.json", eos_token_id=[2, 5])
    assert load_config(tmp_path).eos_ids == (2, 5)
    (tmp_path / "generation_config.json").unlink()
    assert load_config(tmp_path).eos_ids == (2,)


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe", b"[]", b'"llama"', b"\0" * 64])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_file_that_is_no_json_object_is_named(content, name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(raw()))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"\b{name} is not valid JSON"):
        load_config(tmp_path)


def test_a_folder_without_a_config_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        load_config(tmp_path)


@pytest.mark.parametrize("kind", ["llama-llama3-rope", "qwen2", "qwen3", "mistral"])
def test_what_transformers_writes_is_read_as_it_meant(kind, tmp_path):
    theirs = random_model(kind).config
    theirs.save_pretrained(tmp_path)
    ours = load_config(tmp_path)
    assert ours.family == theirs.model_type
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.norm_eps == theirs.rms_norm_eps
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == head_dim
    assert (ours.rope_scaling is not None) == (kind == "llama-llama3-rope")


def test_the_converted_models_own_config():
    config = load_config(fetch())
    assert (config.n_q, config.n_kv, config.head_dim, config.num_layers) == (9, 3, 64, 30)
    assert (config.vocab_size, config.context, config.rope_theta) == (49_152, 8192, 100_000.0)
    assert (config.eos_ids, config.tied_head) == ((2,), True)
