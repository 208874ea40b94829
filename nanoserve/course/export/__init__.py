"""A notebook as a page: nbconvert's HTML with folded cells closed and pictures described.

The wheel puts etc/ and share/ of this folder into the environment, so that a plain
`jupyter nbconvert --to html notebooks/day05_swiglu.ipynb` finds template and settings.
"""

from pathlib import Path

HERE = Path(__file__).resolve().parent
TEMPLATES = HERE / "share/jupyter/nbconvert/templates"


def page(notebook: Path, theme: str = "light") -> str:
    """The HTML page of a notebook file; `theme` is "light" or "dark"."""
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(
        template_name="nanoserve", extra_template_basedirs=[str(TEMPLATES)], theme=theme
    )
    return exporter.from_filename(str(notebook))[0]
