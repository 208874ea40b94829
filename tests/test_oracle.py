"""The oracle: transformers itself, with three functions around it."""

import pytest
import torch

from nanoserve.oracle import Oracle, load_oracle
from tests.bounds import assert_near
from tests.checkpoints import edit_json, random_model, reference_logits, save

IDS = torch.tensor([[5, 9, 33, 60, 2, 71]])


@pytest.fixture
def theirs():
    return random_model()


@pytest.fixture
def oracle(theirs, tmp_path):
    return load_oracle(save(theirs, tmp_path))


def greedy(model, ids: list[int], n: int) -> list[int]:
    """The definition: n times the argmax of one long forward."""
    ids = list(ids)
    for _ in range(n):
        ids.append(int(reference_logits(model, torch.tensor([ids]))[0, -1].argmax()))
    return ids[-n:]


def hooks_of(oracle: Oracle) -> int:
    return sum(len(module._forward_hooks) for module in oracle.model.modules())


def test_its_logits_are_the_saved_models(oracle, theirs):
    logits = oracle.logits(IDS)
    assert (logits.shape, logits.dtype, logits.requires_grad) == (
        (1, 6, 97),
        torch.float32,
        False,
    )
    assert_near(logits, reference_logits(theirs, IDS))


def test_it_is_ready_to_infer_and_takes_a_dtype(theirs, tmp_path):
    oracle = load_oracle(save(theirs, tmp_path), torch.bfloat16)
    assert not oracle.model.training
    assert oracle.logits(IDS).dtype == torch.bfloat16


def test_its_weights_have_the_names_and_values_that_were_saved(oracle, theirs):
    weights = oracle.state_dict()
    assert weights.keys() == theirs.state_dict().keys()
    assert all(torch.equal(weights[name], w) for name, w in theirs.state_dict().items())


@pytest.mark.parametrize("use_cache", [True, False])
def test_it_continues_greedily(use_cache, oracle, theirs):
    prompt = [5, 9, 33]
    ids = oracle.generate(prompt, 7, use_cache)
    assert ids == greedy(theirs, prompt, 7)
    assert len(set(ids)) > 1


def test_it_really_goes_without_a_cache_when_told(oracle, monkeypatch):
    seen, forward = [], oracle.model.forward

    def spy(*args, **kwargs):
        seen.append(kwargs["input_ids"].shape[1])
        return forward(*args, **kwargs)

    monkeypatch.setattr(oracle.model, "forward", spy)
    oracle.generate([5, 9, 33], 3, use_cache=False)
    oracle.generate([5, 9, 33], 3, use_cache=True)
    assert seen == [3, 4, 5, 3, 1, 1]


def test_on_token_is_called_once_a_token_and_never_for_the_prompt(oracle):
    seen = []
    ids = oracle.generate([5, 9, 33], 5, on_token=seen.append)
    assert seen == ids
    assert all(type(i) is int for i in ids + seen)


def test_an_end_token_is_the_last_one_and_with_stop_false_ends_nothing(theirs, tmp_path):
    expected = greedy(theirs, [5, 9, 33], 9)
    end = expected[3]
    stop_at = expected.index(end) + 1
    folder = save(theirs, tmp_path)
    for name in ("config.json", "generation_config.json"):
        edit_json(folder / name, eos_token_id=[96, end])
    oracle = load_oracle(folder)
    assert oracle.generate([5, 9, 33], 9) == expected[:stop_at]
    assert oracle.generate([5, 9, 33], 9, stop=False) == expected


def test_capture_sees_what_went_in_and_out(oracle):
    seen = oracle.capture(IDS, ["model.embed_tokens", "model.layers.1.mlp", "lm_head"])
    assert list(seen) == ["model.embed_tokens", "model.layers.1.mlp", "lm_head"]
    weights = oracle.state_dict()
    assert torch.equal(seen["model.embed_tokens"].input, IDS)
    assert torch.equal(seen["model.embed_tokens"].output, weights["model.embed_tokens.weight"][IDS])
    mlp = seen["model.layers.1.mlp"]
    module = dict(oracle.model.named_modules())["model.layers.1.mlp"]
    assert mlp.input.shape == mlp.output.shape == (1, 6, 48)
    assert torch.equal(module(mlp.input), mlp.output)
    assert torch.equal(seen["lm_head"].output, oracle.logits(IDS))


def test_capture_takes_the_tensor_of_a_module_that_gives_several_or_is_called_by_keyword(oracle):
    name = "model.layers.0.self_attn"  # returns (output, weights), gets hidden_states by keyword
    seen = oracle.capture(IDS, [name, "model.layers.0.input_layernorm"])
    assert torch.equal(seen[name].input, seen["model.layers.0.input_layernorm"].output)
    assert seen[name].output.shape == (1, 6, 48)


def test_capture_leaves_no_hook_behind(oracle):
    oracle.capture(IDS, ["lm_head", "model.norm"])
    assert hooks_of(oracle) == 0


def test_a_module_that_is_not_there_is_named_and_no_hook_stays(oracle):
    with pytest.raises(ValueError, match=r"the oracle has no module 'model\.layers\.2\.mlp'"):
        oracle.capture(IDS, ["lm_head", "model.layers.2.mlp"])
    assert hooks_of(oracle) == 0


def test_a_failing_forward_leaves_no_hook_behind(oracle):
    with pytest.raises(IndexError):
        oracle.capture(torch.tensor([[5, 10_000]]), ["lm_head", "model.norm"])
    assert hooks_of(oracle) == 0


def test_an_unknown_source_is_named():
    with pytest.raises(ValueError, match="unknown model 'no such model'"):
        load_oracle("no such model")
