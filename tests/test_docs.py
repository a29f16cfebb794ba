"""The documentation: generated pages are fresh and complete, and every relative link leads somewhere."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest

from sglang_sm120.integration.hooks import EXTENSIONS, HOOKS
from sglang_sm120.options import Sm120Options

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "tools" / "generate_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pages() -> list[Path]:
    return [path for path in (ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/**/*.md")) if path.exists()]


def rows(page: str) -> list[list[str]]:
    """The cells of every table row of a page."""
    lines = (ROOT / page).read_text().splitlines()
    return [line.strip("|").split(" | ") for line in lines if line.startswith("| ")]


def test_generated_pages_are_fresh(generator: ModuleType) -> None:
    assert {"docs/flags.md", "docs/hooks.md"} <= set(generator.PAGES)
    stale = [name for name, page in generator.PAGES.items() if (ROOT / name).read_text() != page()]
    assert not stale, "run tools/generate_docs.py"


def test_every_option_has_its_row_in_the_flags_page() -> None:
    flags = [cells[0].strip(" `") for cells in rows("docs/flags.md")[1:]]
    assert flags == ["--" + field.name.replace("_", "-") for field in fields(Sm120Options)]


def test_every_hook_and_door_has_its_row_in_the_hooks_page() -> None:
    first_cells = [cells[0].strip() for cells in rows("docs/hooks.md")]
    assert first_cells == ["name", *(row.name for row in EXTENSIONS), "name", *(row.name for row in HOOKS)]
    targets = [cells[1].strip(" `") for cells in rows("docs/hooks.md")]
    assert set(targets) >= {row.target for row in HOOKS}


def test_every_relative_link_resolves() -> None:
    links = [(page, link) for page in pages() for link in LINK.findall(page.read_text())]
    relative = [(page, link.partition("#")[0]) for page, link in links if not re.match(r"[a-z]+:|#", link)]
    assert len(relative) >= 3, "the pattern finds links"
    broken = [f"{page.relative_to(ROOT)}: {link}" for page, link in relative if not (page.parent / link).exists()]
    assert not broken
