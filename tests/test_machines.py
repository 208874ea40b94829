"""The steps of `make test` and its variants, the oldest versions, and the CI workflow."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from tests import run_all
from tests.oldest import oldest

ROOT = Path(__file__).resolve().parent.parent
WORKFLOW = (ROOT / ".github/workflows/tests.yml").read_text("utf-8")
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")


def test_every_requirement_has_a_lower_bound_that_test_oldest_installs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    pins = oldest(project)
    extras = project["optional-dependencies"].values()
    stated = [*project["dependencies"], *(name for extra in extras for name in extra)]
    assert len(pins) == len([name for name in stated if not name.startswith("nanoserve[")])
    assert all(
        re.match(r"[\w-]+==\d+(\.\d+)*( ; sys_platform == \"linux\")?$", pin) for pin in pins
    )


@pytest.mark.parametrize("requirement", ["torch", "torch>2.7", "torch==2.7", "torch>=2.7,>=2.8"])
def test_a_requirement_without_one_lower_bound_is_refused(requirement):
    project = {"name": "x", "dependencies": [requirement], "optional-dependencies": {}}
    with pytest.raises(ValueError, match="one lower bound"):
        oldest(project)


def test_markers_and_extras_reach_the_oldest_versions():
    project = {
        "name": "x",
        "dependencies": ["b>=1.2,<3", 'a>=4; sys_platform == "linux"'],
        "optional-dependencies": {"more": ["x[less]", "c>=5.0.1"], "less": []},
    }
    assert oldest(project) == ['a==4 ; sys_platform == "linux"', "b==1.2", "c==5.0.1"]


def test_steps_name_notebooks_that_exist_and_set_what_they_promise():
    for days in (run_all.NUMERICAL, run_all.KERNELS):
        assert len(days.split()) >= 9
        assert all((ROOT / path).exists() for path in days.split())
    plain = [step for step in run_all.RUNS["all"].values() if "ATEN_CPU_CAPABILITY" in step]
    assert plain == [f"{run_all.PLAIN} {run_all.NBVAL} {run_all.NUMERICAL}"]
    machines = " ".join(run_all.RUNS["machines"].values())
    for setting in ("=default", "=avx2", "NANOSERVE_BACKEND=reference", "TRITON_INTERPRET=1"):
        assert setting in machines


def test_an_unknown_run_is_refused_in_one_line(capsys):
    assert run_all.main("everything") == 2
    assert capsys.readouterr().err == (
        "usage: python tests/run_all.py [all | machines | versions]\n"
    )


def test_a_step_without_triton_says_so_in_one_line(capsys, monkeypatch):
    monkeypatch.setattr(run_all, "RUNS", {"all": run_all.INTERPRETED})
    monkeypatch.setattr(run_all, "NO_TRITON", True)
    assert run_all.main() == 0
    out = capsys.readouterr().out
    assert "kernels under Triton's interpreter: not run, there is no Triton here\n" in out


def test_the_workflow_is_sound():
    workflow = yaml.safe_load(WORKFLOW)
    triggers = workflow[True]  # YAML 1.1 reads the key `on` as a boolean
    assert set(triggers) == {"push", "pull_request", "schedule", "workflow_dispatch"}
    assert workflow["permissions"] == {"contents": "read"}
    jobs = workflow["jobs"]
    assert set(jobs) == {"linux", "others", "weekly"}
    assert set(jobs["others"]["strategy"]["matrix"]["os"]) == {"macos-latest", "windows-latest"}
    for job in jobs.values():
        assert job["timeout-minutes"] > 0
        assert job["runs-on"]
        for step in job["steps"]:
            assert len({"uses", "run"} & set(step)) == 1
    used = set(re.findall(r"uses: (\S+)@", WORKFLOW))
    assert used == {"actions/checkout", "actions/setup-python"}


def test_the_workflow_and_the_help_name_targets_of_the_makefile():
    weekly = yaml.safe_load(WORKFLOW)["jobs"]["weekly"]["strategy"]["matrix"]["target"]
    named = {*weekly, *re.findall(r"run: make ([\w-]+)$", WORKFLOW, re.MULTILINE)}
    assert {"test", "test-machines", "test-oldest", "test-newest", "mutants"} <= named
    for target in named:
        assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), target
        assert f'"make {target} ' in MAKEFILE
        assert re.search(rf"^\.PHONY:.* {target}\b", MAKEFILE, re.MULTILINE)
