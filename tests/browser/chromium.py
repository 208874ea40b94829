"""Finding and starting Chromium for the browser tests."""

import os
import shutil
from collections.abc import Iterator

import pytest

NAMES = ("chromium", "google-chrome", "chromium-browser")
FOUND = [os.environ.get("NANOSERVE_CHROMIUM"), *map(shutil.which, NAMES)]
CHROMIUM = next(filter(None, FOUND), None)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--no-first-run",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
]

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None,
    reason="no Chromium: apt install chromium, or set NANOSERVE_CHROMIUM to a Chrome's path",
)


def launched() -> Iterator:
    """The body of a fixture: a headless Chromium, closed afterwards."""
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as browsers:
        browser = browsers.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()
