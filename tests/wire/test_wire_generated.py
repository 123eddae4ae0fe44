"""The committed stubs are those of the protos."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from duplet.peer.v1 import peer_pb2
from duplet_core.errors import Reason
from duplet_core.ids import Role

WIRE = Path(__file__).parents[2] / "libs" / "wire"


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", WIRE / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_committed_stubs_are_those_of_the_protos(tmp_path: Path) -> None:
    written = load_generator().generate(tmp_path)
    committed = sorted(
        path.relative_to(WIRE)
        for path in (WIRE / "duplet").rglob("*_pb2*")
        if path.suffix in (".py", ".pyi")
    )
    assert len(written) >= 20
    assert written == committed
    for path in written:
        assert (WIRE / path).read_bytes() == (tmp_path / path).read_bytes(), path


def test_contract_names_every_reason_and_role() -> None:
    assert set(peer_pb2.Reason.keys()) == {
        "REASON_UNSPECIFIED",
        *(f"REASON_{reason.name}" for reason in Reason),
    }
    assert set(peer_pb2.Role.keys()) == {
        "ROLE_UNSPECIFIED",
        *(f"ROLE_{role.name}" for role in Role),
    }
