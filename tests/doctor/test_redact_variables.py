"""What of variables, of files and of the kernel's arguments a report shows: what is known to be harmless."""

from __future__ import annotations

import pytest

from sglang_sm120.doctor.redact import file_text, kernel_arguments, variables
from sglang_sm120.doctor.redact_variables import SECRET
from sglang_sm120.options import OPTIONS


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("NCCL_DEBUG", "INFO", "INFO"),
        ("NCCL_P2P_LEVEL", "SYS", "SYS"),
        ("NCCL_SOMETHING_NEW", "1", "1"),
        ("NCCL_SOMETHING_NEW", "4096", "4096"),
        ("NCCL_SOMETHING_NEW", "acme", "[...]"),
        ("NCCL_SOCKET_IFNAME", "enp1s0", "[...]"),
        ("NCCL_HOSTID", "gpubox-17", "[...]"),
        ("NCCL_COMM_ID", "10.0.0.7:2000", "[...]"),
        ("CUDA_VISIBLE_DEVICES", "0,1", "0,1"),
        ("CUDA_VISIBLE_DEVICES", "GPU-3f9c,GPU-41b7,GPU-3F9C", "[uuid 1],[uuid 2],[uuid 1]"),
        ("CUDA_VISIBLE_DEVICES", "MIG-GPU-3f9c/1/0", "[uuid 1]"),
        ("CUDA_HOME", "/usr/local/cuda-13.0", "/usr/local/cuda-13.0"),
        ("CUDA_HOME", "/opt/acme/cuda", "[path]"),
        ("CUDA_HOME", "/home/ann lee", "[home]"),
        ("LD_LIBRARY_PATH", "/usr/lib:/home/ann lee/lib::/mnt/acme secret:acme/lib", "/usr/lib:[home]::[path]:[...]"),
        ("PYTHONPATH", "/home/ann/v/lib/site-packages/x", "[home]/site-packages/x"),
        ("LD_PRELOAD", "libacme.so libother.so", "[...]"),
        ("CXX", "g++-13", "g++-13"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "expandable_segments:True"),
        ("FLASHINFER_CUDA_ARCH_LIST", "9.0a 12.0f", "9.0a 12.0f"),
        ("FLASHINFER_EXTRA_CUDAFLAGS", "-DACME", "[...]"),
        ("SGLANG_PLUGINS", "smg, sm120", "smg, sm120"),
        ("SGLANG_SM120_MOE_NUMERICS", "w4a16", "w4a16"),
        ("SGLANG_SM120_MOE_PROFILE", "/data/acme.json", "[path]"),
        ("SGLANG_SM120_MISSPELT", "acme", "[...]"),
        ("SGLANG_PWD", "hunter2", "[...]"),
        ("SGLANG_PWD", "1", "[...]"),
        ("SGLANG_ADMIN_LOGIN", "1234", "[...]"),
        ("SGLANG_SOMETHING", "1234", "[...]"),
        ("SGLANG_SOMETHING", "true", "true"),
        ("SGLANG_API_KEY", "sk-1", "[...]"),
        ("SGLANG_HOST_IP", "::ffff:10.0.0.7", "[...]"),
        ("TORCH_HF_TOKEN", "hf_1", "[...]"),
        ("TORCH_LOGS", "+dynamo", "[...]"),
        ("CUDA_VERSION", "13.0.1", "13.0.1"),
        ("NCCL_DEBUG", "", ""),
        ("NCCL_ALGO", "hf_AbCdEfGhIjKl", "[token]"),
    ],
)
def test_variables(name: str, value: str, shown: str) -> None:
    assert variables({name: value}) == {name: shown}


def test_every_variable_of_ours_is_known() -> None:
    given = {option.env: "value" for option in OPTIONS if not SECRET.search(option.env)}
    assert given and variables(given) == given


@pytest.mark.parametrize(
    ("path", "text", "kept"),
    [
        ("/proc/7/status", "Name:\tacme\nPPid:\t1\nUid:\t1000\n", "PPid:\t1"),
        ("/proc/7/status", "Name:\tacme\n", "[...]"),
        ("/proc/7/status", "", ""),
        ("/run/.containerenv", 'engine="podman-5"\nname="acme"\n', 'engine="podman-5"'),
        ("/proc/cpuinfo", "processor: 0\nflags: a\n\nprocessor: 1\n", "processor: 0\nflags: a"),
        ("/proc/cmdline", "quiet acme=1\n", "quiet acme=[...]"),
        ("/proc/meminfo", "MemTotal: 1 kB\n", "MemTotal: 1 kB\n"),
    ],
)
def test_of_a_file_only_what_was_asked_for(path: str, text: str, kept: str) -> None:
    assert file_text(path, text) == kept


def test_kernel_arguments() -> None:
    line = "BOOT_IMAGE=/vmlinuz root=UUID=1 ro iommu=pt amd_iommu=on ip=10.1.1.1 luks=secret pci=realloc customername"
    assert kernel_arguments(line) == (
        "BOOT_IMAGE=[...] root=[...] ro iommu=pt amd_iommu=on ip=[...] luks=[...] pci=realloc"
    )
