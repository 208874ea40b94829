"""Each part of a block, compared with torch, with transformers, or with a closed form."""

import math

import pytest
import torch
import torch.nn.functional as F
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama import modeling_llama

from nanoserve import layers
from nanoserve.config import parse_config
from nanoserve.layers import (
    QUERY_TILE,
    apply_rope,
    block,
    gqa_attention,
    linear,
    rms_norm,
    rope_frequencies,
    rope_tables,
    rotate_half,
    sdpa,
    swiglu,
)
from tests.bounds import assert_near
from tests.checkpoints import KINDS, LLAMA3, SHAPES, random_model


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def config_of(family: str = "llama", **changes):
    return parse_config(SHAPES | {"model_type": family} | changes)


# products


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 36), (36,), (1, 36), (2, 3, 36)])
@pytest.mark.parametrize("products", [False, True])
def test_linear_is_the_same_sum_on_every_processor(shape, dtype, with_bias, products, monkeypatch):
    """Within the rounding of the result, and of a sum of 36 products in float32."""
    monkeypatch.setattr(layers, "_bfloat16_products", lambda: products)
    x, weight = torch.randn(shape).to(dtype), torch.randn(20, 36).to(dtype)
    bias = torch.randn(20).to(dtype) if with_bias else None
    out = linear(x, weight, bias)
    assert (out.shape, out.dtype) == ((*shape[:-1], 20), dtype)
    wide = x.double() @ weight.double().T
    exact = wide if bias is None else wide + bias.double()
    size = x.double().abs() @ weight.double().abs().T  # what rounding is relative to
    unit = torch.finfo(dtype).eps * exact.abs() + torch.finfo(dtype).eps * wide.abs()
    assert ((out.double() - exact).abs() <= unit + 36 * torch.finfo(torch.float32).eps * size).all()


@pytest.mark.parametrize("products", [False, True])
def test_a_row_of_bfloat16_goes_to_the_routine_that_suits_the_processor(products, monkeypatch):
    called = []
    monkeypatch.setattr(layers, "_bfloat16_products", lambda: products)
    mv = torch.mv
    monkeypatch.setattr(torch, "mv", lambda *args: called.append("mv") or mv(*args))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        called.clear()
        linear(torch.ones(1, 1, 4).to(dtype), torch.ones(3, 4).to(dtype))
        assert called == ([] if products and dtype == torch.bfloat16 else ["mv"])


def test_the_processor_is_asked_once_and_may_be_one_that_torch_cannot_describe(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", None, raising=False)
    assert layers._bfloat16_products.__wrapped__() is False
    assert layers._bfloat16_products() in (False, True)


# norm and MLP


def test_rms_norm_is_the_formula():
    x, weight = torch.randn(2, 5, 12), torch.randn(12)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 0.1).sqrt() * weight
    assert_near(rms_norm(x, weight, 0.1), expected)


def test_rms_norm_takes_the_mean_in_float32():
    x = torch.full((1, 64), 300.0, dtype=torch.float16)  # 300² is past float16's largest number
    assert torch.equal(rms_norm(x, torch.ones(64).half(), 1e-6), torch.ones(1, 64).half())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rms_norm_equals_transformers_and_leaves_its_input(dtype):
    x, theirs = torch.randn(2, 5, 12).to(dtype), modeling_llama.LlamaRMSNorm(12, eps=1e-3).to(dtype)
    theirs.weight.data = torch.randn(12).to(dtype)
    before = x.clone()
    ours = rms_norm(x, theirs.weight.data, 1e-3)
    assert ours.dtype == dtype
    assert torch.equal(ours, theirs(x))
    assert torch.equal(x, before)


def test_swiglu_is_the_formula_and_tells_gate_from_up():
    x, gate, up = torch.randn(2, 5, 6), torch.randn(10, 6), torch.randn(10, 6)
    down = torch.randn(6, 10)
    before = x.clone()
    h = x @ gate.T
    expected = (h / (1 + torch.exp(-h)) * (x @ up.T)) @ down.T
    assert_near(swiglu(x, gate, up, down), expected)
    assert (swiglu(x, up, gate, down) - expected).abs().max() > 0.1
    assert torch.equal(x, before)


