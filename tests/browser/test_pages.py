"""Every stored notebook as a page in a real browser: nothing is wider than its column."""

import os
from pathlib import Path

import pytest

from nanoserve.course import export
from nanoserve.course.lands import notebooks
from tests.browser.chromium import launched, needs_chromium

pytestmark = [pytest.mark.slow, needs_chromium]

NOTEBOOKS = notebooks()
COLUMN = 1006  # pixels: a cell's column in JupyterLab on a screen of 1,440, file browser open

NARROW = f".jp-Cell {{ width: {COLUMN}px }} .jp-OutputPrompt, .jp-InputPrompt {{ width: 0 }}"
TOO_WIDE = """() => {
  const parts = '.jp-RenderedMarkdown, .jp-OutputArea-output, .jp-InputArea-editor';
  const told = [];
  for (const part of document.querySelectorAll(parts)) {
    const column = part.closest('.jp-Cell').getBoundingClientRect();
    for (const inner of [part, ...part.querySelectorAll('*')]) {
      const box = inner.getBoundingClientRect();
      const wide = Math.max(box.right - column.left, inner.scrollWidth);
      if (box.width && wide > column.width + 1)
        told.push(`${inner.tagName} ${Math.round(wide)}: ${inner.textContent.slice(0, 60)}`);
    }
  }
  if (document.documentElement.scrollWidth > innerWidth) told.push('the page scrolls sideways');
  return told.slice(0, 5);
}"""
BROKEN_WORDS = """() => {
  const told = [];
  for (const pre of document.querySelectorAll('.jp-OutputArea-output pre')) {
    const style = getComputedStyle(pre);
    const rows = Math.round((pre.scrollHeight - parseFloat(style.paddingTop)
      - parseFloat(style.paddingBottom)) / parseFloat(style.lineHeight));
    const lines = pre.textContent.replace(/\\n$/, '').split('\\n').length;
    if (rows > lines) told.push(pre.textContent.slice(0, 80));
  }
  return told;
}"""
PICTURES = "() => [...document.images].map(i => [i.alt, i.width, i.naturalWidth])"
OPEN = "() => [...document.querySelectorAll('details.folded')].map(d => [d.open, d.innerText])"


@pytest.fixture(scope="module")
def browser():
    yield from launched()


@pytest.fixture(params=["light", "dark"])
def theme(request) -> str:
    return request.param


@pytest.fixture
def page(browser, tmp_path):
    """Opens a notebook's page at 1,440 pixels; nothing is fetched from elsewhere."""
    opened = browser.new_page(viewport={"width": 1440, "height": 900}, device_scale_factor=2)
    opened.route("http*://**", lambda route: route.abort())

    def show(notebook: Path, theme: str):
        path = tmp_path / f"{notebook.stem}.html"
        path.write_text(export.page(notebook, theme), encoding="utf-8")
        opened.goto(path.as_uri(), wait_until="load")
        opened.add_style_tag(content=NARROW)
        if folder := os.environ.get("NANOSERVE_PAGES"):  # to look at them
            name = f"{notebook.stem}-{theme}.png"
            opened.screenshot(path=Path(folder) / name, full_page=True, scale="css")
        return opened

    yield show
    opened.close()


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_page_keeps_to_its_column_describes_its_pictures_and_closes_its_folds(
    notebook, theme, page
):
    shown = page(notebook, theme)
    assert shown.evaluate(TOO_WIDE) == []
    for alt, width, pixels in shown.evaluate(PICTURES):
        assert len(alt) > 20 and not alt.startswith("["), f"a picture says only {alt!r}"
        assert pixels >= 2 * width - 2, f"{alt}: {pixels} pixels for {width}: blurred"
    folds = shown.evaluate(OPEN)
    assert folds and not any(is_open for is_open, _ in folds)
    assert folds[0][1].startswith("Set-up:")


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_printed_line_is_broken(notebook, page):
    """JupyterLab breaks lines that are too long for the column, within words."""
    assert page(notebook, "light").evaluate(BROKEN_WORDS) == []
