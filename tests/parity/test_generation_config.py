"""Defaults that a checkpoint's publisher wrote beside its shape."""

from __future__ import annotations

from pathlib import Path

import pytest

from duplet_core.errors import InvalidInput
from duplet_engine.published_configs import read_model_config
from duplet_pages.spec import SamplingDefaults
from tests.parity.published import S2_LIKE, nested_config, write_json

FILE = "generation_config.json"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_json(tmp_path / "config.json", nested_config(S2_LIKE))
    return tmp_path


def test_without_the_file_s2_pros_published_values_hold(directory: Path) -> None:
    model = read_model_config(directory)
    assert model.sampling == SamplingDefaults(0.8, 0.8, 30, 10)
    assert model.default_max_rows == 1024


def test_the_files_values_hold_and_missing_ones_stay(directory: Path) -> None:
    wanted = {"temperature": 0.7, "top_p": None, "repetition_window": 0, "max_new_tokens": 400}
    write_json(directory / FILE, wanted | {"do_sample": True})
    model = read_model_config(directory)
    assert model.sampling == SamplingDefaults(0.7, 0.8, 30, 0)
    assert model.default_max_rows == 400


def test_no_limit_of_entries_is_all_of_them(directory: Path) -> None:
    write_json(directory / FILE, {"top_k": 0})
    model = read_model_config(directory)
    assert model.sampling.top_k == model.vocab


def test_who_does_not_sample_takes_the_most_probable(directory: Path) -> None:
    write_json(directory / FILE, {"do_sample": False, "temperature": 0.7, "top_p": 0.9})
    assert read_model_config(directory).sampling == SamplingDefaults(0.0, 0.9, 30, 10)


def test_a_temperature_that_is_not_used_is_judged_too(directory: Path) -> None:
    write_json(directory / FILE, {"do_sample": False, "temperature": -1})
    with pytest.raises(InvalidInput, match=rf"{FILE}: .*temperature: -1 "):
        read_model_config(directory)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("temperature", float("nan")),
        ("temperature", 6),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_p", float("inf")),
        ("top_p", "0.8"),
        ("top_k", -3),
        ("top_k", 2.5),
        ("repetition_window", True),
        ("repetition_window", 200),
        ("max_new_tokens", 0),
        ("max_new_tokens", 10**9),
        ("max_new_tokens", "many"),
        ("do_sample", "false"),
        ("do_sample", 0),
    ],
)
def test_a_bad_value_names_file_and_field(directory: Path, field: str, value: object) -> None:
    write_json(directory / FILE, {field: value})
    with pytest.raises(InvalidInput, match=rf"{FILE}: .*{field}.*{value}"):
        read_model_config(directory)
