"""`register()`: what SGLang calls in every process before it parses arguments. Light: no CUDA, no model code."""

from __future__ import annotations

import logging
import os
import sys

from sglang_sm120.options import asked_for, unpickled_enabled_options

logger = logging.getLogger(__name__)


def register() -> None:
    """Install the hooks that every process needs.

    SGLang logs and drops an exception of a plugin. So when the user asked for this package, a failure becomes an exit
    with the reason; when not, it changes nothing.
    """
    from sglang_sm120.errors import Sm120Error

    try:
        _install()
    except Exception as error:
        if not (asked_for(sys.argv, os.environ) or unpickled_enabled_options()):
            logger.debug("sglang-sm120 stays inactive: %s", error)
            return
        if isinstance(error, Sm120Error):
            sys.exit(str(error))
        raise SystemExit(f"sglang-sm120 could not register: {type(error).__name__}: {error}") from error


def _look_at_machine() -> None:
    from sglang_sm120.doctor.quick import log_problems

    log_problems()


def _install() -> None:
    from sglang_sm120.integration import apply, fp4_gemm, resolution
    from sglang_sm120.integration.hooks import Stage

    apply.require_version()
    resolution.register(_look_at_machine)
    if asked_for(sys.argv, os.environ):
        fp4_gemm.add_choice()
    apply.install(Stage.PROCESS)
    engine = sys.modules.get("sglang.srt.entrypoints.engine")
    if (
        engine is not None and not apply.has_options_door()
    ):  # Engine.__init__ loads plugins, so its module is there whenever its keywords matter
        from sglang_sm120.integration.server_options import server_args_from_keywords

        engine.Engine.server_args_class = staticmethod(server_args_from_keywords)
