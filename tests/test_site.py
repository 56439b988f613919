"""The pages as a site: its navigation names each of them, and links lead to pages of the site."""

import re
import runpy
from types import SimpleNamespace

import pytest
from helpers.paths import ROOT

HOOKS = runpy.run_path(str(ROOT / "docs" / "hooks.py"))
SITE = (ROOT / "mkdocs.yml").read_text("utf-8")


def test_the_navigation_names_every_page_once():
    named = re.findall(r"^      - [^:]+: (\S+\.md)$", SITE, re.MULTILINE)
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} | {*HOOKS["JOINED"].values()}
    assert sorted(named) == sorted(pages)


@pytest.mark.parametrize(
    ("page", "text", "want"),
    [
        ("faq.md", "[a](api.md#x), [b](https://c.d)", "[a](api.md#x), [b](https://c.d)"),
        ("faq.md", "[a](../bench/README.md#x)", "[a](bench.md#x)"),
        ("faq.md", "[a](../bench/fuzz.py)", "a (`bench/fuzz.py`)"),
        ("faq.md", "[a](nowhere.md)", "[a](nowhere.md)"),
        ("index.md", "![a](docs/images/tokens.png), [b](#c)", "![a](images/tokens.png), [b](#c)"),
        ("bench.md", "[a](../docs/api.md)", "[a](api.md)"),
    ],
)
def test_links_of_the_repository_lead_on_the_site(page: str, text: str, want: str):
    at = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    assert HOOKS["on_page_markdown"](text, at, None, None) == want
