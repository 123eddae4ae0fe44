"""What an engine adds to the packet filter is taken back, and nothing else."""

from __future__ import annotations

from tests.compose.firewall import undo

BEFORE = """\
*filter
:INPUT DROP [0:0]
:FORWARD ACCEPT [12:840]
:MINE - [0:0]
-A INPUT -i lo -j ACCEPT
-A FORWARD -j MINE
COMMIT
"""
AFTER = """\
*nat
:POSTROUTING ACCEPT [0:0]
:DOCKER - [0:0]
-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE
COMMIT
*filter
:INPUT DROP [7:300]
:FORWARD DROP [0:0]
:DOCKER - [0:0]
:MINE - [0:0]
-A INPUT -i lo -j ACCEPT
-A FORWARD -j DOCKER
-A FORWARD -j MINE
-A DOCKER -j RETURN
COMMIT
"""


def test_what_was_added_is_taken_back() -> None:
    assert undo(BEFORE, AFTER).splitlines() == [
        "*nat",
        "-D POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE",
        "-X DOCKER",
        "COMMIT",
        "*filter",
        ":FORWARD ACCEPT [0:0]",
        "-D FORWARD -j DOCKER",
        "-D DOCKER -j RETURN",
        "-X DOCKER",
        "COMMIT",
    ]


def test_what_was_there_stays() -> None:
    assert undo(AFTER, AFTER) == ""
    fewer = AFTER.replace("-A FORWARD -j MINE\n", "").replace(":MINE - [0:0]\n", "")
    assert undo(AFTER, fewer) == ""


def test_one_more_of_an_equal_rule() -> None:
    twice = BEFORE.replace("-A FORWARD -j MINE\n", "-A FORWARD -j MINE\n" * 2)
    assert undo(BEFORE, twice).splitlines() == ["*filter", "-D FORWARD -j MINE", "COMMIT"]
