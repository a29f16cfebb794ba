"""The GPUs that `tune --comm` measures between: whether there are enough, idle ones, and what connects them."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch

from sglang_sm120.errors import UnsupportedError
from sglang_sm120.kernels.communication import ipc
from sglang_sm120.kernels.communication.all_reduce_rmsnorm.api import unsupported_reason
from sglang_sm120.tune.comm_options import CommOptions
from sglang_sm120.tune.run import require_idle

NVLINK, SOME_NVLINK, PCIE, UNKNOWN = "NVLink", "NVLink between some", "PCIe", "link not known"

_PCIE_WORDS = ("PIX", "PXB", "PHB", "NODE", "SYS")  # of `nvidia-smi topo -m`, from near to far
_TIME_LIMIT_S = 30

Ask = Callable[..., str]
"""What `nvidia-smi` prints with these arguments; "" where it cannot be asked."""


@dataclass(frozen=True)
class Host:
    """devices: CUDA indices, by rank; None on the CPU, in tests. gpus: their names. link: one of the four above."""

    devices: tuple[int, ...] | None
    gpus: tuple[str, ...]
    link: str


def find_host(options: CommOptions) -> Host:
    """The GPUs that were asked for.

    Raises: UnsupportedError: fewer than two, or than asked for; sizes that are not covered; a GPU that others use.
    """
    count = torch.cuda.device_count()
    if count < 2:
        raise UnsupportedError(
            f"{count or 'no'} CUDA GPU{'' if count == 1 else 's'} visible to tune --comm",
            "two or more on one host: it measures what goes between them",
            "run it on the machine that will serve, with its GPUs visible (CUDA_VISIBLE_DEVICES); --from-profile FILE "
            "reports anywhere",
        )
    world_size = options.world_size or (count if options.devices is None else len(options.devices))
    devices = options.devices or tuple(range(world_size))
    if max(devices) >= count:
        raise UnsupportedError(
            f"devices {', '.join(map(str, devices))}, of 0 to {count - 1}",
            "a GPU for each rank",
            f"--world-size {count}, or --devices with those that are there; see CUDA_VISIBLE_DEVICES",
        )
    reason = unsupported_reason(
        world_size=world_size, dtype=getattr(torch, options.dtype), hidden_size=options.hidden_size
    )
    if reason is not None:
        raise UnsupportedError(reason, "what the kernels cover", "--world-size and --hidden-size of what you serve")
    for device in devices:
        try:
            require_idle(*torch.cuda.mem_get_info(device))
        except UnsupportedError as error:
            raise UnsupportedError(f"GPU {device}: {error.found}", error.needed, error.fix) from error
    torch.cuda.set_device(devices[0])  # of which the profile's machine is
    names = tuple(torch.cuda.get_device_properties(device).name for device in devices)
    return Host(devices, names, link_between([ipc.pci_bus_id(device) for device in devices]))


def link_between(pci_bus_ids: Sequence[str], ask: Ask | None = None) -> str:
    """What connects GPUs at these addresses, as `nvidia-smi topo -m` has it. ask: for tests."""
    ask = ask or _nvidia_smi
    known = dict(re.findall(r"(\d+), *([\da-fA-F:.]+)", ask("--query-gpu=index,pci.bus_id", "--format=csv,noheader")))
    index_of = {_bus(bus_id): int(index) for index, bus_id in known.items()}
    rows = {}
    for line in ask("topo", "-m").splitlines():
        name, *cells = line.split() or [""]
        if re.fullmatch(r"GPU\d+", name):
            rows[int(name[3:])] = cells  # the columns of GPUs come first
    try:
        order = [index_of[_bus(bus_id)] for bus_id in pci_bus_ids]
        words = [rows[one][other] for one, other in combinations(order, 2)]
    except (KeyError, IndexError):
        return UNKNOWN
    fast = [re.fullmatch(r"NV\d+", word) is not None for word in words]
    if any(fast):
        return NVLINK if all(fast) else SOME_NVLINK
    return PCIE if words and all(word in _PCIE_WORDS for word in words) else UNKNOWN


def _bus(bus_id: str) -> str:
    """Comparable: a domain has four digits or eight."""
    return bus_id.lower()[-len("0000:00:00.0") :]


def _nvidia_smi(*arguments: str) -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False, timeout=_TIME_LIMIT_S)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""
