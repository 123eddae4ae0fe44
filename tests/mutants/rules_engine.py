"""What engines' loops owe: nothing is waited for, and no page let go of too early."""

from __future__ import annotations

from tests.mutants.rule import Rule

LOOP = "tests/engine/test_engine_gpu_loop.py"
NEWCOMERS = "tests/engine/test_engine_gpu_newcomers.py"
PASSES = "tests/engine/test_engine_gpu_prefill_loop.py"

LOOPS = (
    Rule(
        "decode's loop waits for the step that runs",
        "duplet_engine.gpu_loop",
        "        loop.step(wait=False)",
        "        loop.step()",
        (f"{NEWCOMERS}::test_newcomer_is_in_the_next_step_that_is_launched",),
    ),
    Rule(
        "decode's loop waits for checks while steps could run",
        "duplet_engine.gpu_loop",
        "take_done(wait=wait and idle)",
        "take_done(wait=True)",
        (
            f"{LOOP}::test_steps_go_on_beside_a_check",
            f"{NEWCOMERS}::test_a_check_holds_up_no_start",
        ),
    ),
    Rule(
        "decode's loop sleeps on its link while a check runs",
        "duplet_engine.gpu_loop",
        "        return bool(self._batch.seqs or self._flights or self._checks)",
        "        return bool(self._batch.seqs or self._flights)",
        (f"{LOOP}::test_a_check_is_waited_for_when_nothing_steps",),
    ),
    Rule(
        "decode's pages are let go of while a launched step names them",
        "duplet_engine.gpu_loop",
        "        if stream.last_step > self._read or stream.checking:",
        "        if stream.checking:",
        (
            f"{LOOP}::test_stopped_waits_for_the_last_launched_step",
            f"{LOOP}::test_stop_in_flight_waits_and_sends_no_more_rows",
            f"{NEWCOMERS}::test_no_step_before_its_check_and_no_stopped_before_its_work",
        ),
    ),
    Rule(
        "decode's pages are let go of while a check reads them",
        "duplet_engine.gpu_loop",
        "        if stream.last_step > self._read or stream.checking:",
        "        if stream.last_step > self._read:",
        (
            f"{LOOP}::test_stopped_waits_for_the_check_that_reads_its_pages",
            f"{NEWCOMERS}::test_no_step_before_its_check_and_no_stopped_before_its_work",
        ),
    ),
    Rule(
        "the step launched last is not noted as one that names the pages",
        "duplet_engine.gpu_loop",
        "            stream.last_step = self._launched",
        "            stream.last_step = self._launched - 1",
        (f"{LOOP}::test_stopped_waits_for_the_last_launched_step",),
    ),
    Rule(
        "more steps are launched ahead than one",
        "duplet_engine.gpu_loop",
        "        if self._batch.seqs and len(self._flights) <= self._ahead:",
        "        if self._batch.seqs and len(self._flights) <= self._ahead + 1:",
        (f"{LOOP}::test_overlap_launches_before_it_reads",),
    ),
    Rule(
        "a stream that was stopped gets the row of the step that ran",
        "duplet_engine.gpu_loop",
        "            if stream is None or stream.ended:",
        "            if stream is None:",
        (f"{LOOP}::test_stop_in_flight_waits_and_sends_no_more_rows",),
    ),
    Rule(
        "landed KV that is not what was sent is called right",
        "duplet_engine.gpu_loop",
        "Verified(verify.seq, verify.transfer, ok=not detail, detail=detail)",
        "Verified(verify.seq, verify.transfer, ok=True, detail=detail)",
        (f"{LOOP}::test_wrong_kv_is_named_and_never_started",),
    ),
    Rule(
        "decode's engine leaves while a step runs",
        "duplet_engine.gpu_loop",
        "        while self._flights:\n            self._read_oldest()\n        return False",
        "        return False",
        (f"{LOOP}::test_shutdown_reads_what_is_in_flight",),
    ),
    Rule(
        "prefill's pages are let go of while a launched pass names them",
        "duplet_engine.gpu_prefill_loop",
        "        if prompt.last_pass < read:",
        "        if True:",
        (f"{PASSES}::test_stopped_waits_for_the_pass_that_names_its_pages",),
    ),
    Rule(
        "prefill's pages are let go of when an earlier pass is read",
        "duplet_engine.gpu_prefill_loop",
        "            if prompt.ended and prompt.last_pass <= oldest.number:",
        "            if prompt.ended:",
        (f"{PASSES}::test_stopped_waits_for_the_last_of_the_passes_that_run",),
    ),
)
