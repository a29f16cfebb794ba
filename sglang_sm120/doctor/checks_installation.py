"""This package and SGLang: versions, the plugin's entry, hooks, options, what keeps the all-reduce out."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from sglang_sm120.doctor.check import Check, listed
from sglang_sm120.doctor.facts import Facts
from sglang_sm120.errors import ConfigError
from sglang_sm120.findings import Finding
from sglang_sm120.integration import all_reduce_rules
from sglang_sm120.integration.check import version_problem
from sglang_sm120.options import Sm120Options, flag_given, resolve


def _sglang(facts: Facts) -> Iterator[Finding]:
    version = facts.version("sglang")
    if not version:
        fix = "pip install sglang-sm120 brings the version that it supports"
        yield Finding("fail", "SGLang", "not installed", "SGLang in this Python", fix)
        return
    problem = version_problem(version)
    if problem is None:
        yield Finding("ok", "SGLang", version)
    else:
        yield Finding("fail", "SGLang", problem.found, problem.needed, "install that SGLang, or a newer sglang-sm120")


def _entry_point(facts: Facts) -> Iterator[Finding]:
    names = facts.python.get("entry_points", ())
    if names:
        yield Finding("ok", "plugin entry point", names[0])
    else:
        yield Finding(
            "fail", "plugin entry point", "not installed: SGLang cannot find this package",
            "this package in the environment that runs SGLang", "pip install sglang-sm120 there",
        )  # fmt: skip


def _selected(facts: Facts) -> Iterator[Finding]:
    plugins = facts.environ.get("SGLANG_PLUGINS", "")
    # As SGLang reads it: what is not empty restricts, so that a lone comma or blank leaves out every plugin.
    names = [name.strip() for name in plugins.split(",") if name.strip()]
    if plugins and "sm120" not in names:
        wanted = shlex.quote(",".join([*dict.fromkeys(names), "sm120"]))
        yield Finding(
            "fail", "SGLANG_PLUGINS", f"{plugins!r} leaves out sm120, so SGLang does not know our flags",
            fix=f"set SGLANG_PLUGINS={wanted}, or unset it",
        )  # fmt: skip
    platform = facts.environ.get("SGLANG_PLATFORM", "")
    if platform == "sm120" and flag_given("sm120_emulate", (), facts.environ):
        return
    if platform:
        reason = "that platform is for emulation" if platform == "sm120" else "SGLang then loads none of our plugins"
        yield Finding("fail", "SGLANG_PLATFORM", f"{platform!r}: {reason}", fix="unset SGLANG_PLATFORM")


def _readable(facts: Facts) -> Iterator[Finding]:
    """What other packages' damage kept doctor from reading; the checks that need it are silent."""
    for name, error in facts.python.get("unreadable", {}).items():
        yield Finding(
            "warn", "damaged installation", f"{name}: {error}", "packages that can be read",
            "`pip check`, and install anew what the error names",
        )  # fmt: skip


def _hooks(facts: Facts) -> Iterator[Finding]:
    problems = facts.python.get("hook_problems")
    if problems is None:
        return
    if not problems:
        yield Finding("ok", "hooks", f"every target in {facts.python['sglang_tree']} is as tested")
    for name, found, needed in problems:
        yield Finding("fail", f"hook {name}", found, needed, "see docs/hooks.md")


def _options(facts: Facts) -> Iterator[Finding]:
    try:
        options = resolve({"enable_sm120_opts": True}, facts.environ)
    except ConfigError as error:
        yield Finding("fail", "options", error.found, error.needed, error.fix)
        return
    default = Sm120Options(enable_sm120_opts=True).as_dict()
    given = [f"{name}={value}" for name, value in options.as_dict().items() if value != default[name]]
    yield Finding("ok", "options", ", ".join(given) or "none set in the environment")


def _all_reduce(facts: Facts) -> Iterator[Finding]:
    """What of the environment decides who sums over the ranks (docs/all-reduce.md)."""
    for obstacle in all_reduce_rules.of_environment(facts.environ):
        found = f"{obstacle.found}: our all-reduce is left out"
        yield Finding("warn", "all-reduce", found, obstacle.needed, obstacle.fix)


def _mscclpp(facts: Facts) -> Iterator[Finding]:
    if facts.python.get("mscclpp"):
        yield Finding("ok", "MSCCL++", "installed: --enable-mscclpp can use it")
    else:
        fix = "build its Python package from github.com/microsoft/mscclpp: the package index does not have it"
        yield Finding("ok", "MSCCL++", "not installed, and only --enable-mscclpp needs it", fix=fix)


