"""The log: what it keeps, what a run goes on from, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from duplet_canary.journal import Journal, open_journal
from duplet_canary.plan import Jobs, Pair, Plan
from duplet_core.errors import InvalidInput, Unavailable
from tests.canary.canary_parts import UTTERANCES, pair, plan, side


def pairs(count: int) -> list[Pair]:
    return [pair(n, side(n), side(n + 1), equal=n % 2 == 0) for n in range(count)]


def write(path: Path, count: int, its_plan: Plan | None = None) -> None:
    with open_journal(path, its_plan or plan()) as (journal, done):
        for one in pairs(count)[len(done) :]:
            journal.add(one)


def test_a_run_goes_on_from_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "canary.jsonl"
    write(path, 3)
    write(path, 5)
    with open_journal(path, plan()) as (_, done):
        assert done == pairs(5)
    assert path.read_text().count('"plan"') == 1


def test_no_path_forgets() -> None:
    with open_journal(None, plan()) as (journal, done):
        journal.add(pairs(1)[0])
        assert done == []


@pytest.mark.parametrize("cut", [1, 40, 200])
def test_a_line_that_a_killed_run_left_unfinished_is_cut_off(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "canary.jsonl"
    write(path, 4)
    path.write_bytes(path.read_bytes()[:-cut])
    with open_journal(path, plan()) as (journal, done):
        assert done == pairs(3)
        journal.add(pairs(4)[3])
    with open_journal(path, plan()) as (_, done):
        assert done == pairs(4)


def test_a_run_killed_in_its_first_line_starts_anew(tmp_path: Path) -> None:
    path = tmp_path / "canary.jsonl"
    path.write_text('{"duplet_can')
    write(path, 2)
    with open_journal(path, plan()) as (_, done):
        assert done == pairs(2)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model": "wren beef"}, "model: 'wren f00d', not 'wren beef'"),
        ({"voices": ("amber",)}, "voices: ('amber', 'cedar'), not ('amber',)"),
        ({"other_seeds": True}, "other_seeds: False, not True"),
        ({"damaged_pages": 2}, "damaged_pages: 0, not 2"),
        ({"recogniser": "hama 2"}, "recogniser: 'stub 1', not 'hama 2'"),
    ],
)
def test_another_plans_log_is_refused(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    path = tmp_path / "canary.jsonl"
    write(path, 2)
    before = path.read_bytes()
    with (
        pytest.raises(InvalidInput, match="of another run") as error,
        open_journal(path, plan(**changes)),
    ):
        pass
    assert told in error.value.detail
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("hello\n", "no log of the canary"),
        ("[1, 2]\n", "no log of the canary"),
        ('{"plan": {}}\n', "no log of the canary"),
        (json.dumps({"duplet_canary": 2, "plan": plan().to_fields()}) + "\n", "version 2, not 1"),
        (
            json.dumps({"duplet_canary": 1, "plan": plan().to_fields()}) + "\n{}\n",
            "line 2 is no pair",
        ),
    ],
)
def test_a_damaged_log_is_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "canary.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=told), open_journal(path, plan()):
        pass


def test_a_folder_is_no_log(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="log: "), open_journal(tmp_path, plan()):
        pass


def test_every_voice_says_every_utterance_and_no_pair_comes_twice() -> None:
    jobs = Jobs(plan(), UTTERANCES)
    made = [jobs.job(n) for n in range(2 * len(UTTERANCES))]
    assert len({(job.utterance.number, job.voice) for job in made}) == len(made)
    assert len({job.monolith_seed for job in made}) == len(made)
    assert all(job.monolith_seed == job.unit_seed for job in made)


def test_other_seeds_are_others() -> None:
    jobs = Jobs(plan(other_seeds=True), UTTERANCES)
    made = [jobs.job(n) for n in range(1_000)]
    seeds = {job.monolith_seed for job in made} | {job.unit_seed for job in made}
    assert len(seeds) == 2_000


@pytest.mark.parametrize("text", ["my notes", "my notes\nthe last of them"])
def test_nothing_is_cut_off_a_file_that_is_no_log(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes"
    path.write_text(text)
    with pytest.raises(InvalidInput, match="no log of the canary"):
        write(path, 1)
    assert path.read_text() == text


def test_two_runs_do_not_write_one_log(tmp_path: Path) -> None:
    path = tmp_path / "canary.jsonl"
    with open_journal(path, plan()), pytest.raises(InvalidInput, match="another run writes"):
        write(path, 1)
    write(path, 1)


def test_a_device_is_no_log() -> None:
    with pytest.raises(InvalidInput, match="/dev/zero is no regular file"):
        write(Path("/dev/zero"), 1)


def test_a_full_disk_is_named() -> None:
    named = pytest.raises(Unavailable, match="log: No space left on device")
    with open("/dev/full", "r+b", buffering=0) as full, named:
        Journal(full).add(pairs(1)[0])
