"""Generate the Python stubs of `protos/` into a folder: `python libs/wire/generate.py [OUT]`.

Without OUT they go beside this file, where they are committed.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

WIRE = Path(__file__).resolve().parent
PROTOS = WIRE.parent.parent / "protos"


def generate(out: Path) -> list[Path]:
    """Write the stubs of every proto under `out`; its path is their Python package.

    Returns:
        The files written, relative to `out`, sorted.

    Raises:
        subprocess.CalledProcessError: a proto is wrong or a plugin is missing.
    """
    sources = sorted(path.relative_to(PROTOS) for path in PROTOS.rglob("*.proto"))
    # Plugins are found beside this interpreter, whether or not its environment is activated.
    scripts = Path(sysconfig.get_path("scripts"))
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"--proto_path={PROTOS}",
        f"--plugin=protoc-gen-mypy={scripts / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={scripts / 'protoc-gen-mypy_grpc'}",
        f"--python_out={out}",
        f"--grpc_python_out={out}",
        f"--mypy_out=quiet:{out}",
        f"--mypy_grpc_out=quiet:{out}",
        *(str(source) for source in sources),
    ]
    subprocess.run(command, check=True)
    return sorted(
        path.relative_to(out) for path in out.glob("duplet/**/*_pb2*") if path.suffix != ".pyc"
    )


if __name__ == "__main__":
    for written in generate(Path(sys.argv[1]) if len(sys.argv) > 1 else WIRE):
        print(written)