# RoPE


def test_rotate_half_turns_each_pair_by_a_right_angle():
    x = torch.tensor([1.0, 2, 3, 10, 20, 30])
    assert rotate_half(x).tolist() == [-10, -20, -30, 1, 2, 3]
    assert torch.equal(rotate_half(rotate_half(x)), -x)


def test_rope_is_a_complex_rotation_of_each_pair():
    x, config = torch.randn(1, 6, 5, 8), config_of()
    cos, sin = rope_tables(config, 5)
    pairs = torch.complex(x[..., :4], x[..., 4:])
    angles = torch.arange(5)[:, None] * 10_000.0 ** (-torch.arange(4) / 4)
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    expected = torch.cat([turned.real, turned.imag], -1)
    assert_near(apply_rope(x, cos, sin), expected)


def test_rope_makes_a_score_depend_on_the_distance_alone():
    q, k = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    cos, sin = rope_tables(config_of(), 50)

    def score(i: int, j: int) -> float:
        turned = (apply_rope(x, cos[p], sin[p]) for x, p in ((q, i), (k, j)))
        return float(torch.dot(*turned))

    assert math.isclose(score(7, 3), score(44, 40), abs_tol=1e-4)
    assert not math.isclose(score(7, 3), score(7, 4), abs_tol=1e-2)


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("scaled", [False, True])
def test_frequencies_equal_those_of_transformers(theta, scaled):
    rope = LLAMA3 | {"rope_theta": theta, "original_max_position_embeddings": 32}
    rope = rope if scaled else {"rope_type": "default", "rope_theta": theta}
    theirs = random_model(head_dim=20, rope_parameters=rope).model.rotary_emb.inv_freq
    ours = rope_frequencies(config_of(head_dim=20, rope_parameters=rope))
    assert ours.shape == (10,)
    torch.testing.assert_close(ours, theirs, atol=0, rtol=1e-6)


def test_llama3_scaling_keeps_short_waves_slows_long_ones_and_blends_between():
    rope = LLAMA3 | {"original_max_position_embeddings": 8192, "factor": 32.0}
    config = config_of(head_dim=64, rope_parameters=rope)
    plain = 500_000.0 ** (-torch.arange(32) / 32)
    ratio = rope_frequencies(config) / plain
    wavelength = 2 * math.pi / plain
    torch.testing.assert_close(ratio[wavelength < 8192 / 4], torch.ones(15))
    slowed = ratio[wavelength > 8192]
    torch.testing.assert_close(slowed, torch.full_like(slowed, 1 / 32))
    between = ratio[(wavelength > 8192 / 4) & (wavelength < 8192)]
    assert len(between) >= 3
    assert ((between > 1 / 32) & (between < 1)).all()
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](
        random_model(head_dim=64, rope_parameters=rope).config, "cpu"
    )
    torch.testing.assert_close(rope_frequencies(config), theirs, atol=0, rtol=1e-6)


@pytest.mark.parametrize("position", [15_962, 16_000, 16_383])
def test_angles_far_out_are_exact_whatever_the_models_dtype(position):
    """In bfloat16 position 15,962 is 15,936: the fastest pair would be 26 radians off."""
    config = config_of(head_dim=64, max_position_embeddings=16_384)
    cos, sin = rope_tables(config, 16_384)
    assert (cos.dtype, cos.shape) == (torch.float32, (16_384, 64))
    angles = position * 10_000.0 ** (-torch.arange(32, dtype=torch.float64) / 32)
    expected = torch.cat([angles, angles])
    rounding = position * torch.finfo(torch.float32).eps  # of the largest angle, in float32
    torch.testing.assert_close(cos[position].double(), expected.cos(), atol=rounding, rtol=0)
    torch.testing.assert_close(sin[position].double(), expected.sin(), atol=rounding, rtol=0)
    x = torch.randn(64)
    exact = x.double() * expected.cos() + rotate_half(x.double()) * expected.sin()
    turned = apply_rope(x.bfloat16(), cos[position], sin[position])
    assert turned.dtype == torch.bfloat16
    assert_near(turned, exact, units=4)


# attention


