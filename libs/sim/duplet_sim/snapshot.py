"""Copies and keys of a machine's state, without the machine's help.

`clone` copies what can change and shares what cannot; `freeze` turns the same state into a
hashable value: equal values mean machines that behave alike from here on. Both look at
objects as they are, so a new field of a machine is part of its state without a word here.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import is_dataclass
from enum import Enum
from types import FunctionType, MethodType
from typing import Any

_SHARED: dict[type, bool] = {}
"""Types whose values are never changed: shared by clones, their own keys."""
_FIELDS: dict[type, tuple[str, ...]] = {}

_FIGURES = frozenset({"kv_checks", "kv_mismatches", "aborts_resent", "ends_withheld"})
_NOT_STATE = frozenset({"_out", "_effects", "config", "parent"}) | _FIGURES
"""Back references, settings and figures: they do not decide what a machine does."""


def clone(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """A copy that shares nothing that can change; identities inside are kept."""
    if memo is None:
        memo = {}
    kind = value.__class__
    if _is_shared(kind):
        return value
    known = memo.get(id(value))
    if known is not None:
        return known
    if kind is dict or kind is OrderedDict:
        copy = memo[id(value)] = kind()
        for key, item in value.items():
            copy[key] = clone(item, memo)
        return copy
    if kind is list or kind is deque:
        items = memo[id(value)] = kind()
        items.extend(clone(item, memo) for item in value)
        return items
    if kind is set:
        return set(value)
    if kind is MethodType:
        return MethodType(value.__func__, clone(value.__self__, memo))
    copy = memo[id(value)] = kind.__new__(kind)
    for name in _fields(kind, value):
        object.__setattr__(copy, name, clone(getattr(value, name), memo))
    return copy


def freeze(value: Any) -> Hashable:
    """A hashable value of the state; order in dicts and lists counts."""
    kind = value.__class__
    if _is_shared(kind):
        return value  # type: ignore[no-any-return]
    if kind is dict or kind is OrderedDict:
        return tuple((key, freeze(item)) for key, item in value.items())
    if kind is list or kind is deque:
        return tuple(freeze(item) for item in value)
    if kind is set:
        return frozenset(value)
    if kind is MethodType:
        return None
    return tuple(
        freeze(getattr(value, name)) for name in _fields(kind, value) if name not in _NOT_STATE
    )


def _is_shared(kind: type) -> bool:
    known = _SHARED.get(kind)
    if known is None:
        known = _SHARED[kind] = (
            kind in (int, str, bytes, bool, float, tuple, frozenset, type(None), FunctionType)
            or issubclass(kind, Enum | int | str)
            or (is_dataclass(kind) and _is_value(kind.__dataclass_params__))  # type: ignore[attr-defined]
        )
    return known


def _is_value(params: Any) -> bool:
    """What is frozen, or is a `value` of core, is never changed."""
    return bool(params.frozen or params.unsafe_hash)


def _fields(kind: type, value: Any) -> tuple[str, ...]:
    names = _FIELDS.get(kind)
    if names is None:
        slots = [s for base in kind.__mro__ for s in getattr(base, "__slots__", ())]
        names = _FIELDS[kind] = tuple(slots) or tuple(vars(value))
    return names
