"""Whole checkpoints that do not fit, are damaged or made up: named, and nothing is changed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hetero
from hetero.checkpoint.manifest import NAME
from hetero.checkpoint.plain_data import pack
from hetero.checkpoint.safetensors_header import read as read_header
from offload.errors import CheckpointError, HeteroError
from tests.support.checkpoint.small_trainings import steps
from tests.support.manifests import checksummed, mutations
from tests.support.training.small_net import SETTINGS, Net, Settings, loss_of, managed

pytestmark = pytest.mark.usefixtures("nothing_left")

DATA = "rank-0000-of-0001.safetensors"


def whole(model: Net, optimizer: hetero.HybridAdam) -> list[Any]:
    """Masters, states, options and random numbers' state."""
    found = hetero.masters(model.parameters())
    for state in optimizer.state_dict()["state"].values():
        found += [torch.as_tensor(value) for value in state.values()]
    options = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    params = [id(p) for g in optimizer.param_groups for p in g["params"]]
    return [*found, torch.get_rng_state(), options, params, np.random.get_state()[2]]


def same(found: list[Any], wanted: list[Any]) -> bool:
    return len(found) == len(wanted) and all(
        torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b
        for a, b in zip(found, wanted, strict=True)
    )


def saved(settings: Settings, folder: Path) -> tuple[Net, hetero.HybridAdam, Path]:
    """A net, two steps after what is in the checkpoint."""
    model, optimizer = managed(settings, folder)
    steps(model, optimizer, range(2))
    generator = torch.Generator().manual_seed(4)
    hetero.save(folder / "saved", model, optimizer, extra={"generator": generator, "n": 3})
    steps(model, optimizer, range(2, 4))
    return model, optimizer, folder / "saved"


def change(path: Path, changes: Callable[[dict[str, Any]], object]) -> None:
    """Changes the manifest's object, and makes its checksum right again."""
    content = json.loads((path / NAME).read_bytes())
    changes(content)
    (path / NAME).write_bytes(checksummed(content))