def torch_sdpa(q, k, v, scale=None):
    """torch's own, with the causal mask in the bottom right corner."""
    query_len, kv_len = q.shape[2], k.shape[2]
    mask = torch.ones(query_len, kv_len, dtype=torch.bool).tril(kv_len - query_len)
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)


LENGTHS = [(1, 1), (1, 7), (5, 5), (3, 8), (127, 127), (128, 128), (129, 129), (130, 301)]
LENGTHS += [(QUERY_TILE, 2 * QUERY_TILE), (2 * QUERY_TILE + 1, 2 * QUERY_TILE + 4), (1, 300)]


@pytest.mark.parametrize(("query_len", "kv_len"), LENGTHS)
@pytest.mark.parametrize(("n_q", "n_kv"), [(6, 2), (6, 6), (3, 1)])
def test_attention_equals_torchs_own_at_every_length(query_len, kv_len, n_q, n_kv):
    q = torch.randn(2, n_q, query_len, 8)
    k, v = torch.randn(2, 2, n_kv, kv_len, 8)
    ours = sdpa(q, k, v)
    assert ours.shape == q.shape
    assert_near(ours, torch_sdpa(q, k, v))


@pytest.mark.parametrize("query_len", [1, 5, QUERY_TILE, QUERY_TILE + 1])
def test_attention_in_bfloat16_comes_near_that_of_the_same_numbers_in_float32(query_len):
    q = torch.randn(2, 6, query_len, 8).bfloat16()
    k, v = torch.randn(2, 2, 2, query_len + 40, 8).bfloat16()
    ours = sdpa(q, k, v)
    assert ours.dtype == torch.bfloat16
    expected = torch_sdpa(q.float(), k.float(), v.float())
    assert_near(ours, expected, units=4)


def test_a_single_query_rounds_no_score_or_weight_to_16_bits():
    q, (k, v) = torch.randn(2, 6, 1, 8).bfloat16(), torch.randn(2, 2, 2, 300, 8).bfloat16()
    in_float32 = sdpa(q.float(), k.float(), v.float(), scale=0.3)
    assert torch.equal(sdpa(q, k, v, scale=0.3), in_float32.bfloat16())


@pytest.mark.parametrize("scale", [0.05, 1.0])
def test_a_scale_of_ones_own(scale):
    q, k, v = torch.randn(1, 6, 5, 8), torch.randn(1, 2, 7, 8), torch.randn(1, 2, 7, 8)
    expected = torch_sdpa(q, k, v, scale)
    assert_near(sdpa(q, k, v, scale), expected)
    assert (sdpa(q, k, v) - expected).abs().max() > 0.01


def test_attention_leaves_its_inputs():
    tensors = torch.randn(1, 6, 5, 8), torch.randn(1, 2, 7, 8), torch.randn(1, 2, 7, 8)
    before = [t.clone() for t in tensors]
    sdpa(*tensors)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


