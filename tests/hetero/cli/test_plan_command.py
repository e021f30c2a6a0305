"""`hetero plan` and `hetero profile` as their user meets them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hetero
from hetero.cli.main import main
from hetero.cli.plan import case, explain_cases
from hetero.job.models import build_model, count_parameters, model_config
from hetero.job.options import TrainOptions
from hetero.planning.group_plans import arrange
from hetero.planning.step_cost import PhaseCost, StepCost
from offload.memory.process_memory import resident_bytes
from offload.profile import measure
from offload.profile.machine_profile import Profile
from tests.support.cli_runs import Refuses, words_of
from tests.support.training.planning import make_profile

MODEL = {
    "model_type": "gpt2",
    "n_layer": 3,
    "n_embd": 64,
    "n_head": 2,
    "vocab_size": 256,
    "n_positions": 32,
}
SHORT = "--seq-len 16 --batch-size 2"
Planned = Callable[..., dict[str, Any]]
CPU_RATES = {"bf16": 1e9, "fp16": 1e9, "fp32": 1e9}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with a model, and a profile of a CPU in round numbers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("model.json").write_text(json.dumps(MODEL))
    make_profile(
        nvme_read_bytes_per_s=2e9,
        nvme_write_bytes_per_s=1e9,
        nvme_mixed_bytes_per_s=1.5e9,
        dram_bytes_per_s=5e9,
        update_bytes_per_s=CPU_RATES,
        matmul_flop_per_s=CPU_RATES,
        host_bytes=1 << 34,
        nvme_bytes=1 << 40,
    ).save("cpu.json")
    return tmp_path


def plan(*arguments: str, profile: str | None = "cpu.json") -> int:
    """Arguments are as words_of() takes them."""
    given = "" if profile is None else f"--machine {profile}"
    try:
        return main(words_of("plan --model model.json", SHORT, given, *arguments))
    except SystemExit as end:  # of what the parser itself refuses
        return int(end.code or 0)


@pytest.fixture
def planned(capsys: pytest.CaptureFixture[str]) -> Planned:
    """What a plan says under --json."""

    def read(*arguments: str, **more: Any) -> dict[str, Any]:
        assert plan("--json", *arguments, **more) == 0
        out = capsys.readouterr().out
        assert out.count("\n") == 1
        found: dict[str, Any] = json.loads(out)
        return found

    return read


def test_a_plan_needs_neither_the_model_nor_the_directory(planned: Planned) -> None:
    found = planned("--host-memory", "1MiB", "--nvme-path", "/nowhere/at/all")
    assert found["params"] == count_parameters(
        model_config(TrainOptions(model="model.json", seq_len=16))
    )
    assert found["budget_bytes"]["disk"] == int((1 << 40) * 0.95)
    assert sum(found["bytes"]["host"].values()) <= 1 << 20
    assert sum(found["bytes"]["disk"].values()) > 0
    assert found["step_s"] == pytest.approx(sum(p["seconds"] for p in found["phases"]))
    assert found["traffic_bytes"]["nvme_read"] > 0


def test_overlapped_updates_are_planned(planned: Planned) -> None:
    budget = ("--host-memory", "1MiB", "--nvme-path", "/nowhere")
    names = []
    for setting in ("none", "forward", "auto"):
        found = planned(*budget, "--overlap-updates", setting)
        names.append([phase["name"] for phase in found["phases"]])
    assert names == [
        ["forward", "backward", "update"],
        ["forward and update", "backward"],
        ["forward, backward and update"],
    ]


@pytest.mark.parametrize("policy", ["cpu", "nvme", "auto"])
def test_what_is_planned_without_a_device_is_what_the_runtime_takes(
    planned: Planned, here: Path, policy: str
) -> None:
    """The smallest budget that the runtime knows is the same, to the byte."""
    nvme = ("--nvme-path", str(here)) if policy != "cpu" else ()
    least = planned("--policy", policy, *nvme)["smallest_budgets"]["host"]
    for host, works in ((least, True), (least - 1, False)):
        config = hetero.Config(
            placement_policy=policy,  # type: ignore[arg-type]
            host_memory=host,
            nvme_path=str(here) if nvme else None,
        )
        with torch.device("meta"):
            model = build_model(model_config(TrainOptions(model="model.json", seq_len=16)))
        try:
            arrange(model, config, config.dtypes, host, config.disk_bytes())
        except hetero.BudgetError:
            assert not works
        else:
            assert works


def test_ranks_and_machines_divide_what_there_is(planned: Planned) -> None:
    one = planned(profile="8xh200-node")
    many = planned("--ranks", "64", "--nodes", "8", profile="8xh200-node")
    assert one["traffic_bytes"]["sent"] == 0 < many["traffic_bytes"]["sent"]
    assert one["budget_bytes"]["host"] == pytest.approx(8 * many["budget_bytes"]["host"], abs=8)
    assert one["budget_bytes"]["device"] == many["budget_bytes"]["device"]
    assert sum(one["bytes"]["device"].values()) > sum(many["bytes"]["device"].values())
    assert one["smallest_budgets"]["device"] > 0


def test_hybrid_sharding_sends_less_between_machines(
    planned: Planned, capsys: pytest.CaptureFixture[str]
) -> None:
    machines = ("--ranks", "64", "--nodes", "8")
    whole = planned(*machines, profile="8xh200-node")
    hybrid = planned(*machines, "--shard-ranks", "8", profile="8xh200-node")
    assert (whole["shard_ranks"], hybrid["shard_ranks"]) == (64, 8)
    assert hybrid["busy_s"]["network"] < whole["busy_s"]["network"]
    assert hybrid["busy_s"]["links in a node"] > 0
    assert "links in a node" not in whole["busy_s"]
    assert plan(*machines, "--shard-ranks", "8", profile="8xh200-node") == 0
    assert "64 ranks on 8 machines, 8 of which share a chunk" in capsys.readouterr().out


def test_the_profile_of_this_machine_is_the_default(
    planned: Planned, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(profile=None) == 2
    assert "run `hetero profile` first" in capsys.readouterr().err
    Profile.load("cpu.json").save(here / "cache" / "hetero" / "profile.json")
    assert planned(profile=None)["profile"] == "made up"
    # Of this machine the directory must be there.
    assert plan("--nvme-path", "/nowhere", profile=None) == 2
    assert "/nowhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "lama-7b"), "--model"),
        (("--policy", "nvme"), "--policy nvme needs --nvme-path"),
        (("--policy", "cuda"), "no device with memory of its own"),
        (("--device-memory", "1GiB"), "--device-memory: on the machine"),
        (("--host-memory", "much"), "--host-memory: cannot read 'much'"),
        (("--host-memory", "4KiB"), "smallest that works"),
        (("--nvme-capacity", "1GiB"), "of no use without --nvme-path"),
        (("--ranks", "0"), "--ranks must be at least 1"),
        (("--ranks", "3", "--nodes", "2"), "cannot be spread evenly"),
        (("--ranks", "8", "--shard-ranks", "3"), "--shard-ranks 3: parts of a machine's 8 ranks"),
        (("--ranks", "8", "--shard-ranks", "0"), "--shard-ranks must be at least 1"),
        (("--ranks", "16", "--nodes", "4", "--shard-ranks", "6"), "--shard-ranks 6"),
        (("--seq-len", "1"), "--seq-len must be at least 2"),
        (("--zero-stage", "4"), "zero_stage must be one of"),
        (("--dtype", "fp8"), "argument --dtype: invalid choice: 'fp8'"),
        (("--machine", "8xh20"), "did you mean '8xh200-node'"),
        (("--machine", "model.json"), "model.json"),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    if arguments[0] == "--model":
        assert main(["plan", "--machine", "cpu.json", *arguments]) == 2
        message = "unknown model 'lama-7b'; did you mean llama-7b"
    else:
        assert plan(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("hetero plan: error: ")
    assert err.count("\n") == 1
    assert message in err


def test_a_profile_without_a_disk_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    no_disk = {"nvme_bytes": None}
    no_disk |= {f"nvme_{mode}_bytes_per_s": None for mode in ("read", "write", "mixed")}
    make_profile(**no_disk).save("diskless.json")
    assert plan("--nvme-path", "/nowhere", profile="diskless.json") == 2
    assert "hetero profile --nvme-path /nowhere" in capsys.readouterr().err


def test_what_is_measured_is_saved_and_planned_with(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    refuses: Refuses,
) -> None:
    monkeypatch.setattr(measure, "SHAPES", ((64, 64, 64),))
    for name, value in (("numel", 4096), ("area_bytes", 1 << 24), ("window_s", 0.01)):
        monkeypatch.setitem(measure.measure_profile.__kwdefaults__, name, value)
    assert main(["profile", "--nvme-path", str(here)]) == 0
    out, err = capsys.readouterr()
    saved = here / "cache" / "hetero" / "profile.json"
    assert re.search(r"NVMe, both at once +\d+\.\d+ GB/s", out)
    assert f"saved in {saved}" in out
    assert f"NVMe in {here}" in err
    assert Profile.load(saved).nvme_read_bytes_per_s is not None
    assert plan("--nvme-path", str(here), profile=None) == 0
    capsys.readouterr()
    assert main(["profile", "--json", "--output", "p.json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(Path("p.json").read_text())
    refuses("hetero profile: error: ", "profile --nvme-path /nowhere")
    refuses("hetero profile: error: --threads must be at least 1", "profile --threads 0")


def test_each_case_is_the_plan_that_it_names(planned: Planned) -> None:
    disk = ("--nvme-path", "/nowhere")
    found = planned("--host-memory", "1MiB", *disk, "--what-if")
    ram = [case for case in found["what_if"] if case["of"] == "RAM"]
    assert ram[0]["value"] == found["smallest_budgets"]["host"]
    assert ram[-1]["nvme_read_bytes"] == 0, "all state fits the largest"
    assert next(case for case in ram if case["is_given"])["step_s"] == found["step_s"]
    other = planned("--host-memory", str(ram[1]["value"]), *disk)
    assert ram[1]["step_s"] == other["step_s"]
    assert "what_if" not in other
    disks = [case for case in found["what_if"] if case["of"] == "NVMe bandwidth"]
    assert [case["value"] for case in disks] == [5e8, 1e9, 2e9, 4e9, 8e9]
    assert [case["is_given"] for case in disks] == [False, False, True, False, False]
    assert disks[2]["step_s"] == found["step_s"] <= disks[0]["step_s"]


def test_a_budget_of_more_than_all_state_is_there_too(planned: Planned) -> None:
    found = planned("--host-memory", "1GiB", "--what-if")["what_if"]
    assert (found[-1]["is_given"], found[-1]["value"]) == (True, 1 << 30)
    assert {case["of"] for case in found} == {"RAM"}
    values = [case["value"] for case in found]
    assert values == sorted(set(values))


def test_with_a_device_one_budget_changes_at_a_time(planned: Planned) -> None:
    host = ("--host-memory", "1GiB")
    found = planned(*host, "--what-if", profile="rtx4090-nvme")
    cases = found["what_if"]
    assert [case["of"] for case in cases if case["is_given"]] == ["RAM", "DEVICE"]
    device = [case for case in cases if case["of"] == "DEVICE"]
    assert device[0]["value"] == found["smallest_budgets"]["device"]
    arguments = ("--device-memory", str(device[1]["value"]))
    other = planned(*host, *arguments, profile="rtx4090-nvme")
    assert device[1]["step_s"] == other["step_s"]


def test_what_does_not_fit_is_said_and_not_left_out() -> None:
    step = StepCost((PhaseCost("forward", 2.0),))
    cases = [case("RAM", 1 << 20, False, None), case("RAM", 2 << 20, True, step)]
    assert cases[0]["step_s"] is None
    text = explain_cases(cases)
    assert "nothing fits" in text
    assert "2.0 MiB of RAM" in text


@pytest.mark.parametrize("name", ["8xh100-node", "laptop"])
def test_a_kind_of_machine_needs_no_file(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--model", "model.json", "--seq-len", "32", "--machine", name, "--json")
    assert main(["plan", *given, "--nvme-path", "/nowhere"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["profile"] == name
    assert found["budget_bytes"]["disk"] > 0


GPU_MACHINE = ("--machine", "rtx4090-nvme", "--nvme-path", "/nowhere")


def on_gpu(*arguments: str) -> int:
    small = ("--model", "model.json", "--batch-size", "8")
    return main(["plan", *small, *GPU_MACHINE, *arguments])


def test_activations_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """A layer of width 64 saves 34 bytes an element: with 2^17 tokens 3 layers 0.8 GiB, of 2^22
    tokens 25 GiB; checkpointed the latter are a layer's and 3 inputs."""
    assert on_gpu("--seq-len", str(1 << 14), "--json") == 0
    found = json.loads(capsys.readouterr().out)["activation_bytes"]
    assert found["kept_bytes"] == 3 * 34 * 64 << 17
    assert found["checkpointed_bytes"] == (34 + 3 * 2) * 64 << 17
    assert on_gpu("--seq-len", str(1 << 19)) == 2
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("Activations (estimated") for line in lines)
    (begin,) = (number for number, line in enumerate(lines) if line.startswith("does not fit: "))
    assert "--gradient-checkpointing" in " ".join(lines[begin:])
    assert on_gpu("--seq-len", str(1 << 19), "--gradient-checkpointing") == 0
    assert "does not fit" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--machine", "a100-pcie", "--ranks", "8"), "or more --nodes"),
        (("--machine", "a100-pcie", "--ranks", "4", "--nodes", "4"), "--machine 8xh100-node"),
        (("--model", "qwen"), "unknown model 'qwen'"),
    ],
)
def test_a_machine_that_is_not_there_is_refused(
    refuses: Refuses, arguments: tuple[str, ...], says: str
) -> None:
    refuses(says, "plan", arguments)


