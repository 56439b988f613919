"""The pages: README lists each of them, links lead somewhere, and lists are those of the code."""

import re

from helpers.paths import ROOT

from areal_q.system.run_dir import MAY_CHANGE_ON_RESUME

PAGES = sorted((ROOT / "docs").glob("*.md"))


def test_readme_lists_every_page():
    listed = set(re.findall(r"\]\(docs/([a-z-]+\.md)\)", (ROOT / "README.md").read_text()))
    assert listed == {page.name for page in PAGES}


def test_every_link_between_pages_leads_somewhere():
    broken = [
        f"{page.name}: {link}"
        for page in [*PAGES, ROOT / "README.md"]
        for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / link).exists()
    ]
    assert broken == []


def test_troubleshooting_names_what_may_change_on_resume():
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    section = text.partition("## What may change on `--resume`")[2].partition("All others")[0]
    named = re.findall(r"`([a-z_.*]+)`", section)
    assert [name.removesuffix("*") for name in named] == list(MAY_CHANGE_ON_RESUME)
