"""Manifests and images of the documents: they are read, and the commands in them are parsed.

Nothing is built or started: that needs a registry of images, and a cluster.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import yaml

from tests.support.documents.blocks import ROOT, Block, all_blocks
from tests.support.documents.commands import check

INSTRUCTIONS = {"FROM", "RUN", "COPY", "USER", "WORKDIR", "ENTRYPOINT", "ENV"}


def blocks(language: str = "") -> list[Block]:
    """Those of all pages, or of one language."""
    found = [block for each in all_blocks().values() for block in each]
    return [block for block in found if language in ("", block.language)]


def lists_under(key: str, found: Any) -> Iterator[Any]:
    """The values of a key, however deep."""
    if isinstance(found, dict):
        for name, value in found.items():
            if name == key:
                yield value
            yield from lists_under(key, value)
    elif isinstance(found, list):
        for value in found:
            yield from lists_under(key, value)


def test_manifests() -> None:
    # (What is saved as a file is run by test_blocks.py.)
    manifests = [block for block in blocks("yaml") if "file" not in block.says]
    assert manifests
    for block in manifests:
        documents = list(yaml.safe_load_all(block.text))
        assert all({"apiVersion", "kind", "metadata", "spec"} <= set(each) for each in documents)
        commands = list(lists_under("command", documents))
        assert commands, block.place
        for words in commands:
            check(words)
        mounted = {
            mount["name"] for mounts in lists_under("volumeMounts", documents) for mount in mounts
        }
        volumes = {each["name"] for found in lists_under("volumes", documents) for each in found}
        assert mounted == volumes, block.place


def test_images() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert blocks("dockerfile")
    for block in blocks("dockerfile"):
        lines = block.text.replace("\\\n", " ").splitlines()
        assert {line.split()[0] for line in lines} <= INSTRUCTIONS, block.place
        extras = re.findall(r"/src\[(\w+)\]", block.text)
        assert extras, block.place
        assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras)
        for line in lines:
            if line.startswith("ENTRYPOINT"):
                check([*yaml.safe_load(line.removeprefix("ENTRYPOINT")), "doctor", "--json"])


def test_commands_for_images_are_parsed() -> None:
    """What `docker run` is given after the image's name goes to the entry point."""
    texts = [each.text.replace("\\\n", " ") for each in blocks() if "docker run" in each.text]
    runs = [line for text in texts for line in text.splitlines() if line.startswith("docker run")]
    assert runs
    for line in runs:
        words = shlex.split(line)
        check(words[words.index("hetero") :])
