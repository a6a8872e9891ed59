"""One base error, and one class for each thing a user can mend.

A message says where, what, and what to do next. Inner code raises the short fact; the
facts are fields, so that a caller can act on them without parsing a sentence.
"""

from __future__ import annotations


class FxmemError(Exception):
    """Base of every error that a user can mend.

    Attributes:
        what: One sentence that states the fact.
        where: Where it happened (``model.py:12``, a target, an option), or ``None``.
        hint: What to do next, or ``None``.
    """

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(what, where, hint)
        self.what = what
        self.where = where
        self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.where, self.hint), self.__dict__)

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head}\n  next: {self.hint}" if self.hint else head


def _rebuild(cls: type[FxmemError], what: str, where: str | None, hint: str | None) -> FxmemError:
    return cls(what, where=where, hint=hint)


class UsageError(FxmemError):
    """An option has a value that cannot be read (exit status 2)."""


class SourceError(FxmemError):
    """The target cannot be found, imported or built."""


class MissingExtraError(SourceError):
    """The target needs a package that is not installed."""


class InputError(FxmemError):
    """The inputs do not fit the model, or none could be found for it."""


class TraceError(FxmemError):
    """The model was built but its run failed."""


class UnsupportedOpError(TraceError):
    """An operator has no fake kernel, so its output's shape is unknown."""


class DataDependentError(TraceError):
    """A tensor's values decide about shapes or the way through the code."""


class OutOfMemoryError(FxmemError):
    """The replayed allocator cannot serve a request.

    Attributes:
        requested_bytes: The request that failed.
        allocated_bytes: Allocated when it failed.
        reserved_bytes: Reserved when it failed.
        capacity_bytes: What the device offers to the allocator.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        hint: str | None = None,
        requested_bytes: int = 0,
        allocated_bytes: int = 0,
        reserved_bytes: int = 0,
        capacity_bytes: int = 0,
    ) -> None:
        super().__init__(what, where=where, hint=hint)
        self.requested_bytes = requested_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes
        self.capacity_bytes = capacity_bytes


class DoesNotFitError(FxmemError):
    """The workload does not fit the device (exit status 3).

    Attributes:
        need_bytes: What the workload takes from the device, with the CUDA context where it is known.
        have_bytes: What the device offers.
        largest_batch: The largest batch that fits, ``None`` where it is not known.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        hint: str | None = None,
        need_bytes: int = 0,
        have_bytes: int = 0,
        largest_batch: int | None = None,
    ) -> None:
        super().__init__(what, where=where, hint=hint)
        self.need_bytes = need_bytes
        self.have_bytes = have_bytes
        self.largest_batch = largest_batch
