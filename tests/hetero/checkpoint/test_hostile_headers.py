"""JSON that was made to take memory: what its reading takes is in proportion to its size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
MIB = 1 << 20
SIZE = 2 * MIB

# argv: kind, folder. Prints for each file by what its reading has grown, over its size.
_SCRIPT = """
import gc, json, resource, sys
from pathlib import Path
from hetero.checkpoint.manifest import parse_manifest
from hetero.checkpoint.safetensors_header import read
from offload.errors import CheckpointError
from offload.memory.process_memory import peak_resident_bytes, resident_bytes

used = int(resource.getrusage(resource.RUSAGE_SELF).ru_utime)
resource.setrlimit(resource.RLIMIT_CPU, (used + 60, used + 60))
found = {}
for path in sorted(Path(sys.argv[1]).glob("*/*")):
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before, error = resident_bytes(), ""
    try:
        if path.parent.name == "safetensors":
            read(path)
        else:
            parse_manifest(path.read_bytes(), path.name)
    except CheckpointError as caught:
        error = str(caught)
    taken = (peak_resident_bytes() - before) / SIZE
    found.setdefault(path.parent.name, {})[path.name] = [taken, error]
print(json.dumps(found))
""".replace("SIZE", str(SIZE))


def filled(head: str, unit: str, tail: str) -> str:
    return head + unit * ((SIZE - len(head) - len(tail)) // len(unit)) + tail


def numbered(head: str, unit: str, tail: str) -> str:
    """Units with a number each, so that all are different."""
    count = SIZE // len(unit.format(SIZE // 8))
    return head + ",".join(unit.format(i) for i in range(count)) + tail


CONTENTS = {
    "lists": filled('{"a":[', "[],", "0]}"),
    "objects": filled('{"a":[', "{},", "0]}"),
    "nested": filled('{"a":[', "[" * 500 + "]" * 500 + ",", "0]}"),
    "numbers": filled('{"a":{"dtype":"U8","shape":[', "300,", '0],"data_offsets":[0,0]}}'),
    "floats": filled('{"a":[', "1.5,", "0]}"),
    "negative": filled('{"a":[', "-1,", "0]}"),
    "own_floats": numbered('{"a":[', "{}.5", "]}"),
    "texts": numbered('{"__metadata__":{', '"{}":""', "}}"),
    "long_texts": numbered('{"__metadata__":{', '"{:012}":""', "}}"),
    "pairs": numbered("{", '"{}":1', "}"),
    "tensors": numbered("{", '"{}":{{"dtype":"U8","shape":[],"data_offsets":[0,0]}}', "}"),
    "wide": filled('{"\U0001f600":"', "a", '"}'),
    "escapes": filled('{"a":"', "\\u0100", '"}'),
}


# What docs/reliability.md says.
def test_memory_in_proportion(tmp_path: Path) -> None:
    for kind in ("safetensors", "manifest"):
        (tmp_path / kind).mkdir()
        for name, content in CONTENTS.items():
            text = content.encode()
            head = len(text).to_bytes(8, "little") if kind == "safetensors" else b""
            (tmp_path / kind / name).write_bytes(head + text)
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-1000:]
    for kind, found in json.loads(done.stdout).items():
        assert found.keys() == CONTENTS.keys()
        assert {name: taken for name, (taken, _) in found.items() if taken > 20} == {}
        assert all(len(error) < 1000 for _, error in found.values())
        read = [name for name, (_, error) in found.items() if not error]
        assert read == (["long_texts", "texts"] if kind == "safetensors" else [])
