"""Describes the machine of a measurement, and writes the file that records a measurement."""

import json
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from datetime import date
from importlib import metadata
from pathlib import Path

import torch

DATA = Path("notebooks/data")  # where runs are recorded, from the root of a clone


def machine(
    device: torch.device | str, packages: Sequence[str] = ("torch", "triton")
) -> dict[str, object]:
    """The description of this machine in every recorded run and in `nanoserve doctor`.

    Keys: device, driver and cuda (None without an NVIDIA GPU), platform, threads, versions (None
    for a package that is not installed), date.
    """
    device = torch.device(device)
    gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if gpu else device.type.upper(),
        "driver": _driver() if gpu else None,
        "cuda": torch.version.cuda if gpu else None,
        "platform": f"{platform.system()} {platform.machine()}",
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            **{package: _version(package) for package in packages},
        },
        "date": date.today().isoformat(),
    }


def _driver() -> str | None:
    """The driver's version as nvidia-smi prints it; None where nvidia-smi gives no version."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return None
    query = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
    printed = subprocess.run(query, capture_output=True, text=True)
    lines = printed.stdout.split() if printed.returncode == 0 else []
    return lines[0] if lines else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def save_run(run: Mapping[str, object], benchmark: str, folder: Path = DATA) -> Path:
    """Write a run as JSON, for example as attention_h200.json for an "NVIDIA H200".

    `run` holds the keys of `machine` and its own. Raises ValueError if the folder is missing.
    """
    if not folder.is_dir():
        raise ValueError(f"no folder {folder.as_posix()} here: run this at the root of a clone")
    device = str(run["device"]).lower().removeprefix("nvidia ")
    path = folder / f"{benchmark}_{re.sub(r'[^a-z0-9]+', '_', device).strip('_')}.json"
    path.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
    return path
