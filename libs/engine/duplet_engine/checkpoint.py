"""Models by name: a built-in model, a published checkpoint's directory, or a shape.

A directory is read as its publisher left it: `config.json` for the shape, safetensors files (or
S1-mini's `model.pth`) for the weights. Nothing in it is executed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

import duplet_models
from duplet_core.errors import InvalidInput, Reason
from duplet_engine.model_config import ModelConfig
from duplet_engine.published_configs import read_model_config
from duplet_engine.published_layouts import Layout, find_layout, join_parts
from duplet_engine.shapes import SHAPES, random_weights
from duplet_engine.tensor_files import TensorEntry, open_tensor_files, refuse_checkpoint
from duplet_engine.tiny import TINY, tiny_weights
from duplet_pages.engine_config import RANDOM

_MOST_NAMED = 4
"""Tensors that an error names one by one."""

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all, growing, from 0 to all."""


def load_checkpoint(
    path_or_name: str, device: torch.device | str, dtype: torch.dtype, progress: Progress
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Load a model's weights, tensor by tensor, straight to the device.

    Args:
        path_or_name: a model that `duplet_models` has, 'tiny', 'random:<shape>' with a shape of
            `duplet_engine.shapes`, or the path of a checkpoint's directory.
        device: where the tensors shall be.
        dtype: of all of them; torch.float32 or torch.bfloat16.
        progress: told of bytes read; not called for models that are made.

    Returns:
        The config, and tensors as `duplet_engine.weights.tensor_shapes` names and shapes them.
        On the CPU, tensors whose order and dtype are the file's are mapped, not copied: the
        files must not change while the model lives.

    Raises:
        InvalidInput: there is no such model, or its files are not what its config says; the
            detail names file, tensor and shapes.
    """
    target = torch.device(device)
    if path_or_name in duplet_models.NAMES:
        return _load_directory(duplet_models.directory(path_or_name), target, dtype, progress)
    if path_or_name == TINY.name:
        made = tiny_weights()
        return TINY, {name: tensor.to(target, dtype) for name, tensor in made.items()}
    if path_or_name.startswith(RANDOM):
        config = SHAPES.get(path_or_name.removeprefix(RANDOM))
        if config is not None:
            return config, random_weights(config, target, dtype)
    elif Path(path_or_name).is_dir():
        return _load_directory(Path(path_or_name), target, dtype, progress)
    raise InvalidInput(
        Reason.INVALID_REQUEST,
        f"model is {path_or_name!r}, there is {', '.join(map(repr, duplet_models.NAMES))}, "
        f"{TINY.name!r}, '{RANDOM}' with one of {', '.join(SHAPES)}, and the path of a "
        "checkpoint's directory",
    )


def _load_directory(
    directory: Path, device: torch.device, dtype: torch.dtype, progress: Progress
) -> tuple[ModelConfig, dict[str, Tensor]]:
    config = read_model_config(directory)
    files = open_tensor_files(directory, device)
    layout = find_layout(config, files.entries)
    _check_names(files.top, layout, files.entries)
    _check_tensors(layout, files.entries)
    parts = layout.parts
    total = sum(files.entries[name].file_bytes for name in parts)
    done = 0
    progress(done, total)
    weights = {}
    for name, recipe in layout.recipes.items():
        weights[name] = join_parts(recipe, [files.read(part.name) for part in recipe], dtype)
        done += sum(files.entries[part.name].file_bytes for part in recipe)
        progress(done, total)
    return config, weights


def _check_names(top: Path, layout: Layout, entries: Mapping[str, TensorEntry]) -> None:
    needed = layout.parts
    missing = [f"{name} {list(part.shape)}" for name, part in needed.items() if name not in entries]
    unexpected = [
        f"{name} {list(entry.shape)} in {entry.path.name}"
        for name, entry in entries.items()
        if name not in needed and name not in layout.spare
    ]
    problems = [
        f"{_count(names)} {what}: {_enumerate(names)}"
        for what, names in (("missing", missing), ("unexpected", unexpected))
        if names
    ]
    if problems:
        raise refuse_checkpoint(top, "; ".join(problems))


def _check_tensors(layout: Layout, entries: Mapping[str, TensorEntry]) -> None:
    for name, part in layout.parts.items():
        entry = entries[name]
        if entry.shape != part.shape:
            raise refuse_checkpoint(
                entry.path,
                f"{name} has shape {list(entry.shape)}, config.json makes it {list(part.shape)}",
            )
        if not entry.is_float:
            raise refuse_checkpoint(
                entry.path, f"{name} is {entry.dtype}; quantised weights are not supported"
            )


def _count(names: list[str]) -> str:
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''}"


def _enumerate(names: list[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
