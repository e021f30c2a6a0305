"""bench.train: contenders, what it reports of them, and its JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import train as bench_train
from bench.harness.rounds import ContenderError, MissingError, Sample, run_rounds
from bench.peers.train import deepspeed_config
from bench.peers.workload import Workload
from bench.train import contenders, main, run_contender, sample_of, summarize, write_workload
from hetero.job.data import load_corpus
from hetero.job.options import TrainOptions
from hetero.job.ranks import Ranks
from tests.support.training.loops import SMALLEST_MODEL


@pytest.fixture
def inputs(tmp_path: Path) -> list[str]:
    (tmp_path / "model.json").write_text(json.dumps(SMALLEST_MODEL))
    (tmp_path / "text").write_bytes(bytes(range(256)) * 4)
    return [
        *("--model", str(tmp_path / "model.json"), "--data", str(tmp_path / "text")),
        *("--max-steps", "3", "--seq-len", "8", "--batch-size", "2", "--threads", "1"),
        *("--run-dir", str(tmp_path / "run")),
    ]


def figures(step_s: list[float], loss: float = 1.0, ranks: int = 1) -> dict[str, object]:
    return {
        "step_s": step_s,
        "forward_s": step_s,
        "backward_s": step_s,
        "optimizer_s": step_s,
        "losses": [loss],
        "ranks": ranks,
        "threads": 1,
        "tokens_per_s": 100.0,
        "peak_rss_bytes": 1 << 30,
        "peak_rss_by_rank_bytes": [(rank + 1) << 30 for rank in range(ranks)],
        "bytes_per_step": {"h2d": 0, "d2h": 0, "disk_read": 5, "disk_write": 6},
        "sent_bytes_per_step": None,
        "received_bytes_per_step": 7 << 20,
        "gather_wait_s_per_step": 0.25,
    }


MISSING = MissingError("No module named 'deepspeed'; install: how")
RUNS: dict[str, Any] = {
    "hetero cpu": figures([9.0, 9.0, 2.0, 2.0]),
    "hetero nvme": figures([9.0, 9.0, 3.0, 5.0]),
    "torch bf16": figures([8.0, 8.0, 1.0, 1.0]),
    "deepspeed cpu": MISSING,
}


def summary_of(*rounds_of: Mapping[str, Any], skip_steps: int = 0) -> dict[str, Any]:
    """Of rounds, each of which has a contender's figures or its error."""
    runs: dict[str, list[Any]] = {name: [] for name in rounds_of[0]}

    def turn(name: str) -> Sample:
        found = rounds_of[len(runs[name])][name]
        if isinstance(found, Exception):
            raise found
        runs[name].append(found)
        return sample_of(found, skip_steps)

    turns = {name: partial(turn, name) for name in runs}
    rounds = run_rounds(turns, len(rounds_of), lambda _: None, warm_up=False)
    main_name = max(name for name in rounds.samples if name.startswith("hetero"))
    return {**summarize(rounds, runs, main_name), "rounds": len(rounds_of)}


def test_summary_has_medians_without_the_first_steps_and_ratios() -> None:
    summary = summary_of(RUNS, skip_steps=2)
    assert summary["main"] == "hetero nvme"
    assert summary["median_step_s"] == 4.0
    assert summary["step_s"] == [9.0, 9.0, 3.0, 5.0]
    contenders = summary["contenders"]
    assert contenders["hetero nvme"]["ratio_to"] == {"torch bf16": 4.0}
    assert contenders["hetero cpu"]["ratio_to"] == {"torch bf16": 2.0}
    assert contenders["deepspeed cpu"]["status"] == "missing"
    json.dumps(summary)
    # One step is left, however many are skipped.
    assert summary_of({"hetero cpu": RUNS["hetero cpu"]}, skip_steps=99)["median_step_s"] == 2.0


def test_ratios_are_of_runs_in_the_same_round() -> None:
    def runs(own_s: float, peer_s: float, other: Any) -> dict[str, Any]:
        peer = figures([peer_s], loss=peer_s)
        return {"hetero cpu": figures([own_s]), "torch bf16": peer, "torch autocast": other}

    # The machine was slow in the second round; the last contender failed in the third.
    one = figures([1.0])
    rounds = [runs(1, 2, one), runs(30, 40, one), runs(2, 3, ContenderError("x"))]
    summary = summary_of(*rounds)
    contenders = summary["contenders"]
    assert contenders["hetero cpu"]["ratio_to"] == {"torch bf16": 2.0 / 3.0}
    step_s = contenders["hetero cpu"]["measured"]["step_s"]
    assert step_s == {"median": 2.0, "min": 1.0, "max": 30.0}
    assert contenders["torch bf16"]["losses"] == [3.0]  # of the run with the median step time
    assert contenders["torch autocast"] == {"status": "failed", "error": "x"}
    out = "\n".join(bench_train.show(summary))
    for text in ("3 rounds", "2.00 (1.00-30.00)", "0.67", "torch autocast: left out: x"):
        assert text in out


