"""Where the browser tests find a Chromium, and how they start it."""

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
    """A headless Chromium, closed afterwards: the body of a fixture."""
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as browsers:
        browser = browsers.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()
