"""Hooks of mkdocs.yml: the pages outside of this folder join the site, and links to code become its text."""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
JOINED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "bench/README.md": "bench.md",
}
"""Pages elsewhere, and what they are called on the site"""
_LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]

    for path, name in JOINED.items():
        files.append(File.generated(config, name, content=(ROOT / path).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Returns the page with its links as they are on the site. A link to a file that is no page, such as code,
    becomes the path, since the site has none."""
    sources = {name: path for path, name in JOINED.items()}
    home = (ROOT / sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")).parent

    def onto_site(found: re.Match[str]) -> str:
        target = (home / found[2]).resolve()
        if not target.exists():
            return found[0]  # mkdocs says that it is broken
        path = str(target.relative_to(ROOT))
        name = JOINED.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        return f"[{found[1]}]({name}{found[3] or ''})" if name else f"{found[1]} (`{path}`)"

    return _LINK.sub(onto_site, markdown)
