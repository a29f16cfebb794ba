"""What the numbers of a probe mean, and what to change. Pure: recorded numbers give the same findings anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from sglang_sm120.findings import Finding, failed, worst_first
from sglang_sm120.kernels.communication.p2p_probe import config, remedies, report
from sglang_sm120.kernels.communication.p2p_probe.report import Pair, ProbeReport

_MOST_NAMED = 6
_GENERATION_4_GB_S = 31.5  # 16 lanes


def find(of: ProbeReport) -> list[Finding]:
    """What is to know about a report, worst first.

    Args:
        of: measured now, or recorded.

    Returns:
        At least one finding. No "fail" if and only if memory may be shared between all of these GPUs.
    """
    found = [
        *_denied(of),
        *_broken(of),
        *_through_host(of),
        *_collapsed_pairs(of),
        *_collapsed_together(of),
        *_slow_reads(of),
        *_asymmetric(of),
        *_lanes(of),
        *_settings(of),
        *_nvlink(of),
    ]
    if not failed(found):
        found.insert(0, _summary(of))
    named = (replace(finding, check=f"p2p.{finding.what.lower().replace(' ', '-')}") for finding in found)
    return worst_first(named)


def _denied(of: ProbeReport) -> Iterator[Finding]:
    denied = [pair for pair in of.pairs if pair.status == report.DENIED]
    if not denied:
        return
    fix = (
        "GeForce cards have P2P only with open kernel modules that were built for it; RTX PRO and data centre cards "
        "with the stock driver, unless a virtual machine or the platform takes it away. NCCL through the host "
        "works without: --disable-custom-all-reduce"
    )
    yield Finding(
        "fail",
        "peer access",
        f"the driver gives none between GPUs {_names(denied)}",
        fix=remedies.steps(remedies.bar1(of.environment), fix),
    )


def _broken(of: ProbeReport) -> Iterator[Finding]:
    kinds = (
        (report.HUNG, "P2P hangs", "what one GPU sends does not arrive at the other"),
        (report.WRONG, "wrong data", "what arrives is not what was sent"),
        (report.CRASHED, "P2P crashes", "a process ended while its GPU used another's memory"),
        (report.FAILED, "P2P fails", "the test could not be done"),
    )
    for status, what, meaning in kinds:
        pairs = [pair for pair in of.pairs if pair.status == status]
        together = of.all_to_all.status == status
        if not pairs and not together:
            continue
        where = [f"GPUs {_names(pairs)}"] if pairs else []
        where += ["all GPUs at once"] if together else []
        details = dict.fromkeys([pair.detail for pair in pairs] + ([of.all_to_all.detail] if together else []))
        because = "; ".join(detail for detail in list(details)[:2] if detail)
        found = f"{' and '.join(where)}: {meaning} ({because})" if because else f"{' and '.join(where)}: {meaning}"
        yield Finding(
            "fail", what, found, fix=remedies.LOOK if status == report.FAILED else remedies.bus(of.environment)
        )


def _through_host(of: ProbeReport) -> Iterator[Finding]:
    pairs = [pair for pair in _right(of) if _best(pair) is not None and pair.push_latency_us is not None]
    if not pairs:
        return
    shares = [(_best(pair) or 0.0) / (_link(of, pair) or _GENERATION_4_GB_S) for pair in pairs]
    shortest = min(pair.push_latency_us or 0.0 for pair in pairs)
    if max(shares) >= config.THROUGH_HOST_LINK or shortest < config.THROUGH_HOST_US:
        return
    best = max(_best(pair) or 0.0 for pair in pairs)
    environment = of.environment
    causes = [remedies.forced, remedies.bar1, remedies.iommu, remedies.acs]
    yield Finding(
        "warn",
        "through the host",
        f"no pair has more than {best:.1f} GB/s ({100 * max(shares):.0f} % of its PCIe link) and no write takes less "
        f"than {shortest:.1f} us: traffic goes through host memory, not from GPU to GPU",
        fix=remedies.steps(*(cause(environment) for cause in causes)),
    )


def _collapsed_pairs(of: ProbeReport) -> Iterator[Finding]:
    collapsed = []
    for pair in _right(of):
        back = of.pair(pair.target, pair.source)  # its reads take the way that this pair's writes take
        if pair.push_gb_s is not None and back.pull_gb_s and pair.push_gb_s < config.COLLAPSE * back.pull_gb_s:
            collapsed.append((pair, back.pull_gb_s))
    if collapsed:
        worst, pull = min(collapsed, key=lambda item: item[0].push_gb_s or 0.0)
        yield Finding(
            "warn",
            "writes collapse",
            f"GPUs {_names(pair for pair, _ in collapsed)}: {worst.push_gb_s:.1f} GB/s pushed, {pull:.1f} GB/s pulled "
            "on the same way",
            fix="use algorithms that pull; a newer firmware of the PCIe switch, or GPUs in other slots, may mend it",
        )


def _collapsed_together(of: ProbeReport) -> Iterator[Finding]:
    push, pull = _mean(of.all_to_all.push_gb_s), _mean(of.all_to_all.pull_gb_s)
    push_alone = _mean(pair.push_gb_s for pair in _right(of))
    pull_alone = _mean(pair.pull_gb_s for pair in _right(of))
    if push is None or push_alone is None or push >= config.COLLAPSE * push_alone:
        return
    numbers = f"{push:.1f} GB/s a GPU pushed when all push at once, {push_alone:.1f} when one does"
    if pull is not None and pull_alone and pull < config.UPLINK * pull_alone and pull < 2 * push:
        yield Finding(
            "warn",
            "shared link",
            f"{numbers}; pulled {pull:.1f} and {pull_alone:.1f}: GPUs share a link that is slower than theirs together",
            fix="keep a tensor-parallel group behind one PCIe switch, or on one processor's own lanes",
        )
        return
    pulled = "" if pull is None else f"; {pull:.1f} GB/s a GPU pulled at once"
    yield Finding(
        "warn",
        "writes collapse together",
        f"{numbers}{pulled}",
        fix="use algorithms that pull, for more than two GPUs; keep a tensor-parallel group behind one PCIe root",
    )


def _slow_reads(of: ProbeReport) -> Iterator[Finding]:
    slow = [
        (pair.pull_latency_us / pair.push_latency_us, pair)
        for pair in _right(of)
        if pair.pull_latency_us and pair.push_latency_us
        and pair.pull_latency_us >= config.SLOW_READ * pair.push_latency_us
    ]  # fmt: skip
    if slow:
        ratio, worst = max(slow, key=lambda item: item[0])
        yield Finding(
            "note",
            "slow reads",
            f"GPUs {_names(pair for _, pair in slow)}: a read takes {worst.pull_latency_us:.2f} us, a write "
            f"{worst.push_latency_us:.2f} us ({ratio:.0f} times)",
            fix="use algorithms that push for small messages",
        )


def _asymmetric(of: ProbeReport) -> Iterator[Finding]:
    uneven = []
    for pair in _right(of):
        back = of.pair(pair.target, pair.source)
        for there, here in ((pair.push_gb_s, back.push_gb_s), (pair.pull_gb_s, back.pull_gb_s)):
            if there and here and there > config.ASYMMETRIC * here:
                uneven.append((there / here, pair))
    if uneven:
        ratio, worst = max(uneven, key=lambda item: item[0])
        yield Finding(
            "note",
            "uneven directions",
            f"GPUs {_names(pair for _, pair in uneven)}: GPU {worst.source} moves up to {ratio:.1f} times what GPU "
            f"{worst.target} moves the other way",
            fix="compare their PCIe slots (lanes, generation) and the bridges above them: nvidia-smi topo -m",
        )


def _lanes(of: ProbeReport) -> Iterator[Finding]:
    narrow = [gpu for gpu in of.gpus if gpu.link_lanes and gpu.max_link_lanes and gpu.link_lanes < gpu.max_link_lanes]
    if narrow:
        lanes = ", ".join(f"GPU {gpu.index} {gpu.link_lanes} of {gpu.max_link_lanes}" for gpu in narrow)
        yield Finding(
            "note", "PCIe lanes", f"fewer than the card has: {lanes}", fix="another slot, or the BIOS's bifurcation"
        )


def _settings(of: ProbeReport) -> Iterator[Finding]:
    """What is set up in a way that often makes trouble, where none was seen."""
    if any(pair.status != report.OK for pair in of.pairs):
        return
    if of.all_to_all.status == report.SKIPPED and of.all_to_all.detail:
        yield Finding("note", "all GPUs at once", f"not measured: {of.all_to_all.detail}")
    if of.environment.force_p2p:
        keys = next(line for line in of.environment.driver_parameters if "forcep2p" in line.lower())
        yield Finding("note", "forced P2P", f"the driver was told to allow it ({keys}); what arrived here was right")
    if of.environment.iommu_translates:
        yield Finding(
            "note",
            "IOMMU",
            "it translates these GPUs' traffic, which costs bandwidth and is the usual cause of hangs with more GPUs",
            fix="iommu=pt on the kernel's command line",
        )


def _nvlink(of: ProbeReport) -> Iterator[Finding]:
    linked = []
    for pair in _right(of):
        best, link = _best(pair), _link(of, pair)
        if best is not None and best > (config.PCIE_LIMIT_GB_S if link is None else config.NVLINK * link):
            linked.append((best, pair))
    if linked:
        best = max(rate for rate, _ in linked)
        yield Finding(
            "ok", "NVLink", f"GPUs {_names(pair for _, pair in linked)}: {best:.0f} GB/s is more than PCIe can carry"
        )


def _summary(of: ProbeReport) -> Finding:
    pairs = _right(of)
    push, pull = (_range(getattr(pair, f"{way}_gb_s") for pair in pairs) for way in ("push", "pull"))
    write, read = (_range((getattr(pair, f"{way}_latency_us") for pair in pairs), 2) for way in ("push", "pull"))
    return Finding(
        "ok",
        "P2P",
        f"right between all {len(of.gpus)} GPUs: push {push} GB/s, {write} us; pull {pull} GB/s, {read} us",
    )


def _right(of: ProbeReport) -> list[Pair]:
    return [pair for pair in of.pairs if pair.status == report.OK]


def _best(pair: Pair) -> float | None:
    return max((rate for rate in (pair.push_gb_s, pair.pull_gb_s) if rate is not None), default=None)


def _link(of: ProbeReport, pair: Pair) -> float | None:
    """The rate of the slower of a pair's two PCIe links; None unless both are known."""
    rates = [gpu.link_gb_s for gpu in of.gpus if gpu.index in (pair.source, pair.target)]
    known = [rate for rate in rates if rate is not None]
    return min(known) if len(known) == 2 else None


def _names(pairs: Iterable[Pair]) -> str:
    """ "0-1, 0-2": each pair once, whatever its direction."""
    both = sorted({(min(pair.source, pair.target), max(pair.source, pair.target)) for pair in pairs})
    more = f" and {len(both) - _MOST_NAMED} more pairs" if len(both) > _MOST_NAMED else ""
    return ", ".join(f"{one}-{other}" for one, other in both[:_MOST_NAMED]) + more


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _range(values: Iterable[float | None], digits: int = 1) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "?"
    low, high = f"{min(known):.{digits}f}", f"{max(known):.{digits}f}"
    return low if low == high else f"{low}..{high}"
