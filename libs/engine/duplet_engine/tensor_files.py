"""The tensor files of a published checkpoint, mapped into memory and read one tensor at a time.

Only data is read. Of safetensors files that is all there is; a `model.pth` is a pickle, and is
read by torch's unpickler for weights, which makes tensors and refuses everything else.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from duplet_core.errors import InvalidInput, Reason

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLE = "model.pth"
_FLOATS = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
}
"""Number formats that weights come in, as safetensors writes them; others are quantised."""
_BITS = {"float64": 64, "float32": 32, "float16": 16, "bfloat16": 16}


def refuse_checkpoint(path: Path, detail: str) -> InvalidInput:
    """The error of a checkpoint that cannot be served; it names the file."""
    return InvalidInput(Reason.INVALID_REQUEST, f"{path}: {detail}")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as its file describes it."""

    path: Path
    shape: tuple[int, ...]
    dtype: str
    """As torch names it, where it is a float; else as the file does."""

    @property
    def is_float(self) -> bool:
        return self.dtype in _BITS

    @property
    def file_bytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * _BITS.get(self.dtype, 0) // 8


class TensorFiles(Protocol):
    """Tensors by name. Owns the mappings of its files while it lives; a tensor that was read on
    the CPU keeps its file's mapping alive by itself."""

    @property
    def top(self) -> Path:
        """The file that says which tensors there are."""
        ...

    @property
    def entries(self) -> Mapping[str, TensorEntry]: ...

    def read(self, name: str) -> Tensor:
        """The tensor on the device that the files were opened for; lent where it is mapped."""
        ...


def open_tensor_files(directory: Path, device: torch.device) -> TensorFiles:
    """Open a directory's weights: one safetensors file, shards with their index, or `model.pth`.

    Raises:
        InvalidInput: there are none, or one of them is broken; the detail names the file.
    """
    index, single, pickled = (directory / name for name in (_INDEX, _SINGLE, _PICKLE))
    if index.is_file():
        return _SafeTensors(index, _read_index(index), device)
    if single.is_file():
        return _SafeTensors(single, None, device)
    if pickled.is_file():
        return _PickledTensors(pickled, device)
    raise refuse_checkpoint(directory, f"there is no {_INDEX}, {_SINGLE} or {_PICKLE}")


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object of a checkpoint.

    Raises:
        InvalidInput: it is not there, or is no object.
    """
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise refuse_checkpoint(path, f"cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise refuse_checkpoint(path, "is no JSON object")
    return found


def _read_index(path: Path) -> dict[str, str]:
    """Which shard has which tensor."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise refuse_checkpoint(path, "weight_map is missing or empty")
    for name, shard in weight_map.items():
        # A shard lies beside its index; a path could lead out of the checkpoint.
        if not isinstance(shard, str) or shard != Path(shard).name:
            raise refuse_checkpoint(path, f"weight_map: {name} is in {shard!r}, no file name")
    return weight_map


class _SafeTensors:
    def __init__(
        self, top: Path, weight_map: Mapping[str, str] | None, device: torch.device
    ) -> None:
        self.top = top
        names = [top.name] if weight_map is None else sorted(set(weight_map.values()))
        self._files = {name: _open_safe(top.parent / name, device) for name in names}
        self.entries: dict[str, TensorEntry] = {}
        for name, file in self._files.items():
            for tensor in file.keys():  # noqa: SIM118 - no mapping
                path = top.parent / name
                if weight_map is not None and weight_map.get(tensor) != name:
                    raise refuse_checkpoint(path, f"{tensor} is here, but {top.name} says not")
                found = file.get_slice(tensor)
                dtype = found.get_dtype()
                self.entries[tensor] = TensorEntry(
                    path, tuple(found.get_shape()), _FLOATS.get(dtype, dtype)
                )
        for tensor in sorted(set(weight_map or ()) - set(self.entries)):
            assert weight_map is not None
            raise refuse_checkpoint(
                top.parent / weight_map[tensor], f"{tensor} is not here, but {top.name} says so"
            )

    def read(self, name: str) -> Tensor:
        return self._files[self.entries[name].path.name].get_tensor(name)


def _open_safe(path: Path, device: torch.device) -> Any:
    if not path.is_file():
        raise refuse_checkpoint(path, "the shard is missing")
    try:
        return safe_open(path, framework="pt", device=str(device))
    except (OSError, SafetensorError) as error:
        raise refuse_checkpoint(path, f"cannot be read: {error}") from error


class _PickledTensors:
    def __init__(self, top: Path, device: torch.device) -> None:
        self.top = top
        self._device = device
        try:
            found = torch.load(top, map_location="cpu", mmap=True, weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            # The first line says what; the rest of torch's text is how to lift the guard.
            reason = str(error).splitlines()[0]
            raise refuse_checkpoint(top, f"cannot be read as weights only: {reason}") from error
        if not isinstance(found, dict) or not all(isinstance(t, Tensor) for t in found.values()):
            raise refuse_checkpoint(top, "is no plain dict of tensors")
        self._tensors: dict[str, Tensor] = found
        self.entries = {
            name: TensorEntry(top, tuple(t.shape), str(t.dtype).removeprefix("torch."))
            for name, t in found.items()
        }

    def read(self, name: str) -> Tensor:
        return self._tensors[name].to(self._device)
