"""What kvproxy owes to its copies: their ends, and the tables that their launches read."""

from __future__ import annotations

from tests.mutants.rule import Rule

HEAD = "tests/services/test_kvproxy_head_start.py"
MOVER = "tests/services/test_kvproxy_gpu_mover.py"
TABLES = "tests/services/test_kvproxy_staged_tables.py"
KERNELS = "tests/services/test_kvproxy_kernel_moves.py"

COPIES = (
    Rule(
        "a copy refused after its head began counts as one that never began",
        "duplet_kvproxy.head_start",
        "        raise MovedInPart(error.detail) from error",
        "        raise",
        (
            f"{HEAD}::test_what_is_refused_later_is_not_called_refused",
            f"{MOVER}::test_a_copy_that_is_refused_after_its_head_has_an_unknown_end",
        ),
    ),
    Rule(
        "a copy whose start failed half-way is told as not started",
        "duplet_kvproxy.mover",
        'return CopyResult.UNKNOWN, f"{type(error).__name__}: {error}"',
        'return CopyResult.NOT_STARTED, f"{type(error).__name__}: {error}"',
        (
            f"{MOVER}::test_a_copy_that_is_refused_after_its_head_has_an_unknown_end",
            f"{MOVER}::test_a_start_that_fails",
        ),
    ),
    Rule(
        "a copy with a head is told as landed when its head has",
        "duplet_kvproxy.head_start",
        "        self._rest.wait()",
        "        pass",
        (f"{HEAD}::test_head_and_rest_are_the_copy",),
    ),
    Rule(
        "a head begins although the lists of pages do not agree",
        "duplet_kvproxy.head_start",
        "    fits = len(source_pages) == len(dest_pages) == pages",
        "    fits = True",
        (
            f"{HEAD}::test_what_the_head_can_show_is_refused_before_it_starts",
            f"{HEAD}::test_pages_that_lists_disagree_about_are_refused_whole",
        ),
    ),
    Rule(
        "what a failed start holds is given to the next copy",
        "duplet_kvproxy.mover",
        "            self._lost_flights += 1",
        "            pass",
        (f"{MOVER}::test_a_copy_that_is_refused_after_its_head_has_an_unknown_end",),
    ),
    Rule(
        "a copy begins when failed starts have left it nothing",
        "duplet_kvproxy.mover",
        "        if self._lost_flights >= MAX_IN_FLIGHT:",
        "        if False:",
        (f"{MOVER}::test_what_failed_starts_keep_is_not_asked_for_again",),
    ),
    Rule(
        "a copy behind a failed GPU is told as landed",
        "duplet_kvproxy.mover",
        '                detail = f"the GPU failed: {self._broken}"',
        '                result, detail = CopyResult.OK, ""',
        (f"{MOVER}::test_a_failed_wait_makes_everything_in_flight_unknown",),
    ),
    Rule(
        "copies begin on a GPU that has failed",
        "duplet_kvproxy.mover",
        "        if self._broken:\n            return CopyResult.NOT_STARTED",
        "        if False:\n            return CopyResult.NOT_STARTED",
        (f"{MOVER}::test_a_failed_wait_makes_everything_in_flight_unknown",),
    ),
    Rule(
        "a pool is unmapped under copies whose end nobody knows",
        "duplet_kvproxy.mover",
        "        if detail and isinstance(pool, MappedPool):",
        "        if False:",
        (f"{MOVER}::test_a_failed_wait_makes_everything_in_flight_unknown",),
    ),
    Rule(
        "a pool is unmapped under what a failed start queued",
        "duplet_kvproxy.mover",
        "            self._used_by_lost |= {copy.source, copy.dest}",
        "            pass",
        (f"{MOVER}::test_a_start_that_fails",),
    ),
)

TABLES_OF_PAGES = (
    Rule(
        "a table counts as grown before it has memory",
        "duplet_kvproxy.gpu_queue",
        '        address = int(call("cuMemHostAlloc", size, PORTABLE))',
        "        self._pages = pages\n"
        '        address = int(call("cuMemHostAlloc", size, PORTABLE))',
        (f"{TABLES}::test_a_table_that_cannot_grow_stays_what_it_was",),
    ),
    Rule(
        "a table is given back before there is a larger one",
        "duplet_kvproxy.gpu_queue",
        '        address = int(call("cuMemHostAlloc", size, PORTABLE))',
        '        if self._address:\n            call("cuMemFreeHost", self._address)\n'
        '        address, self._address = int(call("cuMemHostAlloc", size, PORTABLE)), 0',
        (f"{TABLES}::test_a_table_that_cannot_grow_stays_what_it_was",),
    ),
    Rule(
        "staging's table counts as grown before it is written",
        "duplet_kvproxy.move_staged",
        "            self._identity_pages = 0  #",
        "            self._identity_pages = written  #",
        (f"{TABLES}::test_staging_pages_are_never_those_of_a_table_that_failed",),
    ),
    Rule(
        "staging's table is written over while launches read it",
        "duplet_kvproxy.move_staged",
        "            done.wait()",
        "            pass",
        (f"{KERNELS}::test_copies_in_flight_keep_apart",),
        slow=True,
    ),
    Rule(
        "a copy's table goes to the next one before the copy is over",
        "duplet_kvproxy.move_direct",
        "        return Flight(event, lambda: self._free.append(slot))",
        "        self._free.append(slot)\n        return Flight(event, lambda: None)",
        (f"{KERNELS}::test_copies_in_flight_keep_apart",),
        slow=True,
    ),
    Rule(
        "a copy that failed gives its table to the next one",
        "duplet_kvproxy.gpu_queue",
        "        self._event.wait()\n        self._quiet()",
        "        self._quiet()\n        self._event.wait()",
        (f"{TABLES}::test_a_copy_that_failed_gives_nothing_back",),
    ),
    Rule(
        "a stage is filled before its last chunk has left",
        "duplet_kvproxy.move_staged",
        "        side = self._from\n        identity = side.identity(chunk.pages)\n"
        "        side.queue.wait_for(self._copied[stage])",
        "        side = self._from\n        identity = side.identity(chunk.pages)",
        (f"{KERNELS}::test_copies_in_flight_keep_apart",),
        slow=True,
    ),
)