@pytest.mark.parametrize("seq", [6, 131, 260])
def test_a_changed_future_token_changes_nothing_before_it(seq):
    q, k, v = torch.randn(1, 6, seq, 8), torch.randn(1, 2, seq, 8), torch.randn(1, 2, seq, 8)
    before = sdpa(q, k, v)
    for poked in (1, seq // 2, seq - 1):
        k2, v2 = k.clone(), v.clone()
        k2[:, :, poked], v2[:, :, poked] = 50.0, 1e4
        after = sdpa(q, k2, v2)
        assert torch.equal(after[:, :, :poked], before[:, :, :poked])
        assert (after[:, :, poked] != before[:, :, poked]).any(-1).all()


def test_a_tile_never_touches_keys_after_its_last_query():
    """NaN times a weight of zero is NaN, so a product with a later value would be noticed."""
    seq = 2 * QUERY_TILE
    q, k, v = torch.randn(1, 2, seq, 8), torch.randn(1, 1, seq, 8), torch.randn(1, 1, seq, 8)
    v[:, :, QUERY_TILE:] = torch.nan
    assert not sdpa(q, k, v)[:, :, :QUERY_TILE].isnan().any()


def test_large_scores_do_not_overflow_in_half_precision():
    q, k = (torch.full((1, 2, 3, 8), 30.0, dtype=torch.float16) for _ in range(2))
    v = torch.randn(1, 2, 3, 8).half()
    assert_near(sdpa(q, k, v)[:, :, 2], v.float().mean(2), units=4)


def test_each_query_head_reads_its_groups_kv_head():
    """Values that are their KV head's number come out as that number."""
    v = torch.arange(3.0).view(1, 3, 1, 1).expand(1, 3, 4, 8)
    out = sdpa(torch.randn(1, 6, 4, 8), torch.randn(1, 3, 4, 8), v)
    heads = out[0, :, 0, 0]
    torch.testing.assert_close(heads, torch.tensor([0.0, 0, 1, 1, 2, 2]))


# attention and block against transformers


def layer_of(model, i: int) -> dict[str, torch.Tensor]:
    return dict(model.model.layers[i].state_dict())


def their_layer(model, x, part: str):
    """(what layer 1 of a transformers model, or its attention alone, makes of x, our tables)."""
    seq = x.shape[1]
    embeddings = model.model.rotary_emb(x, torch.arange(seq)[None])
    mask = torch.full((seq, seq), -torch.inf).triu(1)[None, None]
    layer = model.model.layers[1]
    module = layer.self_attn if part == "attention" else layer
    with torch.no_grad():
        out = module(x, attention_mask=mask, position_embeddings=embeddings)
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("part", ["attention", "block"])
@pytest.mark.parametrize("kind", [k for k in KINDS if "tied" not in k])
def test_a_layer_equals_that_of_transformers(kind, part):
    model = random_model(kind)
    config, x = parse_config(model.config.to_dict()), torch.randn(2, 5, 48)
    ours = gqa_attention if part == "attention" else block
    theirs = their_layer(model, x, part)
    result = ours(x, layer_of(model, 1), *rope_tables(config, 5), config)
    assert_near(result, theirs)


@pytest.mark.parametrize(
    ("mistake", "change"),
    [
        (
            "KV heads swapped",
            lambda w: {"self_attn.k_proj.weight": w["self_attn.k_proj.weight"].roll(8, 0)},
        ),
        (
            "value heads swapped",
            lambda w: {"self_attn.v_proj.weight": w["self_attn.v_proj.weight"].roll(8, 0)},
        ),
        (
            "gate and up swapped",
            lambda w: {
                "mlp.gate_proj.weight": w["mlp.up_proj.weight"],
                "mlp.up_proj.weight": w["mlp.gate_proj.weight"],
            },
        ),
        (
            "norms swapped",
            lambda w: {"input_layernorm.weight": w["post_attention_layernorm.weight"]},
        ),
        (
            "interleaved rows",
            lambda w: {
                "self_attn.q_proj.weight": w["self_attn.q_proj.weight"]
                .view(6, 2, 4, 48)
                .transpose(1, 2)
                .reshape(48, 48)
            },
        ),
    ],
)
def test_weights_in_the_wrong_place_are_far_from_transformers(mistake, change):
    """The bound above is strict enough: the classical mistakes are far outside it."""
    model = random_model()
    config, x = parse_config(model.config.to_dict()), torch.randn(2, 5, 48)
    theirs, layer = their_layer(model, x, "block"), layer_of(model, 1)
    wrong = block(x, layer | change(layer), *rope_tables(config, 5), config)
    assert (wrong - theirs).abs().max() > 0.01 * theirs.abs().max(), mistake


@pytest.mark.parametrize("query_len", [1, 3])
def test_attention_in_float64_keeps_its_digits(query_len):
    random = torch.Generator().manual_seed(3)
    q = torch.randn(1, 6, query_len, 8, generator=random, dtype=torch.float64)
    k, v = torch.randn(2, 1, 2, 11, 8, generator=random, dtype=torch.float64)
    whole = [x.repeat_interleave(3, dim=1) for x in (k, v)]
    scores = q @ whole[0].transpose(2, 3) / 8**0.5
    future = torch.arange(11) > torch.arange(11 - query_len, 11)[:, None]
    expected = scores.masked_fill(future, -torch.inf).softmax(-1) @ whole[1]
    out = sdpa(q, k, v)
    assert out.dtype == torch.float64
    assert_near(out, expected)