def test_limits_of_this_machine_are_none_of_another_one(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetero.config.allowed_bytes", lambda: 1 << 30)
    auto, whole = (planned("--process-memory", each) for each in ("auto", "16GiB"))
    assert auto["budget_bytes"]["host"] == pytest.approx(whole["budget_bytes"]["host"], rel=0.01)


def test_a_limit_of_the_process_leaves_less_for_state(
    planned: Planned, capsys: pytest.CaptureFixture[str]
) -> None:
    """State and what steps need share what a process without state leaves."""
    assert plan("--process-memory", "100TiB") == 2
    assert "--process-memory 100.0 TiB: a rank on the machine" in capsys.readouterr().err
    held = resident_bytes()
    found = planned("--process-memory", str(held + (1 << 30)), "--nvme-path", "/nowhere")
    assert 0.5 * (1 << 30) < found["budget_bytes"]["host"] < 0.9 * (1 << 30)
    most = planned("--process-memory", str(held + (1 << 30)), "--host-memory", "64MiB")
    assert most["budget_bytes"]["host"] == 64 << 20
    # 2^17 tokens of 3 layers of width 64 keep 0.8 GiB, checkpointed 0.3 GiB.
    given = ("--batch-size", "8", "--seq-len", str(1 << 14))
    assert plan(*given, "--process-memory", str(held + (1 << 29)), "--nvme-path", "/x") == 0
    capsys.readouterr()
    assert plan(*given, "--process-memory", str(held + (1 << 28)), "--nvme-path", "/x") == 2
    said = " ".join(capsys.readouterr().out.split())
    assert "does not fit: a process without model state holds about" in said
    needed = re.search(r"--process-memory (\d+) at least", said)
    assert needed is not None
    assert (
        plan(*given, "--process-memory", str(int(needed[1]) + (1 << 26)), "--nvme-path", "/x") == 0
    )


def test_an_adapter_alone_has_optimizer_state(planned: Planned) -> None:
    whole = planned()
    adapter = planned("--lora-rank", "2")
    assert adapter["params"] > whole["params"]
    state, frozen = (found["bytes"]["host"]["OPTIM_STATE"] for found in (whole, adapter))
    assert 0 < frozen < state / 4
    assert adapter["bytes"]["host"]["PARAM"] >= whole["bytes"]["host"]["PARAM"]


def test_a_narrow_terminal_has_all_figures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = "--machine cpu.json --host-memory 1MiB --nvme-path /nowhere --what-if"
    for command in (
        f"plan --model model.json {SHORT} {arguments}",
        "plan --machine list",
        "bench",
    ):
        words = []
        for width in (200, 80, 60):
            monkeypatch.setenv("COLUMNS", str(width))
            assert main(command.split()) == 0
            out = capsys.readouterr().out
            assert max(map(len, out.splitlines())) <= width
            words.append(set(re.findall(r"\S+", re.sub("-{9,}", "", out))))
        assert words[0] == words[1] == words[2]
