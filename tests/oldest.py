"""Print the oldest versions that pyproject.toml admits, one `name==version` a line.

`make test-oldest` installs them all at once: `pip install -c oldest.txt -e .[dev]`.
"""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent


def oldest(project: dict) -> list[str]:
    """The lower bound of each requirement of a `[project]` table, extras included, as a pin.

    Raises ValueError for a requirement without exactly one bound of the form `>=`, because no
    test could then run the oldest version.
    """
    stated = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        stated += extra
    pins = []
    for requirement in map(Requirement, stated):
        if requirement.name == project["name"]:  # one extra includes another
            continue
        bounds = [bound for bound in requirement.specifier if bound.operator == ">="]
        if len(bounds) != 1:
            raise ValueError(f"pyproject.toml: {requirement} needs one lower bound, as in >=1.2")
        marker = f" ; {requirement.marker}" if requirement.marker else ""
        pins.append(f"{requirement.name}=={bounds[0].version}{marker}")
    return sorted(pins, key=str.lower)


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    print(*oldest(project), sep="\n")
