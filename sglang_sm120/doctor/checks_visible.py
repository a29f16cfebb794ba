"""CUDA_VISIBLE_DEVICES: which GPUs it leaves, by number, by UUID or its beginning, by a part that MIG made.

CUDA reads the list up to the first word that names no GPU, and says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from sglang_sm120.doctor.check import Check, listed
from sglang_sm120.doctor.facts import Facts
from sglang_sm120.doctor.facts_gpus import Gpu
from sglang_sm120.findings import Finding

_NAME = "CUDA_VISIBLE_DEVICES"
_NOTHING = ("", "-1", "nodevfiles", "none", "void")
"""Words with which job schedulers, containers and users give a process no GPU."""


def _visible(facts: Facts) -> Iterator[Finding]:
    given, gpus = facts.environ.get(_NAME), facts.driver.gpus
    if given is None or not gpus:
        return
    words = [word.strip() for word in given.strip().removesuffix(",").split(",")]
    if words[0].lower() in _NOTHING or re.fullmatch(r"-\d+", words[0]):
        yield Finding("fail", _NAME, f"{given!r} hides every GPU", "the GPUs to serve on", "unset it")
        return
    if strange := [word for word in words if not re.fullmatch(r"-?\d+|(?:GPU|MIG)-\S*|.*\[.*", word, re.IGNORECASE)]:
        found = f"{given!r}: {listed(repr(word) for word in strange)} is no number and no UUID"
        yield Finding("fail", _NAME, found, "numbers, or UUIDs as `nvidia-smi -L` has them, with commas", "set it anew")
        return
    named = [_named(word, gpus) for word in words]
    chosen = [gpu for found in named if found is not None for gpu in found]
    wrong = [word for word, found in zip(words, named, strict=True) if found is not None and len(found) != 1]
    # Not all GPUs may be listed where one is in trouble.
    complete = not facts.driver.lost and not facts.driver.detail
    known = [word.lower() for word in words if "[" not in word]  # not blanked, as in a recording
    if len(set(known)) < len(known) or len({gpu.index for gpu in chosen}) < len(chosen):
        yield Finding("fail", _NAME, f"{given!r} names a GPU twice: CUDA then sees none", "each once", "set it anew")
    elif wrong and complete:
        found = (
            f"{given!r}: there is no GPU {listed(wrong)} of {len(gpus)}, and CUDA hides those behind it in the list too"
        )
        several = any(found and len(found) > 1 for found in named)
        needed = "UUIDs that one GPU has" if several else f"0 to {len(gpus) - 1}, or UUIDs as `nvidia-smi -L` has them"
        yield Finding("fail", _NAME, found, needed, "set it anew")
    elif wrong:
        return
    elif len([word for word in words if word.upper().startswith("MIG-")]) > 1:
        found = f"{len(words)} parts that MIG made: a process gets one of them, and they have no peer-to-peer memory"
        yield Finding("warn", _NAME, found, "one part, or whole GPUs", "name one; or sudo nvidia-smi -mig 0")
    else:
        yield from _kinds(facts, given, words, chosen)


def _named(word: str, gpus: Sequence[Gpu]) -> list[Gpu] | None:
    """The GPUs that a word names; None where that is not known: parts of MIG, UUIDs that are blanked."""
    if re.fullmatch(r"-?\d+", word):
        return [gpu for gpu in gpus if gpu.index == int(word)]
    if not word.upper().startswith("GPU-") or "[" in word or not all(gpu.uuid for gpu in gpus):
        return None
    return [gpu for gpu in gpus if gpu.uuid.lower().startswith(word.lower())]


def _kinds(facts: Facts, given: str, words: Sequence[str], chosen: Sequence[Gpu]) -> Iterator[Finding]:
    """A choice without faults; whether it is the one that was meant, where GPUs differ."""
    gpus = facts.driver.gpus
    numbers = any(word.isdecimal() for word in words)
    by_place = facts.environ.get("CUDA_DEVICE_ORDER", "").upper() == "PCI_BUS_ID"
    if numbers and not by_place and len(words) < len(gpus) and len({gpu.name for gpu in gpus}) > 1:
        found = f"{given}: CUDA counts the fastest GPU first, nvidia-smi by place, and these GPUs differ"
        yield Finding(
            "note", _NAME, found, "CUDA_DEVICE_ORDER=PCI_BUS_ID", "set it, or name GPUs by UUID (nvidia-smi -L)"
        )
    elif chosen and len(chosen) == len(words) and not any(gpu.is_sm120 for gpu in chosen):
        if any(gpu.is_sm120 for gpu in gpus):
            right = listed((gpu.index for gpu in gpus if gpu.is_sm120), len(gpus)).replace(" ", "")
            found = f"{given}: none of these is an SM120 GPU, which are here too"
            yield Finding("warn", _NAME, found, "the SM120 GPUs", f"CUDA_DEVICE_ORDER=PCI_BUS_ID {_NAME}={right}")
    else:
        yield Finding("ok", _NAME, f"{given}: {len(words)} of {len(gpus)} GPUs")


CHECKS = (Check("environment.visible-devices", _visible),)
