"""Ranks on two hosts, which are network namespaces, train as on one; one host is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks import on_hosts
from tests.support.ranks.hosts import INTERFACE, Hosts, why_no_hosts
from tests.support.ranks.processes import RankPool
from tests.support.waiting import until

WHY_NOT = why_no_hosts()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
GIGABIT = 125e6  # bytes per second


def on(hosts: Hosts, host: int, program: str) -> str:
    command = hosts.command(host, [sys.executable, "-c", program])
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_host_has_its_own_network_name_processes_and_memory() -> None:
    own = """
import os, socket
open("/dev/shm/mine", "x")  # there is none of another host
listener = socket.create_server(("127.0.0.1", 40404))
print(socket.gethostname(), socket.gethostbyname(socket.gethostname()), os.getpid() < 100)
"""
    with Hosts(2, GIGABIT) as hosts:
        assert on(hosts, 0, own) == "host0 10.77.0.1 True\n"
        assert on(hosts, 1, own) == "host1 10.77.0.2 True\n"
        assert on(hosts, 1, "import os; print(os.getcwd())").strip() == os.getcwd()
        before = hosts.sent_bytes(1)
        on(hosts, 1, "import socket as s; s.socket(type=s.SOCK_DGRAM).sendto(b'', ('host0', 9))")
        assert hosts.sent_bytes(1) > before
        command = hosts.command(0, ["sleep", "1000"])
        left = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    assert left.wait(30) != 0  # it ended with its host


def test_ranks_on_two_hosts_train_as_one_machine_s(ranks2: RankPool, tmp_path: Path) -> None:
    """The same bits; a host sends what its rank sends the other, and little more. Then one is lost.

    Nothing tells the others: no connection is closed. They wait no longer than rank_timeout_s.
    """
    with Hosts(2, GIGABIT) as hosts:
        ranks = []
        for rank in range(2):
            own = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            place = {"MASTER_ADDR": hosts.address(0), "MASTER_PORT": "29400"}
            command = [sys.executable, "-m", on_hosts.__name__, "until_lost", str(tmp_path)]
            process = subprocess.Popen(
                hosts.command(rank, [*command, str(tmp_path)]),
                env={**os.environ, **own, **place, "GLOO_SOCKET_IFNAME": INTERFACE},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            ranks.append(process)

        def are_there(*names: str) -> None:
            until(
                lambda: (
                    all((tmp_path / name).exists() for name in names)
                    or any(rank.poll() is not None for rank in ranks)
                )
            )

        are_there("plain-0", "plain-1")
        sent = [hosts.sent_bytes(host) for host in range(2)]
        (tmp_path / "go").touch()
        are_there("1-3")
        hosts.lose(1)
        said, _ = ranks[0].communicate(timeout=120)
        assert ranks[0].returncode == 0, said
        ranks[1].communicate(timeout=120)
    two = [json.loads((tmp_path / f"plain-{rank}").read_text()) for rank in range(2)]
    one = ranks2.run(on_hosts.plain_of_rank)
    assert [rank["losses"] for rank in two] == [rank["losses"] for rank in one]
    for rank, nbytes in zip(two, sent, strict=True):
        assert 0 < rank["sent_bytes"] < nbytes < rank["sent_bytes"] * 5 // 4 + (1 << 20)
    assert json.loads((tmp_path / "until_lost-0.json").read_text()).startswith("PeerError")