def group(content: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = content["optimizers"][0]["groups"][0]
    return found


def no_random_numbers(key: str, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda c: c["ranks"][0]["random"].update({key: pack(value, key, [])})


def shaped(content: dict[str, Any], name: str, *shape: int) -> None:
    for key, record in content["tensors"].items():
        if f"/{name}" in key:
            record[1:] = shape


def as_buffer(content: dict[str, Any]) -> None:
    del content["params"]["scale"]
    content["buffers"].append("scale")
    group(content)["params"].remove("scale")


def doubled(content: dict[str, Any]) -> None:
    content["params"]["other"] = content["params"]["scale"]
    for key in [key for key in content["tensors"] if "/scale" in key]:
        content["tensors"][key.replace("/scale", "/other")] = content["tensors"][key]


def numpy_position(content: dict[str, Any]) -> None:
    state = content["ranks"][0]["random"]["numpy"]["$tuple"]
    assert state[0] == "MT19937"
    state[2] = 10**6


CHANGES: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (
        lambda c: shaped(c, "first.weight", 64, 32),
        r"\(64, 32\) in the checkpoint, \(64, 64\) in",
    ),
    (lambda c: shaped(c, "first.weight", 64, 64, 1), r"first.weight: \(64, 64, 1\) in"),
    (lambda c: c["tensors"].update({"optimizer/scale/exp_avg": ["float32", 2]}), "'scale' is not"),
    (lambda c: c["tensors"].pop("model/scale"), "the parameter 'scale', and no tensor of it"),
    (lambda c: c["params"].pop("scale"), r"1 only in the model:\n    scale: \(1,\)"),
    (doubled, r"1 only in the checkpoint:\n    other: \(1,\)"),
    (as_buffer, "scale: no parameter that can be trained in the checkpoint"),
    (
        lambda c: c["params"]["scale"].update(trained=False),
        "scale: frozen in the checkpoint",
    ),
    (lambda c: c["params"]["scale"].update(step=2**60), "'scale' has got"),
    (lambda c: c["tensors"].update(more=["float32", 1]), "0 elements of 'more'"),
    (lambda c: c["optimizers"].clear(), "has 0 optimizers, and 1 are given"),
    (lambda c: c["optimizers"].append(c["optimizers"][0]), "has 2 optimizers, and 1 are given"),
    (lambda c: c["optimizers"][0].update(states=["exp_avg"]), "of HybridAdam, with the states exp"),
    (lambda c: c["optimizers"][0].update(groups=[]), "has 0 param groups"),
    (lambda c: group(c)["params"].pop(), "param group 0 has .* in the checkpoint where"),
    (lambda c: group(c)["options"].update(lr="fast"), "in param group 0 of the checkpoint lr must"),
    (lambda c: group(c)["options"].update(lr={"$tensor": 10**9}), "no tensor 'data/0/1000000000'"),
    (lambda c: group(c)["options"].update(betas=[2, 3]), "in param group 0 .* betas must be"),
    (lambda c: group(c)["options"].update(params=[]), "param group 0 of the checkpoint is no"),
    (lambda c: group(c).update(options=[1]), "param group 0 of the checkpoint is no group's"),
    (lambda c: group(c).update(options={"$code": 1}), r"param group 0 has .*\$code"),
    (lambda c: c.update(ranks=[]), "has no extra 'generator'; it has"),
    (lambda c: c.update(ranks=[5]), "lack 'extra'"),
    (lambda c: c["ranks"][0].update(extra=[]), "extra of the checkpoint must be values by name"),
    (lambda c: c["ranks"][0]["extra"].update(generator=5), r"extra\['generator'\], a Generator"),
    (lambda c: c["ranks"][0]["extra"].pop("generator"), "has no extra 'generator'; it has"),
    (no_random_numbers("torch", 3), "the state of random numbers is of no use"),
    (no_random_numbers("python", (3, (2**70,) * 625, None)), "random numbers is of no use"),
    (no_random_numbers("python", {}), "random numbers is of no use"),
    (no_random_numbers("numpy", {"state": 1}), "random numbers is of no use"),
    (no_random_numbers("numpy", ()), "random numbers is of no use"),
    (no_random_numbers("cuda", 5), "random numbers is of no use"),
    (numpy_position, "of no use: numpy's is at 1000000, must be 0 to 624"),
    (lambda c: c["ranks"][0].update(random=None), "has no state of random numbers"),
    (lambda c: c["files"].clear(), "elements of .*, and the manifest says"),
]


def test_what_does_not_fit_is_named_and_changes_nothing(tmp_path: Path) -> None:
    """Contradictions inside of a manifest are in test_manifest.py."""
    model, optimizer, path = saved(SETTINGS[0].values[0], tmp_path)  # type: ignore[arg-type]
    good = (path / NAME).read_bytes()
    before = whole(model, optimizer)
    generator = torch.Generator().manual_seed(9)
    generators = generator.get_state()
    for changes, message in CHANGES:
        (path / NAME).write_bytes(good)
        change(path, changes)
        with pytest.raises((ValueError, CheckpointError), match=message):
            hetero.load(path, model, optimizer, extra={"generator": generator})
        assert same(whole(model, optimizer), before), message
        assert torch.equal(generator.get_state(), generators)
    (path / NAME).write_bytes(good)
    with pytest.raises(ValueError, match=r"extra\['n'\] is a int without load_state_dict"):
        hetero.load(path, model, optimizer, extra={"n": 3})
    with pytest.raises(ValueError, match="2 optimizers are given"):
        hetero.load(path, model, [optimizer, optimizer])
    assert hetero.load(path, model, optimizer, extra={"generator": generator}).extra["n"] == 3
    assert generator.initial_seed() == 4
    optimizer.engine.close()


@pytest.mark.parametrize("settings", SETTINGS)
def test_damage_in_the_middle(settings: Settings, tmp_path: Path) -> None:
    """Whichever piece it is: the net refuses to be used, until it is whole again."""
    model, optimizer, path = saved(settings, tmp_path)
    hetero.save(tmp_path / "later", model, optimizer)
    steps(model, optimizer, range(4, 6))
    wanted = whole(model, optimizer)
    content = (path / DATA).read_bytes()
    header = read_header(path / DATA)
    names = [name for name in header.entries if name.startswith(("model/", "optimizer/"))]
    assert len(names) == 21
    for name in names:
        at = header.data_offset + header.entries[name].end - 1
        (path / DATA).write_bytes(content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :])
        key = name.rpartition("@")[0]
        with pytest.raises(CheckpointError, match=f"of '{key}' are damaged in .*{DATA}"):
            hetero.load(path, model, optimizer)
        uses: list[Callable[[], object]] = [
            lambda: loss_of(model, 0),
            optimizer.step,
            optimizer.state_dict,
            lambda: hetero.masters(model.parameters()),
            lambda: hetero.save(tmp_path / "no", model, optimizer),
        ]
        for use in uses:
            with pytest.raises(HeteroError, match="saved"):
                use()
    assert not (tmp_path / "no").exists()
    # One that does not even begin to load does not make it usable.
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        hetero.load(tmp_path / "no", model, optimizer)
    with pytest.raises(HeteroError, match="saved"):
        loss_of(model, 0)
    hetero.load(tmp_path / "later", model, optimizer)
    steps(model, optimizer, range(4, 6))
    assert same(whole(model, optimizer), wanted)
    optimizer.engine.close()


