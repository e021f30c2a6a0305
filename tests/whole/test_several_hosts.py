"""Ranks on several hosts: bytes between them, their folders and names, and the loss of one.

The hosts are network namespaces (tests/support/ranks/hosts.py), so this needs root.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.harness.ranks import RankError, rank_log, run_ranks
from hetero.job.options import TrainOptions
from tests.support.ranks.hosts import INTERFACE, Hosts, why_no_hosts
from tests.support.training.loops import SMALLEST_MODEL
from tests.support.waiting import until

WHY_NOT = why_no_hosts()
pytestmark = [
    pytest.mark.extra,
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
]
GIGABIT, SLOW = 125e6, 12.5e6  # bytes per second
MODULE = "tests.support.ranks.on_hosts"


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(2, GIGABIT) as made:
        yield made


def run(name: str, ranks: int, out: Path, hosts: Hosts | None, *arguments: Any) -> list[Any]:
    """What each rank returns of a function of on_hosts."""
    command = [sys.executable, "-m", MODULE, name, str(out), *map(str, arguments)]
    command = command if hosts is None else hosts.spread(command, ranks)
    run_ranks(command, ranks, os.environ, out / f"{name}.log", None, 300)
    return [json.loads((out / f"{name}-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("bytes_per_s", [GIGABIT, SLOW])
def test_hybrid_sharding_sends_gradients_alone_between_hosts(
    bytes_per_s: float, tmp_path: Path
) -> None:
    """The bits of one machine. Inside a host ranks read each other's memory, which sends nothing;
    between hosts go the means of gradients, (r - 1)/r of each shard twice."""
    steps = 20
    one = run("hybrid", 4, tmp_path, None, steps)
    with Hosts(2, bytes_per_s) as hosts:
        two = run("hybrid", 4, tmp_path, hosts, steps)
        sent = [hosts.sent_bytes(host) for host in range(2)]
    assert [rank["losses"] for rank in two] == [rank["losses"] for rank in one]
    assert [rank["local_ranks"] for rank in two] == [2] * 4
    assert [rank["reads_memory"] for rank in one] == [[True, True]] * 4
    assert [rank["reads_memory"] for rank in two] == [[True, False]] * 4
    assert [rank["sent_bytes"] for rank in two] == [rank["sent_bytes"] for rank in one]
    inside, between = two[0]["sent_bytes"]
    params = 64 * 256 + 256 + 256 * 64 + 64
    shard_bytes = 4 * params // 2
    assert steps * shard_bytes <= between < steps * shard_bytes * 5 // 4  # padded chunks
    assert inside > between
    for host_sent in sent:
        assert 2 * between < host_sent < 2 * between + inside // 2 + (1 << 20)


def give_own(hosts: Hosts, path: Path) -> list[Path]:
    """Gives each host a folder of its own at `path`, which the others do not see.

    Returns where this process sees them, beside `path`, by host.
    """
    folders = [path.with_name(f"{path.name}-{hosts.name(host)}") for host in range(hosts.count)]
    path.mkdir()
    for host, folder in enumerate(folders):
        folder.mkdir()
        bind = hosts.command(host, ["mount", "--bind", str(folder), str(path)])
        subprocess.run(bind, check=True)
    return folders


def test_checkpoints_need_a_folder_that_all_hosts_see(hosts: Hosts, tmp_path: Path) -> None:
    """Else all ranks are told which host does not see which file, before anything is replaced, and
    training can go on. Whole copies of a checkpoint on each host can be loaded."""
    own = give_own(hosts, tmp_path / "own")
    first, second = run("checkpoints", 2, tmp_path, hosts, tmp_path / "shared", tmp_path / "own")
    for rank in (first, second):
        assert rank["loaded"] == rank["then"]
        assert rank["loaded copies"] == ["", rank["then"]]
    told = first["saved to separate ones"]
    assert "rank 1 on host1 could not save" in told
    assert f"does not see {tmp_path / 'own' / '.a.incomplete'} on host1" in told
    assert "on a filesystem that all machines share" in told
    for rank in (first, second):
        told = rank["saved beside leftovers"]
        assert "on host0 has no rank-0001-of-0002.safetensors" in told
        assert "on a filesystem that all machines share" in told
    for case, why in (
        ("loaded where one sees it", "there is no checkpoint"),
        ("loaded where one sees its own file", "rank-0000-of-0002.safetensors cannot be read"),
    ):
        assert "rank 1 on host1 could not load" in first[case]
        assert "must be on a filesystem that all machines share" in first[case]
        assert why in first[case]
        assert why in second[case]
    assert not (own[0] / ".a.incomplete").exists()


def test_each_host_commits_to_its_own_disk(hosts: Hosts, tmp_path: Path) -> None:
    """And goes on from there; if one host's disk is gone, that is an error of all."""
    own = give_own(hosts, tmp_path / "nvme")
    without_end = run("commits", 2, tmp_path, hosts, tmp_path / "nvme")
    assert [rank["begin"] for rank in without_end] == [0, 0]
    resumed = run("commits", 2, tmp_path, hosts, tmp_path / "nvme")
    assert [rank["begin"] for rank in resumed] == [2, 2]
    for path in own[1].iterdir():
        shutil.rmtree(path)
    for rank in run("commits", 2, tmp_path, hosts, tmp_path / "nvme"):
        assert "has records of the ranks [0] alone" in rank["error"]
        assert "the directories of the others are also needed" in rank["error"]


