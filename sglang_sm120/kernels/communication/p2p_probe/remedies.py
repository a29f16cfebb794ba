"""What to change on a machine whose P2P is wrong or slow, in words, from what is known about it."""

from __future__ import annotations

from sglang_sm120.kernels.communication.p2p_probe.environment import Environment

LOOK = "`dmesg | grep -iE 'xid|iommu|dmar|aer'` right after this run names the device that refused"
WITHOUT_P2P = "until then: NCCL_P2P_DISABLE=1, and `--disable-custom-all-reduce` for SGLang"


def steps(*each: str) -> str:
    """Those that there are, a line each."""
    return "\n".join(step for step in each if step)


def bus(environment: Environment) -> str:
    """Where traffic between GPUs hangs, fails or is spoilt: the likeliest first, as this machine's facts have it."""
    hmm = "`options nvidia_uvm uvm_disable_hmm=1` in /etc/modprobe.d" if environment.uvm_disable_hmm is False else ""
    return steps(iommu(environment), acs(environment), bar1(environment), forced(environment), hmm, LOOK, WITHOUT_P2P)


def forced(environment: Environment) -> str:
    """Registry keys that promise P2P where there is none."""
    if not environment.force_p2p:
        return ""
    return (
        "the driver's registry forces P2P that may not be there: take the ForceP2P keys out of "
        "NVreg_RegistryDwords and NVreg_RegistryDwordsPerDevice in /etc/modprobe.d"
    )


def iommu(environment: Environment) -> str:
    """Translation that peers do not get through; nothing where it is known to be off."""
    change = (
        "iommu=pt, or amd_iommu=off or intel_iommu=off, on the kernel's command line, or the IOMMU (AMD-Vi, VT-d) off "
        "in the BIOS"
    )
    if environment.iommu_translates is False:
        return ""
    if environment.iommu_translates:
        return f"the IOMMU translates these GPUs' traffic: {change}"
    return f"where the IOMMU is on: {change}"


def acs(environment: Environment) -> str:
    """Bridges that send everything to the root."""
    if not environment.acs_bridges:
        return (
            "where GPUs share a switch and `sudo lspci -vvv` shows ReqRedir+ at its downstream ports: "
            "`setpci -s PORT ECAP_ACS+6.w=0000` for each above a GPU (as root, after every boot), or ACS "
            "off in the BIOS"
        )
    commands = "; ".join(f"setpci -s {bridge} ECAP_ACS+6.w=0000" for bridge in environment.acs_bridges)
    return (
        f"ACS sends traffic between GPUs up to the root: `{commands}` (as root, after every boot), or off in the BIOS"
    )


def bar1(environment: Environment) -> str:
    """Too little of a GPU's memory on the bus."""
    if not environment.small_bar1:
        return ""
    return f"Above 4G Decoding and Resizable BAR on in the BIOS: BAR1 is small ({', '.join(environment.small_bar1)})"