def test_every_round_begins_with_another_contender_and_leaves_out_who_failed(
    inputs: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = []

    def run_contender(_: list[str], log: Path, __: float, ranks: int) -> Any:
        assert log.parent.is_dir()
        turns.append((log.parent.name, log.stem))
        if log.stem == "torch-bf16":
            raise ContenderError("too big")
        return figures([1.0])

    monkeypatch.setattr(bench_train, "run_contender", run_contender)
    assert main([*inputs, "--json", "--policy", "cpu", "--peers", "torch", "--rounds", "2"]) == 1
    assert turns == [
        ("round-1", "hetero-cpu"),
        ("round-1", "torch-bf16"),
        ("round-1", "torch-autocast"),
        ("round-2", "torch-autocast"),
        ("round-2", "hetero-cpu"),
    ]
    summary = json.loads(capsys.readouterr().out)
    assert summary["rounds"] == 2
    assert summary["contenders"]["torch bf16"]["error"] == "too big"
    assert list(summary["contenders"]) == ["hetero cpu", "torch bf16", "torch autocast"]


def test_several_ranks_have_a_table_of_their_own() -> None:
    summary = summary_of({"hetero nvme": figures([1.0], ranks=2), "deepspeed cpu": MISSING})
    assert summary["measured"]["peak_rss_max_bytes"]["median"] == 2 << 30
    assert summary["measured"]["peak_rss_sum_bytes"]["median"] == 3 << 30
    out = "\n".join(bench_train.show(summary))
    for text in ("ranks", "2.0 GiB", "3.0 GiB", "7.0 MiB", "0.25"):
        assert text in out


def test_of_several_ranks_each_gets_its_turn_of_the_batches_of_one(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(range(256)))
    options = TrainOptions(data=str(tmp_path / "text"), steps=3, accumulate=2, batch_size=2,
                           seq_len=8, warmup=1)  # fmt: skip
    path = tmp_path / "workload.json"
    write_workload(options, path, ranks=3)
    workload = Workload.read(path)
    assert workload.tokens_per_step == 3 * 2 * 2 * 8
    assert workload.lrs == pytest.approx([options.lr / 2, options.lr, options.lr / 10])
    assert workload.model_config["n_embd"] == 1024
    alone = load_corpus(options.data, options.seq_len, options.seed)
    in_order = [alone.batch(2) for _ in range(3 * 2 * 3)]
    for rank in range(3):
        mine = [batch for step in workload.batches(rank) for batch in step]
        assert all(map(torch.equal, mine, in_order[rank::3]))
        assert len(mine) == 6
        corpus = load_corpus(options.data, options.seq_len, options.seed, Ranks(rank, 3))
        assert all(torch.equal(batch, corpus.batch(2)) for batch in mine)


def test_deepspeed_gets_a_buffer_that_holds_the_largest_tensor(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(range(256)))
    path = tmp_path / "workload.json"
    options = TrainOptions(
        model="gpt2-xl", vocab_size=100_000, data=str(tmp_path / "text"), steps=1, seq_len=8
    )
    write_workload(options, path)
    config = deepspeed_config(Workload.read(path), "nvme", str(tmp_path))
    assert config["zero_optimization"]["offload_param"]["buffer_size"] > 100_000 * 1600
    assert config["train_micro_batch_size_per_gpu"] == options.batch_size


@pytest.mark.parametrize(
    ("arguments", "variants", "main_policy"),
    [
        ([], ["cpu", "nvme"], "nvme"),
        (["--policy", "cpu"], ["cpu"], "cpu"),
        (["--variants", "nvme, cpu"], ["nvme", "cpu"], "cpu"),
        (["--variants", "cpu,nvme", "--policy", "cpu"], ["cpu", "nvme"], "cpu"),
        (["--variants", "cpu,nvme --verify-reads"], ["cpu", "nvme --verify-reads"], "nvme"),
    ],
)
def test_variants_and_the_main_one(
    arguments: list[str], variants: list[str], main_policy: str
) -> None:
    given = bench_train.PROGRAM.parse(arguments)
    options = bench_train.read_options(given)
    assert given.variants == variants
    assert options.policy == main_policy
    assert (options.model, options.vocab_size, options.seq_len) == ("gpt2-medium", 50257, 256)


@pytest.mark.extra
def test_two_ranks_train_as_one_with_twice_the_micro_batches(
    inputs: list[str], tmp_path: Path
) -> None:
    losses = {}
    for peer, ranks in (("torch", 1), ("ddp", 2), ("fsdp2", 2)):
        words = [*inputs, "--ranks", str(ranks), "--lr", "0.01", "--peers", peer]
        given = bench_train.PROGRAM.parse(words)
        options = replace(bench_train.read_options(given), accumulate=4 // ranks)
        path = tmp_path / f"workload{ranks}.json"
        write_workload(options, path, ranks)
        # The last of them all keeps fp32 weights and computes in bf16.
        command = list(contenders(options, given, path, tmp_path).values())[-1]
        found = run_contender(command, tmp_path / "log", 300, ranks)
        losses[peer] = found["losses"]
        assert (found["ranks"], found["threads"]) == (ranks, 1)
        assert len(found["peak_rss_by_rank_bytes"]) == ranks
        assert found["sent_bytes_per_step"] == (0 if ranks == 1 else None)
    # Rounding differs; other batches, or gradients of one rank alone, would show.
    assert losses["ddp"] == pytest.approx(losses["torch"], rel=2e-3)
    assert losses["fsdp2"] == pytest.approx(losses["torch"], rel=2e-3)


def test_what_a_peer_stands_for(tmp_path: Path) -> None:
    """Where the CPU has no bf16, computing in it takes many times as long: with fp32 peers do
    without, too."""

    def names(*words: str) -> list[str]:
        given = bench_train.PROGRAM.parse(["--variants", "cpu", "--peer-python", "other", *words])
        made = contenders(bench_train.read_options(given), given, tmp_path / "w", tmp_path)
        for name, command in made.items():
            assert (command[0] == "other") == name.startswith("deepspeed")
        return list(made)[1:]

    assert names("--peers", "deepspeed") == ["deepspeed cpu", "deepspeed nvme"]
    two = ("--ranks", "2", "--peers", "ddp,fsdp2")
    assert names(*two) == ["ddp bf16", "ddp autocast", "fsdp2 offload"]
    assert names(*two, "--dtype", "fp32") == ["ddp fp32", "fsdp2 fp32"]


def test_a_variant_may_have_options_of_its_own(tmp_path: Path) -> None:
    given = bench_train.PROGRAM.parse(["--variants", "nvme,nvme --commit-every 1"])
    made = contenders(bench_train.read_options(given), given, tmp_path / "w", tmp_path)
    plain, durable = made["hetero nvme"], made["hetero nvme --commit-every 1"]
    assert durable[-2:] == ["--commit-every", "1"]
    jobs = [
        json.loads(Path(line[4].removeprefix("--config=")).read_text()) for line in (plain, durable)
    ]
    assert {job["policy"] for job in jobs} == {"nvme"}
    assert jobs[0]["run_dir"] != jobs[1]["run_dir"]


def run(tmp_path: Path, code: str, ranks: int = 1) -> dict[str, Any]:
    return run_contender((sys.executable, "-c", code), tmp_path / "log", 300, ranks)


def test_a_missing_peer_says_how_to_install_it(tmp_path: Path) -> None:
    said = {"status": "missing", "error": "No module named deepspeed"}
    with pytest.raises(MissingError, match="No module named deepspeed; install: .*deepspeed"):
        run(tmp_path, f"import json; print(json.dumps({said!r}))")


def test_the_first_of_several_ranks_says_the_result(tmp_path: Path) -> None:
    code = "import json, os; print('x'); print(json.dumps({'rank': int(os.environ['RANK'])}))"
    assert run(tmp_path, code, ranks=2)["rank"] == 0


def test_failures_are_told(tmp_path: Path) -> None:
    """As run_ranks() says them."""
    with pytest.raises(ContenderError, match="exit code 1: .* too big"):
        run(tmp_path, "raise MemoryError('too big')")
    with pytest.raises(ContenderError, match="cannot start"):
        run_contender([str(tmp_path / "none")], tmp_path / "log", 300)


def test_what_is_as_large_as_the_state_goes_away(
    inputs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_contender(command: list[str], *_: Any) -> Any:
        if "deepspeed" in command:
            Path(command[-1]).mkdir()
        else:
            job = json.loads(Path(command[4].removeprefix("--config=")).read_text())
            Path(job["run_dir"], "hetero-state").mkdir(parents=True)
        return figures([1.0])

    monkeypatch.setattr(bench_train, "run_contender", run_contender)
    assert main([*inputs, "--variants", "cpu", "--peers", "deepspeed", "--json"]) == 0
    left = sorted(path.name for path in (tmp_path / "run").glob("*/*"))
    assert left == ["hetero-cpu", "hetero-cpu.json"]
    assert list((tmp_path / "run").glob("*/*/*")) == []
