"""Every command of bench/, run small: its JSON, its text, and how it refuses bad input."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from bench import cuda, predict
from bench.adam import PEER_KINDS
from bench.bound import RESOURCES
from bench.harness.program import Program
from bench.kernels import __main__ as kernels
from bench.kernels.__main__ import PAIRS
from bench.tiling import __main__ as tiling
from bench.tiling.contenders import CONTENDERS
from bench.work import bandwidths, compute_alone, job_steps
from bench.work.curve import buffer_counts
from bench.work.step_model import tensor_shape
from bench.work.transfers import PATTERNS
from offload import _native
from tests.support.training.loops import SMALLEST_MODEL
from tests.support.training.planning import make_profile

CHUNK = 8192
OPTIM_STATE_BYTES = CHUNK * 10
SMALL_GPT = "--layers 2 --width 64 --heads 2 --vocabulary 256"
STATE_BYTES = 12  # of a checkpoint, per parameter: master and two moments
ADAMW = "adam bf16/bf16, states fp32"
RATES = {"bf16": 1e9, "fp16": 1e9, "fp32": 1e9}


class Place(NamedTuple):
    """Where a command runs: `words` of its line that stand for paths, and an empty folder."""

    words: dict[str, str]
    folder: Path


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Yardsticks and pauses are smaller than what a machine needs to be measured."""
    for module, name, value in (
        (bandwidths, "DISK_WINDOW_S", 0.01),
        (bandwidths, "LINK_COPY_BYTES", 1 << 20),
        (bandwidths, "STREAM_NUMEL", 1 << 16),
        (compute_alone, "UPDATE_NUMEL", 1 << 16),
        (job_steps, "QUIET_S", 0.01),
        (job_steps, "WARM_UP_STEPS", 2),
        (kernels, "TURN_BYTES", 10_000),
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
    make_profile(host_bytes=1 << 30, device_bytes=None, rank_bytes_per_s=1e9,
                 node_bytes_per_s=1e9, nvme_bytes=8).save(tmp_path / "little")  # fmt: skip
    (tmp_path / "nvme").mkdir()
    names = ("model.json", "tiny.json", "text", "profile", "little", "nvme", "run", "picture.png")
    words = {name.partition(".")[0].upper(): str(tmp_path / name) for name in names}
    threads = torch.get_num_threads(), _native.threads()
    yield Place(words, tmp_path / "nvme")
    torch.set_num_threads(threads[0])
    _native.set_threads(threads[1])


def program_of(name: str) -> Program:
    """Of bench.`name`, or of its __main__."""
    module = importlib.import_module(f"bench.{name}")
    if not hasattr(module, "PROGRAM"):
        module = importlib.import_module(f"bench.{name}.__main__")
    found: Program = module.PROGRAM
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
    updates, peers = result["updates"], {kind.name for kind in PEER_KINDS["torch"]}
    assert len(updates) == 1 + 93 + len(peers)
    assert peers < set(updates)
    for figures in updates.values():
        assert set(figures) == {"params_per_s", "gbps", "bytes_per_param", "of_stream"}
        assert all(each["min"] > 0 and math.isfinite(each["max"]) for each in figures.values())
        own = median(figures)
        assert own["gbps"] == pytest.approx(own["params_per_s"] * own["bytes_per_param"] / 1e9)
    assert updates["stream"]["of_stream"]["median"] == 1.0
    assert updates[ADAMW]["bytes_per_param"]["median"] == 26
    assert (result["numel"], result["threads"], result["isa"]) == (4096, 1, _native.isa())
    assert len(result["notes"]) == 2 + len(PEER_KINDS["deepspeed"])


def check_io(result: dict[str, Any], place: Place) -> None:
    for found in result["contenders"].values():
        for pattern in PATTERNS:
            assert found[f"{pattern}_gbps"]["min"] > 0
            assert found[f"{pattern}_cpu_s_per_gb"]["min"] >= 0
    sizes = (result["block_bytes"], result["depth"], result["size_bytes"])
    assert sizes == (64 << 10, 4, 4 << 20)
    assert result["path"] == str(place.folder)


def check_step(result: dict[str, Any], place: Place) -> None:
    each, count = tensor_shape(300_000)
    assert result["params"] == each * count >= 300_000
    assert (result["chunk_numel"], result["buffers"]) == (CHUNK, 4)
    assert result["optim_state_bytes"] == OPTIM_STATE_BYTES
    assert result["host_memory"] == 4 * OPTIM_STATE_BYTES == result["peak_managed_bytes"]
    assert result["resident_bytes"] == result["optim_states"] * CHUNK * 4
    moved = (result["optim_states"] - 4) * OPTIM_STATE_BYTES
    assert list(result["contenders"]) == ["hetero", "disk alone", "memory alone"]
    own = result["contenders"]["hetero"]
    for direction in ("read_bytes", "written_bytes"):
        assert own[direction] == {"median": moved, "min": moved, "max": moved}
    assert min(own["step_s"]["min"], own["share_of_bound"]["min"]) > 0
    assert any("deepspeed: left out: cannot start" in note for note in result["notes"])
    states = result["optim_states"]
    assert [point["buffers"] for point in result["curve"]] == buffer_counts(states)
    for point in result["curve"]:  # a straight line to nothing
        streamed = (states - point["buffers"]) * OPTIM_STATE_BYTES
        assert point["host_memory"] == point["buffers"] * OPTIM_STATE_BYTES
        assert point["read_bytes"] == point["written_bytes"] == streamed
        assert point["theory_bytes"] == 2 * streamed
    assert result["curve"][-1]["theory_bytes"] == 0
    assert Path(place.words["PICTURE"]).read_bytes().startswith(b"\x89PNG")


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
    for what, direction, other in (("save", "written", "read"), ("load", "read", "written")):
        # (Manifests differ by a few bytes, and a load may be of the round before.)
        assert found[what]["bytes"] == pytest.approx(found["save"]["bytes"], rel=0.01)
        # The state that is on NVMe moves to the checkpoint and back.
        assert found[what][f"{direction}_bytes"] >= found[what]["bytes"] > least
        assert min(found[what][f"{other}_bytes"], found[what]["of_the_disk"]) > 0
        for peer in ("torch", "dcp"):
            assert found[f"{peer} {what}"]["bytes"] > least
            assert found[f"{peer} {what}"]["hetero_is_faster_by"] > 0
    assert "torch beside" not in found
    for name in ("beside", "dcp beside"):
        assert found[name]["steps"] >= 1
        assert found[name]["save_s"] >= found[name]["pause_s"] > 0
        assert {"lost_s", "slower_by"} <= set(found[name])
    assert result["notes"] == []


def check_commits(result: dict[str, Any], _: Place) -> None:
    """All state in RAM is written with each commit, once; nothing is left in the end."""
    found, files = median(result["contenders"]), result["file_bytes"]
    names = ["plain", "verified reads", "a commit every 1", "a commit every 4"]
    assert list(found) == names
    plain, _, each, rarely = (found[name]["disk_write"] for name in names)
    state_bytes = STATE_BYTES * result["params"]  # (chunks have some room besides)
    if result["policy"] == "cpu":
        assert plain == 0 == files["plain"]
        assert state_bytes <= each <= 2 * state_bytes
        assert rarely == pytest.approx(each / 4, rel=0.01)
        assert files["durable"] >= 2 * each
    else:
        assert each >= rarely
        assert files["durable"] > files["plain"] > state_bytes / 2
    assert found["plain"]["slower_by"] == 1.0


def check_bound(result: dict[str, Any], _: Place) -> None:
    nvme, emulated = result["cases"]
    assert nvme["name"] == "model nvme, 50 % clipped"
    assert emulated["homes"]["optim_state"]["device"] > 0
    for case in (nvme, emulated):
        assert (case["status"], case["compute_from"]) == ("measured", "the whole model")
        found = median(case["contenders"])
        own, compute = found["hetero"], found["compute"]
        assert own["disk_read"] > 0
        parts = {part: own[part] for part in RESOURCES}
        assert case["bound"] == max(parts, key=lambda part: parts[part])
        assert compute.pop("compute_s") == pytest.approx(sum(compute.values())) == parts["compute"]
        assert (own["h2d"] > 0, own["d2h"] > 0, own["link"] > 0) == (case is emulated,) * 3


def check_refused_bound(result: dict[str, Any], _: Place) -> None:
    assert [case["status"] for case in result["cases"]] == ["measured", "refused"]


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
    errors = [abs(row["error"]["median"]) for row in rows.values()]
    assert result["within_goal"] == sum(error <= result["goal"] for error in errors)
    assert result["worst_error"] == max(errors)
    assert result["mean_error"] == pytest.approx(sum(errors) / len(errors))


def check_largest(result: dict[str, Any], _: Place) -> None:
    for found in result["found"].values():
        assert found["limited_by"] == "--most"
        assert 0 < found["peak_bytes"] <= found["budget_bytes"]
        assert found["step_s"] > 0


def check_arrival(result: dict[str, Any], _: Place) -> None:
    assert list(result["groups"]) == [f"{source} to {kept}" for source, kept in PAIRS]
    for figures in map(median, result["groups"].values()):
        ratios = figures["add and sum"]
        assert ratios["of_plain"] == pytest.approx(ratios["s"] / figures["add"]["s"])
        assert ratios["of_both"] == pytest.approx(ratios["s"] / figures["add, then sum"]["s"])


def check_checksum(result: dict[str, Any], _: Place) -> None:
    assert list(result["groups"]) == ["4.0 KiB", "1000 B"]
    for figures in result["groups"].values():
        assert list(figures) == ["crc32c", "crc32c by tables", "memcpy", "zlib.crc32"]
        assert all(found["gbps"]["min"] > 0 for found in figures.values())


def check_collectives(result: dict[str, Any], _: Place) -> None:
    ((name, calls),) = result["groups"].items()
    assert name == "1.0 MiB, 2 ranks"
    assert set(calls) >= {"hetero's gather", "hetero's mean, by gloo", "reduce_scatter_tensor"}
    assert all(call["s"]["median"] > 0 for call in calls.values())


def check_tiling(result: dict[str, Any], _: Place) -> None:
    found = median(result["contenders"])
    assert list(found) == [f"linear: {name}" for name in CONTENDERS["linear"]]
    assert found["linear: plain"]["seconds_of_first"] == 1.0
    for figures in found.values():
        assert min(figures["seconds"], figures["cpu_seconds"], figures["host_memory_bytes"]) > 0


def check_scaling(result: dict[str, Any], place: Place) -> None:
    found = [(row["ranks"], row["hybrid"]) for row in result["steps"]]
    assert found == [(8, False), (16, False), (16, True)]
    for row in result["steps"]:
        assert abs(row["error"]) < 0.05
        assert row["simulated_s"] >= row["computing_s"] > 0
    assert {row["kind"] for row in result["stragglers"]} == {"slower", "jitter", "stall_s"}
    for row in result["stragglers"]:
        assert row["seconds"][0] <= min(row["seconds"][1:]) * (1 + 1e-9)
    for row in result["collectives"]:
        assert row["latency_share"] == sorted(row["latency_share"], reverse=True)
    picture = Path(place.words["PICTURE"])
    pictures = [picture, picture.with_stem("picture-stragglers")]
    assert result["pictures"] == [str(path) for path in pictures]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)


