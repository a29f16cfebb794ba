"""What a probe found out, as data. Standard library only."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from sglang_sm120.errors import ConfigError
from sglang_sm120.kernels.communication.p2p_probe.environment import Environment

# What became of a pair, or of all at once.
OK = "ok"
DENIED = "denied"  # the driver gives no peer access
FAILED = "failed"  # an error of the driver, or a process that did not start
HUNG = "hung"  # a flag that never came, or a process that did not answer within the time limit
CRASHED = "crashed"  # a process that ended by itself
WRONG = "wrong"  # something else arrived than was sent
SKIPPED = "skipped"


@dataclass(frozen=True)
class Gpu:
    """One GPU. link: its PCIe link while it copied, as far as the system says."""

    index: int
    name: str = ""
    pci_bus_id: str = ""
    capability: str = ""
    link_gb_s: float | None = None
    link_lanes: int | None = None
    max_link_lanes: int | None = None


@dataclass(frozen=True)
class Pair:
    """What `source` does to memory of `target`. None: not measured; for a status other than "ok", detail says why.

    Attributes:
        can_access: what the driver promises. opened: CUDA IPC mapped the memory.
        push_right, pull_right: what was written there, and read from there, was what was sent.
        messages_right: each message that a flag announced was whole when the flag came.
        push_latency_us: from a flag's store until its sight; half of a way there and back.
        pull_latency_us: of a read, one at a time.
        message_latency_us: as push_latency_us, with a message before the flag and a check of it.
        push_gb_s, pull_gb_s: 1e9 bytes a second, by one kernel.
    """

    source: int
    target: int
    status: str = SKIPPED
    detail: str = ""
    can_access: bool | None = None
    opened: bool | None = None
    push_right: bool | None = None
    pull_right: bool | None = None
    messages_right: bool | None = None
    push_latency_us: float | None = None
    pull_latency_us: float | None = None
    message_latency_us: float | None = None
    push_gb_s: float | None = None
    pull_gb_s: float | None = None


@dataclass(frozen=True)
class AllToAll:
    """All GPUs at once, each with every other one. GB/s: what one GPU sends, or fetches; in the order of the GPUs."""

    status: str = SKIPPED
    detail: str = ""
    push_gb_s: tuple[float, ...] = ()
    pull_gb_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class ProbeReport:
    """Everything that one probe measured. `pairs` has both directions of each pair."""

    gpus: tuple[Gpu, ...]
    pairs: tuple[Pair, ...]
    all_to_all: AllToAll
    environment: Environment
    seconds: float = 0.0

    def pair(self, source: int, target: int) -> Pair:
        """The result of one direction. Raises KeyError."""
        for pair in self.pairs:
            if (pair.source, pair.target) == (source, target):
                return pair
        raise KeyError((source, target))

    @property
    def usable(self) -> bool:
        """Every pair, and all at once, did what they should."""
        return all(pair.status == OK for pair in self.pairs) and self.all_to_all.status in (OK, SKIPPED)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ProbeReport:
        """What `to_dict` gave, also after JSON.

        Raises:
            ConfigError: it is not that.
        """
        try:
            return cls(
                gpus=tuple(_build(Gpu, gpu) for gpu in data["gpus"]),
                pairs=tuple(_build(Pair, pair) for pair in data["pairs"]),
                all_to_all=_build(AllToAll, data["all_to_all"]),
                environment=_build(Environment, data["environment"]),
                seconds=float(data["seconds"]),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"not a report of the P2P probe ({type(error).__name__}: {error})", "what to_dict gave", "probe again"
            ) from error


def _build(kind: Any, data: dict[str, Any]) -> Any:
    """A dataclass of this module; lists become tuples, as they were."""
    values = {name: _tuples(value) for name, value in data.items()}
    unknown = values.keys() - {field.name for field in fields(kind)}
    if unknown:
        raise KeyError(f"{kind.__name__} has no {', '.join(sorted(unknown))}")
    return kind(**values)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list | tuple) else value
