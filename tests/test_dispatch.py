"""The choice of the backend, the refused arguments, and the call of the chosen backend alone."""

import re
import warnings

import pytest
import torch

from nanoserve.kernels import dispatch
from nanoserve.kernels.dispatch import (
    BACKENDS,
    check_attention,
    has_triton,
    paged_attention_dispatch,
    paged_attention_tlsim,
    paged_attention_triton,
    select_backend,
    use_backend,
)
from nanoserve.kernels.reference import paged_attention_reference
from tests.attention_cases import LAYOUTS, AttentionCase, assert_expected, tensors

GPUS = {(7, 0): "Tesla V100", (7, 5): "Tesla T4", (9, 0): "NVIDIA H200", (10, 0): "NVIDIA B200"}


@pytest.fixture(autouse=True)
def nobody_has_chosen(monkeypatch):
    monkeypatch.delenv("NANOSERVE_BACKEND", raising=False)
    monkeypatch.delenv("NANOSERVE_CHECK_SLOTS", raising=False)
    dispatch._warn_fallback.cache_clear()


@pytest.fixture
def machine(monkeypatch):
    """Simulate a GPU of some compute capability, or a missing Triton."""

    def believe(capability: tuple[int, int] = (9, 0), triton: bool = True) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: GPUS[capability])
        monkeypatch.setattr(dispatch, "has_triton", lambda: triton)

    return believe