def check_refused_scaling(result: dict[str, Any], _: Place) -> None:
    assert [row["status"] for row in result["steps"]] == ["refused"]


def check_activations(result: dict[str, Any], _: Place) -> None:
    found = median(result["results"])
    assert all(each["step_s"] > 0 for each in found.values())
    if result["compare"] == "recompute":
        assert found["none"]["nvme_gbps"] > 0
    if result["compare"] == "batches":
        losses = result["losses"]
        assert list(found) == ["one micro-batch", "micro-batches", "large batch"]
        # The same tokens, in parts and at once; activations in bf16.
        assert losses["large batch"] == pytest.approx(losses["micro-batches"], rel=0.01)


Check = Callable[[dict[str, Any], Place], None]
GPT = "--config MODEL --seq-len 16 --rounds 1 --io-size 32MiB"
SAVES = f"{GPT} --steps 1 --path NVME"
BOUND = f"{GPT} --steps 2 --data TEXT --host-memory 1200KiB --link-gbps 1 --dtype bf16"
BOUND += " --nvme-path NVME"
IO = "--path NVME --size 4MiB --block 64KiB --depth 4 --sample 4MiB --rounds 1"
STEP = f"--params 300000 --path NVME --rounds 2 --steps 2 --chunk-numel {CHUNK} --io-size 16MiB"
STEP += f" --host-memory {4 * OPTIM_STATE_BYTES}"
TRAIN = "--config TINY --data TEXT --steps 3 --seq-len 8 --batch-size 2 --threads 1 --run-dir RUN"
ADAM = "--numel 4Ki --rounds 1 --repeats 1 --threads 1"
PREDICT = "--config MODEL --data TEXT --seq-len 16 --nvme-path NVME --profile PROFILE"
SCALING = "--models gpt2 --nodes 1,2"
ACTIVATIONS = f"{SMALL_GPT} --path NVME --steps 1"
SMALL_BATCHES = "--host-memory 16MiB --activation-memory 12MiB --seq-len 64"
extra, slow = pytest.mark.extra, pytest.mark.slow
NO_PYTHON = "--peer-python /nonexistent/python"


