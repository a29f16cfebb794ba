"""The installed SGLang's source tree, and copies of it that are changed in one place."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_sm120.doctor.checks import sglang_tree
from sglang_sm120.integration.check import find_target, target_file
from sglang_sm120.integration.hooks import Hook


@pytest.fixture(scope="session")
def installed() -> Path:
    tree = sglang_tree()
    assert tree is not None, "the tests need SGLang"
    return tree


@pytest.fixture
def changed_tree(installed: Path, tmp_path: Path) -> Callable[[Hook, Callable[[str], str]], Path]:
    """(hook, edit) -> a tree with the one file of the hook's target, its definition passed through `edit`."""

    def make(hook: Hook, edit: Callable[[str], str]) -> Path:
        file, _ = target_file(installed, hook.target)
        assert file is not None, hook.target
        found = find_target(installed, hook.target)
        assert not isinstance(found, str), found
        source, node = found
        lines = source.splitlines(keepends=True)
        start, end = node.lineno - 1, node.end_lineno
        text = "".join(lines[start:end])
        edited = edit(text)
        assert edited != text, "the edit must change something"
        tree = tmp_path / "sglang"
        copy = tree / file.relative_to(installed)
        copy.parent.mkdir(parents=True)
        shutil.copy(file, copy)
        copy.write_text("".join(lines[:start]) + edited + "".join(lines[end:]))
        return tree

    return make
