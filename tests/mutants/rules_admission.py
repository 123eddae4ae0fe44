"""Who is let in: the door of a full unit, what lb counts, and what steps leave room for."""

from __future__ import annotations

from tests.mutants.rule import Rule

DOOR = "tests/services/test_lb_door.py"
FULL = "tests/core/test_core_front_full.py"
FRONT = "tests/core/test_core_front.py"
GUARD = "tests/core/test_core_step_guard.py"
FRESH = "tests/core/test_core_guard_start.py"
DECODE = "tests/services/test_decode_timed_steps.py"
TIMES = "tests/engine/test_engine_step_times.py"

FULL_UNIT = (
    Rule(
        "a full unit has no door",
        "duplet_lb.door",
        " == GENERATE and self._executor.machine.full:",
        " == GENERATE and False:",
        (f"{DOOR}::test_a_full_unit_says_so_whatever_was_sent",),
    ),
    Rule(
        "the door keeps out who only asks how the unit is",
        "duplet_lb.door",
        "        if handler_call_details.method == GENERATE and ",
        "        if ",
        (f"{DOOR}::test_who_asks_for_something_else_or_later_comes_in",),
    ),
    Rule(
        "the door reads the prompt of whom it refuses",
        "duplet_lb.door",
        "grpc.stream_stream_rpc_method_handler(self._refuse)",
        "grpc.unary_stream_rpc_method_handler(self._refuse)",
        (f"{DOOR}::test_who_has_not_sent_its_prompt_yet_is_refused_as_well",),
    ),
    Rule(
        "a prompt that never ends is waited for",
        "duplet_lb.door",
        "            async with asyncio.timeout(RECEIVE_S) as limit:",
        "            async with asyncio.timeout(None) as limit:",
        (f"{DOOR}::test_who_does_not_send_its_whole_prompt_in_time_is_let_go",),
        slow=True,
    ),
    Rule(
        "any number of half-sent prompts is kept",
        "duplet_lb.door",
        "        if len(self._receiving) < MOST_RECEIVING:",
        "        if True:",
        (f"{DOOR}::test_of_too_many_that_are_half_sent_the_oldest_is_let_go",),
        slow=True,
    ),
    Rule(
        "refusals at the door are not counted",
        "duplet_lb.door",
        "        self._executor.count_end(Reason.OVERLOADED)",
        "        pass",
        (f"{DOOR}::test_a_full_unit_says_so_whatever_was_sent",),
    ),
    Rule(
        "the queue has no end",
        "duplet_core.front",
        " or len(self._queue) >= self.config.queue_limit",
        "",
        (f"{FRONT}::test_the_queue_is_bounded",),
    ),
    Rule(
        "who waits in vain waits until its deadline",
        "duplet_core.front",
        "        due += [r.queued_until_ns for r in self._queue]",
        "        pass",
        (f"{FRONT}::test_the_end_of_a_wait_is_a_timer",),
    ),
    Rule(
        "after a wait in vain others wait in vain, too",
        "duplet_core.front",
        "                self._waited_in_vain = self._refusing() is None",
        "                pass",
        (f"{FULL}::test_after_a_wait_in_vain_nobody_waits_until_somebody_was_admitted",),
    ),
    Rule(
        "after a wait in vain nobody waits any more, for ever",
        "duplet_core.front",
        "        self._waited_in_vain = False\n        self._admits_sent += 1",
        "        self._admits_sent += 1",
        (f"{FULL}::test_after_a_wait_in_vain_nobody_waits_until_somebody_was_admitted",),
    ),
    Rule(
        "a wait for decode to take requests again counts as one in vain",
        "duplet_core.front",
        "                self._waited_in_vain = self._refusing() is None",
        "                self._waited_in_vain = True",
        (f"{FULL}::test_who_waited_while_decode_refused_waited_for_something_else",),
    ),
    Rule(
        "who stood behind somebody that waited in vain is not looked at",
        "duplet_core.front",
        "                self._admit_what_fits()  #",
        "                #",
        (f"{GUARD}::test_who_waits_for_a_long_prompts_refusal_is_not_refused_with_it",),
    ),
    Rule(
        "a door that is shut says what the unit would not",
        "duplet_core.front",
        "        return able and self._must_leave(pages=1)",
        "        return self._must_leave(pages=1)",
        (f"{FULL}::test_full_is_what_the_smallest_request_would_hear",),
    ),
    Rule(
        "who leaves the queue stays in it",
        "duplet_core.front",
        "            self._queue.remove(request)\n            return",
        "            return",
        (f"{FRONT}::test_a_cancelled_request_makes_room_for_the_queue",),
    ),
    Rule(
        "an id stays taken after its request",
        "duplet_core.front",
        "        self._live_ids.remove(submit.request_id)",
        "        pass",
        (f"{FRONT}::test_late_messages_about_an_earlier_use_are_not_taken_for_the_later_one",),
    ),
    Rule(
        "an Admit under way is counted by nobody",
        "duplet_core.front",
        "        self._unseen.append(submit.pages)",
        "        pass",
        (
            f"{FRONT}::test_admits_under_way_are_counted_against_the_told_pages",
            f"{FRONT}::test_admits_under_way_are_counted_against_the_told_slots",
        ),
    ),
    Rule(
        "an Admit that decode has seen is counted twice",
        "duplet_core.front",
        "            self._unseen.popleft()",
        "            break",
        (
            f"{FRONT}::test_a_refused_request_gives_its_credit_back_with_decodes_word",
            f"{GUARD}::test_lb_counts_what_it_sent_against_the_steps",
        ),
    ),
    Rule(
        "Admits of a broken stream are counted against the next one",
        "duplet_core.front",
        "            self._unseen.clear()",
        "            pass",
        (f"{FRONT}::test_a_new_stream_to_decode_starts_the_credit_anew",),
    ),
    Rule(
        "a client that reads nothing learns of no failure",
        "duplet_lb.call",
        "            self._writing.reschedule(asyncio.get_running_loop().time())",
        "            pass",
        ("tests/services/test_lb_call.py::test_a_failure_cuts_a_stuck_write_short",),
        slow=True,
    ),
    Rule(
        "a failure moves the end of a write whose time is just over",
        "duplet_lb.call",
        "self._writing is not None and not self._writing.expired():",
        "self._writing is not None:",
        (
            "tests/services/test_lb_call.py::"
            "test_a_failure_while_the_write_expires_is_taken_without_harm",
        ),
    ),
    Rule(
        "a request whose client left goes on",
        "duplet_lb.speech",
        "            if call.ended is None:  # the client left, or the service stops",
        "            if False:",
        (
            "tests/services/test_lb_client_leaves.py::"
            "test_a_client_that_leaves_gives_back_what_it_held_once",
        ),
    ),
)

