"""The options of a server: given, from the environment or by default; checked and merged as `option_table.py` has them.

Imports only the standard library: the options object is pickled into every SGLang process, which imports this module.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from sglang_sm120.errors import ConfigError
from sglang_sm120.option_table import OPTIONS, Option

ATTRIBUTE = "_sm120"
"""Where the options ride on SGLang's `ServerArgs`: a private attribute survives pickling, copying and resolution."""

ENV_PREFIX = "SGLANG_SM120_"

_BY_NAME = {option.name: option for option in OPTIONS}
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


@dataclass(frozen=True)
class Sm120Options:
    """The options of one server. Its fields are the table's names; build it with `resolve`."""

    enable_sm120_opts: bool = False
    sm120_moe_backend: str = "auto"
    sm120_moe_numerics: str = "auto"
    sm120_moe_profile: str = ""
    sm120_all_reduce: str = "auto"
    sm120_all_reduce_profile: str = ""
    sm120_l2: str = "off"
    sm120_l2_prefetch_mb: str = ""
    sm120_l2_persist_mb: str = ""
    sm120_verify: str = "auto"
    sm120_emulate: bool = False

    @property
    def needs_own_runner(self) -> bool:
        """Whether the stock path cannot serve: another runner was asked for by name, or there is no SM120 GPU."""
        return self.sm120_moe_backend not in ("auto", "flashinfer_cutlass") or self.sm120_emulate

    @property
    def l2_prefetches(self) -> bool:
        return self.sm120_l2 in ("prefetch", "both")

    @property
    def l2_persists(self) -> bool:
        return self.sm120_l2 in ("persist", "both")

    def l2_prefetch_bytes(self) -> tuple[int, int, int] | None:
        """Of each of the three prefetches; None: by the device's L2. Raises: ConfigError."""
        if not self.sm120_l2_prefetch_mb:
            return None
        parts = self.sm120_l2_prefetch_mb.split(",")
        sizes = [_megabytes("--sm120-l2-prefetch-mb", part) for part in parts]
        if len(sizes) not in (1, 3):
            raise ConfigError(
                f"--sm120-l2-prefetch-mb {self.sm120_l2_prefetch_mb}", "one number or three", "such as 26,35,20"
            )
        first, second, third = sizes if len(sizes) == 3 else sizes * 3
        return first, second, third

    def l2_persist_bytes(self) -> int | None:
        """To set aside; None: all that the device allows. Raises: ConfigError."""
        return _megabytes("--sm120-l2-persist-mb", self.sm120_l2_persist_mb) if self.sm120_l2_persist_mb else None

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.as_dict(),)

    def as_dict(self) -> dict[str, Any]:
        """The options as plain values, for `/server_info`."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


_unpickled_enabled = False


def _rebuild(values: dict[str, Any]) -> Sm120Options:
    """Unpickle; remembers that this process belongs to a server that asked for us, however it was started."""
    global _unpickled_enabled
    options = Sm120Options(**values)
    _unpickled_enabled = _unpickled_enabled or options.enable_sm120_opts
    return options


def unpickled_enabled_options() -> bool:
    """Whether this process received a ServerArgs record with the package on (spawned from an `Engine`, say)."""
    return _unpickled_enabled


def add_cli_args(parser: Any) -> None:
    """Add the table's flags to an argparse parser. A default of None tells "not given" from any value."""
    group = parser.add_argument_group("SM120 (sglang-sm120)")
    for option in OPTIONS:
        if option.kind is bool:
            group.add_argument(option.flag, action="store_true", default=None, help=option.help)
        else:
            # `choices` are checked in `resolve`, so that a variable or a keyword gets the same message.
            metavar = "{" + ",".join(option.choices) + "}" if option.choices else option.values[0]
            group.add_argument(option.flag, type=str, default=None, metavar=metavar, help=option.help)


def resolve(given: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> Sm120Options:
    """Merge explicit values, environment variables and defaults (in this order of precedence) and check them.

    given: option name -> value; None means not given.
    Raises: ConfigError for an unknown name, variable or value, and for values that contradict each other.
    """
    environ = os.environ if environ is None else environ
    given = given or {}
    unknown = sorted(set(given) - set(_BY_NAME))
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]!r}", f"one of {', '.join(_BY_NAME)}", _nearest(unknown[0]))
    values: dict[str, Any] = {}
    explicit: list[str] = []
    for option in OPTIONS:
        if given.get(option.name) is not None:
            values[option.name] = _parse(option, given[option.name], option.flag)
            explicit.append(option.flag)
        elif option.env in environ:
            values[option.name] = _parse(option, environ[option.env], option.env)
            explicit.append(option.env)
    options = Sm120Options(**values)
    _check_environment(options, environ)
    _check_contradictions(options, explicit)
    return options


def options_of(server_args: Any) -> Sm120Options:
    """The options stashed on a `ServerArgs` record, else the environment's (for launchers without our flags)."""
    stashed = getattr(server_args, ATTRIBUTE, None)
    return stashed if stashed is not None else resolve()


def asked_for(argv: Iterable[str], environ: Mapping[str, str] | None = None) -> bool:
    """Whether the user asked for this package, as far as a command line and the environment can tell.

    A `--config` file counts: its text is searched for the flag's name.
    """
    environ = os.environ if environ is None else environ
    return flag_given("enable_sm120_opts", argv, environ)


