"""What the doctor's findings mean, in plain words, and what to do about them. No GPU needed."""

from __future__ import annotations

from typing import Any

from duplet_kvproxy.choice import TRANSPORTS, best_trial
from duplet_kvproxy.transport import WHOLE_PAGES
from duplet_kvproxy.trial import Trial
from duplet_memory.layout import ENGINES_HANDLE

NO_PEER = (
    "No peer access between these GPUs: allow `host`, which goes through host memory. GeForce "
    "cards have none with the stock driver; a driver with P2P is faster. On other cards look at "
    "`nvidia-smi topo -p2p r`, at IOMMU and at ACS."
)
NO_IMEX = (
    "FABRIC handles need an IMEX channel (nvidia-imex, /dev/nvidia-caps-imex-channels). They are "
    "not needed where one kvproxy sees both GPUs."
)
USE_MPS = (
    "Layer-major pools move by kernels, which wait for time slices while both GPUs work: start "
    "MPS for all services of the unit, or use page-major pools."
)
ONE_GPU = "One GPU is visible: prefill and decode would share it. kvproxy must see both GPUs."
NO_ENGINES_HANDLE = (
    f"Engines pass GPU pools as {ENGINES_HANDLE} and in no other way, so no unit runs on these "
    "GPUs: kvproxy must see the GPUs of prefill and decode, and their driver must have virtual "
    "memory management, which some virtual GPUs lack."
)


def draw_verdict(report: dict[str, Any]) -> dict[str, Any]:
    """`ok`, `verdict` and `advice` for a report of `doctor.examine`."""
    verdict: list[str] = []
    advice: list[str] = []
    cpu = report["cpu"]
    if cpu["ok"]:
        verdict.append(f"CPU pools pass between processes and move at {cpu['gb_s']:g} GB/s (shm)")
    else:
        verdict.append(f"CPU pools do not work: {cpu['detail']}")
        advice.append("CPU pools need memfd_create, and descriptors over Unix sockets.")
    ok = bool(cpu["ok"])
    if not report["gpus"]:
        why = report["no_gpus_because"] or "the driver sees none"
        verdict.insert(0, f"No GPU here ({why}): units on this machine run on the CPU")
        return {"ok": ok, "verdict": verdict, "advice": advice}
    ok &= _judge_handles(report, verdict, advice)
    ok &= _judge_pairs(report, verdict, advice)
    return {"ok": ok, "verdict": verdict, "advice": advice}


def _judge_handles(report: dict[str, Any], verdict: list[str], advice: list[str]) -> bool:
    """Whether the handles that engines make work; the other kinds are told of."""
    works = True
    for kind in dict.fromkeys(h["kind"] for h in report["handles"]):
        trials = [h for h in report["handles"] if h["kind"] == kind]
        failed = [h for h in trials if not h["ok"]]
        if not failed:
            slowest = max(h["map_ms"] for h in trials)
            verdict.append(f"{kind} handles work (mapped in {slowest:g} ms)")
            continue
        verdict.append(f"{kind} refused: {failed[0]['detail']}")
        if kind == ENGINES_HANDLE:
            advice.append(NO_ENGINES_HANDLE)
            works = False
        elif kind == "cumem-fabric":
            advice.append(NO_IMEX)
    return works


def _judge_pairs(report: dict[str, Any], verdict: list[str], advice: list[str]) -> bool:
    trials = [Trial(**fields) for fields in report["trials"]]
    if any(not link["peer_access"] for link in report["links"]):
        advice.append(NO_PEER)
    if len(report["gpus"]) == 1:
        advice.append(ONE_GPU)
    ok = True
    for source, dest in dict.fromkeys((t.source, t.dest) for t in trials):
        for arrangement in ("page-major", "layer-major"):
            pair = [
                t
                for t in trials
                if (t.source, t.dest, t.arrangement) == (source, dest, arrangement)
            ]
            best = best_trial(pair, TRANSPORTS, report["mps"])
            name = f"{source[:12]} → {dest[:12]}, {arrangement} pools"
            if best is None:
                why = "; ".join(sorted({f"{t.transport}: {t.detail}" for t in pair}))
                verdict.append(f"{name}: nothing works ({why})")
                ok = ok and arrangement == "layer-major"
                continue
            verdict.append(f"{name}: {_tell_way(best)}")
            if best.transport not in WHOLE_PAGES and not report["mps"] and USE_MPS not in advice:
                advice.append(USE_MPS)
    return ok


def _tell_way(best: Trial) -> str:
    if best.transport == "host":
        return f"through host memory by host at {best.gb_s:g} GB/s"
    staged = "" if best.transport == "staged" else "; staged not needed"
    return f"P2P by {best.transport} at {best.gb_s:g} GB/s{staged}"
