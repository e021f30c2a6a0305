"""Functions that mkdocs calls while it builds the site: pages from elsewhere, and versions."""

from __future__ import annotations

import json
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


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The site goes into a folder of its version, beside those of others that were built before."""
    found = re.search(r'^__version__ = "(.+)"', (_ROOT / "hetero/__init__.py").read_text(), re.M)
    assert found is not None
    config.site_dir = str(Path(config.site_dir) / found[1])
    return config


def on_post_build(config: MkDocsConfig) -> None:
    """Lists the versions for the site's selector, and leads to this one from the folder above."""
    folder = Path(config.site_dir).parent
    names = sorted((path.parent.name for path in folder.glob("*/sitemap.xml")), key=_numbers)
    versions = [{"version": name, "title": name, "aliases": []} for name in reversed(names)]
    (folder / "versions.json").write_text(json.dumps(versions) + "\n")
    to = f"{names[-1]}/index.html"
    refresh = f'<meta http-equiv="refresh" content="0; url={to}">'
    page = f'<!DOCTYPE html>\n{refresh}\n<a href="{to}">hetero</a>\n'
    (folder / "index.html").write_text(page)


def _numbers(version: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", version)]


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
