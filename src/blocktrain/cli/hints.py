"""Extra hints for command-line errors, beside the parser's own words. Next: main.py, which adds them."""

from __future__ import annotations

from typing import Any

CHANGES = "--set"


def hint(error: Any) -> str:
    """The end of the message of a usage error: how the command is meant. Empty if the parser has said all."""
    context = getattr(error, "ctx", None)
    if context is None:
        return ""
    if getattr(error, "option_name", None) is not None:
        return _of_option(error.option_name, context.command)
    return _of_arguments(context.command) if error.message.startswith("Got unexpected extra argument") else ""


def _of_option(name: str, command: Any) -> str:
    """--steps where a setting was meant"""
    if not any(CHANGES in param.opts for param in command.params):
        return ""
    from blocktrain.spec import known_keys
    from blocktrain.unknown_keys import namesake

    ours = namesake(name.lstrip("-").replace("-", "_"), known_keys())
    return f"; settings are given with {CHANGES} KEY=VALUE: {ours}" if ours else ""


def _of_arguments(command: Any) -> str:
    """generate RUN "The president" where --prompt was meant"""
    arguments = [p.metavar for p in command.params if p.param_type_name == "argument" and p.metavar]
    takes = " ".join(arguments) or "no argument"
    valued = (p for p in command.params if p.param_type_name == "option" and not getattr(p, "is_flag", False))
    rest = (f", everything else follows the name of an option, for example {p.opts[0]} {p.metavar}" for p in valued)
    return f": {command.name} takes {takes}{next(rest, '')}"
