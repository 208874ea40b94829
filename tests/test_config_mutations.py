"""Mutated configurations: refused in one line, or read as transformers reads them."""

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # torch 2.7 cannot import it later, on a meta device
import transformers
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from packaging.version import Version

from nanoserve.config import FAMILIES, ModelConfig, load_config, parse_config
from nanoserve.layers import rope_frequencies
from nanoserve.model import load_model
from nanoserve.weights import expected_shapes
from tests.bounds import apart
from tests.checkpoints import LLAMA3, SHAPES, reference_logits, save

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
MANY = settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
ABSENT = object()
# transformers 5.0 fails on a null partial_rotary_factor or quantization_config; 5.24 accepts both.
NULL = [None] if Version(transformers.__version__) >= Version("5.24") else []

ROPE = {
    "rope_type": ["default", "llama3", "yarn", "linear", None, 3],
    "type": ["default", "llama3", "linear", None],
    "rope_theta": [10_000.0, 500_000, 1e6, 0, -1.0, None, "1e4", True, float("nan"), 10**400],
    "factor": [4.0, 8, 1.0, 0.5, 0, None, "4"],
    "low_freq_factor": [1.0, 2, 0, 4.0, None, -1.0],
    "high_freq_factor": [4.0, 8, 1.0, None, "4"],
    "original_max_position_embeddings": [16, 32, 16.0, 0, None, "16"],
    "partial_rotary_factor": [1.0, 1, 0.5, "1", *NULL],
    "full_attention": [{"rope_type": "default", "rope_theta": 1e6}, None, 1],
    "mscale": [1.0],
}
ROPES = st.fixed_dictionaries({}, optional={k: st.sampled_from(v) for k, v in ROPE.items()})
ROPES |= st.sampled_from([LLAMA3, {**LLAMA3, "rope_theta": 10_000.0}, {}])
ROPES |= st.builds(
    lambda rope, key: {k: v for k, v in rope.items() if k != key},
    st.just(LLAMA3),
    st.sampled_from(sorted(LLAMA3)),
)

# Every field that the engine reads, with values that are right, that another family uses, or wrong.
FIELDS: dict[str, st.SearchStrategy] = {
    "model_type": st.sampled_from([*FAMILIES, "gemma2", "Llama"]),
    "vocab_size": st.sampled_from([97, 3, 2, 1, 2**31]),
    "hidden_size": st.sampled_from([48, 24, 50, 7]),
    "intermediate_size": st.sampled_from([80, 1]),
    "num_hidden_layers": st.sampled_from([2, 1, 3, 10_001]),
    "num_attention_heads": st.sampled_from([6, 4, 12, 1, 16]),
    "num_key_value_heads": st.sampled_from([2, 1, 3, 6, 8, 4]),
    "head_dim": st.sampled_from([8, 14, 7, 3, 2]),
    "max_position_embeddings": st.sampled_from([64, 1, 16]),
    "rms_norm_eps": st.sampled_from([1e-5, 1e-6, 0.5, 1.5, float("inf")]),
    "rope_theta": st.sampled_from(ROPE["rope_theta"]),
    "rope_scaling": ROPES,
    "rope_parameters": ROPES,
    "partial_rotary_factor": st.sampled_from(ROPE["partial_rotary_factor"]),
    "original_max_position_embeddings": st.sampled_from([16, 32]),
    "tie_word_embeddings": st.booleans(),
    "attention_bias": st.booleans(),
    "mlp_bias": st.booleans(),
    "hidden_act": st.sampled_from(["silu", "gelu", "swish", "relu"]),
    "sliding_window": st.sampled_from([32, 4096, 131_072]),
    "use_sliding_window": st.booleans(),
    "max_window_layers": st.sampled_from([0, 1, 2, 28]),
    "layer_types": st.lists(
        st.sampled_from(["full_attention", "full_attention", "sliding_attention", "attention"]),
        min_size=1,
        max_size=3,
    ),
    "eos_token_id": st.sampled_from([2, 96, 97, [2, 5], [], [2, 97], [2, "5"], [True]]),
    "bos_token_id": st.sampled_from([1, 0, 96, 97]),
    "quantization_config": st.sampled_from(["awq", {}, {"quant_method": "gptq"}]),
    "per_layer_config": st.sampled_from([{}, {"0": {"num_key_value_heads": 1}}]),
}
NOTHING_RIGHT = [None, None, True, False, 0, 1, -1, 2.0, 0.5, float("nan"), "", "8", "x\ny"]
NOTHING_RIGHT += [[], {}, [1], [None], {"a": 1}, {"x\ny": 1}, 10**40, [[[[[[[[1]]]]]]]]]
ANYTHING = st.sampled_from([ABSENT, ABSENT, *NOTHING_RIGHT])
BASE = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False, "sliding_window": 32},
    "qwen3": {"head_dim": 14, "use_sliding_window": False},
}


