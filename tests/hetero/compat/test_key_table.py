"""hetero/compat/key_table: keys of other projects' configurations."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hetero.compat.key_table import Key, KeyTable, Treatment, log_not_needed

TABLE = KeyTable(
    "things",
    taken="count size",
    not_needed={"there are chunks": "buckets"},
    refused={"do it by hand": "magic"},
    aliases={"sise": "size"},
)


def test_keys_of_a_reason_and_of_another_table() -> None:
    table = KeyTable("more", refused={"it is not there": "a b"}, others=TABLE.keys)
    assert list(table.keys) == ["a", "b", *TABLE.keys]
    assert table.keys["a"] == table.keys["b"] == Key(Treatment.REFUSED, "it is not there")


def test_values_come_back_under_their_usual_names() -> None:
    assert TABLE.read({"sise": 3, "count": 0, "buckets": 7}) == {"size": 3, "count": 0}


@pytest.mark.parametrize("off", [False, None, 0, "none", {"enabled": False}, {}])
def test_a_refused_key_may_be_off(off: object) -> None:
    assert TABLE.read({"magic": off}) == {}


@pytest.mark.parametrize("on", [True, 2, "yes", {"enabled": True}])
def test_a_refused_key_says_what_to_do(on: object) -> None:
    with pytest.raises(ValueError, match="refused: do it by hand"):
        TABLE.read({"magic": on})


def test_two_names_of_a_key_must_agree() -> None:
    assert TABLE.read({"size": 3, "sise": 3}) == {"size": 3}
    with pytest.raises(ValueError, match="size is given under two names, with 3 and 4"):
        TABLE.read({"size": 3, "sise": 4})


def test_what_is_not_needed_is_logged_once(
    not_needed: Callable[[], list[str]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for _ in range(2):
        TABLE.read({"buckets": 1})
    assert caplog.messages == ["things: buckets is not needed here, because there are chunks"]
    monkeypatch.setenv("RANK", "1")
    log_not_needed("another", "only the first rank says so")
    assert not_needed() == ["things: buckets"]
