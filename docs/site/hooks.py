"""What mkdocs calls while it builds the site: pages that are not files of docs/."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

_ROOT = Path(__file__).resolve().parents[2]
# Files of the repository's root that are pages, by their addresses in the site.
_FROM_ROOT = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the root's pages, and an empty page for each entry of the navigation without a file."""
    for address, name in _FROM_ROOT.items():
        text = as_in_docs((_ROOT / name).read_text())
        files.append(File.generated(config, address, content=text))
    for title, address in _entries(config.nav):
        if files.get_file_from_path(address) is None:
            text = f"# {title}\n\nThis page is not written yet.\n"
            files.append(File.generated(config, address, content=text))
    return files


def as_in_docs(text: str) -> str:
    """A page of the root with its links as they are from docs/."""
    for address, name in _FROM_ROOT.items():
        text = text.replace(f"]({name}", f"]({address}")
    return re.sub(r"\]\(docs/", "](", text)


def _entries(nav: Any) -> Iterator[tuple[str, str]]:
    """Titles and addresses of a navigation's pages."""
    for entry in nav:
        for title, below in entry.items():
            if isinstance(below, str):
                yield title, below
            else:
                yield from _entries(below)
