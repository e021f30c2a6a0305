"""offload/memory/ledger: budgets are never passed and nothing is lost on the way."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import BudgetError
from offload.memory.ledger import Ledger
from offload.memory.tiers import Account, Tier

HOST, DISK = Tier.HOST, Tier.DISK
PARAM, GRAD, OPTIM_STATE = Account.PARAM, Account.GRAD, Account.OPTIM_STATE

changes = st.lists(
    st.tuples(st.sampled_from(Tier), st.sampled_from(Account), st.integers(0, 60), st.booleans()),
    max_size=40,
)
budgets = st.fixed_dictionaries({}, optional=dict.fromkeys(Tier, st.none() | st.integers(0, 100)))


@given(budgets, changes)
def test_any_sequence_agrees_with_a_simple_model(budgets, changes):
    ledger = Ledger(budgets)
    held = {(t, a): 0 for t in Tier for a in Account}
    peak = dict.fromkeys(Tier, 0)
    for tier, account, nbytes, gives_back in changes:
        total = sum(n for (t, _), n in held.items() if t is tier)
        budget = budgets.get(tier)
        if gives_back:
            nbytes = min(nbytes, held[tier, account])
            ledger.release(tier, account, nbytes)
            held[tier, account] -= nbytes
        elif budget is not None and total + nbytes > budget:
            with pytest.raises(BudgetError):
                ledger.charge(tier, account, nbytes)
        else:
            ledger.charge(tier, account, nbytes)
            held[tier, account] += nbytes
            peak[tier] = max(peak[tier], total + nbytes)
        in_use = {t: sum(n for (u, _), n in held.items() if u is t) for t in Tier}
        assert {(t, a): ledger.used(t, a) for t in Tier for a in Account} == held
        assert ledger.in_use_bytes == {t.value: n for t, n in in_use.items()}
        assert ledger.peak_bytes == {t.value: n for t, n in peak.items()}


def test_the_refusal_has_the_numbers():
    ledger = Ledger({HOST: 100 << 10, DISK: 5})
    ledger.charge(HOST, PARAM, 60 << 10)
    ledger.charge(HOST, OPTIM_STATE, 20 << 10)
    ledger.charge(DISK, GRAD, 5)
    with pytest.raises(BudgetError) as refusal:
        ledger.charge(HOST, GRAD, (20 << 10) + 7)
    message = str(refusal.value)
    held = "param 60.0 KiB", "optim_state 20.0 KiB"
    for fact in ("host budget of 100.0 KiB", "by 7 bytes", *held):
        assert fact in message
    assert "5 B" not in message  # what other tiers hold


def test_the_largest_budget_is_what_a_peak_is_compared_with():
    ledger = Ledger({HOST: 100})
    ledger.charge(HOST, PARAM, 100)
    ledger.release(HOST, PARAM, 70)
    for nbytes, largest in ((40, 100), (120, 120), (30, 120)):
        ledger.set_budget(HOST, nbytes)
        ledger.set_budget(DISK, nbytes)
        assert ledger.largest_budget_bytes == {"device": None, "host": largest, "disk": None}
    assert ledger.peak_bytes["host"] == 100 > (ledger.budget_bytes["host"] or 0)


def test_relieve_is_asked_once_for_just_what_is_missing():
    """If it frees too little, nothing changes but what it freed."""
    asked, freed = [], [50, 1]

    def relieve(tier, nbytes):
        asked.append((tier, nbytes))
        ledger.release(HOST, Account.INIT, freed[len(asked) - 1])

    ledger = Ledger({HOST: 100}, relieve)
    ledger.charge(HOST, Account.INIT, 90)
    ledger.charge(HOST, PARAM, 10)
    assert asked == []
    ledger.charge(HOST, PARAM, 20)
    assert asked == [(HOST, 20)]
    assert ledger.used(HOST, Account.INIT) == 40
    assert ledger.used(HOST, PARAM) == 30
    assert ledger.peak_bytes["host"] == 100
    with pytest.raises(BudgetError, match="by 69 bytes"):
        ledger.charge(HOST, PARAM, 100)
    assert asked[1:] == [(HOST, 70)]
    assert ledger.used(HOST, Account.INIT) == 39
    assert ledger.used(HOST, PARAM) == 30


def test_a_relieve_that_raises_leaves_the_ledger_usable():
    def relieve(tier, nbytes):
        raise OSError("disk gone")

    ledger = Ledger({HOST: 100}, relieve)
    ledger.charge(HOST, PARAM, 100)
    with pytest.raises(OSError, match="disk gone"):
        ledger.charge(HOST, GRAD, 1)
    ledger.release(HOST, PARAM, 1)
    ledger.charge(HOST, GRAD, 1)
    assert ledger.in_use_bytes["host"] == 100


def test_what_was_not_charged_cannot_be_released():
    ledger = Ledger({})
    ledger.charge(HOST, PARAM, 10)
    for tier, account, nbytes in [(HOST, PARAM, 11), (HOST, GRAD, 1), (DISK, PARAM, 1)]:
        with pytest.raises(AssertionError):
            ledger.release(tier, account, nbytes)
    assert ledger.in_use_bytes == {"device": 0, "host": 10, "disk": 0}


def test_threads_together_never_pass_the_budget():
    ledger = Ledger({HOST: 10})
    refused = []

    def work():
        for _ in range(2000):
            try:
                ledger.charge(HOST, PARAM, 3)
            except BudgetError:
                refused.append(1)
            else:
                ledger.release(HOST, PARAM, 3)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.in_use_bytes["host"] == ledger.used(HOST, PARAM) == 0
    assert ledger.peak_bytes["host"] <= 9


def test_a_peak_is_of_the_time_since_it_was_asked_last():
    ledger = Ledger({})
    ledger.charge(HOST, PARAM, 50)
    ledger.release(HOST, PARAM, 40)
    assert ledger.take_peak(HOST) == 50
    assert ledger.take_peak(HOST) == 10
    ledger.charge(HOST, PARAM, 20)
    assert ledger.take_peak(HOST) == 30
    assert ledger.peak_bytes["host"] == 50
