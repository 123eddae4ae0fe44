"""Which transport a pair of pools uses: what is allowed, works here and is best under load.

At start every allowed transport is tried on every pair of GPUs. Tried GPUs are idle, the unit's
are not, so the rule corrects for that: both GPUs will be busy with their engines' work, and a
kernel of another process waits there for a time slice, while the copy engine does not. Under
MPS kernels wait less.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import permutations

from duplet_core.errors import InvalidInput, Reason, Unavailable
from duplet_kvproxy.transport import GPU_TRANSPORTS, WHOLE_PAGES, GpuTransport, TransportName
from duplet_kvproxy.trial import Trial, build_transport, run_trials
from duplet_memory.cuda_driver import CudaError, Device, open_devices
from duplet_memory.layout import PoolDescription
from duplet_pages.engine_config import Arrangement

TRANSPORTS: tuple[TransportName, ...] = ("shm", *GPU_TRANSPORTS)

BUSY_FACTOR = {"pages": 1.0, "push": 2.6, "pull": 2.7, "staged": 8.7, "host": 1.0}
"""Time with both GPUs busy over time on idle ones, without MPS: 2.45 over 0.93 ms, 2.44 over
0.91, 8.80 over 1.01 for 2,048 rows of layer-major pools (two H200: docs/measurements/kv_move.md).
Each step of `staged` waits for a time slice."""
BUSY_FACTOR_MPS = {"pages": 1.0, "push": 1.3, "pull": 1.0, "staged": 2.6, "host": 1.0}
"""The same under MPS: 1.12 over 0.89 ms by 2 programs a multiprocessor, 0.93 over 0.91, 2.64 over
1.01."""
NEAR = 1.1
"""Within this ratio of the best, the configured order decides."""


class TransportRefused(Unavailable):
    """None of the allowed transports can be used; the detail says what failed and what to do."""

    def __init__(self, detail: str) -> None:
        super().__init__(Reason.TRANSFER_FAILED, detail)


def parse_transports(text: str) -> tuple[TransportName, ...]:
    """Names in order of preference from "pages,push".

    Raises:
        ValueError: empty, unknown or double names.
    """
    names = [name.strip() for name in text.split(",")]
    known = [name for name in TRANSPORTS if name in names]
    if len(known) != len(names):
        raise ValueError(f"{text!r}: each of {', '.join(TRANSPORTS)} at most once, by commas")
    return tuple(sorted(known, key=names.index))


def expected_busy_ms(trial: Trial, mps: bool) -> float:
    """The trial's time with both GPUs busy."""
    return trial.time_ms * (BUSY_FACTOR_MPS if mps else BUSY_FACTOR)[trial.transport]


def best_trial(
    trials: Iterable[Trial], allowed: tuple[TransportName, ...], mps: bool
) -> Trial | None:
    """The first allowed one of those that are about as fast as the fastest; None: none works."""
    working = [t for t in trials if t.ok and t.transport in allowed]
    if not working:
        return None
    limit_ms = NEAR * min(expected_busy_ms(t, mps) for t in working)
    near = [t for t in working if expected_busy_ms(t, mps) <= limit_ms]
    return min(near, key=lambda t: allowed.index(t.transport))