def test_hosts_of_one_name_are_two_machines(hosts: Hosts, tmp_path: Path) -> None:
    """Images have the same name on many machines; budgets are not divided by that."""
    for host in range(2):
        subprocess.run(hosts.command(host, ["hostname", "image"]), check=True)
    assert [rank["local_ranks"] for rank in run("plain", 2, tmp_path, hosts)] == [1, 1]


@pytest.mark.parametrize("address", ["127.0.1.1", None])
def test_a_host_name_of_the_loopback_address_or_of_none(
    address: str | None, hosts: Hosts, tmp_path: Path
) -> None:
    """As Debian has it in /etc/hosts; gloo would listen where no other host can connect."""
    for host in range(2):
        names = tmp_path / f"hosts{host}"
        own = "" if address is None else f"{address} image{host}\n"
        names.write_text(f"127.0.0.1 localhost\n{own}{hosts.address(0)} first\n")
        change = f"hostname image{host} && mount --bind {names} /etc/hosts"
        subprocess.run(hosts.command(host, ["sh", "-c", change]), check=True)
    found = run("without_interface", 2, tmp_path, hosts)
    assert [rank["interface"] for rank in found] == [INTERFACE] * 2


def hetero_train(
    tmp_path: Path, hosts: Hosts | None, ranks: int = 2, **options: Any
) -> dict[str, Any]:
    """What `hetero train` tells; its run is in the folder `runs`, its nvme in `nvme`."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SMALLEST_MODEL))
    where = {"nvme_path": (str(tmp_path / "nvme"),), "run_dir": str(tmp_path / "runs" / "a")}
    small: dict[str, Any] = {"seq_len": 16, "batch_size": 1, "threads": 1, "host_memory": "4MiB"}
    chosen = {"steps": 4, "dtype": "fp32", "policy": "nvme", "json": True, **small, **where}
    job = TrainOptions(model=str(config), **{**chosen, **options}).as_dict()
    (tmp_path / "job.json").write_text(json.dumps(job))
    command = [sys.executable, "-m", "hetero.cli", "train", f"--config={tmp_path}/job.json"]
    command = command if hosts is None else hosts.spread(command, ranks)
    out = tmp_path / "out"
    run_ranks(command, ranks, os.environ, tmp_path / "train.log", out, 300)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_hetero_train_with_folders_of_each_host(hosts: Hosts, tmp_path: Path) -> None:
    """What needs a shared run folder is refused before the first step; commits do not."""
    give_own(hosts, tmp_path / "runs")
    give_own(hosts, tmp_path / "nvme")
    for options, why in (
        ({"save_every": 2, "save_model": False}, "--save-every needs a folder"),
        ({}, "the trained model .without it: --no-save-model. needs a folder"),
    ):
        with pytest.raises(RankError, match=why) as refused:
            hetero_train(tmp_path, hosts, **options)
        assert f"rank 1 on host1 does not see --run-dir {tmp_path}/runs/a of rank 0 on host0" in (
            str(refused.value)
        )
        log = rank_log(tmp_path / "train.log", 0, 2).read_text()
        assert "step 1/" not in log
    whole = hetero_train(tmp_path, hosts, save_model=False, commit_every=2)
    assert whole["status"] == "finished"
    more = hetero_train(tmp_path, hosts, save_model=False, commit_every=2, steps=6, resume="")
    assert more["status"] == "finished"
    assert len(more["losses"]) == 2


def test_hetero_train_shards_within_hosts(tmp_path: Path) -> None:
    """--shard-ranks: the bits of the same on one machine, and less between hosts than without."""
    (tmp_path / "nvme").mkdir()
    told, sent = {}, {}
    for name, hosts_count, shard_ranks in (("one", 0, 2), ("hybrid", 2, 2), ("all", 2, None)):
        options = {"run_dir": str(tmp_path / name), "save_model": False}
        with contextlib.ExitStack() as stack:
            hosts = stack.enter_context(Hosts(hosts_count, GIGABIT)) if hosts_count else None
            told[name] = hetero_train(tmp_path, hosts, 4, shard_ranks=shard_ranks, **options)
            if hosts is not None:
                sent[name] = hosts.sent_bytes(0)
    assert told["hybrid"]["losses"] == told["one"]["losses"]
    assert told["hybrid"]["sent_bytes_per_step"] == told["one"]["sent_bytes_per_step"]
    assert sent["hybrid"] < sent["all"]


def start_agent(
    hosts: Hosts, host: int, tmp_path: Path, environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    """torchrun on one of one or two hosts, with one rank."""
    rendezvous = "--nnodes 1:2 --nproc-per-node 1 --max-restarts 3 --rdzv-backend c10d --rdzv-id x"
    rendezvous += f" --rdzv-endpoint {hosts.name(0)}:29500 --rdzv-conf last_call_timeout=20,"
    rendezvous += "keep_alive_interval=1,keep_alive_max_attempt=3"
    program = ["-m", MODULE, "elastic", tmp_path, tmp_path / "saved", tmp_path / "marks", "60"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *rendezvous.split()]
    with (tmp_path / f"agent{host}.log").open("wb") as log:
        return subprocess.Popen(
            hosts.command(host, [*torchrun, *map(str, program)]),
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


@pytest.mark.parametrize("comes_back", [False, True])
def test_the_run_goes_on_with_the_hosts_that_are_left(comes_back: bool, tmp_path: Path) -> None:
    """From the last checkpoint; and again with two when another host has joined. torchrun (2.13)
    tells a host that joins no address unless its ranks have a store of their own."""
    marks = tmp_path / "marks"
    marks.mkdir()
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if comes_back else {}

    def seen(text: str) -> list[str]:
        return [each.name for each in marks.iterdir() if text in each.name]

    with Hosts(3, GIGABIT) as hosts:
        agents = [start_agent(hosts, host, tmp_path, environment) for host in range(2)]
        until(lambda: (tmp_path / "saved" / "step-50").exists(), "no checkpoint of two hosts")
        assert set(seen("")) == {"0-of-2-0", "0-of-2-1"}
        hosts.lose(1)
        until(lambda: seen("50-of-1-0"), "the host that is left did not go on")
        if comes_back:
            agents.append(start_agent(hosts, 2, tmp_path, environment))
            until(lambda: len(seen("50-of-2")) == 2, "the new host did not join")
        (marks / "end").touch()
        assert agents[0].wait(120) == 0, (tmp_path / "agent0.log").read_text()[-2000:]
        for agent in agents[1:]:
            agent.wait(120)
    found = json.loads((tmp_path / "elastic-0.json").read_text())
    assert found["begin"] == 50
    assert found["size"] == 1 + comes_back
    assert len(found["losses"]) == 10
    assert "PeerError" in (tmp_path / "agent0.log").read_text()
