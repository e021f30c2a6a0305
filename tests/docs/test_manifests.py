"""Manifests and images of the documents: they are read, and the commands in them are parsed.

Nothing is built or started: that needs a registry of images, and a cluster.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.support.documents.blocks import PAGES, ROOT, Block, blocks_of
from tests.support.documents.commands import check

ALL = [block for page in PAGES for block in blocks_of(page)]
# (What is saved as a file is run by test_blocks.py.)
MANIFESTS = [block for block in ALL if block.language == "yaml" and "file" not in block.says]
IMAGES = [block for block in ALL if block.language == "dockerfile"]
INSTRUCTIONS = {"FROM", "RUN", "COPY", "USER", "WORKDIR", "ENTRYPOINT", "ENV"}


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


@pytest.mark.parametrize("block", MANIFESTS, ids=lambda block: block.place)
def test_a_manifest(block: Block) -> None:
    documents = list(yaml.safe_load_all(block.text))
    assert all({"apiVersion", "kind", "metadata", "spec"} <= set(each) for each in documents)
    commands = list(lists_under("command", documents))
    assert commands
    for words in commands:
        check(words)
    mounted = {
        mount["name"] for mounts in lists_under("volumeMounts", documents) for mount in mounts
    }
    volumes = {each["name"] for found in lists_under("volumes", documents) for each in found}
    assert mounted == volumes


@pytest.mark.parametrize("block", IMAGES, ids=lambda block: block.place)
def test_an_image(block: Block) -> None:
    lines = block.text.replace("\\\n", " ").splitlines()
    assert {line.split()[0] for line in lines} <= INSTRUCTIONS
    project = (ROOT / "pyproject.toml").read_text()
    extras = re.findall(r"/src\[(\w+)\]", block.text)
    assert extras
    assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras)
    for line in lines:
        if line.startswith("ENTRYPOINT"):
            check([*yaml.safe_load(line.removeprefix("ENTRYPOINT")), "doctor", "--json"])


def test_commands_for_images_are_parsed() -> None:
    """What `docker run` is given after the image's name goes to the entry point."""
    texts = [block.text.replace("\\\n", " ") for block in ALL if "docker run" in block.text]
    runs = [line for text in texts for line in text.splitlines() if line.startswith("docker run")]
    assert runs
    for line in runs:
        words = shlex.split(line)
        check(words[words.index("hetero") :])
