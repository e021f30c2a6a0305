"""Every command of bench/, run small: its JSON, its text, and how it refuses bad input."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from bench import adam, bound, cuda, io, predict
from bench.harness.program import Program
from bench.work import job_steps
from offload import _native
from offload.profile.measure import READ_SHARES
from tests.support.training.loops import SMALLEST_MODEL
from tests.support.training.planning import make_profile

STATE_BYTES = 12  # of a checkpoint, per parameter: master and two moments
RATES = {"bf16": 1e9, "fp16": 1e9, "fp32": 1e9}


class Place(NamedTuple):
    """Where a command runs: `words` of its line that stand for paths, and an empty folder."""

    words: dict[str, str]
    folder: Path


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_python: None) -> Iterator[Place]:
    """Yardsticks and pauses are smaller than what a machine needs to be measured."""
    for module, name, value in (
        (io, "DISK_WINDOW_S", 0.01),
        (bound, "STREAM_NUMEL", 1 << 16),
        (bound, "UPDATE_NUMEL", 1 << 16),
        (job_steps, "QUIET_S", 0.01),
        (job_steps, "WARM_UP_STEPS", 2),
    ):
        monkeypatch.setattr(module, name, value)
    configurations = (("cpu", None, 2), ("auto", 0.5, 1), ("nvme", 0.4, 3), ("auto", 0.01, 1))
    monkeypatch.setattr(predict, "CONFIGURATIONS", configurations)
    for name, more in (("model", {"n_layer": 4, "n_embd": 64}), ("tiny", {})):
        (tmp_path / f"{name}.json").write_text(json.dumps({**SMALLEST_MODEL, **more}))
    (tmp_path / "text").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 50)
    nvme = {f"nvme_{kind}_bytes_per_s": 1e9 for kind in ("read", "write", "mixed")}
    make_profile(
        dram_bytes_per_s=5e9, update_bytes_per_s=RATES, matmul_flop_per_s=RATES, **nvme
    ).save(tmp_path / "profile")
    (tmp_path / "nvme").mkdir()
    names = ("model.json", "tiny.json", "text", "profile", "nvme", "run")
    words = {name.partition(".")[0].upper(): str(tmp_path / name) for name in names}
    threads = torch.get_num_threads(), _native.threads()
    yield Place(words, tmp_path / "nvme")
    torch.set_num_threads(threads[0])
    _native.set_threads(threads[1])


def program_of(name: str) -> Program:
    found: Program = importlib.import_module(f"bench.{name}").PROGRAM
    return found


def line(place: Place, words: str) -> list[str]:
    return [place.words.get(word, word) for word in words.split()]


def median(value: Any) -> Any:
    """The medians of all figures in it."""
    if isinstance(value, dict):
        if set(value) == {"median", "min", "max"}:
            return value["median"]
        return {key: median(each) for key, each in value.items()}
    return value


def check_adam(result: dict[str, Any], _: Place) -> None:
    updates = median(result["updates"])
    names = [adam.name_of(kind) for kind in adam.kinds()]
    assert [*updates] == ["stream", *names, "torch fused AdamW fp32", "torch fused AdamW bf16"]
    for own in updates.values():
        assert own["gbps"] == pytest.approx(own["params_per_s"] * own["bytes_per_param"] / 1e9)
        assert own["of_stream"] > 0
    assert updates["stream"]["of_stream"] == 1.0
    assert updates["adam bf16/bf16, states fp32"]["bytes_per_param"] == 26
    assert updates["torch fused AdamW bf16"]["bytes_per_param"] == 14
    assert (result["numel"], result["threads"], result["isa"]) == (4096, 1, _native.isa())


def check_io(result: dict[str, Any], _: Place) -> None:
    assert "hetero" in result["contenders"]
    for found in result["contenders"].values():
        for pattern in READ_SHARES:
            assert found[f"{pattern}_gbps"]["min"] > 0
            assert found[f"{pattern}_cpu_s_per_gb"]["min"] >= 0


def check_train(result: dict[str, Any], _: Place) -> None:
    contenders = result["contenders"]
    assert list(contenders) == ["hetero nvme", "torch bf16", "torch autocast"]
    assert result["policy"] == "nvme"
    assert result["losses"] == contenders["hetero nvme"]["losses"]
    for contender in contenders.values():
        for key in ("step_s", "tokens_per_s", "peak_rss_bytes", "bytes_per_step"):
            assert key in contender
        assert (contender["params"], contender["threads"]) == (result["params"], 1)
        # The same weights and batches; what differs is rounding.
        assert contender["losses"] == pytest.approx(result["losses"], rel=0.02)
    assert {"budget_bytes", "peak_managed_bytes", "engine", "isa"} <= set(result)


def check_saves(result: dict[str, Any], _: Place) -> None:
    assert (result["policy"], result["budget_bytes"]["host"]) == ("nvme", 1200 << 10)
    found = median(result["contenders"])
    least = STATE_BYTES * result["params"]
    own = found["hetero"]
    for what, direction, other in (("save", "written", "read"), ("load", "read", "written")):
        # The state that is on NVMe moves to the checkpoint and back.
        assert own[f"{what}_{direction}_bytes"] >= own[f"{what}_bytes"] > least
        assert min(own[f"{what}_{other}_bytes"], own[f"{what}_of_the_disk"]) > 0
        for peer in ("torch", "dcp"):
            assert found[peer][f"{what}_bytes"] > least
            assert found[peer][f"hetero_{what}_gbps"] > 0
    assert "lost_s" not in found["torch"]
    for name in ("hetero", "dcp"):
        assert found[name]["steps"] >= 1
        assert found[name]["beside_s"] >= found[name]["pause_s"] > 0
        assert {"lost_s", "slower_by"} <= set(found[name])
    assert result["notes"] == []


def check_bound(result: dict[str, Any], _: Place) -> None:
    (case,) = result["cases"]
    assert (case["name"], case["status"]) == ("model, 50 % clipped", "measured")
    found = median(case["contenders"])
    own, compute = found["hetero"], found["compute"]
    assert own["disk_read"] > 0
    parts = {part: own[part] for part in bound.RESOURCES}
    assert case["bound"] == max(parts, key=lambda part: parts[part])
    assert compute.pop("compute_s") == pytest.approx(sum(compute.values())) == parts["compute"]


def check_link(result: dict[str, Any], _: Place) -> None:
    """The link of an emulated device is a part of the bound."""
    (case,) = result["cases"]
    own = median(case["contenders"])["hetero"]
    assert own["link"] == pytest.approx(max(own["h2d"], own["d2h"]) / 1e9)
    assert own["link"] > 0


def check_refused_bound(result: dict[str, Any], _: Place) -> None:
    assert [case["status"] for case in result["cases"]] == ["refused"]


def check_predict(result: dict[str, Any], _: Place) -> None:
    rows = result["configurations"]
    assert len(rows) == 3
    assert "smallest that works" in result["refused"]["auto, 1% in RAM"]
    for row in rows.values():
        # Seconds are the machine's; bytes are ours.
        assert row["predicted_nvme_read_bytes"] == row["nvme_read_bytes"]
        assert row["predicted_nvme_written_bytes"] == row["nvme_written_bytes"]
    assert rows["auto, 50% in RAM"]["nvme_read_bytes"]["min"] > 0
    cpu = rows["cpu, all in RAM, 2 micro-batches"]
    for end in ("min", "max"):
        traced = 2 * result["traced"]["forward_s"][end]
        assert cpu["predicted_forward_s"][end] == pytest.approx(traced)
    within = sum(abs(row["error"]["median"]) <= predict.GOAL for row in rows.values())
    assert result["within_goal"] == within


def check_largest(result: dict[str, Any], _: Place) -> None:
    for found in result["found"].values():
        assert found["limited_by"] == "--sizes"
        assert 0 < found["peak_bytes"] <= found["budget_bytes"]
        assert found["step_s"] > 0


def check_activations(result: dict[str, Any], _: Place) -> None:
    found = median(result["results"])
    assert all(each["step_s"] > 0 for each in found.values())
    if result["compare"] == "recompute":
        assert found["none"]["nvme_gbps"] > 0


Check = Callable[[dict[str, Any], Place], None]
GPT = "--model MODEL --seq-len 16 --rounds 1 --io-size 32MiB"
SAVES = f"{GPT} --max-steps 1 --path NVME"
BOUND = f"{GPT} --max-steps 2 --data TEXT --host-memory 1200KiB --dtype bf16 --nvme-path NVME"
IO = "--path NVME --size 32MiB --rounds 1"
SMALL = "--max-steps 3 --seq-len 8 --batch-size 2 --threads 1"
TRAIN = f"--model TINY --data TEXT {SMALL} --run-dir RUN"
ADAM = "--numel 4096 --rounds 1 --threads 1"
PREDICT = "--model MODEL --data TEXT --seq-len 16 --nvme-path NVME --profile PROFILE"
ACTIVATIONS = "--model 2,64,2 --path NVME --steps 1"
LARGEST = "--vocabulary 256 --path NVME"
extra, slow = pytest.mark.extra, pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "words", "check", "shown"),
    [
        ("adam", ADAM, check_adam, "adam bf16/bf16, states fp32|of stream"),
        ("io", IO, check_io, "hetero|read GB/s"),
        ("train", f"{TRAIN} --policy nvme --peers torch", check_train, "torch autocast|step s"),
        pytest.param(
            "checkpoint",
            f"{SAVES} --host-memory 1200KiB",
            check_saves,
            "model nvme|save / disk|dcp|lost",
            marks=slow,
        ),
        ("bound", f"{BOUND} --clipped 50", check_bound, "50 % clipped|compute|NVMe|DRAM|bound"),
        (
            "bound",
            f"{BOUND} --clipped 0 --policy cpu --host-memory 64MiB --backend emulated"
            " --link-gbps 1 --device-memory 1MiB",
            check_link,
            "0 % clipped|link",
        ),
        (
            "bound",
            f"{BOUND} --clipped 0 --host-memory 1KiB",
            check_refused_bound,
            "model, 0 % clipped: refused:",
        ),
        (
            "predict",
            f"{PREDICT} --max-steps 4 --rounds 2 --overlap-updates none",
            check_predict,
            "nvme, 40% in RAM|auto, 1% in RAM: left out: |within 15%:|error: mean",
        ),
        (
            "largest",
            f"{LARGEST} --seq-len 16 --budgets 1GiB --sizes 64",
            check_largest,
            "hetero-tiles-checkpoints|limited by",
        ),
        pytest.param(
            "largest",
            f"{LARGEST} --shape 2,64,2 --of batch --budgets 800MiB --sizes 128"
            " --contenders torch-checkpoints,hetero",
            check_largest,
            "torch-checkpoints|128 tokens",
            marks=extra,
        ),
        *(
            pytest.param("activations", words, check_activations, shown, marks=extra)
            for words, shown in (
                (
                    f"{ACTIVATIONS} --seq-len 32 --host-memory 256MiB --activation-memory 48MiB",
                    "torch-oncpu",
                ),
                (
                    f"{ACTIVATIONS} --compare recompute --seq-len 128 --contenders none"
                    " --process-memory 800MiB --io-size 512MiB",
                    "in memory",
                ),
            )
        ),
    ],
)
def test_a_small_run(
    name: str,
    words: str,
    check: Check,
    shown: str,
    place: Place,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One object of JSON, from which the text is made; nothing is left in the folder."""
    program = program_of(name)
    assert program.main([*line(place, words), "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    result = json.loads(out)
    assert f"python -m bench.{name} --" in result["command"]
    assert result["machine"]["cores"] >= 1
    check(result, place)
    text = program.text(result)
    for part in shown.split("|"):
        assert part in text
    assert list(place.folder.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "words", "fact"),
    [
        ("adam", "--numel lots", "--numel: must be a whole number, got 'lots'"),
        (
            "adam",
            "--numel 1000000000000 --peers none",
            "--numel 1000000000000 needs 18.2 TiB, but",
        ),
        ("adam", "--threads 0", "--threads: must be 1 or more, got 0"),
        ("adam", "--peers tortch", "--peers: unknown name 'tortch'; known: torch, none"),
        ("io", f"{IO} --size many", "--size: cannot read 'many' as a size"),
        ("io", f"{IO} --path /none", "--path /none is not a directory; make it first"),
        ("train", f"{TRAIN} --peers torhc", "--peers: unknown name 'torhc'"),
        ("train", f"{TRAIN} --skip-steps -1", "--skip-steps: must be 0 or more, got -1"),
        ("train", f"{TRAIN} --variants ,", "--variants: must name one at least"),
        ("train", f"{TRAIN} --variants nvm", "--variants: 'nvm' begins with no policy"),
        ("train", f"{TRAIN} --ranks 2 --peers torch", "--peers torch cannot be 2 ranks; name ddp"),
        ("train", f"{TRAIN} --peers ddp", "--peers ddp cannot be 1 ranks; name torch"),
        ("checkpoint", f"{SAVES} --path /none", "--path /none is not a directory"),
        ("checkpoint", f"{SAVES} --model /none.json", "configuration /none.json"),
        ("checkpoint", f"{SAVES} --host-memory 4KiB", "host_memory"),
        ("bound", f"{BOUND} --clipped 101", "--clipped: must be percentages"),
        ("bound", f"{BOUND} --timeline FILE", "leave out --backend cuda and --timeline"),
        ("predict", f"{PREDICT} --max-steps 2", "--max-steps must be 3 or more"),
        ("largest", "--contenders torsh", "--contenders: unknown name 'torsh'"),
        ("largest", "--of sentence", "--of: invalid choice: 'sentence'"),
        ("largest", "--of batch --shape 24,63,16", "a width of 63 is no multiple of 16 heads"),
        ("largest", "--of batch --shape 24", "--shape must be layers, width and heads"),
        ("largest", "--path /nonexistent", "not a folder"),
        ("activations", f"{ACTIVATIONS} --contenders some", "unknown contender 'some'"),
        ("activations", f"{ACTIVATIONS} --model 2,63,2", "a width of 63 is no multiple of 2 heads"),
        ("cuda", "--models gpt-15b", "--models: unknown name 'gpt-15b'"),
    ],
)
def test_bad_input_is_one_line(
    name: str, words: str, fact: str, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program_of(name).main(line(place, words)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    error = err.splitlines()[-1]
    assert error.startswith(f"bench.{name}: error: ")
    assert fact in error
    assert list(place.folder.iterdir()) == []


def test_a_peer_that_fails_is_a_note(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.checkpoint.sys.executable", "/nonexistent/python")
    words = f"{SAVES} --policy cpu --peers torch --json"
    assert program_of("checkpoint").main(line(place, words)) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["notes"] == ["torch: left out: cannot start /nonexistent/python"]
    assert result["contenders"]["hetero"]["save_s"]["median"] > 0


def test_cuda_is_a_program_without_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    if not cuda.cuda_available():
        assert cuda.main([]) == 0
        assert "skipped: " in capsys.readouterr().out