@st.composite
def valid(draw: st.DrawFn) -> dict:
    """A configuration that transformers reads and this engine supports, in any spelling."""

    def some(**choices: list) -> dict:
        drawn = {key: draw(st.sampled_from([ABSENT, *values])) for key, values in choices.items()}
        return {key: value for key, value in drawn.items() if value is not ABSENT}

    family = draw(st.sampled_from(FAMILIES))
    config = SHAPES | {"model_type": family} | BASE[family]
    config["num_key_value_heads"] = draw(st.sampled_from([1, 2, 3, 6]))
    config |= some(
        rms_norm_eps=[1e-5, 0.01],
        tie_word_embeddings=[True, False],
        hidden_act=["silu"],
        head_dim=[8, 14],
        eos_token_id=[None, 0, [2, 96]],
        bos_token_id=[None],
        quantization_config=NULL,
        partial_rotary_factor=[1.0, *NULL],
        torch_dtype=["bfloat16"],
        unknown=[{"a": [1, None]}],
    )
    if family in ("llama", "qwen3"):
        config |= some(attention_bias=[True, False])
    else:  # no field of theirs: transformers ignores it
        config |= some(attention_bias=[True, None])
    config |= some(mlp_bias=[False] if family == "llama" else [True, None])
    if family != "mistral":  # with the key, even if it is null, transformers reads a Ministral
        config |= some(layer_types=[None, ["full_attention"] * 2])
    if family == "llama":
        config |= some(num_key_value_heads=[None], head_dim=[None], use_sliding_window=[True])
    elif family == "mistral":
        config |= some(head_dim=[None], use_sliding_window=[True, False])
    else:
        config |= some(num_key_value_heads=[None], sliding_window=[None, 8])
        full = [{"max_window_layers": 2}, {"layer_types": ["full_attention"] * 2}, {}]
        config |= draw(st.sampled_from(full))
        config["use_sliding_window"] = draw(st.booleans()) and (
            config.get("max_window_layers", 28) >= 2
        )
    theta = draw(st.sampled_from([10_000, 1e6, 500.0]))
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    older_scaling = {("type" if k == "rope_type" else k): v for k, v in scaling.items()}
    return config | draw(
        st.sampled_from(
            [
                {},
                {"rope_theta": theta, "rope_scaling": None},
                {"rope_theta": theta, "rope_scaling": scaling},
                {"rope_theta": theta, "rope_scaling": older_scaling | scaling},
                {"rope_scaling": older_scaling, "rope_parameters": None},
                {"rope_parameters": scaling | {"rope_theta": theta}},
                {"rope_parameters": {"rope_type": "default", "rope_theta": theta}},
                {"rope_parameters": {"rope_theta": theta}, "rope_theta": theta},
                {
                    "rope_theta": theta,
                    "rope_scaling": scaling,
                    "rope_parameters": scaling | {"rope_theta": theta},
                },
            ]
        )
    )


@st.composite
def mutated(draw: st.DrawFn) -> dict:
    """A valid configuration with one to four fields changed, as a JSON file gives it."""
    config = draw(valid())
    keys = draw(st.lists(st.sampled_from(sorted(FIELDS)), min_size=1, max_size=4, unique=True))
    for key in keys:
        value = draw(FIELDS[key] if draw(st.integers(0, 3)) else ANYTHING)
        if value is ABSENT:
            config.pop(key, None)
        else:
            config[key] = value
    return json.loads(json.dumps(config))