@pytest.mark.parametrize(
    ("name", "words", "check", "shown"),
    [
        ("adam", f"{ADAM} {NO_PYTHON}", check_adam, f"{ADAMW}|deepspeed step: left out: cannot"),
        ("io", f"{IO} --peers fio,aiofiles", check_io, "hetero threads|read GB/s"),
        (
            "step",
            f"{STEP} --peers deepspeed {NO_PYTHON} --curve --picture PICTURE",
            check_step,
            "disk alone|memory alone|4 buffers of 80.0 KiB|theory, together",
        ),
        ("train", f"{TRAIN} --policy nvme --peers torch", check_train, "torch autocast|step s"),
        pytest.param(
            "checkpoint",
            f"{SAVES} --host-memory 1200KiB --peers torch,dcp",
            check_saves,
            "model nvme|/ disk|torch load|lost",
            marks=slow,
        ),
        *(
            (
                "checkpoint",
                f"{SAVES} --of commits --steps 4 --every 1,4 --policy {policy}",
                check_commits,
                f"model {policy}|a commit every 4|on NVMe",
            )
            for policy in ("nvme", "cpu")
        ),
        (
            "bound",
            f"{BOUND} --clipped 50 --device-memory 600KiB",
            check_bound,
            "model emulated, 50 % clipped|compute|link|DRAM|goal 1.15",
        ),
        (
            "bound",
            f"{BOUND} --clipped 0 --device-memory 1KiB --compute layers",
            check_refused_bound,
            "model emulated, 0 % clipped: refused:|goal 1.15",
        ),
        (
            "predict",
            f"{PREDICT} --steps 4 --rounds 2 --overlap-updates none",
            check_predict,
            "nvme, 40% in RAM|auto, 1% in RAM: left out: |within 15%:|error: mean",
        ),
        (
            "largest",
            "--path NVME --vocabulary 256 --seq-len 16 --budgets 1GiB --most 4e5 --tries 1",
            check_largest,
            "hetero-tiles-checkpoints|--most",
        ),
        pytest.param(
            "largest",
            f"{SMALL_GPT} --of batch --budgets 800MiB --first 128 --most 128 --path NVME"
            " --contenders torch-checkpoints,torch-checkpoints-tiled-loss,hetero"
            ",torch-checkpoints-on-cpu",
            check_largest,
            "128 tokens",
            marks=extra,
        ),
        (
            "kernels",
            "--numel 4096 --rounds 1 --repeats 1",
            check_arrival,
            "/ call, then sum|bf16 to fp32",
        ),
        ("kernels", "--of checksum --sizes 4KiB,1000 --rounds 2", check_checksum, "memcpy"),
        (
            "kernels",
            "--of collectives --size 1MiB --rounds 1 --repeats 1",
            check_collectives,
            "hetero's mean, by gloo",
        ),
        pytest.param(
            "tiling",
            "--parts linear --tokens 32 --vocabulary 4096 --width 64 --tiles 4 --rounds 1"
            " --path NVME",
            check_tiling,
            "linear: tiled|host_memory",
            marks=extra,
        ),
        (
            "scaling",
            f"{SCALING} --picture PICTURE --sequences 2 --chunk-numel 4Mi",
            check_scaling,
            "nothing is measured|two levels|a machine|stands still|all-to-all",
        ),
        (
            "scaling",
            "--models gpt2-xl --nodes 1 --profile LITTLE",
            check_refused_scaling,
            "smallest that works",
        ),
        *(
            pytest.param("activations", words, check_activations, shown, marks=extra)
            for words, shown in (
                (
                    f"{ACTIVATIONS} --seq-len 32 --host-memory 256MiB --activation-memory 48MiB",
                    "torch-on-cpu",
                ),
                (
                    f"{ACTIVATIONS} --compare recompute --seq-len 128 --contenders none"
                    " --process-memory 800MiB --io-size 512MiB",
                    "in memory",
                ),
                (f"{ACTIVATIONS} --compare batches {SMALL_BATCHES}", "large batch"),
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
    assert list(place.folder.iterdir()) == [] or name == "tiling"


@pytest.mark.parametrize(
    ("name", "words", "fact"),
    [
        ("adam", "--numel lots", "--numel: cannot read 'lots' as a count; write e.g. 500e6"),
        (
            "adam",
            "--numel 1e14 --peers none",
            "--numel 100000000000000 needs 1819.0 TiB with these",
        ),
        ("adam", "--threads 0", "--threads must be 1 or more, got 0"),
        ("adam", "--repeats 0", "--repeats must be 1 or more, got 0"),
        ("adam", "--peers tortch", "unknown name 'tortch' in --peers; did you mean torch?"),
        ("io", f"{IO} --size many", "--size: cannot read 'many' as a size"),
        ("io", f"{IO} --block 1000", "--block must be a multiple of 4096 bytes, got 1000"),
        ("io", f"{IO} --depth 0", "--depth must be from 1 to 4096, got 0"),
        ("io", f"{IO} --rounds 0", "--rounds must be 1 or more, got 0"),
        ("io", f"{IO} --path /none", "--path /none is not a directory; make it first"),
        ("step", f"{STEP} --params many", "--params: cannot read 'many'"),
        ("step", f"{STEP} --params 0", "--params must be a whole number of 1 or more"),
        ("step", f"{STEP} --host-memory 79KiB", "less than one optimizer state of 80.0 KiB"),
        ("step", f"{STEP} --path /nonexistent", "does not exist"),
        ("step", f"{STEP} --chunk-numel 100", "chunk_numel must be a positive multiple"),
        ("train", f"{TRAIN} --peers torhc", "unknown name 'torhc' in --peers; did you mean torch?"),
        ("train", f"{TRAIN} --skip-steps -1", "--skip-steps must be 0 or more, got -1"),
        ("train", f"{TRAIN} --variants ,", "--variants names no policy"),
        ("train", f"{TRAIN} --ranks 2 --peers torch", "--peers torch is one process, but --ranks"),
        ("train", f"{TRAIN} --peers ddp", "--peers ddp needs --ranks 2 or more; for one rank name"),
        ("checkpoint", f"{SAVES} --path /none", "--path /none is not a directory"),
        ("checkpoint", f"{SAVES} --every 0", "--every must be 1 or more"),
        ("checkpoint", f"{SAVES} --config /none.json", "configuration /none.json"),
        ("checkpoint", f"{SAVES} --host-memory lots", "lots"),
        ("checkpoint", f"{SAVES} --seq-len 1", "--seq-len must be at least 2"),
        ("checkpoint", f"{SAVES} --host-memory 4KiB", "host_memory"),
        ("bound", f"{BOUND} --settings nvm", "unknown name 'nvm' in --settings"),
        ("bound", f"{BOUND} --steps 0", "--max-steps must be at least 1"),
        ("bound", f"{BOUND} --clipped 101", "--clipped must be percentages"),
        ("bound", f"{BOUND} --backend emulated", "--backend follows from --settings"),
        ("bound", f"{BOUND} --host-memory lots", "lots"),
        ("predict", f"{PREDICT} --steps 2", "--steps must be more than 2"),
        ("largest", "--contenders torsh", "unknown name 'torsh' in --contenders"),
        ("largest", "--of sentence", "unknown name 'sentence' in --of"),
        ("largest", "--budgets lots", "--budgets: cannot read 'lots'"),
        ("largest", "--of batch --width 63", "a width of 63 is no multiple of 16 heads"),
        ("largest", "--path /nonexistent", "not a folder"),
        ("kernels", "--of sums", "unknown name 'sums' in --of"),
        ("kernels", "--sizes 0", "--sizes: a size must be positive"),
        ("kernels", "--of collectives --ranks 1", "--ranks must be 2 or more"),
        ("kernels", "--of collectives --size 1", "--size 1 is too small for 2 ranks"),
        ("tiling", "--parts head", "unknown name 'head' in --parts"),
        ("tiling", "--tiles 0", "--tiles must be 1 or more"),
        ("activations", f"{ACTIVATIONS} --contenders some", "unknown contender 'some'"),
        ("activations", f"{ACTIVATIONS} --factor 1", "--factor must be 2 or more"),
        ("activations", f"{ACTIVATIONS} --width 63", "a width of 63 is no multiple of 2 heads"),
        ("scaling", f"{SCALING} --models lama", "unknown name 'lama' in --models"),
        ("scaling", f"{SCALING} --models ,", "--models must name one"),
        ("scaling", f"{SCALING} --nodes some", "--nodes must be a whole number"),
        ("scaling", f"{SCALING} --picture steps.txt", "--picture"),
        ("scaling", f"{SCALING} --profile none", "no profile is called"),
        ("scaling", f"{SCALING} --profile PROFILE", "says nothing about the network"),
        ("scaling", f"{SCALING} --device-memory 1GiB --profile PROFILE", "no device with memory"),
        ("cuda", "--models gpt-15b", "unknown name 'gpt-15b' in --models; did you mean gpt-14b?"),
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
    assert "torch save" not in result["contenders"]
    assert [note.partition(":")[0] for note in result["notes"]] == ["torch save", "torch load"]
    assert result["contenders"]["save"]["s"]["median"] > 0


def test_a_part_of_tiling_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"status": "broken", "error": "exit code 1: why"}
    monkeypatch.setattr(tiling, "run_trial", lambda *_: found)
    with pytest.raises(ValueError, match="mlp: .*exit code 1: why"):
        tiling.run(tiling.PROGRAM.parse(["--parts", "mlp"]))


def test_cuda_is_a_program_without_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    if not cuda.cuda_available():
        assert cuda.main([]) == 0
        assert "skipped: " in capsys.readouterr().out
