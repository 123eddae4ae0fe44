"""docs/settings.md, made from the settings classes: `python -m docs.settings_tables`.

A test keeps the page equal to what this writes.
"""

from __future__ import annotations

import ast
import html
import inspect
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from docs import compose_tables
from duplet_decode.__main__ import DecodeSettings
from duplet_kvproxy.__main__ import KvproxySettings
from duplet_lb.settings import LbSettings
from duplet_monolith.__main__ import MonolithSettings
from duplet_prefill.__main__ import PrefillSettings
from duplet_runtime.settings import PREFIX, ServiceSettings

PAGE = Path(__file__).with_name("settings.md")

CLASSES: tuple[type[ServiceSettings], ...] = (
    LbSettings,
    PrefillSettings,
    DecodeSettings,
    KvproxySettings,
    MonolithSettings,
)

WORDS_OF_DEFAULTS = {"run_dir": "`$XDG_RUNTIME_DIR/duplet`"}
"""Where a default is made at the start."""

KINDS: dict[Any, str] = {
    bool: "true, false",
    int: "whole number",
    float: "number",
    str: "text",
    Path: "path",
}
SIGNS = {Ge: "≥", Gt: ">", Le: "≤", Lt: "<"}

OPENING = """\
# Settings

Made from the code by `make tables`; do not edit.

Every setting comes from the environment, or from the TOML file that `DUPLET_CONFIG` names: what
all services share at the top, a service's own in its table, in lower case. The environment wins;
`DUPLET_<SERVICE>_<NAME>` wins over `DUPLET_<NAME>`. An unknown name or a bad value ends the start
with exit code 2 and says which it is. Compose stands between, and passes on names that it knows:
see [In containers](#in-containers).
"""


def page() -> str:
    """The whole page."""
    shared = ServiceSettings.model_fields
    parts = [OPENING, *_section("All services", PREFIX, ServiceSettings, list(shared))]
    for kind in CLASSES:
        own = [name for name in kind.model_fields if name not in shared]
        parts += _section(kind.role, f"{PREFIX}{kind.role.upper()}_", kind, own)
    parts += compose_tables.section(CLASSES)
    return "\n".join(parts)


def _section(
    title: str, prefix: str, kind: type[ServiceSettings], names: list[str]
) -> Iterator[str]:
    yield f"## {title}\n"
    yield "| setting | values | default | means |"
    yield "|---|---|---|---|"
    texts = texts_of(kind)
    for name in names:
        field = kind.model_fields[name]
        cells = (f"`{prefix}{name.upper()}`", values(field), default(name, field))
        yield f"| {' | '.join(cells)} | {texts.get(name, '')} |"
    yield ""


def texts_of(kind: type[ServiceSettings]) -> dict[str, str]:
    """What the source says below each field, of this class and those it is made from."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not issubclass(base, ServiceSettings):
            continue
        [body] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(body, ast.ClassDef)
        for field, after in zip(body.body, body.body[1:], strict=False):
            match field, after:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    found[name] = html.escape(" ".join(text.split()), quote=False)
    return found


def values(field: FieldInfo) -> str:
    """What may be written: words, or a kind of value and its bounds."""
    if typing.get_origin(field.annotation) is typing.Literal:
        return ", ".join(f"`{word}`" for word in typing.get_args(field.annotation))
    assert field.annotation is not None
    bounds = [
        f"{sign} {getattr(bound, kind.__name__.lower()):g}"
        for bound in field.metadata
        for kind, sign in SIGNS.items()
        if isinstance(bound, kind)
    ]
    return " ".join([KINDS[field.annotation], ", ".join(bounds)]).strip()


def default(name: str, field: FieldInfo) -> str:
    """The default; where it follows from the device, that of each."""
    if name in WORDS_OF_DEFAULTS:
        return WORDS_OF_DEFAULTS[name]
    if field.default_factory is None:
        return _shown(field.default)
    by_device: dict[str, Any] = {
        device: field.get_default(call_default_factory=True, validated_data={"device": device})
        for device in ("cpu", "cuda")
    }
    return f"{_shown(by_device['cpu'])}; on a GPU {_shown(by_device['cuda'])}"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str):
        return f"`{value}`" if value else "empty"
    return str(value)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
