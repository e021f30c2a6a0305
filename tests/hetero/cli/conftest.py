"""Fixtures of the commands' tests."""

from __future__ import annotations

import pytest

from hetero.cli.main import main
from tests.support.cli_runs import Prints, Refuses, words_of


@pytest.fixture
def refuses(capsys: pytest.CaptureFixture[str]) -> Refuses:
    """Runs `hetero` with arguments, as words_of() takes them, which must say something of them, and
    end with a code: refuses(said, *given)."""

    def run(said: str, *given: str | list[str], code: int = 2) -> None:
        assert main(words_of(*given)) == code
        assert said in capsys.readouterr().err

    return run


@pytest.fixture
def prints(capsys: pytest.CaptureFixture[str]) -> Prints:
    """Runs `hetero` with such arguments, which must succeed; returns what it prints."""

    def run(*given: str | list[str]) -> str:
        capsys.readouterr()
        assert main(words_of(*given)) == 0
        return capsys.readouterr().out

    return run
