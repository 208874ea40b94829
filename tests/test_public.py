"""The public names, the packages that they need, and the order of the imports."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import nanoserve
from tests.folders import write_checkpoint

PACKAGE = Path(nanoserve.__file__).parent
# Each module may import those before it, and no other.
ORDER = (
    "threads",
    "gguf_file",
    "config",
    "quant",
    "weights",
    "fetch",
    "q4_file",
    "tokenizer",
    "layers",
    "kernels",
    "cache",
    "model",
    "sampling",
    "engine",
    "generate",
    "oracle",
    "bench",
    "cli",
)
# quant calls its kernel, which uses the backend selection of the attention kernels.
LATER = {"quant": "nanoserve.kernels.dequant_matvec"}  # imported in the function that needs it
# The same within nanoserve.kernels.
KERNELS = (
    "sizes", "tlsim", "reference", "paged_attention", "split_kv", "dispatch", "dequant_matvec",
)  # fmt: skip
SOURCES = ("paged_attention.py", "split_kv.py", "dequant_matvec.py")  # of Triton kernels
# Imports for functions only, not for modules: the engine runs where these packages are missing.
ELSEWHERE = {
    "triton": {"kernels"},
    "gguf": {"gguf_file", "weights"},
    "huggingface_hub": {"fetch"},
    "filelock": {"fetch"},
    "rich": {"fetch"},
    "jinja2": {"tokenizer"},
    "transformers": {"oracle"},
    "typer": set(),  # of cli alone, at its top
    "matplotlib": set(),
    "ipywidgets": set(),
    "IPython": set(),
}


def modules() -> dict[str, list[Path]]:
    """The engine's modules and packages with their files; the course is no part of it."""
    found: dict[str, list[Path]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        name = file.relative_to(PACKAGE).with_suffix("").parts[0]
        if name not in ("course", "__init__", "__main__"):
            found.setdefault(name, []).append(file)
    return found


def imports(file: Path) -> list[tuple[str, bool]]:
    """Every import of a file as (dotted name, whether it runs when the module is imported)."""
    tree, found = ast.parse(file.read_text(encoding="utf-8")), []

    def visit(node: ast.AST, at_top: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.extend((alias.name, at_top) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{file.name}: imports here are absolute"
                if child.module in ("nanoserve", "nanoserve.kernels"):
                    found.extend((f"{child.module}.{alias.name}", at_top) for alias in child.names)
                else:
                    found.append((child.module, at_top))
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            else:
                inside = (ast.FunctionDef, ast.Lambda)
                visit(child, at_top and not isinstance(child, inside))

    visit(tree, True)
    return found


def test_the_public_names_are_complete():
    assert set(nanoserve.__all__) >= {"LLM", "SamplingParams", "load_model", "load_tokenizer"}
    assert all(hasattr(nanoserve, name) for name in nanoserve.__all__)
    assert nanoserve.SamplingParams() == nanoserve.SamplingParams(
        max_tokens=16,
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        stop=(),
        seed=None,
        logprobs=None,
    )


def test_every_module_is_in_the_order_of_imports():
    assert set(modules()) == set(ORDER)


@pytest.mark.parametrize("module", ORDER)
def test_imports_point_one_way(module):
    public = [*nanoserve.__all__, "__version__"]
    for file in modules()[module]:
        for name, at_top in imports(file):
            package, _, rest = name.partition(".")
            if package != "nanoserve":
                continue
            if not at_top and name.startswith(LATER.get(module, "none")):
                continue
            target = rest.split(".")[0]
            if target == "course":
                assert module == "cli", f"{file.name} imports {name}"
            elif target in ORDER:
                same = target == module and module in file.relative_to(PACKAGE).parts[:-1]
                earlier = ORDER.index(target) < ORDER.index(module)
                assert same or earlier, f"{file.name} imports {name}"
            else:  # names of the package itself: only for modules above all others
                assert module == "cli" and target in public, f"{file.name}: {name}"


def test_the_command_line_reaches_the_course_from_its_own_commands_alone():
    seen = [(name, at_top) for name, at_top in imports(PACKAGE / "cli.py") if "course" in name]
    assert seen
    assert not any(at_top for _, at_top in seen)


def test_within_the_kernels_too_imports_point_one_way():
    found = set()
    for file in modules()["kernels"]:
        module = file.relative_to(PACKAGE / "kernels").with_suffix("").parts[0]
        found.add(module)
        for name, _ in imports(file):
            if name.startswith("nanoserve.kernels."):
                target = name.split(".")[2]
                same = module == target == "tlsim"  # a package, whose files import one another
                assert same or KERNELS.index(target) < KERNELS.index(module), f"{file}: {name}"
    assert found == {*KERNELS, "__init__"}


@pytest.mark.parametrize("source", SOURCES)
def test_a_kernels_module_tries_triton_and_tlsim_takes_its_place(source):
    file = PACKAGE / "kernels" / source
    [attempt] = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.Try)]
    tried = [alias.name for node in attempt.body for alias in node.names]
    everything = [name for name, at_top in imports(file) if at_top]
    assert [name for name in everything if name.startswith("triton")] == tried
    assert tried == ["triton", "triton.language"]
    [handler] = attempt.handlers
    assert handler.type.id == "ImportError"
    assert everything[-2:] == ["nanoserve.kernels.tlsim", "nanoserve.kernels.tlsim"]


@pytest.mark.parametrize("module", ORDER)
def test_what_only_one_function_needs_is_imported_there(module):
    for file in modules()[module]:
        for name, at_top in imports(file):
            package = name.split(".")[0]
            if package in ELSEWHERE and not (module == "cli" and package == "typer"):
                assert module in ELSEWHERE[package], f"{file.name} imports {name}"
                tried = package == "triton" and file.name in SOURCES
                assert tried or not at_top, f"{file.name} imports {name} for everybody"


def test_the_engine_runs_where_everything_else_is_missing(tmp_path):
    folder = write_checkpoint(tmp_path / "checkpoint", eos=None)
    script = f"""
import json, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {[*ELSEWHERE, "nanoserve.course"]!r} or name == "nanoserve.course":
            raise ModuleNotFoundError(f"{{name}} is hidden", name=name)

sys.meta_path.insert(0, Hidden())
import nanoserve
from nanoserve import LLM, SamplingParams, load_model, load_tokenizer
import nanoserve.bench.decode, nanoserve.bench.attention

llm = LLM({str(folder)!r})
answer = llm.generate("hello", SamplingParams(max_tokens=5))[0]
streamed = "".join(llm.stream("hello", SamplingParams(max_tokens=5)))
try:
    llm.chat([{{"role": "user", "content": "hi"}}])
except ModuleNotFoundError as error:
    chat = error.name
hidden = [name for name in sys.modules if name.split(".")[0] in {list(ELSEWHERE)!r}]
course = [name for name in sys.modules if name.startswith("nanoserve.course")]
print(json.dumps([answer.token_ids, answer.text == streamed, chat, hidden, course]))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    ids, streams, chat, hidden, course = json.loads(run.stdout)
    ours = nanoserve.LLM(folder).generate("hello", nanoserve.SamplingParams(max_tokens=5))[0]
    assert ids == ours.token_ids
    assert streams
    assert (chat, hidden, course) == ("jinja2", [], [])  # only a chat's template asks for jinja


def test_python_m_nanoserve_is_the_command(tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "nanoserve", "fetch", "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "NANOSERVE_CACHE": str(tmp_path)},
    )
    assert run.returncode == 0, run.stderr
    assert "SmolLM2" in run.stdout
    assert list(tmp_path.iterdir()) == []
