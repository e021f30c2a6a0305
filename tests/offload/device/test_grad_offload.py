"""offload/device/grad_offload: gradients arrive in RAM, same bits, in order, inside the budget."""

import errno
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.device.grad_offload import BUFFERS, GradOffload
from offload.errors import BudgetError, HeteroError
from offload.memory.arena import HostArena
from offload.memory.ledger import Ledger
from offload.memory.tiers import Account, Tier
from tests.support.native.gates import GatedBackend, HeldOp
from tests.support.waiting import until

BUFFER = 4096
FAST = 1e11


class Rig:
    def __init__(self, limit: int = 1 << 20, budget: int | None = None, rate: float = FAST) -> None:
        self.ledger = Ledger({Tier.DEVICE: budget})
        self.backend = GatedBackend(rate)
        self.buffers = HostArena(BUFFERS, BUFFER, self.ledger, Account.BUFFER)
        self.buffers.commit(0, BUFFERS)
        self.grad_offload = GradOffload(self.backend, self.ledger, limit, self.buffers)

    def take(self, owner, grad, kept, add=False) -> None:
        self.grad_offload.take(owner, f"p{owner}", grad, kept, add)

    def wait(self, owner) -> None:
        self.grad_offload.wait(owner, f"p{owner}")

    def charged(self) -> int:
        return self.ledger.used(Tier.DEVICE, Account.GRAD_SLOT)

    def close(self) -> None:
        self.grad_offload.close()
        self.backend.close()
        self.buffers.close()
        assert set(self.ledger.in_use_bytes.values()) == {0}


