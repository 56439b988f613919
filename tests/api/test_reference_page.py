"""docs/reference.md: it is current, and nothing on it is without a word."""

import re

from helpers.paths import ROOT

import areal_q
from docs.reference_pages import reference_page


def test_the_api_reference_is_current():
    assert (ROOT / "docs" / "reference.md").read_text("utf-8") == reference_page(), "make reference"


def test_the_api_reference_says_something_of_everything():
    sections = re.split(r"^## ", reference_page(), flags=re.MULTILINE)[1:]
    titles = [section.splitlines()[0] for section in sections]
    assert {*titles} == {*areal_q.__all__} - {"__version__"} | {"Types", "Errors"}
    for section in sections:
        # Behind every signature there is a sentence.
        assert not re.search(r"^```\n+(?:```python|\Z)", section, re.MULTILINE), section