def _pins(facts: Facts) -> Iterator[Finding]:
    """The versions that SGLang's own metadata asks for exactly."""
    pins = facts.python.get("pins", {})
    wrong, missing, right = [], [], []
    for name, wanted in pins.items():
        version = facts.version(name)
        if not version:
            missing.append(f"{name}=={wanted}")
        elif version.partition("+")[0] != wanted:
            wrong.append(f"{name} {version} (SGLang asks for {wanted})")
            right.append(f"{name}=={wanted}")
    # Without a GPU to serve on, a part of SGLang's packages is often left out on purpose.
    level = "warn" if facts.sm120_capabilities else "note"
    if wrong:
        fix = f"pip install {' '.join(right)}"
        yield Finding(level, "package versions", listed(wrong), "the versions that this SGLang was tested with", fix)
    if missing:
        fix = f"pip install {' '.join(missing)}"
        yield Finding(level, "missing packages", listed(missing), "what SGLang requires", fix)
    if pins and not wrong and not missing:
        yield Finding("ok", "package versions", ", ".join(f"{name} {facts.version(name)}" for name in pins))


def _duplicates(facts: Facts) -> Iterator[Finding]:
    packages, places = facts.python.get("packages", {}), facts.python.get("places", {})
    twice = {name: versions for name, versions in packages.items() if len(versions) > 1}
    if twice:
        told = [_twice(name, versions, places.get(name, ())) for name, versions in twice.items()]
        fix = ["pip uninstall it until it is gone, then install the one that SGLang asks for"]
        if any("/.local/" in path for name in twice for path in places.get(name, ())):
            fix.insert(0, "PYTHONNOUSERSITE=1 leaves out the packages of ~/.local")
        if facts.environ.get("PYTHONPATH"):
            fix.insert(0, "take folders with packages out of PYTHONPATH, which come before the environment's own")
        yield Finding("warn", "packages installed twice", listed(told), "one version of each", "\n".join(fix))
    parts = {name: versions[0] for name, versions in packages.items() if name.startswith("nvidia-cutlass-dsl")}
    if len(set(parts.values())) > 1:
        have = ", ".join(f"{name} {version}" for name, version in parts.items())
        wanted = facts.python.get("pins", {}).get("nvidia-cutlass-dsl", max(parts.values()))
        yield Finding(
            "warn", "CUTLASS DSL", f"parts of different versions: {have}", "one version of all its parts",
            f"pip install --force-reinstall --no-deps {' '.join(f'{name}=={wanted}' for name in parts)}",
        )  # fmt: skip


def _twice(name: str, versions: Sequence[str], places: Sequence[str]) -> str:
    """Which of them is imported, and where both are."""
    if len(places) != len(versions):
        return f"{name} {' and '.join(versions)}"
    first, rest = versions[0], versions[1:]
    if len(set(places)) == 1:
        return f"{name} {first} and {', '.join(rest)} in one folder ({places[0]})"
    hidden = ", ".join(f"{version} ({place})" for version, place in zip(rest, places[1:], strict=True))
    return f"{name} {first} ({places[0]}) hides {hidden}"


def _b12x(facts: Facts) -> Iterator[Finding]:
    """As runners/handover.py refuses it, which needs torch: PyPI's b12x owns a file of FlashInfer's."""
    if "b12x" not in facts.python.get("packages", {}):
        return
    flashinfer = facts.version("flashinfer-python")
    over = "flashinfer-python" in facts.python.get("b12x_owners", ())
    found = f"PyPI's b12x {facts.version('b12x')} is installed"
    yield Finding(
        "warn" if over else "note",
        "b12x",
        f"{found} over the package of that name that FlashInfer {flashinfer} brings" if over else found,
        "FlashInfer's own package b12x, which the runner b12x was checked with",
        "pip uninstall -y b12x, then pip install --force-reinstall --no-deps flashinfer-python"
        + (f"=={flashinfer}" if flashinfer else ""),
    )


CHECKS = (
    Check("installation.sglang", _sglang, quick=True),
    Check("installation.entry-point", _entry_point, quick=True),
    Check("installation.selected", _selected, quick=True),
    Check("installation.readable", _readable, quick=True),
    Check("installation.hooks", _hooks),
    Check("installation.options", _options),
    Check("installation.pins", _pins, quick=True),
    Check("installation.duplicates", _duplicates, quick=True),
    Check("installation.b12x", _b12x, quick=True),
    Check("all-reduce.environment", _all_reduce, quick=True),
    Check("all-reduce.mscclpp", _mscclpp),
)