def flag_given(name: str, argv: Iterable[str], environ: Mapping[str, str]) -> bool:
    """Whether a boolean option is on by command line, `--config` file or environment, before anything is parsed."""
    option = _BY_NAME[name]
    argv = list(argv)
    if option.flag in argv:
        return True
    if environ.get(option.env, "").strip().lower() in _TRUE:
        return True
    for position, word in enumerate(argv[:-1]):
        if word == "--config":
            return _config_file_sets(argv[position + 1], option)
    return False


def _config_file_sets(path: str, option: Option) -> bool:
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError):
        return False  # SGLang's own parser reports an unreadable file, with its own message
    spellings = {option.name, option.name.replace("_", "-")}
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip().strip("\"'") in spellings:
            return value.split("#")[0].strip().strip("\"'").lower() in _TRUE
    return False


def _parse(option: Option, value: Any, source: str) -> Any:
    if option.kind is bool:
        if isinstance(value, bool):
            return value
        text = str(value).strip().lower()
        if text in _TRUE or text in _FALSE:
            return text in _TRUE
        raise ConfigError(f"{source}={value!r}", "1 or 0", f"set {source} to 1 or 0")
    if not option.choices:
        return str(value)
    if value not in option.choices:
        raise ConfigError(
            f"{source}={value!r}", f"one of {', '.join(option.choices)}", _nearest(str(value), option.choices)
        )
    return value


def _check_environment(options: Sm120Options, environ: Mapping[str, str]) -> None:
    """A misspelt variable would be silently off, so with the package on it is refused."""
    if not options.enable_sm120_opts:
        return
    known = {option.env for option in OPTIONS}
    for name in sorted(environ):
        if name.startswith(ENV_PREFIX) and name not in known:
            raise ConfigError(
                f"environment variable {name}", f"one of {', '.join(sorted(known))}", _nearest(name, known)
            )


def _check_contradictions(options: Sm120Options, explicit: list[str]) -> None:
    enable = _BY_NAME["enable_sm120_opts"]
    if explicit and not options.enable_sm120_opts:
        others = [source for source in explicit if source not in (enable.flag, enable.env)]
        if others:
            raise ConfigError(
                f"{', '.join(others)} without {enable.flag}",
                f"{enable.flag}, which turns the package on",
                f"add {enable.flag} (or {enable.env}=1), or drop {', '.join(others)}",
            )
    if options.sm120_moe_backend == "flashinfer_cutlass" and options.sm120_moe_numerics == "w4a16":
        raise ConfigError(
            "--sm120-moe-numerics w4a16 with --sm120-moe-backend flashinfer_cutlass",
            "a runner that keeps activations unquantised; the stock CUTLASS path always quantises them",
            "use --sm120-moe-backend native, or drop --sm120-moe-numerics",
        )
    if options.sm120_moe_profile and options.sm120_moe_backend != "auto":
        raise ConfigError(
            f"--sm120-moe-profile with --sm120-moe-backend {options.sm120_moe_backend}",
            "--sm120-moe-backend auto: a profile chooses among runners",
            "drop one of the two",
        )
    _check_all_reduce(options)
    check_l2(options)
    if options.sm120_moe_backend == "flashinfer_cutlass" and options.sm120_emulate:
        raise ConfigError(
            "--sm120-moe-backend flashinfer_cutlass with --sm120-emulate",
            "an SM120 GPU: the stock CUTLASS kernels cannot be emulated",
            "use --sm120-moe-backend native or reference, or drop --sm120-emulate on an SM120 GPU",
        )


def _check_all_reduce(options: Sm120Options) -> None:
    if options.sm120_all_reduce_profile and options.sm120_all_reduce != "auto":
        raise ConfigError(
            f"--sm120-all-reduce-profile with --sm120-all-reduce {options.sm120_all_reduce}",
            "--sm120-all-reduce auto: a profile chooses what serves which size",
            "drop one of the two",
        )


def check_l2(options: Sm120Options) -> None:
    for flag, value, needed in (
        ("--sm120-l2-prefetch-mb", options.l2_prefetch_bytes(), "prefetch"),
        ("--sm120-l2-persist-mb", options.l2_persist_bytes(), "persist"),
    ):
        if value is not None and options.sm120_l2 not in (needed, "both"):
            raise ConfigError(
                f"{flag} with --sm120-l2 {options.sm120_l2}",
                f"--sm120-l2 {needed} or both, which it is a size of",
                f"add --sm120-l2 {needed}, or drop {flag}",
            )
    if options.l2_prefetch_bytes() == (0, 0, 0) or options.l2_persist_bytes() == 0:
        raise ConfigError(
            f"a size of 0 with --sm120-l2 {options.sm120_l2}",
            "something to fetch or to keep",
            "use --sm120-l2 off, or only one of prefetch and persist",
        )


_MOST_MB = 4096  # no GPU has as much L2


def _megabytes(flag: str, text: str) -> int:
    """Bytes. Raises: ConfigError for what is no number of MB."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= _MOST_MB:
        raise ConfigError(f"{flag} {text!r}", f"a number of MB from 0 to {_MOST_MB}", "such as 16")
    return int(value * (1 << 20))


def _nearest(word: str, among: Iterable[str] | None = None) -> str:
    candidates = difflib.get_close_matches(word, list(_BY_NAME if among is None else among), n=1, cutoff=0.5)
    return f"did you mean {candidates[0]}?" if candidates else "see docs/flags.md or `sglang-sm120 flags`"
