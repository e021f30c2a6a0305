"""How many units of the stripe pattern each directory gets."""

from __future__ import annotations

from collections.abc import Sequence

from offload._native import StripeMap

UNIT_BYTES = 1 << 20
MAX_PLACES = 16  # a short pattern keeps every directory busy within a few units
_MORE_PLACES = (MAX_PLACES, 4 * MAX_PLACES, 16 * MAX_PLACES)  # where space is tight
_TOLERANCE = 1.05  # a pattern this much slower than the best is taken if it is shorter


def choose_weights(
    rates: Sequence[float], nbytes: int, free: Sequence[int], filesystems: Sequence[int]
) -> list[int] | None:
    """Weights under which `nbytes` move fastest and fit; None if no pattern fits.

    `rates` are bytes per second, positive; `free` the free bytes of each directory's filesystem,
    and directories with the same number in `filesystems` share them. The time of a pattern is
    max(weight / rate): the slowest member's. A directory so slow that others would wait for it
    gets 0. The shortest pattern within 5 % of the best is taken.
    """
    room = dict(zip(filesystems, free, strict=True))

    def fastest(places: int) -> list[int] | None:
        """Deals `places` one by one to who is done with one more first, as far as there is room."""
        weights = [0] * len(rates)
        left = {fs: room[fs] * places // max(1, nbytes) for fs in room}
        for _ in range(places):
            open_ = [member for member, fs in enumerate(filesystems) if left[fs] > 0]
            if not open_:
                return None
            taker = min(open_, key=lambda member: (weights[member] + 1) / rates[member])
            weights[taker] += 1
            left[filesystems[taker]] -= 1
        return weights

    for most in _MORE_PLACES:
        found: list[tuple[float, list[int]]] = []
        for places in range(1, most + 1):
            weights = fastest(places)
            if weights and fits(weights, nbytes, room, filesystems):
                slowest = max(w / rate for w, rate in zip(weights, rates, strict=True))
                found.append((slowest / places, weights))
        if found:
            best = min(cost for cost, _ in found)
            return next(weights for cost, weights in found if cost <= best * _TOLERANCE)
    return None


def fits(
    weights: Sequence[int], nbytes: int, room: dict[int, int], filesystems: Sequence[int]
) -> bool:
    """Whether the shares of `nbytes` under `weights` are within the `room` of each filesystem."""
    used = [(w, filesystem) for w, filesystem in zip(weights, filesystems, strict=True) if w]
    stripes = StripeMap([w for w, _ in used], UNIT_BYTES)
    left = dict(room)
    for member, (_, filesystem) in enumerate(used):
        left[filesystem] -= stripes.member_bytes(member, nbytes)
    return min(left.values()) >= 0
