"""What can be wrong with an installation, checked without starting anything. Works when SGLang or torch is broken."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from sglang_sm120.errors import ConfigError
from sglang_sm120.integration import all_reduce_rules
from sglang_sm120.integration.check import check_tree, version_problem
from sglang_sm120.options import Sm120Options, flag_given, resolve

_DISTRIBUTION = "sglang-sm120"


@dataclass(frozen=True)
class Finding:
    """One result. level: "ok", "warning" (something will not be used) or "error" (the flag will be refused)."""

    level: str
    what: str
    found: str
    fix: str = ""


def run_checks(environ: Mapping[str, str] | None = None) -> list[Finding]:
    """Every check's findings, in the order in which a user would want to fix them."""
    environ = os.environ if environ is None else environ
    checks: tuple[Callable[[Mapping[str, str]], Iterator[Finding]], ...] = (
        _sglang, _plugin_installed, _plugin_selected, _hooks, _variables, _device, _all_reduce,
    )  # fmt: skip
    return [finding for check in checks for finding in check(environ)]


def sglang_tree() -> Path | None:
    """The folder of the installed package `sglang`, found without importing it."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0])


def _sglang_version() -> str | None:
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return None


def _sglang(environ: Mapping[str, str]) -> Iterator[Finding]:
    version = _sglang_version()
    if version is None:
        yield Finding(
            "error", "SGLang", "not installed", "pip install sglang-sm120 brings the version that it supports"
        )
        return
    problem = version_problem(version)
    if problem is None:
        yield Finding("ok", "SGLang", version)
    else:
        fix = "install that SGLang, or a newer sglang-sm120"
        yield Finding("error", "SGLang", f"{problem.found}; needed: {problem.needed}", fix)


def _plugin_installed(environ: Mapping[str, str]) -> Iterator[Finding]:
    names = [ep.value for ep in metadata.entry_points(group="sglang.srt.plugins") if ep.name == "sm120"]
    if names:
        yield Finding("ok", "plugin entry point", names[0])
    else:
        yield Finding(
            "error", "plugin entry point", "not installed: SGLang cannot find this package",
            f"pip install {_DISTRIBUTION} into the environment that runs SGLang",
        )  # fmt: skip


def _plugin_selected(environ: Mapping[str, str]) -> Iterator[Finding]:
    plugins = environ.get("SGLANG_PLUGINS", "")
    if plugins and "sm120" not in [name.strip() for name in plugins.split(",")]:
        yield Finding(
            "error", "SGLANG_PLUGINS", f"{plugins!r} leaves out sm120, so SGLang does not know our flags",
            f"set SGLANG_PLUGINS={plugins},sm120, or unset it",
        )  # fmt: skip
    platform = environ.get("SGLANG_PLATFORM", "")
    if platform == "sm120" and flag_given("sm120_emulate", (), environ):
        return
    if platform:
        reason = "that platform is for emulation" if platform == "sm120" else "SGLang then loads none of our plugins"
        yield Finding("error", "SGLANG_PLATFORM", f"{platform!r}: {reason}", "unset SGLANG_PLATFORM")


def _hooks(environ: Mapping[str, str]) -> Iterator[Finding]:
    tree, version = sglang_tree(), _sglang_version()
    if tree is None or version is None:
        return
    problems = check_tree(tree, version)
    if not problems:
        yield Finding("ok", "hooks", f"every target in {tree} is as tested")
    for problem in problems:
        yield Finding(
            "error", f"hook {problem.hook}", f"{problem.found}; needed: {problem.needed}", "see docs/hooks.md"
        )


def _variables(environ: Mapping[str, str]) -> Iterator[Finding]:
    try:
        options = resolve({"enable_sm120_opts": True}, environ)
    except ConfigError as error:
        yield Finding("error", "environment", error.found, error.fix)
        return
    default = Sm120Options(enable_sm120_opts=True).as_dict()
    given = {name: value for name, value in options.as_dict().items() if value != default[name]}
    yield Finding(
        "ok", "environment", ", ".join(f"{name}={value}" for name, value in given.items()) or "no options set"
    )


def _device(environ: Mapping[str, str]) -> Iterator[Finding]:
    from sglang_sm120.device import current_device

    try:
        device = current_device()
    except (ImportError, OSError, RuntimeError) as error:  # a missing library, a broken driver
        yield Finding("error", "torch", str(error), "reinstall torch as SGLang pins it")
        return
    if device.is_sm120:
        yield Finding("ok", "GPU", device.describe())
    else:
        yield Finding("warning", "GPU", f"{device.describe()}; not SM120", "only --sm120-emulate works here, slowly")


def _all_reduce(environ: Mapping[str, str]) -> Iterator[Finding]:
    """What of this process' surroundings decides who sums over the ranks (docs/all-reduce.md)."""
    for obstacle in all_reduce_rules.of_environment(environ):
        yield Finding("warning", "all-reduce", f"{obstacle.found}: our all-reduce is left out", obstacle.fix)
    if importlib.util.find_spec("mscclpp") is None:
        yield Finding(
            "ok", "MSCCL++", "not installed, and only --enable-mscclpp needs it",
            "build its Python package from github.com/microsoft/mscclpp: the package index does not have it",
        )  # fmt: skip
    else:
        yield Finding("ok", "MSCCL++", "installed: --enable-mscclpp can use it")
