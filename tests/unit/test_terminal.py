"""What commands share towards the terminal."""

from __future__ import annotations

import pytest
import typer

from duplet_unit.terminal import with_pictures


def test_pictures_without_matplotlib_say_how_to_get_it() -> None:
    hint = r"pip install 'duplet-load\[plots\]'"
    with pytest.raises(typer.BadParameter, match=hint), with_pictures():
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")


def test_another_missing_module_is_a_fault_of_ours() -> None:
    with pytest.raises(ModuleNotFoundError), with_pictures():
        raise ModuleNotFoundError("No module named 'duplet_odd'", name="duplet_odd")
