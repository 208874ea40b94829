"""The description of the machine, and the file of a recorded run."""

import json
import platform
import subprocess
from datetime import date
from pathlib import Path

import pytest
import torch

from nanoserve.bench import machine as bench
from nanoserve.bench.machine import machine, save_run

DATA = Path(__file__).parents[1] / "notebooks/data"
RECORDED = [*DATA.glob("agreement_*.json"), *DATA.glob("attention_*.json")]


def test_a_cpu_is_described_by_platform_threads_and_versions():
    about = machine("cpu", ("torch", "no-such-package"))
    assert about == {
        "device": "CPU",
        "driver": None,
        "cuda": None,
        "platform": f"{platform.system()} {platform.machine()}",
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": bench.metadata.version("torch"),
            "no-such-package": None,
        },
        "date": date.today().isoformat(),
    }


@pytest.mark.parametrize(
    ("smi", "code", "driver"),
    [
        ("580.159.03\n580.159.03\n", 0, "580.159.03"),
        ("", 0, None),
        ("NVIDIA-SMI has failed", 9, None),
        (None, 0, None),
    ],
)
def test_a_gpu_is_described_with_its_driver_where_nvidia_smi_prints_it(
    smi, code, driver, monkeypatch
):
    printed = subprocess.CompletedProcess((), code, stdout=smi)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(bench.shutil, "which", lambda _: None if smi is None else "nvidia-smi")
    monkeypatch.setattr(bench.subprocess, "run", lambda *_, **__: printed)
    about = machine("cuda")
    assert (about["device"], about["driver"], about["cuda"]) == ("NVIDIA H200", driver, "13.0")


@pytest.mark.parametrize(
    ("device", "file"),
    [
        ("CPU", "attention_cpu.json"),
        ("NVIDIA H200", "attention_h200.json"),
        ("Tesla T4", "attention_tesla_t4.json"),
        ("NVIDIA A100-SXM4-80GB", "attention_a100_sxm4_80gb.json"),
    ],
)
def test_a_run_is_recorded_under_the_name_of_its_device(device, file, tmp_path):
    path = save_run({"device": device, "rows": []}, "attention", tmp_path)
    assert path == tmp_path / file
    assert json.loads(path.read_text(encoding="utf-8")) == {"device": device, "rows": []}


def test_outside_a_clone_there_is_no_folder_to_record_into(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="no folder notebooks/data here: run this at the root"):
        save_run({"device": "CPU"}, "attention")


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_every_recorded_run_describes_its_machine_in_the_same_keys(path):
    run = json.loads(path.read_text(encoding="utf-8"))
    described = machine("cpu")
    assert list(run)[: len(described) + 1] == [*described, "command"]
    assert list(run["versions"]) == list(described["versions"])
