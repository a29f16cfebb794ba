"""Words by which redact.py tells what is private from what every machine has. Data, and nothing else."""

from __future__ import annotations

import re

_COMMON = """
root user users ubuntu debian admin administrator nvidia docker localhost local localdomain host home runner guest
nobody default linux server node gpu sglang python torch cuda work data shared public path mac ip uuid serial id
mail dev tmp sys proc run etc usr var opt mnt srv bin sbin lib lib64 boot media shm test tests build builder ci
jenkins gitlab github app apps service services system daemon operator developer dev-user staff student lab ai ml
llm model models train training inference serve vllm triton flashinfer nccl cpu pci bus port slot link memory
express switch bridge root-port control device devices driver drivers kernel module modules version status
capabilities max min limit open files file none yes no ok fail warn note needed fix enabled disabled active idle
true false on off all unknown process processes name type mode state bar region latency cache line size width speed
numa physical address subsystem access denied power management total free available used units soft hard bytes class
vendor resource config group groups identity core card cards graphics compute video display audio controller
corporation product brand architecture temperature clocks clock fan performance persistence ecc mig error errors
release info x compatible interface program token host-id
"""
COMMON = frozenset(_COMMON.split())
"""Names of hosts and users that are ordinary words here: blanking them would spoil the texts, and they say nothing."""

DOMAINS = (
    "nvidia.com", "pytorch.org", "github.com", "python.org", "kernel.org", "sglang.ai",
    "ubuntu.com", "pcisig.com", "kubernetes.io",
)  # fmt: skip
"""Of public pages."""

# Ends of names that file names and modules do not have too, as .py, .so, .sh, .rs, .md and .in would be.
TOP_LEVEL = (
    "com|org|net|edu|gov|mil|info|biz|io|ai|co|cloud|tech|xyz|local|lan|internal|intranet|corp|home|localdomain|example|"
    "invalid|arpa|onion|de|fr|uk|us|eu|ch|at|nl|be|se|fi|dk|pl|cz|it|es|pt|ru|ua|cn|jp|kr|tw|hk|sg|ca|au|nz|br|mx|za|il|ie"
)

TOKENS = (
    r"\bhf_[A-Za-z0-9]{6,}\b",
    r"\bsk-[A-Za-z0-9_-]{5,}",
    r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}\b",
    r"\b(?:gh[opsur]|github_pat)_[A-Za-z0-9_]{10,}\b",
    r"\bgl(?:pat|dt|rt)-[A-Za-z0-9_-]{10,}",
    r"\bxox[abeoprs]-[\w-]{8,}",
    r"\bnvapi-[\w-]{8,}",
    r"\bAIza[\w-]{20,}",
    r"\beyJ[\w-]{8,}\.[\w-]+(?:\.[\w-]+)?",
    r"\bpypi-[\w-]{16,}",
    r"\bdckr_pat_[\w-]{8,}",
    r"-----BEGIN [A-Z ]*KEY-----(?:[\s\S]{0,8000}?-----END [A-Z ]*KEY-----)?",
)
"""Patterns of keys as their makers shape them."""

PROGRAMS = re.compile(
    r"|python[\d.]*|sglang\S*|vllm\S*|ray\S*|ollama\S*|llama\S*|tritonserver|trtllm\S*|Xorg|Xwayland|gnome-\S+|kwin\S*|"
    r"plasmashell|cinnamon|mutter|firefox\S*|chrome\S*|chromium\S*|code|steam\S*|nvidia-\S+|dcgm\S*|nsys|ncu|\[\S+",
    re.IGNORECASE,
)
"""Whose names may be shown; what is in brackets is blanked already."""