def silently(device: str) -> str:
    """select_backend, with warnings as errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return select_backend(device)


# ------------------------------------------------------------------------------ what is chosen


@pytest.mark.parametrize("capability", [(7, 5), (9, 0), (10, 0)])
@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda", 0)])
def test_triton_on_a_gpu_that_it_compiles_for(capability, device, machine):
    machine(capability)
    assert silently(device) == "triton"


@pytest.mark.parametrize("triton", [True, False])
@pytest.mark.parametrize("device", ["cpu", "mps", "meta", torch.device("cpu")])
def test_tlsim_anywhere_else_without_a_warning(device, triton, machine):
    machine((9, 0), triton)
    assert silently(device) == "tlsim"


def test_an_older_gpu_falls_back_with_one_warning(machine):
    machine((7, 0))
    says = r"on Tesla V100: its compute capability is 7\.0, and Triton needs 7\.5"
    with pytest.warns(UserWarning, match=says) as seen:
        assert [select_backend("cuda") for _ in range(3)] == ["tlsim"] * 3
    assert len(seen) == 1


def test_a_gpu_without_triton_falls_back_with_one_warning(machine):
    machine((9, 0), triton=False)
    with pytest.warns(UserWarning, match="on NVIDIA H200: Triton cannot be imported") as seen:
        assert [select_backend("cuda") for _ in range(3)] == ["tlsim"] * 3
    assert len(seen) == 1


def test_has_triton_is_whether_it_can_be_imported(monkeypatch):
    try:
        import triton  # noqa: F401
    except ImportError:
        assert not has_triton()
    else:
        assert has_triton()
    monkeypatch.setitem(__import__("sys").modules, "triton", None)  # import triton now fails
    assert not has_triton()


# ------------------------------------------------------------------------------ what overrides it


@pytest.mark.parametrize("name", ["tlsim", "reference"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_override_is_the_answer_everywhere(name, device, machine, monkeypatch):
    machine((7, 0), triton=False)
    with use_backend(name):
        assert silently(device) == name
    monkeypatch.setenv("NANOSERVE_BACKEND", name)
    assert silently(device) == name


def test_triton_can_be_asked_for_where_it_runs(machine, monkeypatch):
    machine((7, 5))
    with use_backend("triton"):
        assert silently("cuda") == "triton"
    monkeypatch.setenv("NANOSERVE_BACKEND", "triton")
    assert silently("cuda") == "triton"


def test_use_backend_goes_before_the_environment(monkeypatch):
    monkeypatch.setenv("NANOSERVE_BACKEND", "tlsim")
    with use_backend("reference"):
        assert select_backend("cpu") == "reference"
    assert select_backend("cpu") == "tlsim"


def test_an_empty_variable_is_no_override(monkeypatch):
    monkeypatch.setenv("NANOSERVE_BACKEND", "")
    assert select_backend("cpu") == "tlsim"


def test_an_override_ends_with_its_block_whatever_happens():
    with use_backend("reference"):
        with use_backend("tlsim"):
            assert select_backend("cpu") == "tlsim"
        assert select_backend("cpu") == "reference"
        with pytest.raises(KeyError), use_backend("tlsim"):
            raise KeyError
        assert select_backend("cpu") == "reference"
    with pytest.raises(ValueError, match="no backend"), use_backend("numpy"):
        pytest.fail("entered")
    assert select_backend("cpu") == "tlsim"


@pytest.mark.parametrize("name", ["Triton", "cuda", "interpreter"])
def test_an_unknown_backend_is_refused_with_those_there_are(name, monkeypatch):
    says = f"no backend '{name}': the backends are triton, tlsim, reference"
    with pytest.raises(ValueError, match=says), use_backend(name):
        pytest.fail("entered")
    monkeypatch.setenv("NANOSERVE_BACKEND", name)
    with pytest.raises(ValueError, match=says):
        select_backend("cpu")


@pytest.mark.parametrize(
    ("device", "capability", "triton", "why"),
    [
        ("cpu", (9, 0), True, "it is not a CUDA GPU, and TRITON_INTERPRET=1 was not set before"),
        ("mps", (9, 0), True, "it is not a CUDA GPU"),
        ("cuda", (7, 0), True, "its compute capability is 7.0, and Triton needs 7.5"),
        ("cuda", (9, 0), False, "Triton cannot be imported"),
        ("cpu", (9, 0), False, "Triton cannot be imported"),
    ],
)
def test_an_override_that_cannot_run_says_why(device, capability, triton, why, machine):
    machine(capability, triton)
    says = re.escape(f'the backend "triton" cannot run on {device}: {why}')
    with use_backend("triton"), pytest.raises(ValueError, match=says):
        select_backend(device)


def test_triton_where_it_cannot_run_is_refused_by_attention_too():
    with use_backend("triton"), pytest.raises(ValueError, match='"triton" cannot run on cpu'):
        paged_attention_dispatch(*tensors(AttentionCase()))


# ------------------------------------------------------------------------------ what is called


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_chosen_backend_is_called_and_its_result_is_returned(backend, monkeypatch):
    calls, results = [], {name: object() for name in BACKENDS}
    for name in BACKENDS:

        def spy(*args, name=name):
            calls.append((name, args))
            return results[name]

        monkeypatch.setattr(dispatch, f"paged_attention_{name}", spy)
    monkeypatch.setattr(dispatch, "select_backend", lambda device: asked.append(device) or backend)
    asked, inputs = [], tensors(AttentionCase(scale=0.5))
    assert paged_attention_dispatch(*inputs) is results[backend]
    [(name, args)] = calls
    assert name == backend
    assert all(a is b for a, b in zip(args, inputs, strict=True))
    assert asked == [torch.device("cpu")]


@pytest.mark.parametrize("name", [name for name in LAYOUTS if "all at once" in name])
def test_on_the_cpu_tlsim_is_within_tolerance_and_the_reference_is_equal(name):
    case = LAYOUTS[name]
    inputs = tensors(case)
    assert_expected(paged_attention_dispatch(*inputs), case)
    assert torch.equal(paged_attention_dispatch(*inputs), paged_attention_tlsim(*inputs))
    with use_backend("reference"):
        out = paged_attention_dispatch(*inputs)
    assert torch.equal(out, paged_attention_reference(*inputs))


# ------------------------------------------------------------------------------ what is refused


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)


REFUSED = {  # the change of the arguments, and the texts that the error must contain
    "q of three axes": ({"q": zeros(6, 1, 8)}, ("q must be [1, n_q,", "[6, 1, 8]")),
    "a batch": ({"q": zeros(2, 6, 1, 8)}, ("q must be [1, n_q,", "[2, 6, 1, 8]")),
    "a pool of blocks": ({"k_pool": zeros(9, 4, 2, 8)}, ("k_pool must be", "8", "[9, 4, 2, 8]")),
    "k's head_dim": ({"k_pool": zeros(79, 2, 9)}, ("k_pool must be", "8", "[79, 2, 9]")),
    "v's head_dim": ({"v_pool": zeros(79, 2, 7)}, ("v_pool must be", "8", "[79, 2, 7]")),
    "a shorter v": ({"v_pool": zeros(78, 2, 8)}, ("must have one shape", "[79, 2, 8], [78, 2, 8]")),
    "v's heads": ({"v_pool": zeros(79, 3, 8)}, ("must have one shape", "[79, 2, 8], [79, 3, 8]")),
    "n_rep 2": ({"n_rep": 2}, ("n_rep 2", "6 query heads", "2 KV heads")),
    "n_rep 0": ({"n_rep": 0}, ("n_rep 0", "6 query heads", "2 KV heads")),
    "more query heads": ({"q": zeros(1, 9, 1, 8)}, ("n_rep 3", "9 query heads", "2 KV heads")),
    "float slots": ({"slots": zeros(37)}, ("slot_mapping must be integers", "float32", "[37]")),
    "bool slots": ({"slots": zeros(37).bool()}, ("slot_mapping must be integers", "bool")),
    "uint8 slots": ({"slots": zeros(37).byte()}, ("slot_mapping must be integers", "uint8")),
    "slots by sequence": ({"slots": zeros(1, 37).long()}, ("slot_mapping", "[1, 37]")),
    "no keys": ({"slots": zeros(0).long()}, ("q has 1 positions", "kv_len, 0")),
    "no queries": ({"q": zeros(1, 6, 0, 8)}, ("q has 0 positions", "kv_len, 37")),
    "fewer keys than queries": (
        {"q": zeros(1, 6, 38, 8)},
        ("q has 38 positions", "kv_len, 37"),
    ),
    "float64": (
        {n: zeros(*s, dtype=torch.float64) for n, s in {
            "q": (1, 6, 1, 8), "k_pool": (79, 2, 8), "v_pool": (79, 2, 8)}.items()},
        ("q must be float32, float16 or bfloat16, got torch.float64",),
    ),
    "k in another dtype": (
        {"k_pool": zeros(79, 2, 8, dtype=torch.float16)},
        ("k_pool and q must have one dtype", "torch.float16 and torch.float32"),
    ),
    "v in another dtype": (
        {"v_pool": zeros(79, 2, 8, dtype=torch.bfloat16)},
        ("v_pool and q must have one dtype", "torch.bfloat16 and torch.float32"),
    ),
    "q with channels apart": ({"q": zeros(1, 6, 1, 16)[..., ::2]}, ("q's head_dim", "2")),
    "k with channels apart": ({"k_pool": zeros(79, 2, 24)[..., ::3]}, ("k_pool's head_dim", "3")),
    "v with channels first": ({"v_pool": zeros(79, 8, 2).mT}, ("v_pool's head_dim", "2")),
    "k elsewhere": ({"k_pool": zeros(79, 2, 8, device="meta")}, ("k_pool", "meta", "cpu")),
    "v elsewhere": ({"v_pool": zeros(79, 2, 8, device="meta")}, ("v_pool", "meta", "cpu")),
    "slots elsewhere": (
        {"slots": zeros(37, device="meta").long()},
        ("slot_mapping is on meta", "q is on cpu"),
    ),
    "a slot below": ({"slots": torch.arange(37) - 1}, ("slot -1", "79")),
    "a slot beyond": ({"slots": torch.arange(37) + 43}, ("slot 79", "79")),
    "an int32 slot beyond": ({"slots": torch.arange(37).int() * 10**7}, ("slot 360000000", "79")),
}  # fmt: skip


def with_changes(**changes):
    """The arguments of a decode of 6/2 heads of 8 at 37 positions in 79 slots, some replaced."""
    names = ("q", "k_pool", "v_pool", "slots", "n_rep", "scale")
    given = dict(zip(names, tensors(AttentionCase()), strict=True))
    assert changes.keys() <= given.keys()
    return tuple((given | changes).values())


@pytest.mark.parametrize("how", ["tlsim", "triton", "reference", "dispatch"])
@pytest.mark.parametrize("what", REFUSED)
def test_arguments_that_a_kernel_would_misread_are_refused_by_name(what, how, monkeypatch):
    changes, says = REFUSED[what]
    monkeypatch.setattr(dispatch, "launch", lambda *args: pytest.fail("launched"))
    calls = {
        "tlsim": paged_attention_tlsim,
        "triton": paged_attention_triton,
        "dispatch": paged_attention_dispatch,
        "reference": use_backend("reference")(paged_attention_dispatch),
    }
    with pytest.raises(ValueError) as refusal:
        calls[how](*with_changes(**changes))
    assert all(part in str(refusal.value) for part in says), str(refusal.value)


def test_what_may_be_given_passes():
    for case in LAYOUTS.values():
        check_attention(*tensors(case)[:5])
    check_attention(*with_changes(slots=torch.arange(42, 79))[:5])  # to the last slot


def test_slots_are_read_on_the_cpu_alone_unless_asked_for(monkeypatch):
    elsewhere = [
        x.to("meta") if isinstance(x, torch.Tensor) else x for x in tensors(AttentionCase())[:5]
    ]  # stands for a GPU: nothing on it can be read
    check_attention(*elsewhere)
    beyond = with_changes(slots=torch.arange(37) + 43)[:5]
    check_attention(*beyond, check_slots=False)
    with pytest.raises(ValueError, match="slot 79"):
        check_attention(*beyond)
    with pytest.raises(RuntimeError):  # meta tensors hold no data
        check_attention(*elsewhere, check_slots=True)
    monkeypatch.setenv("NANOSERVE_CHECK_SLOTS", "1")
    with pytest.raises(RuntimeError):
        check_attention(*elsewhere)
