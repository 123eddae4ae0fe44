"""`say`, `canary` and `demo`: commands that need the built-in voice, which images of services
do not have."""

from __future__ import annotations

from importlib.util import find_spec

import typer

_NAMES = ("say", "canary", "demo")
_VOICE = "duplet_voice"


def add_speaking_commands(app: typer.Typer) -> None:
    """Register them; without the voice installed, each says what is missing."""
    if find_spec(_VOICE) is None:
        for name in _NAMES:
            anything = {"allow_extra_args": True, "ignore_unknown_options": True}
            app.command(name, context_settings=anything)(_say_what_is_missing)
        return
    from duplet_unit.canary_command import canary
    from duplet_unit.demo_command import demo
    from duplet_unit.say_command import say_command

    app.command("say")(say_command)
    app.command("canary")(canary)
    app.command("demo")(demo)


def _say_what_is_missing() -> None:
    """Needs the built-in voice: pip install 'duplet-unit[voice]'."""
    raise typer.BadParameter("this needs the built-in voice: pip install 'duplet-unit[voice]'")
