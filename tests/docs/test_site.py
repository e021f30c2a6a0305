"""The site of `make docs`: it is built without a warning, and every link and file in it exists."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import hetero
from tests.support.documents.blocks import PAGES, ROOT

CONFIG = (ROOT / "mkdocs.yml").read_text()
NAV = re.findall(r"^ +- [^:]+: ([\w/]+\.md)$", CONFIG, re.MULTILINE)
# Pages that the site takes from the repository's root.
FROM_ROOT = {"index.md", "changelog.md", "security.md"}
PATHS = re.compile(r"`((?:hetero|offload|native|bench|tests|docs)/[\w./-]+?)/?(?::\d+)?`")


class Links(HTMLParser):
    """What a page of HTML refers to, what it loads, and the anchors that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.meta: dict[str, str] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value is not None}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag in ("img", "script") and "src" in values:
            self.loaded.append(values["src"])
        elif tag == "link" and values.get("rel") in ("stylesheet", "icon"):
            self.loaded.append(values["href"])
        elif tag == "meta" and "property" in values:
            self.meta[values["property"]] = values["content"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Links]:
    """The built pages."""
    above = tmp_path_factory.mktemp("site")
    folder = above / hetero.__version__
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(above)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "SITE_URL": "https://example.org/"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {path: Links(path.read_text()) for path in sorted(folder.rglob("*.html"))}


def test_the_navigation_has_all_pages() -> None:
    docs = ROOT / "docs"
    files = {str(page.relative_to(docs)) for page in PAGES if docs in page.parents}
    assert len(NAV) == len(set(NAV))
    assert files <= set(NAV), "write the page into mkdocs.yml, under nav"
    assert set(NAV) - files == FROM_ROOT


def test_links_and_anchors(site: dict[Path, Links]) -> None:
    wrong = [
        f"{page.name}: {link}"
        for page, found in site.items()
        if page.name != "404.html"
        for link in found.links + found.loaded
        if not exists(link, page, site)
    ]
    assert len(site) > len(NAV)
    assert not wrong, "\n".join(wrong)


def test_nothing_is_loaded_from_elsewhere(site: dict[Path, Links]) -> None:
    loaded = {link for found in site.values() for link in found.loaded}
    assert loaded
    assert not [link for link in loaded if urlsplit(link).netloc]


def test_the_reference_has_all_public_names(site: dict[Path, Links]) -> None:
    source = (ROOT / "docs/api.md").read_text()
    named = re.findall(r"^::: hetero\.(\w+)$", source, re.MULTILINE)
    assert sorted(named) == sorted(hetero.__all__)
    (page,) = (found for path, found in site.items() if path.name == "api.html")
    assert {f"hetero.{name}" for name in named} <= page.anchors
    for name, members in re.findall(r"^::: hetero\.(\w+)\n.*\n +members: \[(.+)\]", source, re.M):
        assert {f"hetero.{name}.{member}" for member in members.split(", ")} <= page.anchors


def test_versions_stand_beside_one_another(site: dict[Path, Links]) -> None:
    folder = next(path for path in site if path.name == "api.html").parent
    assert folder.name == hetero.__version__
    versions = json.loads((folder.parent / "versions.json").read_text())
    assert [each["version"] for each in versions] == [hetero.__version__]
    assert f"url={folder.name}/index.html" in (folder.parent / "index.html").read_text()


def test_links_from_elsewhere_have_a_picture(site: dict[Path, Links]) -> None:
    for path, found in site.items():
        picture = found.meta["og:image"].removeprefix("https://example.org/")
        content = (next(p for p in site if p.name == "api.html").parent / picture).read_bytes()
        assert struct.unpack(">II", content[16:24]) == (1200, 630), path
        assert found.meta["og:title"]


def test_files_exist() -> None:
    """Of pages as they are read beside the sources: what they link to, and paths that they name."""
    missing: list[str] = []
    for page in PAGES:
        text = page.read_text()
        linked = {(page.parent / link).resolve() for link in relative_links(text)}
        named = {ROOT / path for path in PATHS.findall(text)}
        missing += [f"{page.name}: {path}" for path in linked | named if not path.exists()]
    assert not missing, "\n".join(missing)


def relative_links(text: str) -> Iterator[str]:
    """The files that a page links to, or shows."""
    prose = re.sub(r"```.*?```|`[^`\n]+`", "", text, flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        parts = urlsplit(link)
        if not parts.scheme and parts.path:
            yield parts.path


def exists(link: str, page: Path, site: dict[Path, Links]) -> bool:
    """Whether a link of a page leads to a file of the site, and to an anchor in it."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return True
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if target.is_dir():
        target /= "index.html"
    if target.suffix != ".html" or not parts.fragment:
        return target.exists()
    return target in site and unquote(parts.fragment) in site[target].anchors
