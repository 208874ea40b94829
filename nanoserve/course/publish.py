"""Publishing: the set-up cell at the start of every notebook, and the stamps of `make publish`.

A stamp writes the GitHub repository into a set-up cell and an "Open in Colab" badge under the
notebook's title. A later stamp replaces both. `python -m nanoserve.course.sync --stamp OWNER/NAME`
stamps all twins and updates the notebooks. sync imports this module; this module must not import
sync.
"""

import re
from pathlib import Path

from nanoserve.course.lands import ROOT, twins

SETUP_HEAD = '# %% jupyter={"source_hidden": true}'
SETUP_CELL = """\
# Set-up: on Colab, installs nanoserve in a minute or two. In your own clone it does nothing.
import importlib.util, subprocess, sys
from pathlib import Path

REPOSITORY = ""  # on GitHub, OWNER/NAME
if importlib.util.find_spec("nanoserve") is None:
    wheels = sorted(Path.cwd().glob("nanoserve-*.whl"), key=lambda wheel: wheel.stat().st_mtime)
    source = f"https://github.com/{REPOSITORY}/archive/refs/heads/main.zip" if REPOSITORY else None
    source = wheels[-1].as_uri() if wheels else source
    if source is None:
        raise ModuleNotFoundError("put a nanoserve-*.whl beside this notebook, then run again")
    pip = [sys.executable, "-m", "pip", "install", "-q", f"nanoserve[notebook] @ {source}"]
    done = subprocess.run(pip, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"pip could not install nanoserve from {source}:\\n{done.stdout}")
    importlib.invalidate_caches()
"""

_REPOSITORY = re.compile(r'(?m)^REPOSITORY = "(.*?)"')
_BADGE = re.compile(r"(?m)^#\n# \[!\[Open in Colab\].*\n")


def is_setup(source: str) -> bool:
    """Whether a cell is a set-up cell of any version, or the placeholder for a set-up cell."""
    return source.startswith(("# Set-up:", "# (the set-up cell"))


def stamped(root: Path = ROOT) -> str:
    """The repository in the twins' set-up cells; "" before the first `make publish`."""
    for twin in twins(root):
        for match in _REPOSITORY.finditer(twin.read_text(encoding="utf-8")):
            if match[1]:
                return match[1]
    return ""


def setup_cell(repository: str) -> str:
    """The text of the set-up cell, with the repository."""
    return _REPOSITORY.sub(f'REPOSITORY = "{repository}"', SETUP_CELL)


def stamp(twin_text: str, twin: str, repository: str) -> str:
    """The twin's text with the present set-up cell, folded, and with a badge if `repository` is not
    empty."""
    cells = re.split(r"(?m)^(?=# %%)", _BADGE.sub("", twin_text))
    for i, cell in enumerate(cells):
        _, _, body = cell.partition("\n")
        if is_setup(body):
            cells[i] = f"{SETUP_HEAD}\n{setup_cell(repository)}\n"
    text = "".join(cells)
    return re.sub(r"(?m)^# # .*\n", lambda m: m[0] + _badge(twin, repository), text, count=1)


def _badge(twin: str, repository: str) -> str:
    if not repository:
        return ""
    colab = "https://colab.research.google.com"
    notebook = f"{colab}/github/{repository}/blob/main/notebooks/{twin}.ipynb"
    return f"#\n# [![Open in Colab]({colab}/assets/colab-badge.svg)]({notebook})\n"


def stamp_all(repository: str, root: Path = ROOT) -> int:
    """Stamp every twin; returns their number. ValueError if `repository` is not OWNER/NAME."""
    if not re.fullmatch(r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?/[A-Za-z0-9._-]+", repository):
        raise ValueError(
            f"REPO is OWNER/NAME, as in: make publish REPO=ada/nanoserve (got {repository!r})"
        )
    found = twins(root)
    for twin in found:
        text = twin.read_text(encoding="utf-8")
        twin.write_text(stamp(text, twin.stem, repository), encoding="utf-8")
    return len(found)
