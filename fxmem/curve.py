"""Memory against batch, in parts: what ``fxmem batch --plot`` draws."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from fxmem.allocator import replay
from fxmem.allocator_config import AllocatorConfig
from fxmem.estimate import breakdown
from fxmem.program import Program

PARTS = ("parameters", "optimizer_state", "gradients", "activations", "other", "workspaces", "cached", "context")
"""From the bottom to the top; ``other``: buffers, inputs, outputs, temporaries."""
_POINTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What a batch takes from a device without a limit."""

    batch: int
    parts: Mapping[str, int]
    """Bytes of each of :data:`PARTS`."""

    @property
    def nbytes(self) -> int:
        """All parts."""
        return sum(self.parts.values())


def sample(program: Program, config: AllocatorConfig, largest: int, context_bytes: int | None) -> tuple[Sample, ...]:
    """Replay batches up to somewhat above the largest one that fits.

    Args:
        program: Its tapes.
        config: The allocator's options.
        largest: The largest batch that fits any of the devices; at least 8 batches are shown.
        context_bytes: Of one process.

    Returns:
        Ascending batches; without a law only those that were traced for the search.
    """
    last = max(largest + largest // 5, 8)
    spread = [max(round(1 + (last - 1) * i / (_POINTS - 1)), 1) for i in range(_POINTS)]
    found = []
    for batch in sorted(set(program.traced if program.why else spread)):
        tape = program.at(batch)
        if tape is not None:
            parts = asdict(breakdown(tape, replay(tape, config), context_bytes))
            found.append(Sample(batch=batch, parts=_gathered(parts)))
    return tuple(found)


def _gathered(parts: Mapping[str, int | None]) -> dict[str, int]:
    known = {name: nbytes or 0 for name, nbytes in parts.items()}
    other = sum(nbytes for name, nbytes in known.items() if name not in PARTS)
    return {name: other if name == "other" else known[name] for name in PARTS}
