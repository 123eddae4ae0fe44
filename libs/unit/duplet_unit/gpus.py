"""A unit on GPUs: which service sees which, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from duplet_core.ids import Role
from duplet_pages.engine_config import check_model
from duplet_runtime.settings import MONOLITH
from duplet_unit.supervisor import Service
from duplet_unit.unit import UnitError

VISIBLE = "CUDA_VISIBLE_DEVICES"
TRANSPORTS_VARIABLE = "DUPLET_KVPROXY_TRANSPORTS"
TRANSPORTS = "pages,push,pull,staged"
"""Allowed between GPUs where the environment names none; kvproxy measures which is best."""
ENGINES = (Role.PREFILL, Role.DECODE, MONOLITH)


def parse_gpus(text: str, *, monolith: bool) -> tuple[str, ...]:
    """GPUs by index or UUID: prefill's and decode's ("0,1"; "0,0" shares one), or the monolith's.

    Raises:
        UnitError: another number of them.
    """
    gpus = tuple(name.strip() for name in text.split(","))
    wanted = 1 if monolith else 2
    if len(gpus) != wanted or not all(gpus):
        what = "the monolith's" if monolith else "prefill's and decode's"
        raise UnitError(f"--gpu {text!r}: name {what} GPU, as --gpu {'0' if monolith else '0,1'}")
    return gpus


def on_gpus(services: Sequence[Service], gpus: Sequence[str]) -> list[Service]:
    """The services with their engines on these GPUs: each engine sees its own, kvproxy all."""
    both = ",".join(dict.fromkeys(gpus))
    visible = {
        Role.PREFILL: gpus[0],
        Role.DECODE: gpus[-1],
        MONOLITH: gpus[0],
        Role.KVPROXY: both,
        Role.LB: "",
    }
    return [
        replace(
            service,
            environment={
                TRANSPORTS_VARIABLE: TRANSPORTS,
                **service.environment,
                **{f"DUPLET_{name.upper()}_DEVICE": "cuda" for name in ENGINES},
                VISIBLE: visible[service.name],
            },
        )
        for service in services
    ]


def model_settings(model: str, option: str = "--model") -> Mapping[str, str]:
    """The environment that makes every engine load this model, which `option` named.

    Raises:
        UnitError: there is no such model.
    """
    try:
        check_model(model)
    except ValueError as error:
        raise UnitError(f"{option}: {error}") from error
    return {f"DUPLET_{name.upper()}_MODEL": model for name in ENGINES}
