"""The agreement table: every runtime on the same cases, within the tolerance of Day 18."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nanoserve.bench import agreement as bench
from nanoserve.bench.agreement import SHAPES, AgreementRow, AttentionShape, agreement, draw
from nanoserve.bench.machine import machine
from nanoserve.kernels.dispatch import DTYPES, has_triton, paged_attention_tlsim
from nanoserve.kernels.reference import ATOL, RTOL, paged_attention_reference, tolerance

SMALL = AttentionShape("small", 6, 2, 8, 5, 37)
RECORDED = sorted((Path(__file__).parents[1] / "notebooks/data").glob("agreement_*.json"))


def test_the_cases_hold_what_a_kernel_gets_wrong():
    assert len({shape.name for shape in SHAPES}) == len(SHAPES)
    assert any(shape.query_len == 1 < shape.kv_len for shape in SHAPES)  # decode
    assert any(shape.query_len == shape.kv_len > 1 for shape in SHAPES)  # prefill
    assert any(1 < shape.query_len < shape.kv_len for shape in SHAPES)  # continuation
    assert any(shape.head_dim & (shape.head_dim - 1) for shape in SHAPES)
    assert {1} < {shape.n_q // shape.n_kv for shape in SHAPES}
    assert any(shape.n_kv == 1 < shape.n_q for shape in SHAPES)
    assert max(shape.kv_len for shape in SHAPES) > 512  # more than a tile, under any runtime


def test_a_case_is_scattered_poisoned_and_the_same_each_time():
    q, k_pool, v_pool, slots = draw(SMALL, torch.bfloat16)
    assert (q.shape, q.dtype) == ((1, 6, 5, 8), torch.bfloat16)
    assert q.stride()[1:] == (8, 48, 1)  # the heads of a position lie side by side
    assert k_pool.shape == v_pool.shape == (96, 2, 8)
    assert (len(slots), len(slots.unique())) == (37, 37)
    first = slots[::16].tolist()
    assert first != sorted(first) or first[-1] - first[0] != 32
    owned = torch.zeros(96, dtype=torch.bool)
    owned[slots] = True
    assert not k_pool[owned].isnan().any() and not v_pool[owned].isnan().any()
    assert k_pool[~owned].isnan().all() and v_pool[~owned].isnan().all()
    for one, two in zip((q, k_pool, v_pool, slots), draw(SMALL, torch.bfloat16), strict=True):
        assert torch.equal(one.nan_to_num(), two.nan_to_num())


def test_tlsim_agrees_on_every_case():
    rows = agreement({"tlsim": paged_attention_tlsim})
    assert [(row.shape, row.dtype) for row in rows] == [
        (shape.name, str(dtype)[6:]) for dtype in DTYPES for shape in SHAPES
    ]
    assert [row for row in rows if not row.agrees] == []
    assert 0 < max(row.largest for row in rows if row.dtype == "float32") < ATOL


def test_the_oracle_agrees_with_itself_to_the_last_bit():
    for row in agreement({"oracle": paged_attention_reference}, [SMALL]):
        assert (row.largest, row.used, row.agrees) == (0, 0, True)


def off_by(runtime, change):
    return lambda *args: change(runtime(*args))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_used_share_is_the_difference_over_the_tolerance(dtype):
    def nudged(out):
        out[0, 4, 3, 2] = 64.0
        return out

    runtimes = {"64 there": off_by(paged_attention_reference, nudged)}
    (row,) = agreement(runtimes, [SMALL], [dtype])
    oracle = float(paged_attention_reference(*draw(SMALL, dtype), 3)[0, 4, 3, 2])
    atol, rtol = tolerance(dtype)
    assert row.largest == pytest.approx(64 - oracle, rel=1e-6)
    assert row.used == pytest.approx((64 - oracle) / (atol + rtol * abs(oracle)), rel=1e-5)
    assert not row.agrees


def test_a_key_too_few_a_key_too_many_and_nan_do_not_agree():
    def few(q, k, v, slots, n_rep):
        return paged_attention_reference(q, k, v, slots[1:], n_rep)

    def many(q, k, v, slots, n_rep):
        nobody = torch.arange(len(k))[k[:, 0, 0].isnan()][:1]
        return paged_attention_reference(q, k, v, torch.cat([nobody, slots]), n_rep)

    few, many = agreement({"few": few, "many": many}, [SMALL], [torch.float32])
    assert few.used > 100 and not few.agrees
    assert many.used != many.used and not many.agrees  # NaN: the poison in another sequence's slot


@pytest.mark.parametrize(("used", "agrees"), [(0, True), (1, True), (1.001, False)])
def test_a_backend_agrees_up_to_the_whole_tolerance(used, agrees):
    assert AgreementRow("decode", "float32", "tlsim", 1e-6, used).agrees is agrees


def test_the_tolerance_is_the_one_of_day_18():
    assert tolerance(torch.float32) == (ATOL, RTOL) == (1e-5, 1e-4)


# as a program

ROWS = [AgreementRow("decode", "float32", "tlsim", 2e-7, 0.02)]


def run_main(monkeypatch, rows, *arguments, device="CPU"):
    monkeypatch.setattr(bench, "agreement", lambda runtimes, device: rows)
    monkeypatch.setattr(bench, "machine", lambda _: {"device": device, "versions": {}})
    bench.main(list(arguments))


def test_it_prints_the_machine_and_the_rows(monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    run_main(monkeypatch, ROWS)
    printed = json.loads(capsys.readouterr().out)
    assert printed == {
        "device": "CPU",
        "versions": {},
        "command": "python -m nanoserve.bench.agreement",
        "rows": [
            {
                "shape": "decode",
                "dtype": "float32",
                "runtime": "tlsim",
                "largest": 2e-7,
                "used": 0.02,
            }
        ],
    }


def test_a_run_is_recorded_in_the_folder_that_is_asked_for(monkeypatch, capsys, tmp_path):
    run_main(monkeypatch, ROWS, "--record", str(tmp_path), device="NVIDIA H200")
    (path,) = tmp_path.iterdir()
    assert path.name == "agreement_h200.json"
    assert json.loads(path.read_text()) == json.loads(capsys.readouterr().out)


def test_a_folder_that_is_missing_is_one_line(monkeypatch, capsys, tmp_path):
    with pytest.raises(SystemExit):
        run_main(monkeypatch, ROWS, "--record", str(tmp_path / "none"))
    assert "run this at the root of a clone" in capsys.readouterr().err


def test_a_run_that_does_not_agree_is_named_and_not_recorded(monkeypatch, capsys, tmp_path):
    rows = [*ROWS, AgreementRow("prefill", "float16", "compiled", 0.25, float("nan"))]
    with pytest.raises(SystemExit) as left:
        run_main(monkeypatch, rows, "--record", str(tmp_path))
    assert left.value.code == 1
    assert capsys.readouterr().err == "compiled differs by 2.5e-01: prefill, float16\n"
    assert list(tmp_path.iterdir()) == []


def test_under_triton_s_interpreter_every_backend_agrees():
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "nanoserve.bench.agreement"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    run = json.loads(done.stdout)
    assert run["device"] == "CPU"
    assert run["command"] == "TRITON_INTERPRET=1 python -m nanoserve.bench.agreement"
    runtimes = {"tlsim", "interpreter"} if has_triton() else {"tlsim"}
    assert {row["runtime"] for row in run["rows"]} == runtimes
    assert len(run["rows"]) == len(runtimes) * len(SHAPES) * len(DTYPES)


# what is recorded

assert RECORDED


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_recorded_run_says_where_it_was_made_and_agrees_on_every_case(path):
    run = json.loads(path.read_text())
    assert run["command"].endswith("python -m nanoserve.bench.agreement --record")
    assert list(run) == [*machine("cpu"), "command", "rows"]
    assert all(run[key] for key in ("device", "platform", "date"))
    assert all(run["versions"][name] for name in ("python", "torch", "triton"))
    rows = [AgreementRow(**row) for row in run["rows"]]
    assert all(row.agrees for row in rows)
    for runtime in {row.runtime for row in rows}:
        reads = [(row.shape, row.dtype) for row in rows if row.runtime == runtime]
        assert reads == [(shape.name, str(dtype)[6:]) for dtype in DTYPES for shape in SHAPES]
    if path.stem != "agreement_cpu":
        assert run["driver"] and run["cuda"]
        assert {row.runtime for row in rows} == {"tlsim", "compiled"}