class Choice:
    """The allowed transports on this machine. Owns every GPU transport, for the process's life."""

    def __init__(self, allowed: tuple[TransportName, ...]) -> None:
        """Try them all; takes a second or two where GPU transports are allowed.

        Raises:
            TransportRefused: nothing that is allowed works here.
        """
        self.allowed = allowed
        self.trials: list[Trial] = []
        self.mps = False
        self._transports: dict[tuple[str, str, TransportName], GpuTransport] = {}
        self._decided: dict[tuple[str, str, Arrangement], Trial | None] = {}
        """By source, destination and arrangement: every copy asks."""
        gpu_names = [name for name in allowed if name in GPU_TRANSPORTS]
        self.devices: tuple[Device, ...] = ()
        problem = ""
        if gpu_names:
            try:
                self._try_all(gpu_names)
            except CudaError as error:
                problem = error.detail
        self._check(problem)

    def transport_for(self, source: PoolDescription, dest: PoolDescription) -> GpuTransport:
        """The transport between two GPU pools.

        Raises:
            InvalidInput: none that is allowed works between their GPUs.
        """
        trial = self.trial_for(source, dest)
        if trial is None:
            raise InvalidInput(
                Reason.TRANSFER_FAILED,
                f"none of {', '.join(self.allowed)} works from {source.device} to {dest.device} "
                f"for {source.arrangement} to {dest.arrangement} pools",
            )
        return self._transports[trial.source, trial.dest, trial.transport]

    def trial_for(self, source: PoolDescription, dest: PoolDescription) -> Trial | None:
        """The trial that decided for these pools; None: nothing works."""
        arrangement: Arrangement = "layer-major"
        if source.arrangement == dest.arrangement == "page-major":
            arrangement = "page-major"
        pair = (source.device, dest.device, arrangement)
        if pair not in self._decided:
            fitting = [t for t in self.trials if (t.source, t.dest, t.arrangement) == pair]
            self._decided[pair] = best_trial(fitting, self.allowed, self.mps)
        return self._decided[pair]

    def path_for(self, source: PoolDescription, dest: PoolDescription) -> tuple[str, bool]:
        """How copies between these pools go, in words, and whether they go at all."""
        kinds = {source.handle == "memfd", dest.handle == "memfd"}
        if kinds == {True}:
            return "shm: CPU pools", True
        if kinds == {True, False}:
            return "one pool is on a GPU and the other is not", False
        trial = self.trial_for(source, dest)
        if trial is None:
            return f"no allowed transport from {source.device} to {dest.device}", False
        return (
            f"{trial.transport}: {source.device} to {dest.device}, {trial.arrangement}, "
            f"{trial.gb_s:g} GB/s idle"
        ), True

    def describe(self) -> str:
        """What was found, in one line for health and log."""
        lines = [
            f"{t.transport} {t.arrangement} {t.source[:12]}→{t.dest[:12]} "
            + (f"{t.gb_s:g} GB/s" if t.ok else f"refused ({t.detail})")
            for t in self.trials
        ]
        shm = ["shm for CPU pools"] if "shm" in self.allowed else []
        return "; ".join(shm + lines)

    def _try_all(self, names: list[TransportName]) -> None:
        self.devices = open_devices()
        self.mps = bool(self.devices) and bool(self.devices[0].attribute("MPS_ENABLED"))
        pairs = list(permutations(self.devices, 2)) or [(d, d) for d in self.devices]
        for source, dest in pairs:
            built: dict[TransportName, GpuTransport] = {}
            for name in names:
                try:
                    built[name] = build_transport(name, source, dest)
                except CudaError as error:
                    self.trials += _refused(name, source, dest, error)
            self.trials += run_trials(built, source, dest)
            for name, transport in built.items():
                self._transports[source.uuid, dest.uuid, name] = transport

    def _check(self, problem: str) -> None:
        if "shm" in self.allowed or any(t.ok for t in self.trials):
            return
        failures = problem or "; ".join(
            sorted({f"{t.transport}: {t.detail}" for t in self.trials if not t.ok})
        )
        raise TransportRefused(
            f"no allowed transport works here ({', '.join(self.allowed)}): "
            f"{failures or 'no GPU is visible'}. Run `duplet doctor` to see what does, and allow "
            "it in DUPLET_KVPROXY_TRANSPORTS"
        )


def _refused(name: TransportName, source: Device, dest: Device, error: CudaError) -> list[Trial]:
    return [
        Trial(name, source.uuid, dest.uuid, arrangement, False, error.detail)
        for arrangement in ("page-major", "layer-major")
        if arrangement == "page-major" or name not in WHOLE_PAGES
    ]
