"""What one service's image is made of: `python3 docker/dependencies.py SERVICE KIND [EXTRA]`.

Prints, one a line, either the packages that come from an index (KIND `index`; pip's `-c
constraints.txt` pins them) or the folders of this repository (KIND `own`), for the service and
for the `duplet` command that answers health checks. EXTRA adds the optional dependencies of that
name wherever a package has them.

The images ask this of the pyproject files before they copy any code, so that a change in the code
leaves the layer of dependencies as it is. Standard library only: it runs in a bare base image.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
COMMAND = "duplet-unit"
"""Every image has it: its probe is the health command."""


def own_projects() -> dict[str, tuple[Path, dict[str, Any]]]:
    """Our packages by name: folder, and the `project` table of pyproject.toml."""
    found = {}
    for pattern in ("libs/*/pyproject.toml", "models/pyproject.toml", "services/*/pyproject.toml"):
        for file in sorted(ROOT.glob(pattern)):
            project = tomllib.loads(file.read_text("utf-8"))["project"]
            found[project["name"]] = (file.parent, project)
    return found


def closure(service: str, extra: str) -> tuple[set[str], set[str]]:
    """All that the service's image needs: names of our packages, and requirements of others.

    Raises:
        KeyError: no such service.
    """
    own = own_projects()
    needed, others = set[str](), set[str]()
    waiting = [f"duplet-{service}", COMMAND]
    while waiting:
        name = waiting.pop()
        if name in needed:
            continue
        needed.add(name)
        project = own[name][1]
        optional = project.get("optional-dependencies", {}).get(extra, [])
        for requirement in (*project["dependencies"], *optional):
            # An own package's extra is taken or left by the same word as ours.
            dependency = re.split(r"[^\w-]", requirement)[0]
            if dependency in own:
                waiting.append(dependency)
            else:
                others.add(requirement)
    return needed, others


def main(service: str, kind: str, extra: str = "") -> None:
    """Print the list that was asked for."""
    own = own_projects()
    needed, others = closure(service, extra)
    lines = {
        "index": sorted(others),
        "own": sorted(str(own[name][0].relative_to(ROOT)) for name in needed),
    }
    print("\n".join(lines[kind]))


if __name__ == "__main__":
    main(*sys.argv[1:])