def theirs(config: dict) -> Any:
    """transformers' model of a configuration, without memory for its weights."""
    with tempfile.TemporaryDirectory() as folder:  # as a file: AutoConfig looks at its keys
        (Path(folder) / "config.json").write_text(json.dumps(config))
        built = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(built, attn_implementation="eager")


def assert_same_meaning(ours: ModelConfig, raw: dict) -> None:
    """Tensors, frequencies and options are those of the model that transformers makes of `raw`."""
    model = theirs(raw)
    config = model.config
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert shapes.pop("lm_head.weight") == (ours.vocab_size, ours.hidden_size)
    assert shapes == expected_shapes(ours)
    attention = model.model.layers[0].self_attn
    assert (attention.head_dim, attention.num_key_value_groups) == (ours.head_dim, ours.n_rep)
    assert attention.scaling == ours.head_dim**-0.5
    rotary = type(model.model.rotary_emb)(config)  # on the CPU
    assert rotary.attention_scaling == 1
    torch.testing.assert_close(rotary.inv_freq, rope_frequencies(ours), rtol=1e-5, atol=0)
    assert config.rope_parameters["rope_theta"] == ours.rope_theta
    norms = [m for name, m in model.named_modules() if name.endswith("norm")]
    assert {norm.variance_epsilon for norm in norms} == {ours.norm_eps}
    for layer in model.model.layers:
        assert type(layer.mlp.act_fn) is type(transformers.activations.ACT2FN["silu"])
        assert getattr(layer.self_attn, "sliding_window", None) is None
    assert getattr(config, "sliding_window", None) is None or config.model_type[:4] == "qwen"
    assert config.max_position_embeddings == ours.context
    assert config.model_type == ours.family
    assert config.tie_word_embeddings == ours.tied_head
    if "eos_token_id" in raw:
        eos = config.eos_token_id
        ids = (eos,) if isinstance(eos, int) else tuple(eos or ())
        assert ours.eos_ids == ids
    if "bos_token_id" in raw:
        assert config.bos_token_id == ours.bos_id


LLAMA = SHAPES | {"model_type": "llama"}
MISTRAL = SHAPES | {"model_type": "mistral", "sliding_window": None}
OTHER = LLAMA3 | {"factor": 8.0}
CONTRADICTIONS = {
    "rope_scaling contradicts rope_parameters": LLAMA
    | {"rope_scaling": {"rope_type": "default"}, "rope_parameters": LLAMA3},
    "rope_scaling contradicts": LLAMA | {"rope_scaling": OTHER, "rope_parameters": LLAMA3},
    r"rope_parameters.rope_theta 500000 contradicts rope_theta 10000": LLAMA
    | {"rope_theta": 1e4, "rope_parameters": LLAMA3},
    "rope_scaling.type contradicts rope_type": LLAMA
    | {"rope_scaling": LLAMA3 | {"type": "default"}},
    "rope_parameters.original_max_position_embeddings contradicts": LLAMA
    | {"original_max_position_embeddings": 32, "rope_parameters": LLAMA3},
    "rope_parameters.full_attention is not supported": SHAPES
    | {"model_type": "qwen2", "rope_parameters": {"full_attention": LLAMA3}},
    "rope_scaling.factor is not supported": LLAMA | {"rope_scaling": {"factor": 4.0}},
    "layer_types None is not supported": MISTRAL | {"layer_types": None},  # a Ministral
    "layer_types .* is not supported": MISTRAL | {"layer_types": ["full_attention"] * 2},
    "sliding_window 8 is not supported": MISTRAL
    | {"sliding_window": 8, "use_sliding_window": False},
    "rope_theta must be": LLAMA | {"rope_theta": None},
    "rope_scaling must be an object or null": LLAMA | {"rope_scaling": "yarn"},
    "quantization_config 'awq' is not supported": LLAMA | {"quantization_config": "awq"},
    "eos_token_id must be token ids from 0 to 96, got '260'": LLAMA | {"eos_token_id": "260"},
    "eos_token_id must be": LLAMA | {"eos_token_id": [2, 97]},
    "bos_token_id must be a token id from 0 to 96": LLAMA | {"bos_token_id": [1]},
    "num_key_value_heads must be": MISTRAL | {"num_key_value_heads": None},
    "head_dim must be": SHAPES | {"model_type": "qwen3", "head_dim": None},
}


