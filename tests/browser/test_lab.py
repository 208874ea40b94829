"""Day 1 in a real browser: JupyterLab opens it, runs every cell, and a widget answers."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from tests.browser.chromium import launched, needs_chromium

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.slow

NOTEBOOK = "day01_oracle.ipynb"
RUN_ALL_SECONDS = 300

SETTINGS = {
    "notebook-extension/tracker": '{"windowingMode": "none"}',  # all cells are in the page
    "apputils-extension/notification": '{"fetchNews": "false"}',
}
KERNEL = "jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status"
RUN_FIRST = """(async () => {
  const run = name => jupyterapp.commands.execute(name);
  const cells = jupyterapp.shell.currentWidget.content;
  cells.activeCellIndex = 0;
  for (let i = 0; i < 3; i++) await run('notebook:run-cell-and-select-next');
})()"""
RUN_ALL = "void jupyterapp.commands.execute('notebook:run-all-cells').then(ok => window.ran = ok)"


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[str]:
    """The address of a JupyterLab with default settings on a fresh work folder."""
    for name, text in SETTINGS.items():
        path = tmp_path / "settings/@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    environment = os.environ | {
        "NANOSERVE_WORK": str(tmp_path / "work"),
        "JUPYTER_CONFIG_DIR": str(tmp_path / "config"),
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(tmp_path / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(tmp_path / "workspaces"),
    }
    start = [sys.executable, "-m", "nanoserve", "course", "start"]
    subprocess.run(start, env=environment, check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root"]
    command += [f"--ServerApp.port={port}", "--ServerApp.port_retries=0", "--ip=127.0.0.1"]
    command += ["--IdentityProvider.token=", f"--ServerApp.root_dir={tmp_path / 'work'}"]
    command += ["--LabApp.expose_app_in_browser=True"]
    address = f"http://127.0.0.1:{port}"
    with (tmp_path / "lab.log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            wait_for(address, server, tmp_path / "lab.log")
            yield address
        finally:
            server.terminate()
            server.wait(120)


def wait_for(address: str, server: subprocess.Popen, log: Path) -> None:
    for _ in range(120):
        if server.poll() is not None:
            break
        try:
            urllib.request.urlopen(f"{address}/api", timeout=5)
            return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"JupyterLab did not start:\n{log.read_text()}")


@pytest.fixture
def page(lab: str) -> Iterator["playwright.Page"]:
    for browser in launched():
        page = browser.new_page(viewport={"width": 1440, "height": 900}, device_scale_factor=2)
        page.goto(f"{lab}/lab/tree/{NOTEBOOK}")
        page.wait_for_selector(".jp-NotebookPanel .jp-CodeCell", timeout=60_000)
        page.wait_for_function(f"{KERNEL} === 'idle'", timeout=60_000)
        yield page


FOR_THE_README = ("widget.png",)


def save(page, name: str, folder: Path) -> None:
    """Save a picture of the page, and the README's pictures, small, in $NANOSERVE_SCREENSHOTS."""
    page.screenshot(path=folder / name)
    target = os.environ.get("NANOSERVE_SCREENSHOTS")
    if target and name in FOR_THE_README:
        Path(target).mkdir(parents=True, exist_ok=True)
        picture = Image.open(folder / name).convert("RGB")
        small = picture.quantize(256, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
        small.save(Path(target) / name, optimize=True)


FIRST_SCREEN = """() => {
  const shown = selector => document.querySelector(selector).getBoundingClientRect();
  const picture = shown('.jp-RenderedImage img');
  return {title: shown('h1').top, top: picture.top, bottom: picture.bottom, height: innerHeight};
}"""


@needs_chromium
def test_the_first_screen_of_a_day_shows_its_title_and_its_picture(page, tmp_path):
    page.evaluate(RUN_FIRST)
    page.wait_for_selector(".jp-RenderedImage img", timeout=RUN_ALL_SECONDS * 1000)
    page.evaluate("document.querySelector('h1').scrollIntoView()")
    save(page, "first-screen.png", tmp_path)
    seen = page.evaluate(FIRST_SCREEN)
    assert 0 <= seen["title"] < seen["top"]
    assert seen["top"] + 0.75 * (seen["bottom"] - seen["top"]) < seen["height"]


@needs_chromium
def test_day_1_runs_in_jupyterlab_and_its_widget_answers(page, tmp_path):
    page.evaluate(RUN_ALL)
    page.wait_for_function("window.ran !== undefined", timeout=RUN_ALL_SECONDS * 1000)
    save(page, "day01.png", tmp_path)
    errors = page.locator('[data-mime-type="application/vnd.jupyter.error"]')
    assert errors.all_inner_texts() == []
    assert page.evaluate("window.ran")
    assert page.locator(".jp-CodeCell .jp-InputPrompt", has_text="[ ]:").count() == 0

    output = page.locator(".jp-OutputArea-output", has=page.locator(".widget-slider")).first
    output.scroll_into_view_if_needed()
    image = output.locator("img").first
    before = image.get_attribute("src")
    slider = output.get_by_role("slider").first
    slider.focus()
    slider.press("ArrowRight")
    playwright.expect(image).not_to_have_attribute("src", before, timeout=30_000)
    save(page, "widget.png", tmp_path)
