"""Without Triton, as on macOS and Windows: everything imports, and tlsim runs the kernel."""

import json
import subprocess
import sys

from nanoserve import LLM, SamplingParams
from nanoserve.kernels.dispatch import use_backend
from tests.folders import write_checkpoint

SCRIPT = """
import importlib, json, pkgutil, sys
from importlib.machinery import PathFinder

find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *at: None if name.split(".")[0] == "triton" else find(name, *at)
assert "triton" not in sys.modules
import nanoserve

found = pkgutil.walk_packages(nanoserve.__path__, "nanoserve.")
names = [module.name for module in found if not module.name.endswith("__main__")]
for name in names:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:  # the course's tools, where the engine alone is installed
        assert name.startswith("nanoserve.course.") and error.name in ("jupytext", "nbclient"), name

from nanoserve import LLM, SamplingParams, cli
from nanoserve.kernels import dispatch, paged_attention, tlsim
from tests.attention_cases import LAYOUTS, assert_expected, tensors

assert paged_attention.triton is tlsim
assert paged_attention.tl is tlsim.language
assert type(paged_attention.paged_attention_kernel) is tlsim.launch.Kernel
assert not dispatch.has_triton()
assert dispatch.select_backend("cpu") == "tlsim"
for name, case in LAYOUTS.items():
    assert_expected(dispatch.paged_attention_dispatch(*tensors(case)), case)
try:
    with dispatch.use_backend("triton"):
        dispatch.paged_attention_dispatch(*tensors(case))
except ValueError as error:
    refusal = str(error)
answer = LLM(sys.argv[1]).generate("hello", SamplingParams(max_tokens=12))[0]
print(json.dumps({
    "names": names,
    "refusal": refusal,
    "ids": answer.token_ids,
    "doctor": cli.report(),
    "imported": [name for name in sys.modules if name.split(".")[0] == "triton"],
}))
"""


def test_everything_imports_and_the_engine_runs_by_tlsim(tmp_path):
    folder = write_checkpoint(tmp_path / "checkpoint", eos=None)
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    seen = json.loads(run.stdout.splitlines()[-1])
    assert {"nanoserve.kernels.dispatch", "nanoserve.course.sync"} <= set(seen["names"])
    assert seen["refusal"].endswith("cannot run on cpu: Triton cannot be imported")
    assert seen["imported"] == []
    with use_backend("reference"):
        ours = LLM(folder).generate("hello", SamplingParams(max_tokens=12))[0]
    assert seen["ids"] == ours.token_ids
    doctor = dict(seen["doctor"])
    assert doctor["attention runs"]
    assert "Day 23" not in doctor["attention runs"]
