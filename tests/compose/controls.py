"""Runs that must fail, so that the ones which must not have something to say."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from duplet_client import AsyncClient
from duplet_core.ids import Role
from tests.compose.composed_unit import UNIT_FILES, ComposedUnit
from tests.compose.page_commands import PageShell
from tests.compose.scene import ASKS, Scene, say
from tests.e2e.live_unit import until
from tests.e2e.streams import is_prefix, read_all

DAMAGED_FILES = (*UNIT_FILES, "tests/compose/damaged.yaml")

SHOW = (
    "from duplet_lb.settings import LbSettings; "
    "from duplet_runtime.settings import load_settings_or_exit; "
    "s = load_settings_or_exit(LbSettings); print(s.queue_limit, s.queue_wait_ms)"
)
IS_2 = '[ "$code" = 2 ]'
SHOW_SETTINGS = f'docker compose run --rm --no-deps lb python -c "{SHOW}"'


async def damage_kv(scene: Scene, unit: ComposedUnit) -> None:
    """KV that is overwritten under a stream is counted, by lb and in the log, and changes rows."""
    await unit.observe()
    up = ("up", "-d", "--no-build", str(Role.DECODE))
    await unit.compose(*up, files=DAMAGED_FILES)
    await unit.wait_serving()
    async with AsyncClient(unit.address) as client:
        streams = await read_all(client, scene.spec, ASKS)

    async def counted() -> tuple[int, int] | None:
        told, logged = await unit.count_mismatches()
        return (told, logged) if told and logged else None

    found = await until(counted, "damaged KV is counted")
    assert found is not None
    wrong = [
        s for s, right in zip(streams, scene.reference, strict=True) if not is_prefix(s, right)
    ]
    assert wrong, "damaged KV gave right rows"
    say(
        f"      {found[0]} mismatches told, {found[1]} logged, {len(wrong)} streams with wrong rows"
    )


async def try_settings(unit: ComposedUnit, shell: PageShell) -> None:
    """What the pages say of settings: from the environment and a file; a bad one ends the start."""
    with settings_file("[lb]\nqueue_limit = 7\n") as path:
        told = await shell.run(
            f"UNIT_CONFIG={path} DUPLET_LB_QUEUE_WAIT_MS=33 {SHOW_SETTINGS}", unit
        )
        assert told.splitlines()[-1] == "7 33", told
    with settings_file("[lb]\nqueue_limt = 7\n") as path:
        told = await shell.run(
            f"code=0; UNIT_CONFIG={path} {SHOW_SETTINGS} || code=$?\n{IS_2}", unit
        )
        assert "[lb] queue_limt: no such setting; did you mean queue_limit?" in told, told
    bad = f"code=0; DUPLET_LB_QUEUE_LIMIT=many {SHOW_SETTINGS} || code=$?\n{IS_2}"
    assert "DUPLET_LB_QUEUE_LIMIT" in await shell.run(bad, unit)
    # As the pages warn.
    told = await shell.run(f"DUPLET_LB_QUEUE_LIMT=7 {SHOW_SETTINGS}", unit)
    assert "LIMT" not in told, told


@contextmanager
def settings_file(text: str) -> Iterator[Path]:
    """A file that everybody can read."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(text)
        file.flush()
        Path(file.name).chmod(0o644)
        yield Path(file.name)
