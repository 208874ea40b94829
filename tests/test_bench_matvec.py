"""The benchmark of products in four bits: its kernels are right, a wrong variant is refused."""

import json

import pytest
import torch

from nanoserve.bench import matvec
from nanoserve.bench.correctness import WrongAnswer
from nanoserve.kernels import tlsim

CPU = torch.device("cpu")


def test_the_bytes_of_a_weight_are_those_of_its_tensors():
    product = matvec.draw_product(5, 96, torch.float32, CPU, seed=0)
    assert matvec.q4_bytes(5, 96) == sum(part.nbytes for part in product.q4[1:])


@pytest.mark.parametrize(("num_out", "width"), [(5, 96), (9, 1_056), (2, 32)])
def test_the_kernels_of_the_first_steps_give_the_dequantised_product(num_out, width, monkeypatch):
    for name in ("by_bytes_kernel", "by_groups_kernel"):
        monkeypatch.setattr(matvec, name, tlsim.jit(getattr(matvec, name)))
    product = matvec.draw_product(num_out, width, torch.float32, CPU, seed=1)
    for path in (matvec.by_bytes, matvec.by_groups):
        matvec.check_product(path.__name__, path, product)


def test_a_wrong_variant_is_refused_by_name():
    product = matvec.draw_product(5, 96, torch.float32, CPU, seed=2)
    with pytest.raises(WrongAnswer, match=r"scaled is .* from the dequantised product"):
        matvec.check_product("scaled", lambda p: 1.01 * p.x @ p.weight.T, product)


def test_a_run_on_a_cpu_has_a_time_for_every_shape_and_saves_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(matvec, "SHAPES", ((256, 256), (512, 256)))
    monkeypatch.setattr(matvec, "read_bandwidth", lambda device: 1e10)
    lines = []
    run = matvec.measure("cpu", rounds=1, command="as typed", show=lines.append)
    assert [(row.out, row.width, row.path) for row in run.rows] == [
        (32, 32, "linear"), (32, 32, "q4"), (64, 32, "linear"), (64, 32, "q4"),
    ]  # fmt: skip
    assert [row.bytes for row in run.rows] == [32 * 32 * 4, 640, 64 * 32 * 4, 1_280]
    assert all(row.seconds > 0 for row in run.rows) and len(lines) == 5
    assert "1.00 of F.linear's speed" in lines[1]
    saved = json.loads(run.save(tmp_path).read_text())
    assert saved["command"] == "as typed" and len(saved["rows"]) == 4


def test_what_cannot_be_timed_is_refused():
    with pytest.raises(ValueError, match="device 'meta'"):
        matvec.measure("meta")
    with pytest.raises(ValueError, match="rounds"):
        matvec.measure("cpu", rounds=0)


def test_the_command_line_prints_a_run(monkeypatch, capsys):
    monkeypatch.setattr(matvec, "SHAPES", ((256, 256),))
    monkeypatch.setattr(matvec, "read_bandwidth", lambda device: 1e10)
    matvec.main(["--device", "cpu", "--rounds", "1"])
    assert "q4" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        matvec.main(["--device", "meta"])
    assert "meta" in capsys.readouterr().err
