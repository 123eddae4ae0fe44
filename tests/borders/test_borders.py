"""The borders between packages: what may import what, where each stands, how long a module is."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from duplet_runtime.settings import CONFIG_VARIABLE, SERVICE_NAMES, ServiceSettings

ROOT = Path(__file__).parents[2]
PACKAGES = {
    path.parent.name: path.parent
    for folder in ("libs/*", "services/*", "models")
    for path in sorted(ROOT.glob(f"{folder}/duplet_*/__init__.py"))
}
PACKAGE_OF = {str(top.parent.relative_to(ROOT)): name for name, top in PACKAGES.items()}
"""By the folder of its pyproject.toml."""
WITHOUT_TORCH = (
    "duplet_core",
    "duplet_pages",
    "duplet_models",
    "duplet_wire",
    "duplet_runtime",
    "duplet_client",
    "duplet_load",
    "duplet_voice",
    "duplet_canary",
    "duplet_unit",
    "duplet_lb",
    "duplet_prefill",
    "duplet_decode",
    "duplet_kvproxy",
    "duplet_monolith",
)
LONGEST_MODULE = 450


def modules_of(package: str) -> dict[str, Path]:
    """Dotted names and files of a package's modules; `__main__` included."""
    top = PACKAGES[package]
    names = {}
    for path in sorted(top.rglob("*.py")):
        parts = path.relative_to(top.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imported_names(path: Path) -> Iterator[str]:
    """Every module that the file imports, in functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def reached_modules(start: str) -> dict[str, Path]:
    """The project's own modules that importing `start` loads, found in the sources."""
    files = {name: path for package in PACKAGES for name, path in modules_of(package).items()}
    reached: dict[str, Path] = {}
    waiting = [start]
    while waiting:
        name = waiting.pop()
        if name in files and name not in reached:
            reached[name] = files[name]
            parents = (name.rsplit(".", n)[0] for n in range(1, name.count(".") + 1))
            waiting += [*parents, *imported_names(files[name])]
    return reached


def loaded_after_import(modules: list[str]) -> set[str]:
    """Top-level names in `sys.modules` of a fresh interpreter that imported `modules`."""
    program = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "print('\\n'.join({name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True
    )
    return set(done.stdout.split())


def test_packages_are_found() -> None:
    assert len(PACKAGES) >= 12
    assert len(modules_of("duplet_core")) > 5


def test_core_imports_only_the_standard_library() -> None:
    foreign = {
        (module, name)
        for module, path in modules_of("duplet_core").items()
        for name in imported_names(path)
        if (top := name.partition(".")[0]) != "duplet_core" and top not in sys.stdlib_module_names
    }
    assert not foreign


def test_core_has_no_clock_no_chance_and_no_input_or_output() -> None:
    impure = {"asyncio", "io", "logging", "os", "random", "secrets", "socket", "threading", "time"}
    found = {
        (module, name)
        for module, path in modules_of("duplet_core").items()
        for name in imported_names(path)
        if name.partition(".")[0] in impure
    }
    assert not found


@pytest.mark.parametrize("package", WITHOUT_TORCH)
def test_torch_is_not_loaded(package: str) -> None:
    loaded = loaded_after_import(list(modules_of(package)))
    assert package in loaded
    assert "torch" not in loaded


def test_lb_without_spans_loads_nothing_for_them() -> None:
    assert "opentelemetry" in loaded_after_import(["duplet_lb.tracing"])
    assert "opentelemetry" not in loaded_after_import(["duplet_lb.__main__"])


def test_engine_process_has_no_asyncio_and_no_grpc_of_its_own() -> None:
    """By the sources: torch itself may load asyncio, which then runs no loop."""
    reached = reached_modules("duplet_engine.__main__")
    assert "duplet_engine.__main__" in reached
    assert "duplet_core.engine" in reached
    found = {
        (module, name)
        for module, path in reached.items()
        for name in imported_names(path)
        if name.partition(".")[0] in {"asyncio", "grpc", "grpc_health", "duplet", "duplet_wire"}
    }
    assert not found


def test_no_package_imports_one_that_it_does_not_declare() -> None:
    """What a package imports of the project stands in its pyproject.toml."""
    undeclared = set()
    for package, top in PACKAGES.items():
        declared = set(re.findall(r'"(duplet-\w+)', (top.parent / "pyproject.toml").read_text()))
        for path in modules_of(package).values():
            for name in imported_names(path):
                other = name.partition(".")[0]
                other = "duplet_wire" if other == "duplet" else other
                if other.startswith("duplet_") and other.replace("_", "-") not in declared:
                    undeclared.add((package, other))
    assert not undeclared


def test_images_of_services_need_no_voice() -> None:
    """Each has the `duplet` command for its probe; only an engine needs a model's files."""
    found = subprocess.run(
        [sys.executable, ROOT / "docker" / "dependencies.py", "lb", "own"],
        capture_output=True,
        text=True,
        check=True,
    )
    own = {PACKAGE_OF[line] for line in found.stdout.splitlines()}
    without = [name for name in PACKAGES if name not in own]
    assert {"duplet_models", "duplet_voice", "duplet_canary", "duplet_engine"} <= set(without)
    hidden = f"import sys; sys.modules.update(dict.fromkeys({without}))"
    program = f"{hidden}; import duplet_unit.commands"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_every_package_stands_once_in_the_architecture() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    rows = re.findall(r"^\| `(duplet_\w+)` \| (\S+) \|", text, flags=re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted(PACKAGES)
    assert {name: ROOT / path / name for name, path in rows} == PACKAGES


def test_links_in_the_documents_lead_somewhere() -> None:
    broken = [
        (path.name, target)
        for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text())
        if not (path.parent / target).exists()
    ]
    assert not broken


def test_settings_in_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text()
    known = {f"DUPLET_{field.upper()}" for field in ServiceSettings.model_fields}
    for role in SERVICE_NAMES:
        module = importlib.import_module(f"duplet_{role}.__main__")
        kinds = [v for v in vars(module).values() if getattr(v, "role", None) == role]
        assert kinds, f"{role} has no settings"
        known |= {f"DUPLET_{role}_{f}".upper() for kind in kinds for f in kind.model_fields}
    named = set(re.findall(r"`(DUPLET_[A-Z_]+)`", text)) - {CONFIG_VARIABLE}
    assert len(named) > 8
    assert not named - known


def test_modules_are_short() -> None:
    generated = re.compile(r"_pb2(_grpc)?\.py$")
    files = [
        path
        for folder in ("libs", "services", "tests", "bench")
        for path in (ROOT / folder).rglob("*.py")
        if not generated.search(path.name)
    ]
    assert files
    lengths = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in files}
    assert not {name: n for name, n in lengths.items() if n > LONGEST_MODULE}
