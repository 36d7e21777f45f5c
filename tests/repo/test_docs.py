"""Pages that are generated or that name files must be current."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deepinfer.cli.env import settings_page

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("deepinfer-*/README.md")])


def test_settings_page_is_current():
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert page == settings_page(), "run: deepinfer env --markdown > docs/settings.md"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target]
    missing = [target for target in local if not (page.parent / target).exists()]
    assert not missing


def test_every_page_is_reachable_from_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    unlinked = [page.name for page in ROOT.glob("docs/*.md") if f"docs/{page.name}" not in readme]
    assert not unlinked


@pytest.mark.parametrize("name", ["deepinfer-core", "deepinfer-nvidia", "deepinfer-ascend"])
def test_every_distribution_ships_licence_readme_and_type_marker(name):
    project = ROOT / name
    assert (project / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert (project / "README.md").exists()
    assert list(project.glob("src/*/py.typed"))
