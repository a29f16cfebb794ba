"""How the options of `options.py` enter SGLang: flags, `--config` files, `Engine` keywords, `/server_info`.

Each function comes twice at most: as SGLang's doors would call it, and as HookRegistry does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from sglang_sm120 import options as table
from sglang_sm120.errors import Sm120Error
from sglang_sm120.integration.resolution import require_machine

KEYWORDS = tuple(option.name for option in table.OPTIONS)
"""Names that `Engine(...)` takes beyond SGLang's own."""


def add_cli_args(parser: argparse.ArgumentParser) -> None:
    """Add our flags to SGLang's parser, once."""
    if not any(option.flag in parser._option_string_actions for option in table.OPTIONS):
        table.add_cli_args(parser)


def attach(server_args: Any, values: Mapping[str, Any]) -> None:
    """Resolve explicit values (a parsed command line or keywords) and stash them on a ServerArgs record."""
    options = table.resolve({name: values[name] for name in KEYWORDS if values.get(name) is not None})
    if options.enable_sm120_opts:
        # Before SGLang looks for a device itself: where it finds none it stops with a message that does not help here.
        require_machine(options)
    setattr(server_args, table.ATTRIBUTE, options)


def attach_or_exit(server_args: Any, values: Mapping[str, Any]) -> None:
    """`attach`; a command line gets the message alone, a program that called `Engine(...)` gets the exception."""
    try:
        attach(server_args, values)
    except Sm120Error as error:
        if table.asked_for(sys.argv, {}):
            sys.exit(str(error))
        raise


def describe(server_args: Any) -> dict[str, Any]:
    """What `/server_info` shows; nothing while the package is off."""
    options = table.options_of(server_args)
    return options.as_dict() if options.enable_sm120_opts else {}


def add_flags(_result: None, parser: argparse.ArgumentParser) -> None:
    """AFTER ServerArgs.add_cli_args."""
    add_cli_args(parser)


def keep_values(original: Any, cls: type, args: argparse.Namespace) -> Any:
    """AROUND ServerArgs.from_cli_args."""
    server_args = original(cls, args)
    attach_or_exit(server_args, vars(args))
    return server_args


def report_options(result: dict[str, Any], server_args: Any) -> dict[str, Any]:
    """AFTER ServerArgs.resolved_dict."""
    return {**result, **describe(server_args)}


def server_args_from_keywords(**keywords: Any) -> Any:
    """`Engine.server_args_class`: SGLang's ServerArgs, with our keywords taken out and stashed on the record."""
    from sglang.srt.server_args import ServerArgs

    ours = {name: keywords.pop(name) for name in KEYWORDS if name in keywords}
    server_args = ServerArgs(**keywords)
    attach_or_exit(server_args, ours)
    return server_args
