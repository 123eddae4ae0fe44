"""What messages owe that travel together."""

from __future__ import annotations

from tests.mutants.rule import Rule

TOGETHER = "tests/runtime/test_runtime_together.py"

MESSAGES = (
    Rule(
        "what travels together arrives in another order",
        "duplet_runtime.peer_stream",
        "                first.more.append(self._outbox.popleft())",
        "                first.more.append(self._outbox.pop())",
        (f"{TOGETHER}::test_what_waits_goes_together_and_arrives_in_order",),
    ),
    Rule(
        "any number of messages leave as one",
        "duplet_runtime.peer_stream",
        "            while self._outbox and count < TOGETHER_MESSAGES:",
        "            while self._outbox:",
        (f"{TOGETHER}::test_what_waits_goes_together_and_arrives_in_order",),
    ),
    Rule(
        "messages of any size leave as one",
        "duplet_runtime.peer_stream",
        "                if room < 0:",
        "                if False:",
        (f"{TOGETHER}::test_large_messages_go_alone",),
    ),
    Rule(
        "messages leave as one to a peer that cannot read it",
        "duplet_runtime.peer_stream",
        "        if self._together and self._outbox:",
        "        if self._outbox:",
        (f"{TOGETHER}::test_peers_without_the_field_get_each_message_by_itself",),
    ),
    Rule(
        "what stands behind the end of a stream is heard",
        "duplet_runtime.peer_stream",
        "            if self.ended:\n                return\n            try:\n",
        "            try:\n",
        (
            f"{TOGETHER}::test_nothing_is_heard_behind_the_end_of_a_stream",
            f"{TOGETHER}::test_a_batch_that_begins_a_stream_is_heard_from_its_hello_on",
        ),
    ),
    Rule(
        "any number of messages is acted on in one turn",
        "duplet_runtime.peer_stream",
        "        if len(following) >= TOGETHER_MESSAGES:",
        "        if False:",
        (f"{TOGETHER}::test_more_than_a_peer_ever_sends_together_is_refused_unheard",),
    ),
    Rule(
        "messages within messages within messages are lost unnoticed",
        "duplet_runtime.peer_stream",
        "                if part is not proto and part.more:",
        "                if False:",
        (f"{TOGETHER}::test_more_within_more_and_an_empty_part_are_refused",),
    ),
    Rule(
        "what stands before a malformed message is not heard",
        "duplet_runtime.peer_stream",
        "        for part in (proto, *following):",
        "        for part in [(p, self._decode(p))[0] for p in (proto, *following)]:",
        (f"{TOGETHER}::test_more_within_more_and_an_empty_part_are_refused",),
    ),
    Rule(
        "a stream that begins with something else than a Hello is heard",
        "duplet_runtime.peers",
        "                if not isinstance(message, Hello):",
        "                if False:",
        (f"{TOGETHER}::test_a_batch_that_begins_a_stream_is_heard_from_its_hello_on",),
    ),
    Rule(
        "the answers to one long Hello cut the stream",
        "duplet_runtime.peer_stream",
        "OUTBOX_ANSWERS = 131_072",
        "OUTBOX_ANSWERS = 1024",
        (f"{TOGETHER}::test_all_that_a_hello_may_list_can_wait_to_be_answered",),
    ),
    Rule(
        "a service that leaves in peace loses what waits",
        "duplet_runtime.peer_stream",
        "        if not self._outbox and not self._in_write:",
        "        if True:",
        ("tests/runtime/test_runtime_peers.py::test_a_service_that_leaves_says_its_last_words",),
    ),
    Rule(
        "a dialer waits for a write on a call that was cancelled while it opened",
        "duplet_runtime.peers",
        "            await stream.drop_write()",
        "            await stream.settle()",
        ("tests/runtime/test_runtime_opening.py::test_a_stream_that_ends_while_it_opens_is_over",),
        slow=True,
    ),
    Rule(
        "a condition's detail has no length",
        "duplet_runtime.health",
        "MOST_DETAIL_CHARS = 1000",
        "MOST_DETAIL_CHARS = 100_000",
        ("tests/runtime/test_runtime_health.py::test_a_long_detail_does_not_cost_the_answer",),
    ),
    Rule(
        "packed messages are unpacked",
        "duplet_runtime.server",
        '    ("grpc.compression_enabled_algorithms_bitset", 1),',
        '    ("grpc.compression_enabled_algorithms_bitset", 7),',
        ("tests/runtime/test_runtime_bad_bytes.py::test_a_packed_request_is_not_unpacked",),
    ),
)