def test_names_that_look_like_tags_and_odd_values(tmp_path: Path) -> None:
    model, optimizer = managed(SETTINGS[0].values[0], tmp_path)  # type: ignore[arg-type]
    extra = {"$tuple": [1], "n": 10**5000, "one": torch.arange(9.0)[8::2]}
    extra |= {"conjugate": torch.tensor([1 + 2j]).conj(), "none": torch.ones(3).bfloat16()[3::2]}
    hetero.save(tmp_path / "saved", model, optimizer, extra=extra)
    found = hetero.load(tmp_path / "saved", model, optimizer).extra
    assert list(found) == list(extra)
    assert (found["$tuple"], found["n"]) == ([1], 10**5000)
    for name in ("one", "conjugate", "none"):
        assert torch.equal(found[name], extra[name])  # type: ignore[arg-type]
    # What data files cannot have is refused before anything is written.
    with pytest.raises(ValueError, match=r"extra\['z'\] is a tensor of torch.complex128"):
        double = torch.zeros(1, dtype=torch.complex128)
        hetero.save(tmp_path / "no", model, optimizer, extra={"z": double})
    model.register_buffer("angles", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(ValueError, match="angles is of torch.complex128"):
        hetero.save(tmp_path / "no", model, optimizer)
    assert sorted(os.listdir(tmp_path)) == ["saved"]
    optimizer.engine.close()


def test_made_up_manifests(tmp_path: Path) -> None:
    model, optimizer, path = saved(SETTINGS[0].values[0], tmp_path)  # type: ignore[arg-type]
    good = (path / NAME).read_bytes()
    hetero.load(path, model, optimizer)

    @given(mutations(good), st.booleans())
    def run(content: Any, parameters_alone: bool) -> None:
        (path / NAME).write_bytes(checksummed(content))
        before = whole(model, optimizer)
        try:
            hetero.load(path, model, None if parameters_alone else optimizer)
        except (ValueError, CheckpointError):
            assert same(whole(model, optimizer), before)
        else:  # what was changed then is said nowhere else: training goes on with it
            steps(model, optimizer, range(1))
            (path / NAME).write_bytes(good)
            hetero.load(path, model, optimizer)
            reset(optimizer)

    options = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]

    def reset(optimizer: hetero.HybridAdam) -> None:
        for own, wanted in zip(optimizer.param_groups, options, strict=True):
            for name in set(own) - set(wanted) - {"params"}:
                del own[name]
            own.update(wanted)

    try:
        run()
    finally:
        optimizer.engine.close()
