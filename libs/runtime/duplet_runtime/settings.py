"""Typed settings of a service, from the environment and an optional TOML file.

Where a value comes from, first match wins:

1. `DUPLET_<ROLE>_<FIELD>`, for one service (`DUPLET_LB_METRICS_PORT`);
2. `DUPLET_<FIELD>`, for every service; only the fields of `ServiceSettings`;
3. the file named by `DUPLET_CONFIG`: table `[<role>]`, then its top level, with the same two
   rules.

All services of a unit may share one environment and one file: each judges the names without
a role and those with its own, and leaves other roles' names to them. A name that nobody knows
stops the start; a typo is never ignored.

Run directory: `run_dir` when set, else `$XDG_RUNTIME_DIR/duplet`, else `duplet-<uid>` in the
folder for temporary files.
"""

from __future__ import annotations

import difflib
import os
import stat
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import pydantic_settings
from pydantic import Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from duplet_core.ids import Role

PREFIX = "DUPLET_"
CONFIG_VARIABLE = "DUPLET_CONFIG"

SOCKET_PATH_BYTES = 107
"""Longest path of a Unix socket: `sun_path` has 108 bytes, one of them the final zero."""

_LONGEST_NAME = "kvproxy.sock.new"

BAD_SETTINGS_EXIT = 2

MONOLITH = "monolith"
"""The host that plays prefill and decode in one process; to its peers it is both of them."""

SERVICE_NAMES: tuple[str, ...] = (*Role, MONOLITH)
"""Whoever has settings of its own."""


class SettingsError(Exception):
    """The service cannot start with these settings; the text names the setting at fault."""


def default_run_dir() -> Path:
    """Where sockets and locks live when nothing is set; see the module's text."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime) / "duplet"
    return Path(tempfile.gettempdir()) / f"duplet-{os.getuid()}"


class ServiceSettings(BaseSettings):
    """What every service is told; a service's own class sets `role` and adds its fields."""

    role: ClassVar[str]
    """One of SERVICE_NAMES."""
    model_config = SettingsConfigDict(extra="forbid", frozen=True)

    run_dir: Path = Field(default_factory=default_run_dir, validate_default=True)
    """Folder of the unit's sockets and locks, mode 0700; one unit a folder."""
    log_format: Literal["auto", "json", "text"] = "auto"
    """Of the lines on stderr; auto: text on a terminal, JSON elsewhere."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least that is said."""
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """TCP port of Prometheus metrics; 0: none."""
    metrics_host: str = "127.0.0.1"
    """Address on which they are served: `0.0.0.0` for a scraper outside a container."""

    @field_validator("run_dir")
    @classmethod
    def _fits_sockets(cls, value: Path) -> Path:
        path = Path(os.path.abspath(value))
        longest = len(os.fsencode(path / _LONGEST_NAME))
        if longest > SOCKET_PATH_BYTES:
            room = SOCKET_PATH_BYTES - len(_LONGEST_NAME) - 1
            raise ValueError(
                f"{path} has {len(os.fsencode(path))} bytes; Unix sockets leave room for {room}: "
                "choose a shorter path"
            )
        return path

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (
            init_settings,
            EnvSettingsSource(settings_cls, env_prefix=f"{PREFIX}{cls.role.upper()}_"),
            EnvSettingsSource(settings_cls, env_prefix=PREFIX),
            InitSettingsSource(settings_cls, _read_file(cls)),
        )

    def warnings(self) -> list[str]:
        """What is allowed and must not stay unnoticed."""
        return []

    def socket_path(self, role: Role) -> Path:
        """Unix socket on which `role` takes peer streams."""
        return self.run_dir / f"{role}.sock"

    def peer_address(self, role: Role) -> str:
        """gRPC address of `role`'s peer socket; the same text to listen on and to dial."""
        return f"unix:{self.socket_path(role)}"

    @property
    def lifeline_path(self) -> Path:
        """kvproxy's lifeline socket."""
        return self.run_dir / "lifeline.sock"

    def lock_path(self, role: str) -> Path:
        """The lock that one instance of `role` holds for life."""
        return self.run_dir / f"{role}.lock"


S = TypeVar("S", bound=ServiceSettings)


def load_settings(kind: type[S]) -> S:
    """Settings of one service from environment and file.

    Raises:
        SettingsError: an unknown name or a bad value; the text names each of them.
    """
    _refuse(_unknown_variables(kind, os.environ))
    try:
        return kind()
    except ValidationError as error:
        problems = [
            f"{_source_of(kind, str(entry['loc'][0]) if entry['loc'] else '')}: "
            f"{entry['msg'].removeprefix('Value error, ')} (value {entry['input']!r})"
            for entry in error.errors(include_url=False)
            if entry["type"] != "default_factory_not_called"  # another field's fault
        ]
        raise SettingsError("\n".join(problems)) from error
    except pydantic_settings.SettingsError as error:
        raise SettingsError(str(error)) from error


