"""Batches for a server: what fits, answered from the law in microseconds, and requests packed by it.

A :class:`MemoryBudget` is made once, at start-up, from an estimate, or from one for each of a few
sequence lengths. It never changes, so any number of threads may ask it. :func:`plan` is a function: it
takes the requests that wait and says which go together; nothing is dropped.

Between two lengths the bytes lie on the chord: memory grows with the length in linear and quadratic
parts, none negative, so the chord is nowhere below it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass

from fxmem.batch import Limits
from fxmem.device import Device, as_device
from fxmem.errors import UsageError
from fxmem.estimate import Estimate
from fxmem.program import MAX_BATCH

_UNREPLAYED = 1.03
"""Between two lengths nothing was replayed: what the allocator may waste there more than at the lengths themselves."""


class MemoryBudget:
    """What fits a device, as the estimates of one model say.

    Args:
        estimates: One estimate, or one for each sequence length of a few; best made for the same device
            and safety, since then their proved largest batches count.
        device: A device with a limit, or its name or size.
        safety: Share of the memory that may be used.
        reserve_bytes: Left to others besides.
        processes: Replicas on the device.

    Raises:
        UsageError: The device has no limit, or no estimate is given.
    """

    __slots__ = ("_curves", "_seqs", "allocator_bytes")

    def __init__(
        self, estimates: Estimate | Mapping[int, Estimate], device: Device | str, safety: float = 0.9, *,
        reserve_bytes: int = 0, processes: int = 1,
    ) -> None:  # fmt: skip
        device = as_device(device)
        if device.capacity_bytes is None:
            raise UsageError("a budget needs a limit", hint="name a GPU or a size such as 24GiB")
        by_seq = {0: estimates} if isinstance(estimates, Estimate) else dict(sorted(estimates.items()))
        if not by_seq:
            raise UsageError("a budget needs an estimate")
        self.allocator_bytes = Limits(
            capacity_bytes=device.capacity_bytes, context_bytes=device.context_bytes, safety=safety,
            reserve_bytes=reserve_bytes, processes=processes,
        ).allocator_bytes  # fmt: skip
        """What the allocator of one process may reserve."""
        self._seqs = [] if isinstance(estimates, Estimate) else list(by_seq)
        self._curves = [_Curve(estimate, self.allocator_bytes) for estimate in by_seq.values()]

    def bytes(self, batch: int, seq: int | None = None) -> int:
        """What a batch counts for against :attr:`allocator_bytes`, computed from the law: no replay.

        The bytes that tensors request at the peak, times the factor at which the largest batch that was proved
        is the last within the limit (without one, that of the estimate's own run: reserved to requested bytes).
        The allocator reserves in steps and fills what it may before it gives cached blocks back, so what
        ``torch.cuda.max_memory_reserved()`` shows for a batch may lie on either side of this.

        Args:
            batch: Samples.
            seq: Their length after padding; ``None`` where the budget knows one length only.

        Raises:
            UsageError: The estimates do not reach this batch or length.
        """
        below, above, share = self._place(seq)
        found = above.counted(batch)
        if share < 1.0 and found is not None:
            low = below.counted(batch)
            found = None if low is None else int((low + (found - low) * share) * _UNREPLAYED)
        if found is None:
            raise UsageError(f"the estimates do not reach batch {batch}", hint="make them with a batch law")
        return found

    def fits(self, batch: int, seq: int | None = None) -> bool:
        """Whether a batch fits; false where the estimates do not reach.

        Args:
            batch: Samples.
            seq: As for :meth:`bytes`.
        """
        if self._seqs and (seq is None or seq > self._seqs[-1]):
            return False
        below, above, share = self._place(seq)
        if batch <= above.largest:
            return True
        if share >= 1.0 or batch > below.largest:
            return False
        low, high = below.counted(batch), above.counted(batch)
        if low is None or high is None:
            return False
        return (low + (high - low) * share) * _UNREPLAYED <= self.allocator_bytes

    def largest(self, seq: int | None = None) -> int:
        """The largest batch that fits at a length; 0 if none does."""
        if self._seqs and (seq is None or seq > self._seqs[-1]):
            return 0
        below, above, _ = self._place(seq)
        return _last(above.largest, max(below.largest, above.largest), lambda batch: self.fits(batch, seq))

    def _place(self, seq: int | None) -> tuple[_Curve, _Curve, float]:
        """The curves on both sides of a length, and how far it is on the way between them."""
        if not self._seqs:
            return self._curves[0], self._curves[0], 1.0
        if seq is None or seq > self._seqs[-1]:
            raise UsageError(f"the estimates reach sequences of {self._seqs[-1]}, not {seq}")
        at = bisect_left(self._seqs, seq)
        if at == 0 or self._seqs[at] == seq:
            return self._curves[at], self._curves[at], 1.0
        low, high = self._seqs[at - 1], self._seqs[at]
        return self._curves[at - 1], self._curves[at], (seq - low) / (high - low)


class _Curve:
    """What one length counts for: the law of its estimate, scaled so that the proved largest batch is the last."""

    __slots__ = ("_factor", "_pieces", "_starts", "largest")

    def __init__(self, estimate: Estimate, room: int) -> None:
        self._pieces = estimate.scaling.pieces
        self._starts = [piece.from_batch for piece in self._pieces]
        own, best, capacity = estimate.peak, estimate.max_batch, estimate.device.capacity_bytes
        self._factor = own.reserved_bytes / own.requested_bytes if own.requested_bytes else 1.0
        proved: tuple[int, int] | None = None
        if best is not None and best.batch is not None and best.proved and capacity is not None:
            limits = Limits(
                capacity_bytes=capacity, context_bytes=estimate.breakdown.context, safety=best.safety,
                reserve_bytes=best.reserved_for_others_bytes,
            )  # fmt: skip
            proved = best.batch, limits.allocator_bytes
            self._calibrate(*proved)
        self._factor = max(self._factor, 1.0)
        found = _last(0, MAX_BATCH, lambda batch: (need := self.counted(batch)) is not None and need <= room)
        self.largest = found if proved is None or room > proved[1] else min(found, proved[0])
        if proved is not None and room == proved[1]:
            self.largest = proved[0]

    def counted(self, batch: int) -> int | None:
        """See :meth:`MemoryBudget.bytes`; ``None``: the law does not reach this batch."""
        requested = self._requested(batch)
        return None if requested is None else int(requested * self._factor)

    def _requested(self, batch: int) -> int | None:
        """A batch between the pieces needs no more than the next one that is known."""
        at = bisect_right(self._starts, batch) - 1
        if at >= 0 and self._pieces[at].covers(batch):
            return self._pieces[at].at(batch)
        return self._pieces[at + 1].at(self._starts[at + 1]) if at + 1 < len(self._pieces) else None

    def _calibrate(self, batch: int, room: int) -> None:
        """The allocator holds ``batch`` in ``room`` and no larger one: keep the factor between what that allows."""
        requested, beyond = self._requested(batch), self._requested(batch + 1)
        if beyond:
            self._factor = max(self._factor, room / beyond)
        if batch and requested:
            self._factor = min(self._factor, room / requested)


def _last(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The last number of [low, high] for which ``holds``, which it does for ``low`` and then until some number."""
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Samples that wait to go through the model together.

    Raises:
        UsageError: A size is not positive.
    """

    id: Hashable
    samples: int = 1
    seq: int | None = None
    """Length of the longest sample; ``None`` where the budget knows one length only."""
    arrived: float = 0.0
    """When it came, on the caller's clock."""

    def __post_init__(self) -> None:
        if self.samples < 1 or (self.seq is not None and self.seq < 1):
            raise UsageError(f"request {self.id!r} has {self.samples} samples of length {self.seq}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Requests that go through the model together, padded to the longest."""

    requests: tuple[Request, ...]
    samples: int
    seq: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """Each request is in exactly one batch, or can never fit."""

    batches: tuple[Batch, ...]
    """In the order in which they should run."""
    impossible: tuple[Request, ...] = ()
    """Too large on their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How requests are put together."""

    keep_order: bool = False
    """Batches are runs of the requests as they came; else they are packed tightly."""
    max_samples: int | None = None
    """No batch is larger than this."""
    max_wait: float | None = None
    """Requests that have waited so long go first, in the order in which they came."""
    max_padding: float = 1.0
    """How much of a sample may be padding: 0.25 puts nothing below three quarters of the batch's length into it."""


def plan(
    requests: Iterable[Request], budget: MemoryBudget, policy: Policy | None = None, *, now: float = 0.0
) -> BatchPlan:
    """Pack requests into batches that fit.

    Args:
        requests: What waits, oldest first.
        budget: Says what fits.
        policy: The options; packed tightly by default.
        now: The time on the clock of :attr:`Request.arrived`.

    Returns:
        The batches, and what can never fit.
    """
    policy = policy or Policy()
    room = _Room(budget, policy)
    possible: list[Request] = []
    impossible: list[Request] = []
    for request in requests:
        (possible if request.samples <= room.of(request.seq) else impossible).append(request)
    overdue, rest = [], possible
    if policy.max_wait is not None and not policy.keep_order:
        limit = now - policy.max_wait
        overdue = [request for request in possible if request.arrived <= limit]
        rest = [request for request in possible if request.arrived > limit]
    packed = _in_order(rest, room) if policy.keep_order else _packed(rest, room)
    return BatchPlan(batches=(*_in_order(overdue, room), *packed), impossible=tuple(impossible))


class _Room:
    """Samples that fit at each length, looked up once."""

    def __init__(self, budget: MemoryBudget, policy: Policy) -> None:
        self.policy = policy
        self._budget = budget
        self._known: dict[int | None, int] = {}

    def of(self, seq: int | None) -> int:
        found = self._known.get(seq)
        if found is None:
            found = self._budget.largest(seq)
            if self.policy.max_samples is not None:
                found = min(found, self.policy.max_samples)
            self._known[seq] = found
        return found

    def shortest(self, seq: int | None) -> float:
        """The shortest sample that may be padded to a length."""
        return 0.0 if seq is None else seq * (1.0 - self.policy.max_padding)


def _in_order(requests: list[Request], room: _Room) -> list[Batch]:
    """Cut the queue where the next request no longer fits."""
    batches: list[Batch] = []
    open_: list[Request] = []
    samples, seq, shortest = 0, None, 0
    for request in requests:
        longer = request.seq if seq is None else max(seq, request.seq or 0)
        least = min(shortest, request.seq or 0) if open_ else request.seq or 0
        if open_ and (samples + request.samples > room.of(longer) or least < room.shortest(longer)):
            batches.append(Batch(requests=tuple(open_), samples=samples, seq=seq))
            open_, samples, longer, least = [], 0, request.seq, request.seq or 0
        open_.append(request)
        samples, seq, shortest = samples + request.samples, longer, least
    if open_:
        batches.append(Batch(requests=tuple(open_), samples=samples, seq=seq))
    return batches


def _packed(requests: list[Request], room: _Room) -> list[Batch]:
    """Best fit, longest and largest first: each request goes where the least room is left over.

    A batch's length is that of its first request, so later ones change only the number of its samples.
    """
    members: list[list[Request]] = []
    free: list[tuple[int, int]] = []
    for request in sorted(requests, key=lambda item: (-(item.seq or 0), -item.samples)):
        at = bisect_left(free, (request.samples, -1))
        while at < len(free) and (request.seq or 0) < room.shortest(members[free[at][1]][0].seq):
            del free[at]  # too long for this request, and so for all that follow
        if at < len(free):
            left, index = free.pop(at)
            members[index].append(request)
        else:
            left, index = room.of(request.seq), len(members)
            members.append([request])
        if left > request.samples:
            insort(free, (left - request.samples, index))
    batches = [
        Batch(requests=tuple(items), samples=sum(item.samples for item in items), seq=items[0].seq)
        for items in members
    ]  # fmt: skip
    return sorted(batches, key=lambda batch: min(request.arrived for request in batch.requests))
