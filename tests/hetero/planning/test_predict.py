"""hetero/planning/step_cost: predict(), and what `hetero train` shows of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetero.cli.main import main
from hetero.planning.candidates import place
from hetero.planning.group_plans import ChunkGroupPlan
from hetero.planning.placement import Budgets
from hetero.planning.step_cost import Computing, Work, figures, predict
from tests.support.cli_runs import draw_nothing
from tests.support.training.planning import AMPLE, BF16, SLOT, layout_of, make_profile, make_spec

RATES = {"bf16": 1e9, "fp16": 1e9, "fp32": 1e9}
WORK = Work(tokens=10, micro_batches=1)


def chunk_group(*numels: int, disk: bool = False) -> ChunkGroupPlan:
    layout = layout_of(*numels)
    policy = "nvme" if disk else "cpu"
    spec = make_spec(layout, Budgets(AMPLE, AMPLE, keep_optim_states=False), policy)
    return ChunkGroupPlan(spec, place(spec))


def test_computing_is_shared_out_over_chunk_groups_by_their_elements() -> None:
    chunk_groups = [chunk_group(3 * SLOT, 3 * SLOT), chunk_group(2 * SLOT)]
    plans = predict(chunk_groups, make_profile(), WORK, Computing(8.0, 16.0))
    made = figures(plans)
    assert made["phases_s"]["forward"] == pytest.approx(8)
    assert made["phases_s"]["backward"] == pytest.approx(16)
    assert plans[1].cost.phases[0].seconds == pytest.approx(2)
    update_s = 8 * SLOT * BF16.update_bytes / 10
    assert made["step_s"] == pytest.approx(24 + update_s)
    assert made["phases_s"]["update"] == pytest.approx(update_s)
    assert made["measured_computing"] is True


def test_a_profile_without_a_disk_cannot_tell_about_one() -> None:
    diskless = make_profile(
        nvme_read_bytes_per_s=None,
        nvme_write_bytes_per_s=None,
        nvme_mixed_bytes_per_s=None,
        nvme_bytes=None,
    )
    predict([chunk_group(SLOT)], diskless, WORK)
    with pytest.raises(ValueError, match="says nothing about NVMe"):
        predict([chunk_group(*[SLOT] * 8, disk=True)], diskless, WORK)


class TestTrain:
    @pytest.fixture
    def train(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        draw_nothing(monkeypatch)
        monkeypatch.chdir(tmp_path)
        model = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2}
        model |= {"vocab_size": 256, "n_positions": 32}
        Path("model.json").write_text(json.dumps(model))
        Path("text").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 50)

        def run(*arguments: str) -> int:
            # In bf16 also on a machine whose default it is not: other bytes move in fp32.
            given = (
                "--model",
                "model.json",
                "--data",
                "text",
                "--max-steps",
                "3",
                "--dtype",
                "bf16",
            )
            return main(["train", *given, "--seq-len", "16", "--warmup", "1", *arguments])

        return run

    def save(self, tmp_path: Path, **more) -> None:
        profile = make_profile(
            nvme_read_bytes_per_s=2e9,
            nvme_write_bytes_per_s=1e9,
            nvme_mixed_bytes_per_s=1.5e9,
            update_bytes_per_s=RATES,
            matmul_flop_per_s={**RATES, **more},
        )
        profile.save(tmp_path / "cache" / "hetero" / "profile.json")

    def test_the_report_ends_with_predicted_against_measured(
        self, train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.save(tmp_path)
        assert train("--json", "--overlap-updates", "none") == 0
        summary = json.loads(capsys.readouterr().out)
        predicted = summary["predicted"]
        assert list(predicted["phases_s"]) == ["forward", "backward", "update"]
        assert predicted["step_s"] == pytest.approx(sum(predicted["phases_s"].values()))
        steady = sorted(summary["step_s"][1:])
        assert summary["measured_over_predicted"] == pytest.approx(
            sum(steady) / len(steady) / predicted["step_s"]
        )
        # In a steady step the bytes are those that were predicted.
        assert predicted["nvme_read_bytes"] == summary["bytes_per_step"]["disk_read"]
        assert train("--overlap-updates", "none") == 0
        out = capsys.readouterr().out
        assert "predicted" in out
        assert "times as much" in out

    def test_phases_that_go_on_together_are_shown_as_one(
        self, train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.save(tmp_path)
        given = ("--policy", "nvme", "--overlap-updates", "both")
        assert train(*given, "--max-grad-norm", "0") == 0
        assert "s: forward, backward and update " in capsys.readouterr().out

    def test_without_a_profile_the_run_itself_says_what_a_step_takes(
        self, train, capsys: pytest.CaptureFixture[str]
    ) -> None:
        given = ("--policy", "nvme", "--host-memory", "600KiB", "--chunk-numel", "8192")
        assert train("--json", "--max-steps", "5", "--overlap-updates", "none", *given) == 0
        summary = json.loads(capsys.readouterr().out)
        predicted = summary["predicted"]
        assert predicted["measured_computing"]
        assert predicted["nvme_read_bytes"] == summary["bytes_per_step"]["disk_read"] > 0
        assert summary["measured_over_predicted"] > 0

    def test_a_run_of_one_step_says_nothing(
        self, train, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert train("--json", "--max-steps", "1") == 0
        summary = json.loads(capsys.readouterr().out)
        assert summary["predicted"] is summary["measured_over_predicted"] is None
