"""--config: options of a command in YAML or JSON, and those of an earlier run."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hetero.cli.main import main, make_parser
from hetero.job.options import TrainOptions
from tests.support.cli_runs import draw_nothing


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    draw_nothing(monkeypatch)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def parsed(*words: str, command: str = "train") -> TrainOptions:
    return TrainOptions.from_namespace(make_parser().parse_args([command, *words]))


def refused(capsys: pytest.CaptureFixture[str], *words: str, command: str = "train") -> str:
    with pytest.raises(SystemExit) as raised:
        parsed(*words, command=command)
    assert raised.value.code == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith(f"hetero {command}: error: ")
    return err


JOB = """
model: gpt2            # names of flags, with - or _
max_steps: 7
grad-accum: 2
clip: 0.5              # an older name
host_memory: 600MiB
nvme_path: [a, b]
prefetch: false
json: true
data: null             # as if it were not there
lr: 1e-5
"""


def test_a_file_in_place_of_flags(here: Path) -> None:
    Path("job.yaml").write_text(JOB)
    expected = TrainOptions(
        model="gpt2", steps=7, accumulate=2, clip=0.5, host_memory="600MiB", nvme_path=("a", "b"),
        prefetch=False, json=True, lr=1e-5,
    )  # fmt: skip
    assert parsed("--config", "job.yaml") == expected
    Path("job.json").write_text(json.dumps(yaml.safe_load(JOB)))
    assert parsed("--config=job.json") == expected


def test_flags_win_wherever_they_are(here: Path) -> None:
    Path("job.yaml").write_text(JOB)
    flags = ("--max-steps", "9", "--nvme-path", "c", "--no-json", "--prefetch")
    for words in ((*flags, "--config", "job.yaml"), ("--config", "job.yaml", *flags)):
        found = parsed(*words)
        assert (found.steps, found.nvme_path, found.json, found.prefetch) == (
            9,
            ("c",),
            False,
            True,
        )
        assert found.accumulate == 2
    # Of several files the last counts.
    Path("more.yaml").write_text("max_steps: 8")
    assert parsed("--config", "job.yaml", "--config", "more.yaml").steps == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_stpes: 3", "job.yaml: there is no option 'max_stpes'; did you mean max_steps (--max"),
        (
            "zzz: 3",
            "job.yaml: there is no option 'zzz'; hetero train --help-all says what there is",
        ),
        ("help: 3", "there is no option 'help'"),
        ("job_file: a", "there is no option 'job_file'"),
        ("max_steps: x", "argument --max-steps: invalid int value: 'x'"),
        ("policy: hbm", "argument --policy: invalid choice: 'hbm'"),
        ("max_steps: [3]", "job.yaml: max_steps takes one value, not a list"),
        ("max_steps: true", "job.yaml: max_steps takes a number or a text, not True"),
        ("nvme_path: [{a: b}]", "job.yaml: nvme_path takes a number or a text, not {'a': 'b'}"),
        ("nvme_path: '--'", "job.yaml: nvme_path cannot be '--'; leave it out"),
        ("json: 3", "job.yaml: json must be true or false, not 3"),
        ("- 3", "job.yaml must have options"),
        ("a: [", "job.yaml is not YAML"),
        ("command: finetune", "job.yaml is not of hetero train"),
    ],
)
def test_what_is_wrong_is_named(
    here: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    Path("job.yaml").write_text(text)
    assert message in refused(capsys, "--config", "job.yaml")


def test_files_that_cannot_be_read(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot read --config no: No such file" in refused(capsys, "--config", "no")
    Path("x.json").write_text("{")
    assert "--config x.json is not JSON" in refused(capsys, "--config", "x.json")
    Path("x.yaml").write_bytes(b"\xff\xfe\xff")
    assert "cannot read --config x.yaml" in refused(capsys, "--config", "x.yaml")
    assert "cannot read --config config.json" in refused(capsys, "--config", ".")


def test_yaml_needs_its_package_and_json_does_not(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    Path("job.json").write_text('{"max_steps": 3}')
    assert parsed("--config", "job.json").steps == 3
    Path("job.yaml").write_text("max_steps: 3")
    message = 'pyyaml is missing; install it: pip install "hetero[train]"'
    assert message in refused(capsys, "--config", "job.yaml")


def test_the_configuration_of_a_model(here: Path) -> None:
    Path("config.json").write_text('{"model_type": "gpt2", "n_layer": 2}')
    assert parsed("--model", ".").config_path == Path("config.json")
    assert parsed("--model", "config.json").config_path == Path("config.json")
    assert parsed("--model", "gpt2").config_path is None


MODEL = {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 256}


def test_a_run_is_made_again_from_its_folder(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(MODEL))
    Path("text").write_bytes(b"some text of which a model learns " * 20)
    short = ["--seq-len", "8", "--batch-size", "1", "--max-steps", "2", "--json", "--policy", "cpu"]
    given = ["--model", "model", "--data", "text", *short, "--run-dir", "a", "--no-save-model"]
    assert main(["train", *given]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["model"] == "model"
    assert main(["train", "--config", "a", "--run-dir", "b"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["losses"] == first["losses"]
    assert again["run_dir"] == "b"
    was, now = (json.loads(Path(run, "config.json").read_text()) for run in "ab")
    assert now == {**was, "run_dir": "b"}
    assert parsed("--config", "a", command="plan").seq_len == 8
    # What else a command writes of its run is no option; but it is of one command.
    Path("a/config.json").write_text(json.dumps({**was, "sequences": 3, "command": "finetune"}))
    assert "a/config.json is not of hetero train" in refused(capsys, "--config", "a")
    Path("a/config.json").write_text(json.dumps({**was, "sequences": 3}))
    assert parsed("--config", "a").run_dir is None


def _values(option: dataclasses.Field[object]) -> st.SearchStrategy[object]:
    kind = str(option.type).removesuffix(" | None")
    least, choices = option.metadata["least"], option.metadata["arguments"].get("choices")
    if choices is not None:
        return st.sampled_from(choices)
    if kind == "bool":
        return st.booleans()
    if kind == "int":
        return st.integers(2 if least is None else least, 1 << 40)
    if kind == "float":
        return st.floats(0, 1e9)
    text = st.text("ab=-: #'\"{[é", min_size=1, max_size=8).filter(lambda text: text != "--")
    return st.lists(text, max_size=3).map(tuple) if kind.startswith("tuple") else text


OPTIONS = {option.name: option for option in dataclasses.fields(TrainOptions)}
UNLIKE = ("model", "vocab_size", "recompute")  # which exclude each other


@given(st.data())
def test_a_file_says_what_the_dataclass_says(data: st.DataObject) -> None:
    names = data.draw(st.sets(st.sampled_from(sorted(set(OPTIONS) - set(UNLIKE))), max_size=6))
    values = {name: data.draw(_values(OPTIONS[name]), name) for name in names}
    listed = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(listed, file, allow_unicode=True)
        file.flush()
        assert parsed("--config", file.name) == TrainOptions(**values)  # type: ignore[arg-type]


def test_advanced_options_are_shown_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    texts = {}
    for word in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as raised:
            main(["train", word])
        assert raised.value.code == 0
        texts[word] = capsys.readouterr().out
    for option in OPTIONS.values():
        name = "--" + option.name.replace("_", "-")
        if option.metadata["advanced"]:
            assert name not in texts["--help"]
            assert name in texts["--help-all"]
    assert "--help-all" in texts["--help"]
    assert texts["--help"].count("\n  --") <= 39
    assert "--learning-rate" not in texts["--help-all"]  # which is understood, as the Trainer's


@pytest.mark.parametrize("command", ["train", "finetune", "plan"])
def test_one_flag_has_one_name(command: str) -> None:
    parser = next(a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction))
    flags = parser.choices[command]._option_string_actions
    shown = {flag for flag, action in flags.items() if action.help != argparse.SUPPRESS}
    assert {"--grad-accum", "--config", "--help-all"} <= shown
    assert "--gradient-accumulation-steps" in flags.keys() - shown
    assert "--gradient-checkpointing" in shown or command == "finetune"
    assert {"--max-steps", "--max-grad-norm"} <= shown or command == "plan"