def randn(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def test_shapes_and_strides(rig):
    r = rig()
    base = randn(24, torch.float32)
    grads = [base.view(4, 6).t(), base[::2].view(3, 4), torch.ones(()).expand(2, 3, 4)]
    for add in (False, True):
        for owner, grad in enumerate(grads):
            kept = torch.ones(grad.shape)
            want = kept + grad if add else grad.contiguous()
            r.take(owner, grad, kept, add)
            r.wait(owner)
            assert torch.equal(kept, want)


def test_a_first_gradient_needs_no_buffer(rig, monkeypatch):
    r = rig()
    copies, start = [], r.backend.d2h.start
    monkeypatch.setattr(r.backend.d2h, "start", lambda *sides: copies.append(1) or start(*sides))
    grad, kept = randn(100_000, torch.bfloat16), torch.zeros(100_000, dtype=torch.bfloat16)
    r.take(0, grad, kept)
    r.wait(0)
    assert same(kept, grad)
    assert len(copies) == 1


def test_a_replacing_gradient_does_not_overtake_what_is_added(rig):
    r = rig(rate=20e6)
    first, last = randn(4 * BUFFER, torch.float32, 1), randn(4 * BUFFER, torch.float32, 2)
    for _ in range(5):
        kept = torch.zeros(4 * BUFFER)
        r.take(0, first, kept, add=True)
        r.take(0, last, kept)
        r.take(0, first, kept, add=True)
        r.wait(0)
        assert torch.equal(kept, last + first)


def test_the_gradient_lives_until_it_has_arrived(rig):
    r = rig()
    kept = torch.zeros(10_000)
    with r.backend.gate.closed():
        r.take(0, torch.ones(10_000), kept)
        r.take(1, torch.ones(10_000), torch.zeros(10_000), add=True)
        assert r.charged() == 80_000
    r.wait(0)
    assert kept.eq(1).all()
    r.wait(1)
    assert r.charged() == 0


def test_the_place_is_leased_until_it_has_arrived(rig):
    r = rig()
    arena = HostArena(2, 1 << 16, r.ledger, Account.GRAD_SLOT)
    for slot, add in ((0, False), (1, True)):
        r.take(slot, torch.ones(1 << 14), arena.view(slot, 1, torch.float32, pinned=True), add)
    for owner in (0, 1):
        r.wait(owner)
    assert arena.live_views() == 0
    arena.close()


def test_bytes_under_way_are_limited(rig):
    r = rig(limit=100_000, budget=100_000, rate=5e6)
    kept = [torch.zeros(10_000) for _ in range(12)]
    with r.backend.gate.closed():
        for owner in range(2):
            r.take(owner, torch.full((10_000,), float(owner)), kept[owner], add=owner % 2 == 1)
        assert r.charged() == 80_000
    for owner in range(2, 12):
        r.take(owner, torch.full((10_000,), float(owner)), kept[owner], add=owner % 2 == 1)
        assert r.charged() <= 100_000
    for owner, place in enumerate(kept):
        r.wait(owner)
        assert place.eq(owner).all()
    assert r.ledger.peak_bytes["device"] == 80_000


def test_one_that_the_budget_cannot_hold_is_refused(rig):
    r = rig(limit=1000, budget=20_000)
    kept = torch.zeros(10_000)
    with pytest.raises(BudgetError, match=r"gradient of p3, 39.1 KiB.* device budget of 19.5 KiB"):
        r.take(3, torch.ones(10_000), kept)
    r.wait(3)
    r.take(3, torch.ones(5_000), kept[:5000])  # more than the limit: it goes alone
    r.take(4, torch.ones(5_000), kept[5000:])
    for owner in (3, 4):
        r.wait(owner)
    assert kept.eq(1).all()
    assert r.ledger.peak_bytes["device"] == 20_000


@pytest.mark.parametrize("add", [False, True])
def test_a_failure_is_raised_where_the_gradient_is_needed(rig, add):
    r = rig()
    kept, other = torch.zeros(3 * BUFFER), torch.zeros(10)
    r.backend.d2h.inject(0, error=errno.EIO)
    r.take(0, torch.ones(3 * BUFFER), kept, add)
    r.grad_offload.wait_ended(0)  # or the other gradient could fail
    r.take(1, torch.ones(10), other)
    r.wait(1)
    assert other.eq(1).all()
    for _ in range(2):
        with pytest.raises(HeteroError, match=r"the gradient of p0 did not arrive.*zero_grad\(\)"):
            r.wait(0)
    r.take(0, torch.ones(3 * BUFFER), kept, add=True)
    with pytest.raises(HeteroError, match="device to host"):
        r.wait(0)  # a part of it is missing still
    r.take(0, torch.ones(3 * BUFFER), kept)
    r.wait(0)
    assert kept.eq(1).all()
    assert r.charged() == 0


def test_busy_and_wait_one(rig, monkeypatch):
    r = rig()
    assert not r.grad_offload.wait_one()
    with r.backend.gate.closed():
        for owner in range(3):
            r.take(owner, torch.ones(5000), torch.zeros(5000))
        assert r.grad_offload.busy(2)
        wait = r.grad_offload._changed.wait

        def open_and_wait() -> None:
            r.backend.gate.open()
            wait()

        monkeypatch.setattr(r.grad_offload._changed, "wait", open_and_wait)
        assert r.grad_offload.wait_one()
    assert not r.grad_offload.busy(0)
    while r.grad_offload.wait_one():
        pass
    assert not r.grad_offload.busy(2)


def test_closing_waits_for_no_copy(rig):
    r = rig(rate=1000)  # a gradient takes 20 seconds
    kept = [torch.zeros(5000) for _ in range(4)]
    for owner, place in enumerate(kept):
        r.take(owner, torch.ones(5000), place, add=owner % 2 == 1)
    until(lambda: r.backend.d2h_bytes > 0)
    r.close()
    for owner, place in enumerate(kept):
        assert not place.eq(1).all()
        with pytest.raises(HeteroError, match="did not arrive"):
            r.wait(owner)
    with pytest.raises(HeteroError, match="the engine was closed"):
        r.take(0, torch.ones(500), torch.zeros(500))
    assert r.charged() == 0


def test_a_replaced_gradient_may_be_lost(rig):
    """It is cleared while it is under way, and fails when the next one has been given."""
    r = rig(rate=1e6)
    r.take(1, torch.ones(25_000), torch.zeros(25_000))  # keeps the link busy
    until(lambda: r.backend.d2h_bytes > 0)
    kept = torch.zeros(500)
    r.backend.d2h.inject(0)
    r.take(0, torch.ones(500, dtype=torch.bfloat16), kept)
    r.take(0, torch.full((500,), 2.0, dtype=torch.bfloat16), kept)
    r.wait(0)
    assert kept.eq(2).all()


def test_what_is_added_to_a_lost_gradient_is_lost(rig):
    r = rig()
    kept = torch.zeros(500)
    r.backend.d2h.inject(0)
    r.take(0, torch.ones(500), kept)
    r.take(0, torch.ones(500), kept, add=True)
    r.grad_offload.wait_ended(0)
    with pytest.raises(HeteroError, match="did not arrive"):
        r.wait(0)


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 3), st.booleans(), st.sampled_from(DTYPES)), max_size=20
    ),
    waits=st.sets(st.integers(0, 19)),
    kept_dtype=st.sampled_from(DTYPES),
)
def test_any_sequence(steps, waits, kept_dtype):
    r = Rig(limit=50_000, rate=1e9)
    numels, moved = (0, 1, BUFFER, 3 * BUFFER + 1), 0
    kept = [torch.zeros(numel, dtype=kept_dtype) for numel in numels]
    want = [place.clone() for place in kept]
    for number, (owner, add, dtype) in enumerate(steps):
        grad = randn(numels[owner], dtype, number)
        (want[owner].add_ if add else want[owner].copy_)(grad)
        r.take(owner, grad, kept[owner], add)
        moved += grad.nbytes
        if number in waits:
            r.wait(owner)
            assert same(kept[owner], want[owner])
    for owner in range(4):
        r.wait(owner)
        assert same(kept[owner], want[owner])
    assert (r.backend.d2h_bytes, r.backend.h2d_bytes, r.charged()) == (moved, 0, 0)
    r.close()


@pytest.mark.parametrize("began", [False, True])
def test_no_copy_goes_on_if_its_thread_cannot_start(rig, monkeypatch, began):
    """Its tensors are the caller's again, also where it `began`."""
    r, copies = rig(), []
    offload = r.backend.offload

    def noted(*arguments: object) -> object:
        copies.append(offload(*arguments))
        return copies[-1]

    def refuse(job: object) -> None:
        raise RuntimeError("can't start new thread")

    if began:
        monkeypatch.setattr(HeldOp, "cancel", lambda op: None)
        threading.Timer(0.1, r.backend.gate.open).start()
    kept = torch.zeros(8)
    monkeypatch.setattr(r.grad_offload._worker, "do", refuse)
    monkeypatch.setattr(r.backend, "offload", noted)
    with r.backend.gate.closed(), pytest.raises(RuntimeError, match="new thread"):
        try:
            r.take(0, torch.ones(8), kept)
        finally:
            assert copies[0].done()
    monkeypatch.undo()
    assert r.charged() == 0
    other = torch.zeros(8)
    r.take(1, torch.ones(8), other)
    r.wait(1)
    assert (kept.tolist(), other.tolist()) == ([float(began)] * 8, [1.0] * 8)
