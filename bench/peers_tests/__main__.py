"""Other projects' own tests, from a checkout of theirs, run over hetero's adapters.

usage: python -m bench.peers_tests PEER --repo FOLDER [TEST ...] [-k EXPRESSION] [--timeout-s 1800]
                                   [--json FILE]

PEER is deepspeed, colossalai, accelerate, transformers or pytorch. FOLDER is the project's
repository. A TEST is a file, or a file::test, relative to the folder that the project's tests are
run in; without any, the usual ones are run. Packages that only tests import must be installed:
parameterized for transformers, expecttest for pytorch. Prints, for each file, how many tests
passed, were refused by name, failed, or need what hetero has not (the project's insides, or a
device), and lists the reasons. --timeout-s is of each file. --json writes every test's outcome. The
exit code is 1 if a test failed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.harness.machine import ROOT
from bench.harness.program import program_parser
from bench.peers_tests.peers import PEERS
from bench.peers_tests.results import PEER, RESULTS, Outcome, Result

# Python imports this at its start, so ranks that a test starts have the stand-ins, too.
_AT_START = """import os
from bench.peers_tests.stand_ins import install
from bench.peers_tests.peers import PEERS
install(PEERS[os.environ["{peer}"]])
"""


def run(peer: str, repo: Path, test: str, keyword: str | None, timeout_s: float) -> list[list[str]]:
    """Runs one file, or one test; a line for each test: those of Result, and the whole error."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(_AT_START.format(peer=PEER))
        Path(folder, "pytest.ini").write_text("[pytest]\n")
        results = Path(folder, "results")
        environment = {
            "OMP_NUM_THREADS": "1",
            "LOCAL_SIZE": "4",
            **os.environ,
            PEER: peer,
            RESULTS: str(results),
            "PYTHONPATH": os.pathsep.join([folder, str(ROOT)]),
        }
        command = [sys.executable, "-m", "pytest", "-c", f"{folder}/pytest.ini", "--rootdir=."]
        command += ["-p", "bench.peers_tests.results", "-p", "no:cacheprovider", "-q", "--tb=short"]
        command += ["-W", "ignore", *(["-k", keyword] if keyword else []), test]
        ended = "did not end in time"
        try:
            done = subprocess.run(
                command,
                cwd=repo / PEERS[peer].folder,
                env=environment,
                timeout=timeout_s,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            ended = "" if done.returncode in (0, 1, 5) else done.stdout[-2000:]
        except subprocess.TimeoutExpired:
            pass
        lines = results.read_text().splitlines() if results.exists() else []
        found: dict[str, list[str]] = {line[0]: line for line in map(json.loads, lines)}
    if ended:
        found[test] = [test, Outcome.FAILED.value, " ".join(ended.split())[-400:], ended]
    return list(found.values())


def _print(results: Sequence[Result]) -> None:
    console = Console(width=160, highlight=False)
    table = Table("tests", *(outcome.value for outcome in Outcome))
    files = dict.fromkeys(result.test.partition("::")[0] for result in results)
    rows = {file: [r for r in results if r.test.partition("::")[0] == file] for file in files}
    for name, those in {**rows, "all": results}.items():
        counts = Counter(result.outcome for result in those)
        table.add_row(name, *(str(counts[outcome.value]) for outcome in Outcome))
    console.print(table)
    for outcome in (Outcome.FAILED, Outcome.REFUSED, Outcome.ABSENT):
        reasons = Counter(r.reason for r in results if r.outcome == outcome.value)
        console.print(f"\n{outcome.value}: {reasons.total()}", markup=False)
        for reason, count in reasons.most_common():
            console.print(f"{count:4} {reason}", markup=False)
    for result in results:
        if result.outcome == Outcome.FAILED.value:
            console.print(f"failed: {result.test}", markup=False)


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = program_parser("bench.peers_tests", __doc__)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("tests", nargs="*")
    parser.add_argument("--repo", type=Path, required=True)
    parser.add_argument("-k", dest="keyword")
    parser.add_argument("--timeout-s", type=float, default=1800.0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_intermixed_args(argv)
    lines: list[list[str]] = []
    for test in given.tests or PEERS[given.peer].tests:
        lines += run(given.peer, given.repo, test, given.keyword, given.timeout_s)
        if given.json is not None:
            given.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    results = [Result(*line[:3]) for line in lines]
    _print(results)
    return int(any(result.outcome == Outcome.FAILED.value for result in results))


if __name__ == "__main__":
    sys.exit(main())
