"""Whose rows a pass takes."""

from __future__ import annotations

import random

import pytest

from duplet_core.chunks import ChunkPart, ChunkQueue
from duplet_core.errors import InvariantError


def passes(queue: ChunkQueue) -> list[list[tuple[int, int]]]:
    """(seq, rows) of every pass until nothing waits."""
    found = []
    while queue:
        found.append([(part.seq, part.count) for part in queue.next_pass()])
    return found


def test_a_lone_prompt_has_the_whole_pass() -> None:
    queue = ChunkQueue(512, 16, 8)
    queue.add(1, 0, 1500)
    assert passes(queue) == [[(1, 512)], [(1, 512)], [(1, 476)]]


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    queue = ChunkQueue(512, 16, 8)
    queue.add(1, 0, 1500)
    queue.add(2, 1296, 1500)
    first = queue.next_pass()
    assert first == (ChunkPart(1, 0, 304, last=False), ChunkPart(2, 1296, 204, last=True))


def test_a_long_prompt_gets_on_whatever_arrives() -> None:
    queue = ChunkQueue(512, 16, 8)
    queue.add(0, 0, 2048)
    for turn in range(8):
        for number in range(4):
            queue.add(1 + 4 * turn + number, 0, 100)
        parts = {part.seq: part for part in queue.next_pass()}
        assert parts[0].count >= 256
    assert parts[0].last


def test_equal_prompts_finish_in_their_order() -> None:
    queue = ChunkQueue(256, 16, 8)
    for seq in range(5):
        queue.add(seq, 0, 600)
    done = []
    while queue:
        done += [part.seq for part in queue.next_pass() if part.last]
    assert done == [0, 1, 2, 3, 4]


def test_a_pass_takes_so_many_prompts() -> None:
    queue = ChunkQueue(512, 16, 3)
    for seq in range(7):
        queue.add(seq, 0, 10)
    assert [len(parts) for parts in passes(queue)] == [3, 3, 1]


def test_less_than_a_page_is_a_page() -> None:
    queue = ChunkQueue(5, 16, 8)
    queue.add(1, 0, 40)
    assert queue.budget_rows == 16
    assert passes(queue) == [[(1, 16)], [(1, 16)], [(1, 8)]]


def test_a_removed_prompt_is_in_no_pass() -> None:
    queue = ChunkQueue(64, 16, 8)
    queue.add(1, 0, 200)
    queue.add(2, 0, 40)
    queue.next_pass()
    queue.remove(1)
    queue.remove(9)
    assert {seq for parts in passes(queue) for seq, _ in parts} == {2}


@pytest.mark.parametrize(("first", "rows"), [(0, 0), (16, 16), (8, 20), (-16, 3)])
def test_a_prompt_without_rows_is_our_own_fault(first: int, rows: int) -> None:
    with pytest.raises(InvariantError):
        ChunkQueue(64, 16, 8).add(1, first, rows)


def test_every_row_once_and_every_part_at_a_border() -> None:
    chance = random.Random(7)
    for _ in range(200):
        page_rows, most = chance.choice([1, 4, 16]), chance.randint(1, 4)
        queue = ChunkQueue(chance.randint(1, 100), page_rows, most)
        computed: dict[int, int] = {}
        lengths: dict[int, int] = {}
        waiting = list(range(chance.randint(1, 9)))
        while waiting or queue:
            if waiting and chance.random() < 0.5:
                seq = waiting.pop()
                rows = chance.randint(1, 150)
                computed[seq] = chance.randint(0, rows - 1) // page_rows * page_rows
                lengths[seq] = rows
                queue.add(seq, computed[seq], rows)
            parts = queue.next_pass()
            assert sum(part.count for part in parts) <= queue.budget_rows
            assert len(parts) <= most
            for part in parts:
                assert part.first == computed[part.seq]
                computed[part.seq] += part.count
                assert part.last == (computed[part.seq] == lengths[part.seq])
                assert part.last or computed[part.seq] % page_rows == 0
        assert computed == lengths
