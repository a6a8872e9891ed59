"""What is asked about a convolution, and what is answered. Plain values."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Direction(str, enum.Enum):
    """Which of the three products a convolution kernel computes."""

    FORWARD = "forward"
    DGRAD = "dgrad"
    """The gradient of x."""
    WGRAD = "wgrad"
    """The gradient of w."""

    __str__ = str.__str__


class Source(str, enum.Enum):
    """Who answered."""

    CUDNN = "cudnn"
    """The installed cuDNN, planning for the device without a GPU."""
    CACHE = "cache"
    """The same, in an earlier run."""
    TABLE = "table"
    """The table that fxmem ships, answered by cuDNN for the same question."""
    RULE = "rule"
    """A rule fitted to such answers."""

    __str__ = str.__str__


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """One product of y = conv(x, w), whatever of the three is the result.

    A transposed convolution's forward pass is the ``DGRAD`` of the convolution that it
    transposes (x is its output), and its gradient of the input is that one's ``FORWARD``.

    >>> Convolution(x=(8, 3, 224, 224), w=(64, 3, 7, 7), stride=(2, 2), padding=(3, 3), dilation=(1, 1)).y
    (8, 64, 112, 112)
    """

    direction: Direction = Direction.FORWARD
    x: tuple[int, ...]
    """Batch, channels, then two or three spatial sizes."""
    w: tuple[int, ...]
    """Channels of y, channels of x of one group, kernel."""
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    dtype: str = "float32"
    """Of x, w and y: torch's name."""
    channels_last: bool = False
    """Whether the three lie channels-last in memory."""
    tf32: bool = True
    """``torch.backends.cudnn.allow_tf32``, on by default; counts for float32 alone."""

    @property
    def groups(self) -> int:
        """Groups of the convolution."""
        return self.x[1] // self.w[1]

    @property
    def y(self) -> tuple[int, ...]:
        """Shape of y."""
        sizes = zip(self.x[2:], self.w[2:], self.stride, self.padding, self.dilation, strict=True)
        return (self.x[0], self.w[0], *((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes))

    @property
    def wire(self) -> tuple[object, ...]:
        """The question as the planner reads it."""
        return (
            str(self.direction), self.dtype, self.x, self.w, self.stride, self.padding, self.dilation,
            self.channels_last, self.tf32 or self.dtype != "float32",
        )  # fmt: skip

    @property
    def key(self) -> str:
        """The whole question in one line.

        >>> conv = Convolution(x=(8, 64, 56, 56), w=(64, 64, 1, 1), stride=(1, 1), padding=(0, 0), dilation=(1, 1))
        >>> conv.key
        'forward float32 nchw tf32 8,64,56,56 64,64,1,1 1,1 0,0 1,1'
        """
        layout = "nhwc" if self.channels_last else "nchw"
        mathematics = "tf32" if self.tf32 or self.dtype != "float32" else "full"
        numbers = (self.x, self.w, self.stride, self.padding, self.dilation)
        return " ".join((self.direction, self.dtype, layout, mathematics, *(",".join(map(str, n)) for n in numbers)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A workspace."""

    nbytes: int
    low: int
    """Nine in ten lie within ``low`` and ``high``: the difference that other versions of cuDNN make, and for an
    answer by rule its error too. Free memory and ``cudnn.benchmark`` are not in it."""
    high: int
    source: Source
