"""What a checkpoint's publisher wants its rows drawn with: `generation_config.json`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from duplet_core.errors import InvalidInput
from duplet_engine.model_config import ModelConfig
from duplet_engine.tensor_files import read_json, refuse_checkpoint
from duplet_pages.prompt import check_sampling
from duplet_pages.spec import SamplingDefaults

_FILE = "generation_config.json"


def apply_generation_config(directory: Path, model: ModelConfig) -> ModelConfig:
    """The model with the defaults of its directory's `generation_config.json`, if there is one.

    Read are `temperature`, `top_p`, `top_k` (0: all entries), `do_sample` (false: the most
    probable, whatever the temperature) and `max_new_tokens`, as Hugging Face names them, and
    `repetition_window`; what is missing or null stays as it is.

    Raises:
        InvalidInput: a value is out of range; the detail names file, field and value.
    """
    path = directory / _FILE
    if not path.exists():
        return model
    fields = {name: value for name, value in read_json(path).items() if value is not None}
    names = ("temperature", "top_p", "top_k", "repetition_window")
    found = {name: fields[name] for name in names if name in fields}
    if found.get("top_k") == 0:
        found["top_k"] = model.vocab
    sampling = _checked(path, replace(model.sampling, **found))
    draws = fields.get("do_sample", True)
    if type(draws) is not bool:
        raise refuse_checkpoint(path, f"do_sample is {draws!r}, wanted true or false")
    if not draws:
        sampling = replace(sampling, temperature=0.0)
    max_rows = fields.get("max_new_tokens", model.default_max_rows)
    if type(max_rows) is not int or not 1 <= max_rows <= model.longest_sequence:
        raise refuse_checkpoint(
            path, f"max_new_tokens is {max_rows!r}, wanted one in [1, {model.longest_sequence}]"
        )
    return replace(model, sampling=sampling, default_max_rows=max_rows)


def _checked(path: Path, sampling: SamplingDefaults) -> SamplingDefaults:
    wanted: dict[str, tuple[type[Any], ...]] = {
        "temperature": (int, float),
        "top_p": (int, float),
        "top_k": (int,),
        "repetition_window": (int,),
    }
    for name, types in wanted.items():
        value = getattr(sampling, name)
        if type(value) not in types:
            raise refuse_checkpoint(path, f"{name} is {value!r}, wanted a number")
    try:
        check_sampling(defaults=sampling, seed=0)
    except InvalidInput as error:
        raise refuse_checkpoint(path, error.detail) from error
    return sampling