@pytest.mark.parametrize("said", CONTRADICTIONS)
def test_a_contradiction_or_a_wrong_value_is_refused_by_name(said):
    with pytest.raises(ValueError, match=rf"^config\.json: {said}") as caught:
        parse_config(CONTRADICTIONS[said])
    assert "\n" not in str(caught.value)


@MANY
@given(mutated())
def test_a_mutated_configuration_is_refused_in_one_line_or_read_as_transformers_reads_it(config):
    try:
        ours = parse_config(config)
    except ValueError as refusal:
        event("refused")
        message = str(refusal)
        assert "\n" not in message
        named = re.match(r"config\.json: (?:rope_\w+\.)?(\w+)", message)
        assert named, message
        assert named[1] in FIELDS or named[1] in ROPE or "a" in named[1] or "x" in named[1]
        assert len(message) < 400
        return
    event("accepted")
    assert_same_meaning(ours, config)


@settings(MANY, max_examples=100)
@given(valid())
def test_every_spelling_of_a_supported_configuration_is_accepted(config):
    assert_same_meaning(parse_config(config), config)


@settings(MANY, max_examples=20)
@given(config=valid(), seed=st.integers(0, 2**32))
def test_the_logits_of_an_accepted_configuration_are_those_of_transformers(
    config, seed, tmp_path_factory
):
    folder = tmp_path_factory.mktemp("model")
    model = theirs(config).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.3 * noise if "norm" in name else 0.3 * noise)
    model.tie_weights()
    save(model, folder)
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))  # as it was spelled
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    ids = torch.randint(97, (1, 40), generator=generator)
    with torch.no_grad():
        assert apart(load_model(folder)(ids), reference_logits(model, ids)) < 1e-5, config


@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_left_out_has_the_value_that_transformers_gives_it(family):
    """Except the token ids: where no file names an end token, there is none."""
    shapes = SHAPES | {"num_attention_heads": 32, "hidden_size": 512, "head_dim": 16}
    config = shapes | {"model_type": family} | BASE[family]
    for key in ("num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "rope_theta"):
        config.pop(key, None)
    assert_same_meaning(parse_config(config), config)
    if family != "llama":  # 512 / 32 is 16, and a Qwen3 has 128
        del config["head_dim"]
    assert_same_meaning(parse_config(config), config)
    del config["eos_token_id"]
    assert parse_config(config).eos_ids == ()


NESTED = "[" * 100_000
BAD_FILES = {
    "is missing": None,
    "is not valid JSON: .*recursion": NESTED,
    "is not valid JSON: .*digits": '{"vocab_size": ' + "9" * 5000 + "}",
    "is not valid JSON: its content is not an object": "null",
    "cannot be read: Is a directory": Path,
}


@pytest.mark.parametrize("said", BAD_FILES)
def test_a_file_that_cannot_be_read_is_one_line_with_the_reason(said, tmp_path):
    file, content = tmp_path / "config.json", BAD_FILES[said]
    if content is Path:
        file.mkdir()
    elif content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=rf"config\.json {said}") as caught:
        load_config(tmp_path)
    assert "\n" not in str(caught.value)


def test_the_file_and_the_field_at_fault_are_named(tmp_path):
    config = SHAPES | {"model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": None}))
    with pytest.raises(ValueError) as caught:
        load_config(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path / 'config.json'}: rms_norm_eps must be a number above 0 and below 1, got None"
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "26"}')
    with pytest.raises(ValueError) as caught:
        load_config(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path / 'generation_config.json'}: eos_token_id must be token ids from 0 to 96, "
        "got '26'"
    )
