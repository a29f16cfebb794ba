"""The installed SGLang with patches of patches/ applied: links to its files, real copies where a patch writes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from sglang_sm120.doctor.checks import sglang_tree

PATCHES = Path(__file__).resolve().parent.parent / "patches"


def series() -> list[str]:
    """The patch files in the order in which patches/series applies them."""
    lines = (PATCHES / "series").read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def header(patch: str) -> dict[str, str]:
    """The `Name: value` fields of a patch's last header paragraph."""
    paragraph = (PATCHES / patch).read_text().split("\n---\n")[0].split("\n\n")[-1]
    return dict(re.findall(r"^([A-Z][A-Za-z-]+): *(.*)$", paragraph, re.MULTILINE))


def files(patch: str) -> dict[str, bool]:
    """Path below the folder that `git apply -p2` runs in -> whether the patch adds that file."""
    pairs = re.findall(r"^--- (.*)\n\+\+\+ b/[^/]+/(.*)$", (PATCHES / patch).read_text(), re.MULTILINE)
    return {path: before == "/dev/null" for before, path in pairs}


def git_apply(root: Path, patch: str, *options: str) -> subprocess.CompletedProcess[str]:
    """`git apply` as patches/series says, outside any repository."""
    return subprocess.run(
        ["git", "apply", "-p2", *options, str(PATCHES / patch)],
        cwd=root, capture_output=True, text=True, env={**os.environ, "GIT_CEILING_DIRECTORIES": str(root.parent)},
    )  # fmt: skip


def pristine_copy(root: Path) -> Path:
    """A folder whose `sglang` is the installed one, ready for any patch; root is created."""
    installed = sglang_tree()
    assert installed is not None, "the tests need SGLang"
    shutil.copytree(installed, root / "sglang", copy_function=os.symlink)
    for patch in series():
        for path, is_new in files(patch).items():
            if not is_new and (root / path).is_symlink():
                original = (root / path).resolve()
                (root / path).unlink()
                shutil.copy(original, root / path)
    return root


def patched_copy(root: Path, patches: Sequence[str] | None = None) -> Path:
    """`pristine_copy` with the patches (default: the whole series) applied in order, each checked first."""
    pristine_copy(root)
    for patch in series() if patches is None else patches:
        for options in (["--check"], []):
            done = git_apply(root, patch, *options)
            assert done.returncode == 0, f"{patch}: {done.stderr}"
    return root
