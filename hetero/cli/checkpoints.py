"""`hetero inspect` and `hetero convert`: checkpoints of any format, shown or written in another."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hetero.checkpoint import formats
from hetero.checkpoint.folder import latest_checkpoint
from hetero.checkpoint.hetero_checkpoint import HeteroCheckpoint
from hetero.checkpoint.manifest import Manifest, TensorRecord, dtype_name, master_key
from hetero.checkpoint.plain_data import unpack
from hetero.checkpoint.stored_checkpoint import StoredCheckpoint
from hetero.cli.outcome import EXIT_FAILED, EXIT_OK, print_error
from hetero.durable.stored_commit import StoredCommit, open_stored
from hetero.job.run_folder import CHECKPOINTS_NAME, MODEL_NAME, RunFolder
from hetero.state.state_files import FOLDER
from hetero.text_table import columns, terminal_width
from offload.errors import CheckpointError
from offload.memory.sizes import format_bytes

_DAMAGED = 20  # pieces that are listed
_ROWS = 12  # of the table of modules


def _open(path: Path) -> StoredCheckpoint:
    """open_stored(); of a run folder its last commit or checkpoint, the later of the two, or else
    its trained weights."""
    if not RunFolder.has_run(path):
        return open_stored(path)
    checkpoint = latest_checkpoint(path / CHECKPOINTS_NAME)
    commit = StoredCommit.of_folder(path / FOLDER) if (path / FOLDER).is_dir() else None
    kept: list[StoredCheckpoint] = [] if commit is None else [commit]
    if checkpoint is not None:
        kept.append(open_stored(checkpoint))
    if kept:
        return max(kept, key=lambda each: each.manifest.step)
    return open_stored(path / MODEL_NAME if (path / MODEL_NAME).is_dir() else path)


def convert(arguments: argparse.Namespace) -> int:
    """Converts, and says what was written."""
    target = arguments.target
    stored = formats.convert(
        arguments.source, target, arguments.to, arguments.dtype, arguments.config, _open
    )
    manifest = stored.manifest
    left_out = [
        f"{what} are not in {target}"
        for what, is_there in (
            ("optimizer states", arguments.to == "hf" and manifest.optimizers),
            ("random numbers and extra", manifest.ranks),
        )
        if is_there
    ]
    if arguments.to == "hf" and not (Path(target) / "config.json").exists():
        left_out.append(f"{target} has no config.json, as from_pretrained() needs: --model-config")
    for note in (*stored.notes, *left_out):
        print(f"hetero convert: {note}", file=sys.stderr)
    count = len(manifest.params) + len(manifest.buffers)
    print(f"{count} tensors of the {stored.kind} {stored.path} are in {target}")
    return EXIT_OK


def inspect(arguments: argparse.Namespace) -> int:
    """Prints what the checkpoint has; returns 1 if it was verified and is damaged."""
    with _open(Path(arguments.path)) as stored:
        verified = _verify(stored) if arguments.verify else None
        found = _as_dict(stored)
        if arguments.json:
            print(json.dumps(found if verified is None else {**found, "verified": verified}))
        else:
            print("\n".join(_lines(found, terminal_width())))
    if verified is None:
        return EXIT_OK
    damaged: list[str] = verified["damaged"]
    for each in damaged[:_DAMAGED]:
        print_error("inspect", CheckpointError(each))
    if len(damaged) > _DAMAGED:
        print(f"hetero inspect: error: and {len(damaged) - _DAMAGED} more", file=sys.stderr)
    if damaged:
        return EXIT_FAILED
    if not arguments.json:
        nbytes = verified["verified_bytes"]
        print(
            f"\nverified: {nbytes} bytes ({format_bytes(nbytes)}) in {verified['pieces']} pieces"
            f" have their checksums"
        )
    return EXIT_OK


def _verify(stored: StoredCheckpoint) -> dict[str, Any]:
    """How much is good, and what is damaged. Raises ValueError where there are no checksums."""
    if not isinstance(stored, HeteroCheckpoint):
        raise ValueError(f"--verify is for hetero checkpoints; a {stored.kind} has no checksums")
    damaged: list[str] = []
    nbytes = pieces = 0
    try:
        for piece_bytes, error in stored.verify():
            if error is None:
                nbytes += piece_bytes
                pieces += 1
            else:
                damaged.append(str(error))
    except CheckpointError as error:  # a file is missing, or its header is another one
        damaged.append(str(error))
    return {"verified_bytes": nbytes, "pieces": pieces, "damaged": damaged}


def _as_dict(stored: StoredCheckpoint) -> dict[str, Any]:
    """Everything but values, as JSON takes it."""
    manifest = stored.manifest
    return {
        "path": str(stored.path),
        "kind": stored.kind,
        "step": manifest.step,
        "ranks": len(manifest.ranks),
        "nbytes": sum(stored.files.values()),
        "files": dict(stored.files),
        "params": {
            name: {
                **_tensor(manifest.tensors[master_key(name)]),
                "trained": param.trained,
                "step": param.step,
                "aliases": list(param.aliases),
            }
            for name, param in manifest.params.items()
        },
        "buffers": {name: _tensor(manifest.tensors[master_key(name)]) for name in manifest.buffers},
        "optimizers": [
            {
                "name": optimizer.name,
                "states": list(optimizer.states),
                "state_dtype": optimizer.state_dtype,
                "groups": [
                    {"options": _options(group.options), "params": len(group.params)}
                    for group in optimizer.groups
                ],
            }
            for optimizer in manifest.optimizers
        ],
        "loss_scale": None if manifest.loss_scale is None else dict(manifest.loss_scale),
        "extra": _extra_types(manifest),
        "notes": stored.notes,
    }


def _tensor(record: TensorRecord) -> dict[str, Any]:
    return {"shape": list(record.shape), "dtype": dtype_name(record.dtype)}


def _options(packed: Any) -> Any:
    found = unpack(packed, "a param group", lambda number: f"tensor {number}")  # type: ignore[arg-type, return-value]
    if not isinstance(found, dict):
        return {}
    return {
        name: value if isinstance(value, (int, float, str, list, tuple, type(None))) else str(value)
        for name, value in found.items()
    }


def _extra_types(manifest: Manifest) -> dict[str, str]:
    """What the first rank's `extra` has: names, and types of what was kept."""
    first = manifest.ranks[0] if manifest.ranks else {}
    extra = first.get("extra") if isinstance(first, dict) else None
    return {name: _type(value) for name, value in extra.items()} if isinstance(extra, dict) else {}


