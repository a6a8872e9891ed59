"""Answers from the best source at hand: the cache, the installed cuDNN, the shipped table, the rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from fxmem.cudnn import cache
from fxmem.cudnn.process import Library, find_library, plan
from fxmem.cudnn.question import Answer, Convolution, Source
from fxmem.cudnn.sizes import operands
from fxmem.cudnn.table import Table, table
from fxmem.cudnn.target import description, planned_for

_SPREAD = (-0.4, 0.6)
"""Where no table tells: 90 % of the answers of cuDNN 9.12 and 9.19 lie within these fractions of the operands
around those of 9.24 (sm_80 and sm_90, 5,000 questions each; calibration/cudnn_table.py --other)."""


class Workspaces:
    """Answers questions for one device; hand it all questions at once with :meth:`prepare`.

    Never raises and never fails: where cuDNN cannot be asked, :attr:`reason` says why.
    """

    def __init__(
        self, sm: int, sm_count: int | None, memory: int | None, library: Library | None, folder: Path | None
    ) -> None:
        self.sm = planned_for(sm)
        self.version: int | None = None
        """The cuDNN that answered (92400 is 9.24.0): the installed one, else the table's."""
        self.reason = "" if library else "no cuDNN is installed beside this Python"
        """Why the installed cuDNN does not answer, empty if it does."""
        self._asked_for = sm
        self._library = library
        self._folder = folder
        self._device = description(sm, sm_count, memory)
        self._file = f"sm_{self.sm}-{sm_count or 0}"
        self._answers: dict[Convolution, Answer] = {}

    def __call__(self, question: Convolution) -> Answer:
        """The workspace of a convolution."""
        if question not in self._answers:
            self.prepare((question,))
        return self._answers[question]

    def prepare(self, questions: Iterable[Convolution]) -> None:
        """Answer questions in one go, so that cuDNN is started once."""
        missing = [q for q in dict.fromkeys(questions) if q not in self._answers]
        if not missing:
            return
        known = table(self.sm)
        found = self._from_library(missing)
        if self.version is None and known is not None:
            self.version = known.cudnn
        for question in missing:
            self._answers[question] = found.get(question) or _shipped(question, known)

    def note(self) -> str:
        """Who answered, in one sentence for the report; empty if nothing was asked."""
        if not self._answers:
            return ""
        count = Counter(answer.source for answer in self._answers.values())
        version = (
            "" if self.version is None else f" {self.version // 10000}.{self.version // 100 % 100}.{self.version % 100}"
        )
        planned = count[Source.CUDNN] + count[Source.CACHE]
        texts = [
            f"{planned} planned by the installed cuDNN" if planned else "",
            f"{count[Source.TABLE]} from the shipped table" if count[Source.TABLE] else "",
            f"{count[Source.RULE]} by a rule" if count[Source.RULE] else "",
        ]
        where = f"sm_{self.sm}" if self.sm == self._asked_for else f"sm_{self.sm} in place of sm_{self._asked_for}"
        return f"workspaces of {len(self._answers)} convolutions (cuDNN{version}, {where}): " + ", ".join(
            filter(None, texts)
        )

    def _from_library(self, questions: Sequence[Convolution]) -> dict[Convolution, Answer]:
        """What the cache or the installed cuDNN knows; the latter's answers go into the cache."""
        if self._library is None or self.reason:
            return {}
        version, asked = self._library.version, None
        if version is None:
            asked = plan(self._library.path, self._device, questions)
            version = asked.version
        path = self._folder / f"cudnn-{version}-{self._file}.json" if self._folder and version else None
        kept = cache.load(path) if path is not None and asked is None else {}
        answers = {q: self._answer(q, kept[q.key], Source.CACHE) for q in questions if q.key in kept}
        rest = [q for q in questions if q.key not in kept]
        if rest:
            plans = asked or plan(self._library.path, self._device, rest)
            self.reason, version = plans.reason, plans.version
            new = {q: n for q, n in zip(rest, plans.workspaces, strict=True) if n is not None}
            answers.update((q, self._answer(q, n, Source.CUDNN)) for q, n in new.items())
            if path is not None and new and version is not None:
                cache.store(path.with_name(f"cudnn-{version}-{self._file}.json"), {q.key: n for q, n in new.items()})
        self.version = version
        return answers

    def _answer(self, question: Convolution, nbytes: int, source: Source) -> Answer:
        known = table(self.sm)
        return _between(question, nbytes, known.versions if known else _SPREAD, source)


def workspaces(
    arch: str, sm_count: int | None = None, memory: int | None = None, *, ask: bool = True, keep: bool = True
) -> Workspaces:
    """Make the provider of a device.

    Args:
        arch: ``sm_90``.
        sm_count: Multiprocessors; ``None``: those of a common GPU of the architecture.
        memory: Bytes of the device; likewise.
        ask: Whether to ask the installed cuDNN.
        keep: Whether to read and write the cache in the user's folder.
    """
    sm = int(arch.removeprefix("sm_").rstrip("af"))
    return Workspaces(sm, sm_count, memory, find_library() if ask else None, cache.folder() if keep else None)


def _shipped(question: Convolution, known: Table | None) -> Answer:
    if known is None:
        return _between(question, 0, (0.0, 1.0), Source.RULE)
    exact = known.find(question)
    if exact is not None:
        return _between(question, exact, known.versions, Source.TABLE)
    bounds = (known.versions[0] + known.rule[0], known.versions[1] + known.rule[1])
    return _between(question, known.infer(question), bounds, Source.RULE)


def _between(question: Convolution, nbytes: int, bounds: tuple[float, float], source: Source) -> Answer:
    size = sum(operands(question))
    low, high = (nbytes + int(bound * size) for bound in bounds)
    return Answer(nbytes=nbytes, low=max(low, 0), high=high, source=source)
