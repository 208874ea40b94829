"""A machine whose cores other programs use: libgomp spins for less, and doctor says what to do."""

import os
import subprocess
import sys

import pytest
import torch

from nanoserve import cli, threads

# Prints the setting when nanoserve first imports torch, then exits.
BEFORE_TORCH = """
import os, sys
class Torch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Torch())
import nanoserve
"""


@pytest.mark.parametrize(
    ("already", "expected"),
    [
        ({}, threads.SPINS),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "active"}, "None"),
    ],
)
def test_importing_nanoserve_shortens_the_spin_before_torch_is_loaded(already, expected):
    chosen = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    rest = {key: value for key, value in os.environ.items() if key not in chosen}
    done = subprocess.run(
        [sys.executable, "-c", BEFORE_TORCH],
        env=rest | already,
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert done.stdout == f"{expected}\n"


def test_threads_that_are_not_slower_than_one_are_just_counted():
    assert threads.describe_threads(1, 0.5, 0.001) == "1"
    assert threads.describe_threads(8, 0.0019, 0.001) == "8"


def test_threads_that_wait_for_one_another_are_reported_with_the_remedy():
    line = threads.describe_threads(8, 0.0143, 0.001)
    assert line.startswith("8, which take 14.3 times as long as one: other programs keep the cores")
    assert "OMP_NUM_THREADS=1" in line
    assert "\n" not in line


def test_measuring_takes_turns_and_leaves_the_number_of_threads(monkeypatch):
    before, asked = torch.get_num_threads(), []
    try:
        torch.set_num_threads(2)
        set_num_threads = torch.set_num_threads
        monkeypatch.setattr(
            torch, "set_num_threads", lambda n: (asked.append(n), set_num_threads(n))
        )
        all_threads, one_thread = threads.measure_threads(seconds=0)
        assert all_threads > 0
        assert one_thread > 0
        assert torch.get_num_threads() == 2
        assert asked == [2, 1] * 4 + [2]
    finally:
        monkeypatch.undo()
        torch.set_num_threads(before)


def test_doctor_reports_a_busy_machine(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(threads, "measure_threads", lambda: (0.5, 0.01))
    assert dict(cli.report())["threads"].startswith("2, which take 50.0 times as long as one")