def _type(packed: Any) -> str:
    if not isinstance(packed, dict):
        return "None" if packed is None else type(packed).__name__
    tag = next(iter(packed), "")
    if tag.startswith("$"):
        return tag.removeprefix("$")
    return f"dict of {', '.join(list(packed)[:4])}{', ...' if len(packed) > 4 else ''}"


def _lines(found: dict[str, Any], width: int) -> list[str]:
    """What _as_dict() has found, as a page for people, however many parameters there are."""
    params, optimizers = found["params"], found["optimizers"]
    rows = [("path", found["path"]), ("kind", found["kind"])]
    if found["ranks"] or optimizers:
        rows.append(("step", str(found["step"])))
    if found["ranks"]:
        rows.append(("ranks", str(found["ranks"])))
    files = _counted(len(found["files"]), "file")
    rows.append(("files", f"{files}, {format_bytes(found['nbytes'])}"))
    rows.append(("parameters", _summary(params.values())))
    frozen = sum(not param["trained"] for param in params.values())
    if optimizers and frozen:
        rows.append(("not trained", f"{_counted(frozen, 'tensor')} of these"))
    tied = {name: param["aliases"] for name, param in params.items() if param["aliases"]}
    rows += [("tied", f"{name} = {', '.join(others)}") for name, others in tied.items()]
    if found["buffers"]:
        rows.append(("buffers", _summary(found["buffers"].values())))
    for number, each in enumerate(optimizers):
        states = f"{', '.join(each['states'])} in {each['state_dtype']}"
        rows.append((f"optimizer {number}", f"{each['name']}: {states}"))
        for index, group in enumerate(each["groups"]):
            options = _listed(group["options"]) or "no options"
            names = _counted(group["params"], "parameter")
            rows.append((f"  param group {index}", f"{names}: {options}"))
    if found["loss_scale"] is not None:
        rows.append(("loss scale", _listed(found["loss_scale"])))
    rows += [(f"extra {name!r}", kind) for name, kind in found["extra"].items()]
    rows += [("note", note) for note in found["notes"]]
    lines = columns(rows, width)
    if params:
        table = [("module", "tensors", "elements", "dtype")]
        for module, inside in by_module(list(params)).items():
            some = [params[name] for name in inside]
            table.append((module, str(len(some)), f"{_numel(some):,}", _dtypes(some)))
        lines += ["", *columns(table, width)]
    return lines


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _listed(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


def _summary(tensors: Collection[dict[str, Any]]) -> str:
    count = _counted(len(tensors), "tensor")
    return f"{count}, {_numel(tensors):,} elements, {_dtypes(tensors)}"


def _numel(tensors: Iterable[dict[str, Any]]) -> int:
    return sum(math.prod(each["shape"]) for each in tensors)


def _dtypes(tensors: Iterable[dict[str, Any]]) -> str:
    return ", ".join(dict.fromkeys(each["dtype"] for each in tensors)) or "none"


def by_module(names: Sequence[str]) -> dict[str, list[str]]:
    """Names by the modules that they are in, numbers as "*": as deep as a few rows allow."""
    deepest = max(name.count(".") for name in names)
    found: dict[str, list[str]] = {}
    for depth in range(1, deepest + 2):
        groups: dict[str, list[str]] = {}
        for name in names:
            parts = [re.sub(r"^\d+$", "*", part) for part in name.split(".")]
            groups.setdefault(".".join(parts[:depth]), []).append(name)
        if found and len(groups) > _ROWS:
            break
        found = groups
    if len(found) > _ROWS:  # many names without modules
        kept = list(found)[: _ROWS - 1]
        rest = [name for module in list(found)[_ROWS - 1 :] for name in found[module]]
        found = {**{module: found[module] for module in kept}, "(others)": rest}
    return found