def load_settings_or_exit(kind: type[S]) -> S:
    """As `load_settings`; a bad setting is printed to stderr and ends the process with 2."""
    try:
        return load_settings(kind)
    except SettingsError as error:
        print_problems(kind.role, error)
        sys.exit(BAD_SETTINGS_EXIT)


def print_problems(role: str, error: SettingsError) -> None:
    """Tell the operator on stderr, a line a problem."""
    for line in str(error).splitlines():
        print(f"duplet {role}: {line}", file=sys.stderr)


def prepare_run_dir(path: Path) -> None:
    """Make the run directory, or check that it is ours alone.

    Raises:
        SettingsError: it cannot be made, is no folder, or others may enter it.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
    except OSError as error:
        raise SettingsError(f"run_dir: {path}: {error.strerror}") from error
    if found.st_uid != os.getuid():
        raise SettingsError(f"run_dir: {path} belongs to uid {found.st_uid}, not {os.getuid()}")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise SettingsError(
            f"run_dir: {path} has mode {stat.S_IMODE(found.st_mode):04o}; "
            "it must be a folder of the unit's own, closed to others (mode 0700)"
        )


def _refuse(problems: list[str]) -> None:
    if problems:
        raise SettingsError("\n".join(problems))


def _unknown_variables(kind: type[ServiceSettings], environ: Mapping[str, str]) -> list[str]:
    shared = ServiceSettings.model_fields
    known = {f"{PREFIX}{field.upper()}" for field in shared} | {CONFIG_VARIABLE}
    own_prefix = f"{PREFIX}{kind.role.upper()}_"
    known |= {f"{own_prefix}{field.upper()}" for field in kind.model_fields}
    others = (name for name in SERVICE_NAMES if name != kind.role)
    other_prefixes = tuple(f"{PREFIX}{name.upper()}_" for name in others)
    return [
        f"{name}: no such setting{_suggest_variable(kind, name, known)}"
        for name in sorted(environ)
        if name.startswith(PREFIX) and name not in known and not name.startswith(other_prefixes)
    ]


def _suggest_variable(kind: type[ServiceSettings], name: str, known: Iterable[str]) -> str:
    """What was meant, as far as it can be told; what all names begin with tells nothing."""
    bare = name.removeprefix(PREFIX)
    if bare.lower() in kind.model_fields:
        return f"; did you mean {PREFIX}{kind.role.upper()}_{bare}?"
    close = difflib.get_close_matches(bare, sorted(k.removeprefix(PREFIX) for k in known), n=1)
    return f"; did you mean {PREFIX}{close[0]}?" if close else ""


def _suggest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _read_file(kind: type[ServiceSettings]) -> dict[str, Any]:
    """The file's values for this service, its table over the top level."""
    name = os.environ.get(CONFIG_VARIABLE)
    if not name:
        return {}
    try:
        content = tomllib.loads(Path(name).read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise SettingsError(f"{CONFIG_VARIABLE}: {name}: {why}") from error
    own = content.pop(kind.role, {})
    for role in SERVICE_NAMES:
        content.pop(role, None)
    if not isinstance(own, dict):
        raise SettingsError(f"{name}: {kind.role} must be a table")
    shared = ServiceSettings.model_fields
    at_top = {field: field for field in shared} | {role: f"[{role}]" for role in SERVICE_NAMES}
    _refuse(
        [
            f"{name}: {key}: no such setting{_suggest_key(kind, key, at_top)}"
            for key in sorted(content)
            if key not in shared
        ]
        + [
            f"{name}: [{kind.role}] {key}: no such setting{_suggest(key, kind.model_fields)}"
            for key in sorted(own)
            if key not in kind.model_fields
        ]
    )
    return {**content, **own}


def _suggest_key(kind: type[ServiceSettings], key: str, at_top: Mapping[str, str]) -> str:
    if key in kind.model_fields:
        return f"; it belongs into [{kind.role}]"
    close = difflib.get_close_matches(key, sorted(at_top), n=1)
    return f"; did you mean {at_top[close[0]]}?" if close else ""


def _source_of(kind: type[ServiceSettings], field: str) -> str:
    """How the operator wrote the setting at fault."""
    for name in (f"{PREFIX}{kind.role}_{field}".upper(), f"{PREFIX}{field}".upper()):
        if name in os.environ:
            return name
    if field in _read_file(kind):
        return f"{os.environ[CONFIG_VARIABLE]}: {field}"
    return field