TIMED_STEPS = (
    Rule(
        "decode's service does not ask its engine to time steps",
        "duplet_decode.__main__",
        "longest_step_ns=longest_step_ns(floor) if floor else 0",
        "longest_step_ns=0",
        (f"{DECODE}::test_timed_steps_go_from_the_engine_to_the_guard",),
    ),
    Rule(
        "decode's service keeps what was timed to itself",
        "duplet_decode.__main__",
        "                step_times=ready.step_times,\n",
        "",
        (f"{DECODE}::test_timed_steps_go_from_the_engine_to_the_guard",),
    ),
    Rule(
        "an engine times nothing",
        "duplet_engine.process",
        "time_steps(engine, config.longest_step_ns) if config.longest_step_ns else ()",
        "()",
        (f"{TIMES}::test_an_engine_that_is_asked_says_what_it_timed_with_its_first_word",),
    ),
    Rule(
        "decode does not use the steps that its engine timed",
        "duplet_core.decode",
        "StepGuard(floor, config.step_times)",
        "StepGuard(floor)",
        (f"{FRESH}::test_decode_tells_lb_what_its_engine_timed_before_any_step",),
    ),
    Rule(
        "timed steps open a fresh unit and cost nothing",
        "duplet_core.step_guard",
        "        self._costs = self._timed_costs\n",
        "        self._costs = (0.0, 0.0, 0.0)\n",
        (
            f"{FRESH}::test_a_burst_on_a_fresh_unit_fills_it_and_breaks_no_floor",
            f"{FRESH}::test_decode_tells_lb_what_its_engine_timed_before_any_step",
        ),
    ),
    Rule(
        "a fresh unit takes more streams than were timed",
        "duplet_core.step_guard",
        "        return max(FIRST_STREAMS, self._most_timed, 2 * self.most_streams)",
        "        return 1000",
        (f"{FRESH}::test_beyond_the_largest_timed_batch_it_doubles_as_ever",),
    ),
    Rule(
        "steps that are longer than timed ones correct nothing for larger batches",
        "duplet_core.step_guard",
        "        ratio = of_steps[3] / foretold_ns if foretold_ns > 0 else 1.0",
        "        ratio = 1.0",
        (f"{FRESH}::test_figures_that_were_wrong_are_right_after_one_fit",),
    ),
    Rule(
        "timed steps outweigh the day's",
        "duplet_core.step_guard",
        "TIMED_WEIGHT = 1 / 16",
        "TIMED_WEIGHT = 256",
        (f"{FRESH}::test_timed_steps_do_not_contradict_the_days",),
    ),
    Rule(
        "steps are planned beyond the floor",
        "duplet_core.step_guard",
        "HEADROOM = 0.9",
        "HEADROOM = 1.1",
        (
            f"{FRESH}::test_a_burst_on_a_fresh_unit_fills_it_and_breaks_no_floor",
            f"{GUARD}::test_at_three_times_the_capacity_no_step_breaks_the_floor",
        ),
    ),
    Rule(
        "who is admitted is not charged with pages",
        "duplet_core.decode",
        "self.guard.credit(self.transfers.streams(), self.transfers.reserved_pages())",
        "self.guard.credit(self.transfers.streams(), 0)",
        (f"{GUARD}::test_decode_charges_an_admit_with_all_its_pages",),
    ),
    Rule(
        "lb admits whatever the steps say",
        "duplet_core.front",
        "        return added + (sum(self._unseen) + pages) * step.page_ns <= step.free_ns",
        "        return True",
        (
            f"{GUARD}::test_lb_counts_what_it_sent_against_the_steps",
            f"{GUARD}::test_what_the_floor_has_no_room_for_is_refused_and_costs_prefill_nothing",
        ),
    ),
    Rule(
        "an engine times sizes beyond the longest step",
        "duplet_engine.step_times",
        "            if taken_ns > longest_ns:",
        "            if False:",
        (f"{TIMES}::test_the_first_size_that_takes_too_long_is_the_last",),
    ),
    Rule(
        "a first step and a pause count as what a step takes",
        "duplet_engine.step_times",
        "    return round(median(taken_ns[1:] or taken_ns))",
        "    return round(max(taken_ns))",
        (f"{TIMES}::test_every_size_is_timed_at_two_contexts_without_first_steps_and_pauses",),
    ),
    Rule(
        "timed steps write over pages of their own",
        "duplet_engine.step_times",
        "for k in range(count - 1)), 0)",
        "for k in range(count - 1)), others)",
        (f"{TIMES}::test_streams_read_pages_of_their_own_and_end_in_page_0",),
    ),
)
