"""What one service's image is made of: `python3 docker/dependencies.py SERVICE KIND [CUDA]`.

Prints, for the service and for the `duplet` command that answers health checks, one a line:

- KIND `index`: the packages that come from an index, for pip's `-r`; where torch is one of them,
  PyTorch's index of the variant, too, in the folder that TORCH_INDEX names (empty: none);
- KIND `constraints`: their versions, for pip's `-c`: constraints.txt, with CUDA's bindings of the
  variant;
- KIND `own`: the folders of this repository.

CUDA is the variant, such as `13.0`; it adds the optional dependencies `gpu` wherever a package
has them. Without it the image is for CPUs.

The images ask this of the pyproject files before they copy any code, so that a change in the code
leaves the layer of dependencies as it is. Standard library only: it runs in a bare base image.
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
COMMAND = "duplet-unit"
"""Every image has it: its probe is the health command."""

BINDINGS = "cuda-bindings"
VARIANT = re.compile(r"\d+\.\d+")


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


def index_lines(service: str, cuda: str, torch_index: str) -> list[str]:
    """Requirements, and before them the index that has torch's build for the variant."""
    others = sorted(closure(service, "gpu" if cuda else "")[1])
    if torch_index and any(re.match(r"torch\b", other) for other in others):
        variant = f"cu{cuda.replace('.', '')}" if cuda else "cpu"
        return [f"--extra-index-url {torch_index.rstrip('/')}/{variant}", *others]
    return others


def constraint_lines(pinned: str, cuda: str) -> list[str]:
    """`pinned`, the text of constraints.txt, with the newest bindings of another variant in the
    place of those that it pins."""
    lines = [line for line in pinned.splitlines() if line and not line.startswith("#")]
    [bindings] = [line for line in lines if line.startswith(f"{BINDINGS}==")]
    if cuda and not bindings.startswith(f"{BINDINGS}=={cuda}."):
        lines[lines.index(bindings)] = f"{BINDINGS}=={cuda}.*"
    return lines


def main(service: str, kind: str, cuda: str = "") -> None:
    """Print the list that was asked for."""
    if cuda and not VARIANT.fullmatch(cuda):
        sys.exit(f"CUDA: {cuda}: a variant is written like 13.0")
    if kind == "index":
        lines = index_lines(service, cuda, os.environ.get("TORCH_INDEX", ""))
    elif kind == "constraints":
        lines = constraint_lines((ROOT / "constraints.txt").read_text("utf-8"), cuda)
    else:
        own = own_projects()
        needed = closure(service, "gpu" if cuda else "")[0]
        lines = sorted(str(own[name][0].relative_to(ROOT)) for name in needed)
    print("\n".join(lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
