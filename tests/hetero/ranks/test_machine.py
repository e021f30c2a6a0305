"""hetero/ranks/start/machine: machines of one name, and the interface where others connect."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace

import psutil
import pytest

from hetero.ranks.start import machine
from hetero.ranks.start.machine import choose_interface, machine_id

LOOPBACK = {"lo": ["127.0.0.1", "::1"]}
ONE = {**LOOPBACK, "eth0": ["10.0.0.1", "fe80::1%eth0"]}
TWO = {**ONE, "ib0": ["10.1.0.1"]}
SEVERAL_MACHINES = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}


def test_machines_of_one_name_are_not_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = machine_id()
    assert machine_id() == mine
    monkeypatch.setattr(machine, "boot_id", lambda: "another")
    assert machine_id() != mine


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Two interfaces, and a host name that leads to the loopback one; no way is known."""
    for name in (*SEVERAL_MACHINES, "GLOO_SOCKET_IFNAME", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    monkeypatch.setattr(machine, "_address_towards", lambda host: "")
    have(monkeypatch, TWO)
    return monkeypatch


def have(monkeypatch: pytest.MonkeyPatch, interfaces: dict[str, list[str]]) -> None:
    family = {True: socket.AF_INET6, False: socket.AF_INET}
    addresses = {
        name: [SimpleNamespace(family=family[":" in each], address=each) for each in found]
        for name, found in interfaces.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    is_up = dict.fromkeys(interfaces, SimpleNamespace(isup=True))
    monkeypatch.setattr(psutil, "net_if_stats", lambda: is_up)


def chosen(network: pytest.MonkeyPatch, **environment: str) -> str | None:
    for name, value in environment.items():
        network.setenv(name, value)
    choose_interface()
    return os.environ.get("GLOO_SOCKET_IFNAME")


@pytest.mark.parametrize(
    "environment", [{}, {"WORLD_SIZE": "2"}, {**SEVERAL_MACHINES, "WORLD_SIZE": "2"}]
)
def test_ranks_of_one_machine_need_none(
    environment: dict[str, str], network: pytest.MonkeyPatch
) -> None:
    assert chosen(network, **environment) is None


def test_what_the_user_says_stays(network: pytest.MonkeyPatch) -> None:
    assert chosen(network, **SEVERAL_MACHINES, GLOO_SOCKET_IFNAME="ib0") == "ib0"


def test_a_host_name_of_another_address_stays(network: pytest.MonkeyPatch) -> None:
    network.setattr(socket, "gethostname", lambda: "10.0.0.1")
    assert chosen(network, **SEVERAL_MACHINES) is None


def test_the_only_one_is_taken(network: pytest.MonkeyPatch) -> None:
    have(network, ONE)
    assert chosen(network, **SEVERAL_MACHINES) == "eth0"


@pytest.mark.parametrize(
    ("ways", "wanted"),
    [
        ({"first": "10.1.0.1"}, "ib0"),
        ({"first": "127.0.1.1", "192.0.2.1": "10.0.0.1"}, "eth0"),  # the first's own name
        ({"192.0.2.1": "fe80::1"}, "eth0"),
    ],
)
def test_the_way_to_the_first_machine_or_else_to_all(
    ways: dict[str, str], wanted: str, network: pytest.MonkeyPatch
) -> None:
    network.setattr(machine, "_address_towards", lambda host: ways.get(host, ""))
    assert chosen(network, **SEVERAL_MACHINES, MASTER_ADDR="first") == wanted


@pytest.mark.parametrize(("interfaces", "named"), [(TWO, "one of eth0, ib0"), (LOOPBACK, "ip -br")])
def test_several_or_none_are_an_error(
    interfaces: dict[str, list[str]], named: str, network: pytest.MonkeyPatch
) -> None:
    have(network, interfaces)
    with pytest.raises(ValueError, match=f"localhost.*set GLOO_SOCKET_IFNAME.*{named}"):
        chosen(network, **SEVERAL_MACHINES)


def test_the_kernel_knows_the_way_to_itself() -> None:
    assert machine._address_towards("127.0.0.1") == "127.0.0.1"
    assert machine._address_towards("no.such.host.invalid") == ""
