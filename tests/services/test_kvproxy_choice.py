"""The rule that picks a transport, and the words of the doctor."""

from __future__ import annotations

import re
from typing import Any

import pytest

from duplet_kvproxy.choice import (
    Choice,
    TransportRefused,
    best_trial,
    expected_busy_ms,
    parse_transports,
)
from duplet_kvproxy.transport import TransportName
from duplet_kvproxy.trial import Trial
from duplet_kvproxy.verdict import NO_ENGINES_HANDLE, NO_IMEX, NO_PEER, USE_MPS, draw_verdict
from duplet_memory.cuda_driver import CudaError
from duplet_memory.layout import describe_pool

ALL: tuple[TransportName, ...] = ("pages", "push", "pull", "staged")


def trial(
    name: TransportName, time_ms: float, *, ok: bool = True, arrangement: Any = "page-major"
) -> Trial:
    return Trial(name, "GPU-a", "GPU-b", arrangement, ok, "" if ok else "no", time_ms, 300.0)


def test_names_are_in_the_order_that_was_given() -> None:
    assert parse_transports("push, pages") == ("push", "pages")
    for text in ("", "pages,", "pages,pages", "pages,rdma"):
        with pytest.raises(ValueError, match="at most once"):
            parse_transports(text)


def test_busy_gpus_decide_and_not_the_idle_ones_of_the_trial() -> None:
    trials = [trial("push", 0.8), trial("pages", 1.0), trial("staged", 0.9)]
    best = best_trial(trials, ALL, mps=False)
    assert best is not None
    assert best.transport == "pages"
    assert expected_busy_ms(trials[0], mps=False) > expected_busy_ms(trials[1], mps=False)


def test_order_decides_between_equals_and_only_what_is_allowed_is_used() -> None:
    trials = [trial("push", 0.80), trial("pull", 0.81), trial("pages", 9.0)]
    assert best_trial(trials, ("pull", "push"), mps=False) == trials[1]
    assert best_trial(trials, ("push", "pull"), mps=False) == trials[0]
    assert best_trial(trials, ("staged",), mps=False) is None
    assert best_trial([trial("pages", 0.1, ok=False)], ALL, mps=False) is None


def test_nothing_allowed_that_works_refuses_to_start_and_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_driver() -> None:
        raise CudaError("cuInit", "no driver")

    monkeypatch.setattr("duplet_kvproxy.choice.open_devices", no_driver)
    with pytest.raises(TransportRefused, match="cuInit: no driver") as caught:
        Choice(("pages", "push"))
    assert "DUPLET_KVPROXY_TRANSPORTS" in caught.value.detail
    assert not Choice(("shm", "pages")).trials, "shm is allowed, so CPU pools are served"


def test_cpu_pools_go_by_shared_memory() -> None:
    pool = describe_pool(
        layers=1,
        page_rows=1,
        kv_heads=1,
        head_dim=8,
        dtype="float32",
        pages=1,
        arrangement="page-major",
    )
    choice = Choice(("shm",))
    assert choice.path_for(pool, pool) == ("shm: CPU pools", True)
    assert choice.describe() == "shm for CPU pools"


def test_the_verdict_names_what_works_what_does_not_and_what_to_do() -> None:
    report = {
        "gpus": [{"uuid": "GPU-a"}, {"uuid": "GPU-b"}],
        "no_gpus_because": "",
        "links": [{"source": "GPU-a", "dest": "GPU-b", "peer_access": True}],
        "handles": [
            {"kind": "cumem-fd", "ok": True, "detail": "", "map_ms": 3.0},
            {"kind": "cumem-fabric", "ok": False, "detail": "NOT_PERMITTED", "map_ms": 0.0},
        ],
        "trials": [
            trial("pages", 0.2).fields(),
            trial("push", 0.2, arrangement="layer-major").fields(),
        ],
        "mps": False,
        "cpu": {"ok": True, "gb_s": 5.0, "detail": ""},
    }
    found = draw_verdict(report)
    text = "\n".join(found["verdict"])
    assert found["ok"]
    assert re.search(r"page-major pools: P2P by pages at 300 GB/s; staged not needed", text)
    assert "cumem-fabric refused: NOT_PERMITTED" in text
    assert found["advice"] == [NO_IMEX, USE_MPS]
    failed = {"ok": False, "detail": "no such device", "map_ms": 0.0}
    ipc = {"kind": "cuda-ipc", "ok": True, "detail": "", "map_ms": 1.0}
    without = draw_verdict({**report, "handles": [{"kind": "cumem-fd", **failed}, ipc]})
    assert not without["ok"], "handles that no engine makes do not run a unit"
    assert "cumem-fd refused: no such device" in without["verdict"]
    assert NO_ENGINES_HANDLE in without["advice"]
    report["trials"] = [trial("pages", 0.0, ok=False).fields()]
    report["links"][0]["peer_access"] = False  # type: ignore[index]
    found = draw_verdict(report)
    assert not found["ok"]
    assert NO_PEER in found["advice"]


def test_without_gpus_the_verdict_says_so_and_judges_the_cpu_path() -> None:
    report: dict[str, Any] = {"gpus": [], "no_gpus_because": "no driver"}
    good = draw_verdict({**report, "cpu": {"ok": True, "gb_s": 5.0, "detail": ""}})
    assert good["ok"]
    assert "No GPU here (no driver)" in good["verdict"][0]
    bad = draw_verdict({**report, "cpu": {"ok": False, "gb_s": 0.0, "detail": "no memfd"}})
    assert not bad["ok"]
    assert "CPU pools do not work: no memfd" in bad["verdict"]
