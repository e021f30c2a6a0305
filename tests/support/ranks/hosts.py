"""Network namespaces of this machine as hosts, with links of a given rate between them.

Each host has its own network, name, boot, process numbers, shared memory and /dev/shm, so nothing
that needs one machine works between two: no loopback, no other's memory. They share CPUs, disks and
the filesystem. Needs root, and ip, tc, unshare and nsenter (Linux; iproute2 and util-linux).

A host lives as long as a process of it that waits for this one: whichever way this one ends, the
hosts, their links and all that runs there end, too.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

_PROGRAMS = ("ip", "tc", "unshare", "nsenter")
_NAMESPACES = ("--net", "--uts", "--mount", "--ipc", "--pid")
# Reads until the pipe from this process is closed.
_HOST = """
hostname "$1" && mount --bind "$2/hosts" /etc/hosts && mount -t tmpfs tmpfs /dev/shm || exit 1
cat /proc/sys/kernel/random/uuid > "$2/$1" || exit 1
mount --bind "$2/$1" /proc/sys/kernel/random/boot_id || exit 1
echo ready
exec cat > /dev/null
"""
# A token bucket has to hold what comes in one tick of the kernel's clock (tc-tbf(8)); 1 ms here.
_BURST_S = 1e-3
_LEAST_BURST_BYTES = 32 << 10
INTERFACE = "eth0"  # of each host


def why_no_hosts() -> str | None:
    """Why no hosts can be made here; None if they can."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} is missing: install iproute2 and util-linux"
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    probe = ["unshare", *_NAMESPACES, "--fork", "--mount-proc", "ip", "link", "add", "type", "veth"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"namespaces are refused here: {done.stderr.strip()}"


class Hosts:
    """`count` hosts on one switch: a context manager, at whose end they are gone.

    Attributes:
        count: of hosts.
        bytes_per_s: of each host's link, in each direction.
    """

    def __init__(self, count: int, bytes_per_s: float) -> None:
        """Nothing is made yet. Raises ValueError if hosts cannot be made here."""
        why = why_no_hosts()
        if why is not None:
            raise ValueError(f"hosts: {why}")
        self.count = count
        self.bytes_per_s = bytes_per_s
        self._ends = ExitStack()
        self._pids: list[int] = []  # of the first process of each

    def __enter__(self) -> Hosts:
        with ExitStack() as undo:
            folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="hetero-hosts-")))
            lines = [f"{self.address(host)} {self.name(host)}" for host in range(self.count)]
            text = "\n".join(["127.0.0.1 localhost", *lines, ""])
            (folder / "hosts").write_text(text)
            switch = self._start(undo, "switch", folder)
            self._run(switch, "ip link add switch type bridge")
            self._run(switch, "ip link set switch up")
            for host in range(self.count):
                self._pids.append(self._start(undo, self.name(host), folder))
                self._connect(host, switch)
            self._ends = undo.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._pids.clear()
        self._ends.close()

    def name(self, host: int) -> str:
        """The host's name, which all hosts can look up."""
        return f"host{host}"

    def address(self, host: int) -> str:
        """The host's address on the switch."""
        return f"10.77.0.{host + 1}"

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """The command that runs `command` on the host."""
        where = ["--target", str(self._pids[host]), *_NAMESPACES, f"--wdns={os.getcwd()}"]
        return ["nsenter", *where, *command]

    def spread(self, command: Sequence[str], ranks: int) -> list[str]:
        """The command that runs `command` on the host of its rank, as many ranks on each.

        It is for run_ranks(), which tells all `ranks` that they are of this machine.
        """
        local_ranks = ranks // self.count
        script = f"""
        pids=({" ".join(map(str, self._pids))}); host=$((RANK / {local_ranks}))
        export GROUP_RANK=$host LOCAL_RANK=$((RANK % {local_ranks})) LOCAL_WORLD_SIZE={local_ranks}
        export MASTER_ADDR={self.address(0)} GLOO_SOCKET_IFNAME={INTERFACE}
        exec nsenter --target ${{pids[host]}} {" ".join(_NAMESPACES)} --wdns="$PWD" "$@"
        """
        return ["bash", "-c", script, "bash", *command]

    def lose(self, host: int) -> None:
        """The host is gone, as without power: it says nothing to the others."""
        os.kill(self._pids[host], signal.SIGKILL)

    def sent_bytes(self, host: int) -> int:
        """Bytes that have left the host so far, with all headers."""
        command = self.command(host, ["cat", "/proc/net/dev"])
        out = subprocess.run(command, capture_output=True, text=True, check=True)
        (line,) = (each for each in out.stdout.splitlines() if each.strip().startswith(INTERFACE))
        return int(line.partition(":")[2].split()[8])

    def _start(self, undo: ExitStack, name: str, folder: Path) -> int:
        """Starts a host's first process; returns its number here."""
        command = ["unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc"]
        process = subprocess.Popen(
            [*command, "sh", "-c", _HOST, "sh", name, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        undo.callback(_end, process)
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise OSError(f"{name} did not start; what it said is above")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        return int(children[0])

    def _connect(self, host: int, switch: int) -> None:
        pid, port = self._pids[host], f"port{host}"
        pair = f"{INTERFACE} netns {pid} type veth peer name {port} netns {switch}"
        subprocess.run(["ip", "link", "add", *pair.split()], check=True)
        self._run(switch, f"ip link set {port} master switch up")
        self._run(pid, "ip link set lo up")
        self._run(pid, f"ip address add {self.address(host)}/24 dev {INTERFACE}")
        self._run(pid, f"ip link set {INTERFACE} up")
        burst = max(_LEAST_BURST_BYTES, int(self.bytes_per_s * _BURST_S))
        shape = f"root tbf rate {int(self.bytes_per_s * 8)}bit burst {burst}b latency 50ms"
        self._run(pid, f"tc qdisc add dev {INTERFACE} {shape}")
        self._run(switch, f"tc qdisc add dev {port} {shape}")  # what the host receives

    def _run(self, pid: int, command: str) -> None:
        subprocess.run(["nsenter", "--target", str(pid), "--net", *command.split()], check=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()  # the first process ends, and with it all that runs there
    process.stdout.close()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
