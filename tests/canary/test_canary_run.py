"""What a run makes of its options and of the two sides' models."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import duplet_models
from duplet_canary.ear import EarPool
from duplet_canary.equivalence import Difference
from duplet_canary.recognisers import RecogniserName
from duplet_canary.run import (
    Options,
    check_kinds,
    common_spec,
    has_enough_power,
    make_plan,
    must_rows_be_equal,
)
from duplet_client import ServiceInfo, Unit
from duplet_client.front_end import front_end
from duplet_core.errors import DupletError, InvalidInput, Unavailable
from duplet_engine.engine import Engine
from duplet_pages.engine_config import EngineConfig
from duplet_pages.spec import ModelSpec
from duplet_voice.voices import load_voices
from tests.canary.canary_parts import UTTERANCES


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    engine = Engine(EngineConfig("decode", "tiny", pool_pages=4))
    engine.close()
    return replace(
        engine.spec,
        name="wren",
        vocab=1280,
        codebook_sizes=(1024,) * 10,
        semantic_first=256,
        semantic_last=1279,
        stop_id=1,
    )


@pytest.mark.parametrize(
    ("options", "of_model", "must"),
    [
        ({}, {}, True),
        ({"other_seeds": True}, {}, False),
        ({}, {"dtype": "bfloat16"}, False),
        ({}, {"kv_hash": "some-gpu's"}, False),
    ],
)
def test_rows_must_be_equal_where_arithmetic_is_exact(
    spec: ModelSpec, options: dict[str, Any], of_model: dict[str, Any], must: bool
) -> None:
    assert must_rows_be_equal(Options(**options), replace(spec, **of_model)) is must


def test_a_run_ends_for_its_power_from_a_thousand_pairs_on() -> None:
    precise = Difference(0.07, 0.09, standard_error=0.001, pairs=1_000, clusters=1_000)
    asked = Options(enough_power=0.85)
    assert has_enough_power(precise, asked), "however the sides differ"
    assert not has_enough_power(precise, Options())
    assert not has_enough_power(replace(precise, pairs=999), asked)
    assert not has_enough_power(replace(precise, standard_error=0.0017), asked)
    assert not has_enough_power(None, asked)


def test_two_models_are_not_compared(spec: ModelSpec) -> None:
    assert common_spec(spec, spec) is spec
    with pytest.raises(InvalidInput, match="two models cannot be compared"):
        common_spec(replace(spec, fingerprint="beef"), spec)


def side_of(**instances: str) -> Unit:
    """What a side says of itself, with these instances."""
    services = tuple(ServiceInfo(n, i, "", 2, bool(i)) for n, i in {"lb": "1", **instances}.items())
    return Unit(None, services, (), 0, None, "", 0, 0, {}, {})


MONOLITH = side_of(prefill="7", decode="7")
UNIT = side_of(prefill="7", decode="8")


def test_a_monolith_is_compared_with_a_unit() -> None:
    check_kinds(MONOLITH, UNIT)


@pytest.mark.parametrize(
    ("monolith", "unit", "error", "told"),
    [
        (UNIT, UNIT, InvalidInput, "monolith: a unit answers there"),
        (MONOLITH, MONOLITH, InvalidInput, "unit: a monolith answers there"),
        (UNIT, MONOLITH, InvalidInput, "monolith: a unit answers there"),
        (side_of(prefill="7", decode=""), UNIT, Unavailable, "monolith: it has no decode now"),
        (MONOLITH, side_of(prefill="", decode=""), Unavailable, "unit: it has no prefill now"),
        (side_of(), UNIT, Unavailable, "monolith: it has no prefill now"),
    ],
)
def test_sides_of_another_kind_are_refused(
    monolith: Unit, unit: Unit, error: type[DupletError], told: str
) -> None:
    with pytest.raises(error, match=told):
        check_kinds(monolith, unit)


def test_a_plan_names_what_its_figures_depend_on(spec: ModelSpec) -> None:
    plan = make_plan(Options(first_seed=5, damaged_pages=2), spec, UTTERANCES)
    assert plan.model == f"wren {spec.fingerprint}"
    assert plan.recogniser.startswith("hama ")
    assert plan.voices == load_voices().names
    assert (plan.first_seed, plan.damaged_pages) == (5, 2)


@pytest.mark.parametrize(
    ("options", "of_model", "told"),
    [
        ({"voices": ("amber", "nosuch")}, {}, "voices: no voice 'nosuch'; there are amber"),
        ({}, {"name": "s2-pro"}, "rows of s2-pro cannot be made audible"),
    ],
)
def test_what_cannot_be_is_told(
    spec: ModelSpec, options: dict[str, Any], of_model: dict[str, Any], told: str
) -> None:
    with pytest.raises(InvalidInput, match=told):
        make_plan(Options(**options), replace(spec, **of_model), UTTERANCES)


def test_every_utterance_is_one_request_of_the_built_in_model(spec: ModelSpec) -> None:
    made = front_end(spec)
    assert made is not None
    for utterance in UTTERANCES[::7]:
        assert len(made.rows(utterance.text, "amber")) > len(utterance.text) / 3


async def test_listeners_hear_the_rows_of_the_built_in_model(spec: ModelSpec) -> None:
    """A voice's reference, which says something else than the text."""
    text = "Good morning to you."
    rows = load_voices(duplet_models.directory("wren"))["amber"].rows
    async with EarPool(RecogniserName.PHONEMES, spec, 1) as ear:
        heard = await ear.hear(rows, text)
        silence = await ear.hear(np.empty((0, 11), np.int32), text)
    assert heard.length == silence.length == silence.errors == 13
    assert heard.errors > 3
    assert heard.voice in load_voices().names
    assert silence.voice == ""


def listening_processes() -> list[int]:
    """Pids of this process's listeners; its other child keeps track of resources."""
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text()
    return [
        int(pid)
        for pid in children.split()
        if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


async def test_a_killed_listener_is_told_in_words(spec: ModelSpec) -> None:
    nothing = np.empty((0, 11), np.int32)
    async with EarPool(RecogniserName.PHONEMES, spec, 1) as ear:
        await ear.hear(nothing, "Good morning.")
        (listener,) = listening_processes()
        os.kill(listener, signal.SIGTERM)
        with pytest.raises(Unavailable, match="a listening process was killed"):
            await ear.hear(nothing, "Good morning.")


KILLED_WHILE_IT_LISTENS = """
import asyncio, os, pickle, signal, sys
import numpy as np
from duplet_canary.ear import EarPool
from duplet_canary.recognisers import RecogniserName

async def listen():
    spec = pickle.loads(bytes.fromhex(sys.argv[1]))
    async with EarPool(RecogniserName.PHONEMES, spec, 1) as ear:
        await ear.hear(np.empty((0, 11), np.int32), "Good morning.")
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(listen())
"""


def test_no_listener_outlives_a_killed_canary(spec: ModelSpec) -> None:
    """One that does has stdout open, and its end is not seen."""
    command = [sys.executable, "-c", KILLED_WHILE_IT_LISTENS, pickle.dumps(spec).hex()]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
