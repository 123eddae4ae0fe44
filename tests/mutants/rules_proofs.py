"""What counts as proof: of a death, of a pool, of pages that may be written, of KV."""

from __future__ import annotations

from tests.mutants.rule import Rule

LIFELINE = "tests/runtime/test_runtime_lifeline.py"
PLAN = "tests/memory/test_memory_plan.py"
POOL = "tests/memory/test_memory_pool.py"
MOVER = "tests/services/test_kvproxy_mover.py"
DECODE = "tests/engine/test_engine_decode_loop.py"

DEATHS = (
    Rule(
        "one process's exit is its instance's death",
        "duplet_runtime.lifeline",
        "        if not self._alive:\n            self._on_died()",
        "        self._on_died()",
        (f"{LIFELINE}::test_registration_then_death_of_every_process",),
    ),
    Rule(
        "the end of a connection is the death of its instance",
        "duplet_runtime.lifeline",
        "        del self._connections[fd]\n",
        "        del self._connections[fd]\n        if connection.registered is not None:\n"
        "            self._watches[connection.registered].close()\n"
        "            self._died(connection.registered)\n",
        (
            f"{LIFELINE}::test_registration_then_death_of_every_process",
            f"{LIFELINE}::test_second_registration_replaces_the_socket_only",
        ),
    ),
    Rule(
        "any descriptor counts as a process",
        "duplet_runtime.lifeline_wire",
        '        return any(line.startswith("Pid:") for line in info)',
        "        return True",
        (f"{LIFELINE}::test_what_is_a_pidfd",),
    ),
    Rule(
        "another version of the transfer protocol is heard",
        "duplet_runtime.lifeline_wire",
        "        if one.version != PROTOCOL_VERSION:",
        "        if False:",
        (f"{LIFELINE}::test_malformed_registration_costs_its_connection_only",),
        slow=True,
    ),
    Rule(
        "received descriptors are inherited by children",
        "duplet_runtime.engine_link",
        "flags | socket.MSG_CMSG_CLOEXEC",
        "flags",
        ("tests/runtime/test_runtime_engine_link.py::test_descriptors_stay_with_their_message",),
    ),
    Rule(
        "two kvproxies hold the unit's lock",
        "duplet_runtime.lock",
        "        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)",
        (
            "tests/runtime/test_runtime_service.py"
            "::test_lock_is_waited_for_and_the_wait_can_be_cancelled",
        ),
        slow=True,
    ),
)

POOLS_AND_PAGES = (
    Rule(
        "a copy goes to a page that is in no pool",
        "duplet_memory.plan",
        "        np.maximum.reduce(numbers.view(np.uint64)) >= description.pages",
        "        False",
        (f"{PLAN}::test_pages_that_do_not_fit_are_refused",),
    ),
    Rule(
        "a copy goes to one page twice",
        "duplet_memory.plan",
        "    if np.count_nonzero(named) != wanted:",
        "    if False:",
        (f"{PLAN}::test_pages_that_do_not_fit_are_refused",),
    ),
    Rule(
        "pools of different rows are copied",
        "duplet_memory.plan",
        "    if have != want:",
        "    if False:",
        (f"{PLAN}::test_pools_of_other_rows_are_refused",),
    ),
    Rule(
        "a pool's size may change under its mappings",
        "duplet_memory.pool",
        "        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)",
        "        pass",
        (f"{POOL}::test_the_size_is_sealed",),
    ),
    Rule(
        "whatever is in a descriptor is taken for the pool",
        "duplet_memory.pool",
        "        check_header(mapping[start : start + HEADER.size], description)",
        "        pass",
        (f"{POOL}::test_another_pool_is_refused", f"{POOL}::test_a_damaged_header_is_refused"),
    ),
    Rule(
        "what is only read can be written",
        "duplet_memory.pool",
        "mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ",
        "mmap.ACCESS_WRITE",
        (f"{POOL}::test_a_read_only_mapping_cannot_be_written",),
    ),
    Rule(
        "a copy of a transfer that is over begins when its turn comes",
        "duplet_kvproxy.mover",
        "        if not self._take(copy.copy):",
        "        if not self._take(copy.copy) and False:",
        (f"{MOVER}::test_a_copy_that_was_cancelled_before_its_turn_never_begins",),
    ),
    Rule(
        "a mover whose thread has failed is silent",
        "duplet_kvproxy.mover",
        "            if not done:",
        "            if False:",
        (f"{MOVER}::test_a_thread_that_fails_is_told",),
        slow=True,
    ),
)

DIGESTS = (
    Rule(
        "KV on a CPU that is not what was sent is called right",
        "duplet_engine.decode_loop",
        "Verified(seq, verify.transfer, ok=not detail, detail=detail)",
        "Verified(seq, verify.transfer, ok=True, detail=detail)",
        (f"{DECODE}::test_a_wrong_page_is_named",),
    ),
    Rule(
        "pages without a digest are called right",
        "duplet_engine.decode_loop",
        "        if verify.rows < 1 or len(verify.digests) != wanted:",
        "        if verify.rows < 1:",
        (f"{DECODE}::test_missing_digests_are_no_match",),
    ),
    Rule(
        "KV that was found wrong is started all the same",
        "duplet_engine.decode_loop",
        "        require(not stream.mismatch,",
        "        require(True,",
        (f"{DECODE}::test_wrong_kv_is_never_started",),
    ),
    Rule(
        "KV is not looked at again at the end",
        "duplet_engine.decode_loop",
        "            kv_ok = not self._compare(stream.verify)",
        "            kv_ok = True",
        (f"{DECODE}::test_the_prompts_kv_is_checked_again_at_the_end",),
    ),
)
