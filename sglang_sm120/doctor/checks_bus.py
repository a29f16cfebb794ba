"""How the GPUs reach each other: links, BAR1, IOMMU, ACS, what the driver promises, NUMA."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_sm120.doctor import facts_pci
from sglang_sm120.doctor.check import Check, listed
from sglang_sm120.doctor.facts import Facts
from sglang_sm120.findings import Finding
from sglang_sm120.kernels.communication.p2p_probe import remedies
from sglang_sm120.kernels.communication.p2p_probe.environment import dividing_ports, forces_p2p

# The legend that nvidia-smi prints below its table.
_REFUSALS = {
    "CNS": "chipset not supported",
    "GNS": "GPU not supported",
    "TNS": "topology not supported",
    "NS": "not supported",
    "DR": "disabled by a registry key",
    "U": "unknown",
}
_PROBE = "`sglang-sm120 doctor --probe` tries it"


def _several(facts: Facts) -> bool:
    return max(len(facts.driver.gpus), len(facts.pci_gpus) if facts.quick else 0) > 1


def _link(facts: Facts) -> Iterator[Finding]:
    gpus = [gpu for gpu in facts.gpus if gpu.link_lanes and gpu.max_link_lanes]
    if not gpus:
        return
    narrow = [gpu for gpu in gpus if (gpu.link_lanes or 0) < (gpu.max_link_lanes or 0)]
    if narrow:
        told = [f"GPU {gpu.index} {gpu.link_lanes} of {gpu.max_link_lanes} lanes" for gpu in narrow]
        yield Finding(
            "warn", "PCIe lanes", listed(told), "all lanes of the card",
            "another slot, the BIOS's bifurcation, or the card seated anew (a riser may lose lanes)",
        )  # fmt: skip
    slow = [gpu for gpu in gpus if gpu.card_gen and gpu.slot_gen and gpu.slot_gen < gpu.card_gen]
    if slow:
        told = [f"GPU {gpu.index} generation {gpu.slot_gen} of {gpu.card_gen}" for gpu in slow]
        yield Finding("note", "PCIe slot", listed(told), "a slot of the card's generation", "another slot, or the BIOS")
    # Without load a GPU lowers its generation, so what it has now is judged under load alone, against what both can do.
    below = [gpu for gpu in gpus if gpu.link_gen and gpu.best_gen and gpu.link_gen < gpu.best_gen]
    lower = [gpu for gpu in below if gpu.link_under_load]
    if lower:
        told = [f"GPU {gpu.index} generation {gpu.link_gen} of {gpu.best_gen} while busy" for gpu in lower]
        yield Finding(
            "warn", "PCIe speed", listed(told), "full speed under load",
            "risers, cables or signal quality: `dmesg | grep -i aer`; the slot's generation in the BIOS",
        )  # fmt: skip
    if not narrow and not slow and not lower:
        kinds = sorted({f"generation {gpu.best_gen or '?'}, {gpu.link_lanes} lanes" for gpu in gpus})
        now = sorted({gpu.link_gen for gpu in below if gpu.link_gen})
        idle = f" (now generation {listed(now)}, measured without load, where they slow down)" if now else ""
        yield Finding("ok", "PCIe links", f"{'; '.join(kinds)}{idle}")


def _bar1(facts: Facts) -> Iterator[Finding]:
    if facts.quick and facts.bus.small_bar1 and _several(facts):
        yield Finding("warn", "BAR1", listed(facts.bus.small_bar1), _BAR1_NEEDED, remedies.bar1(facts.bus))
    small = [gpu for gpu in facts.driver.gpus if gpu.bar1_mib and gpu.memory_mib and gpu.bar1_mib < gpu.memory_mib]
    if small:
        told = [f"GPU {gpu.index} {gpu.bar1_mib} MiB for {gpu.memory_mib} MiB of memory" for gpu in small]
        tiny = any((gpu.bar1_mib or 0) < 1024 for gpu in small)
        fix = remedies.bar1(facts.bus) or "Above 4G Decoding and Resizable BAR on in the BIOS"
        yield Finding("warn" if tiny and _several(facts) else "note", "BAR1", listed(told), _BAR1_NEEDED, fix)


_BAR1_NEEDED = "BAR1 as large as the memory, through which other GPUs reach it"


def _iommu(facts: Facts) -> Iterator[Finding]:
    if not facts.pci_gpus and not facts.driver.gpus:
        return
    bus = facts.bus
    arguments = f" (kernel arguments: {' '.join(bus.iommu_arguments)})" if bus.iommu_arguments else ""
    if bus.iommu_translates:
        yield Finding(
            "warn" if _several(facts) else "note", "IOMMU",
            f"it translates what these GPUs send{arguments}: the usual cause of hangs and slow transfers between them",
            "passthrough (iommu=pt) or no IOMMU", f"{remedies.iommu(bus)}\n{_PROBE}",
        )  # fmt: skip
    elif facts.host.virtual:  # what a guest sees is the hypervisor's, and its GPUs are behind the host's IOMMU
        if not facts.quick and _several(facts):
            yield Finding("note", "IOMMU", f"not known: {_GUEST}{arguments}", fix=f"look on the host; or {_PROBE}")
    elif bus.iommu_translates is False:
        yield Finding("ok", "IOMMU", f"on, and passes these GPUs' traffic through{arguments}")
    elif facts.pci_gpus and not bus.iommus:
        yield Finding("ok", "IOMMU", f"off{arguments}")
    elif not facts.quick and _several(facts):
        found = f"not known: /sys does not show these GPUs' groups{arguments}"
        yield Finding("note", "IOMMU", found, fix=f"look on the host, not in a container; or {_PROBE}")


_GUEST = "this is a virtual machine, and the host's does not show in it"


def _acs(facts: Facts) -> Iterator[Finding]:
    """Of the ports of switches below which GPUs part. Those of different root ports meet at the root anyway."""
    if not _several(facts):
        return
    if facts.bus.acs_bridges:
        yield Finding(
            "warn", "ACS", f"it redirects on ports of switches above the GPUs: {listed(facts.bus.acs_bridges)}",
            "no redirection, so that GPUs behind one switch reach each other directly", remedies.acs(facts.bus),
        )  # fmt: skip
    elif facts.host.virtual:
        if not facts.quick:
            yield Finding("note", "ACS", f"not known: {_GUEST}", fix=f"look on the host; or {_PROBE}")
    elif facts.bridges and facts.lspci == "ok":
        ways = facts_pci.chains(facts.bridges, [gpu.bus_id for gpu in facts.driver.gpus or facts.pci_gpus])
        alone = "" if dividing_ports(ways) else ": no two of them share one, and they meet at the root"
        yield Finding("ok", "ACS", f"no switch redirects what the GPUs send each other{alone}")
    elif not facts.quick:
        why = {
            "missing": "lspci is not installed", "denied": "lspci shows it to root alone", "hung": "lspci hangs",
            "failed": "lspci failed",
        }.get(facts.lspci, "lspci does not show all bridges above these GPUs")  # fmt: skip
        fix = f"run doctor as root on the host, with pciutils installed; or {_PROBE}"
        yield Finding("note", "ACS", f"not known: {why}", fix=fix)


def _promised(facts: Facts) -> Iterator[Finding]:
    """What the driver says of peer access: a promise, which the probe tries."""
    cells = facts.driver.p2p
    if not cells:
        return
    refused = [(one, other, cell) for one, other, cell in cells if cell != "OK"]
    if not refused:
        yield Finding("ok", "P2P by the driver", f"promised between all {len(facts.driver.gpus)} GPUs; {_PROBE}")
        return
    kinds = dict.fromkeys(cell for _, _, cell in refused)
    why = ", ".join(f"{cell} ({_REFUSALS.get(cell, 'see nvidia-smi topo -p2p r')})" for cell in kinds)
    pairs = listed((f"{one}-{other}" for one, other, _ in refused), 6)
    geforce = any("GeForce" in gpu.name for gpu in facts.driver.gpus)
    fix = "it is so with NVIDIA's stock driver for GeForce: SGLang then sums through host memory" if geforce else (
        "a virtual machine or the platform takes it away; see IOMMU, ACS and BAR1 above"
    )  # fmt: skip
    found = f"none between GPUs {pairs}: {why}; our all-reduce is left out there"
    yield Finding("warn", "P2P by the driver", found, "peer access", remedies.steps(remedies.bar1(facts.bus), fix))


def _driver_settings(facts: Facts) -> Iterator[Finding]:
    bus = facts.bus
    if bus.force_p2p:
        keys = ", ".join(line for line in bus.driver_parameters if forces_p2p(line))
        found = f"the driver was told to promise it ({keys}); whether data arrives is another matter"
        yield Finding("warn", "forced P2P", found, fix=f"{_PROBE}\nif it fails: {remedies.forced(bus)}")
    if bus.uvm_disable_hmm is False and _several(facts):
        yield Finding(
            "note", "HMM", "on in nvidia_uvm; where P2P hangs, one of the things to switch off",
            fix="`options nvidia_uvm uvm_disable_hmm=1` in /etc/modprobe.d, then reboot",
        )  # fmt: skip


def _numa(facts: Facts) -> Iterator[Finding]:
    if not _several(facts):
        return
    nodes = {gpu.bus_id: gpu.node for gpu in facts.pci_gpus if gpu.node is not None}
    ids = [gpu.bus_id for gpu in facts.driver.gpus] or list(nodes)
    of = [nodes[bus_id] for bus_id in ids if bus_id in nodes]
    across = [(one, other) for one, other, kind in facts.driver.links if kind == "SYS"]
    if len(set(of)) > 1 or across:
        groups = [f"node {node}: GPU {listed(i for i, at in enumerate(of) if at == node)}" for node in sorted(set(of))]
        told = (
            "; ".join(groups) if len(set(of)) > 1 else f"GPUs {listed((f'{one}-{other}' for one, other in across), 6)}"
        )
        yield Finding(
            "note", "NUMA", f"{told}; what they send each other crosses the processors' link",
            "a tensor-parallel group on one node where it fits",
            "smaller groups by CUDA_VISIBLE_DEVICES; --numa-node for SGLang's processes",
        )  # fmt: skip
    elif of and max(of) < 0 and len(facts.host.nodes) > 1:
        fix = "a newer BIOS; `numactl` by the slot's number in the board's manual"
        yield Finding("note", "NUMA", "the BIOS does not say which node these GPUs are on", fix=fix)
    elif of or facts.driver.links:
        yield Finding("ok", "NUMA", "all GPUs on one node")


CHECKS = (
    Check("bus.link", _link),
    Check("bus.bar1", _bar1, quick=True),
    Check("bus.iommu", _iommu, quick=True),
    Check("bus.acs", _acs, quick=True),
    Check("bus.p2p", _promised),
    Check("bus.driver-settings", _driver_settings, quick=True),
    Check("bus.numa", _numa),
)
