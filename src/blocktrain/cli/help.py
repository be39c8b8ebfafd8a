"""How the help of a command looks: without the types of Python. Next: main.py, whose commands are such."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

VALUES = {"<str>": "TEXT", "<int>": "N", "<float>": "X", "<path>": "PATH"}  # of options, as help names them


class Command(TyperCommand):
    """A command whose help shows no types of Python: --json and not --json <bool>, RUN and not {RUN} <path>, N and not
    N [0<=x<=65535]."""

    def get_params(self, ctx: Any) -> Any:
        return without_types(super().get_params(ctx), ctx)


class Group(TyperGroup):
    """The same for commands with commands of their own."""

    def get_params(self, ctx: Any) -> Any:
        return without_types(super().get_params(ctx), ctx)


def without_types(params: Any, ctx: Any) -> Any:
    for param in params:
        param._get_number_range_help_str = lambda: ""  # the column would be as wide as the longest range
        if getattr(param, "is_flag", False):
            param.metavar = ""
        elif param.metavar is None:
            param.metavar = VALUES.get(param.display_type(ctx))
        if param.param_type_name == "argument":
            param.display_type_rich = lambda ctx: None
            param.get_usage_pieces = lambda ctx, param=param: [argument_in_usage(param)]
    return params


def argument_in_usage(param: Any) -> str:
    """RUN, or [RUN] if it may be left out, or RUN... if it may be given several times"""
    name = param.display_name_raw.removesuffix("...") + ("" if param.nargs == 1 else "...")
    return name if param.required else f"[{name}]"
