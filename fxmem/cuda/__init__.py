"""The CUDA personality: fake CPU tensors take the way that CUDA tensors would.

Everything here is scoped: :func:`personality` installs it and takes it back, also after an
error. ``places`` makes code that asks about devices believe it runs on a GPU and tells the
recorder which tensors are on the device; ``operators`` overrides the few composite operators
that choose another path on the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from fxmem.cuda.operators import cuda_operators
from fxmem.cuda.places import gpu_places
from fxmem.cuda.rnn import cuda_rnn
from fxmem.device import Device
from fxmem.recording.recorder import Recorder


@contextlib.contextmanager
def personality(recorder: Recorder, device: Device) -> Iterator[None]:
    """Run what is inside as on ``device``."""
    with (
        cuda_operators(device, recorder.on_device, recorder.notes) as autocast,
        cuda_rnn(recorder, device, autocast),
        gpu_places(recorder, device),
    ):
        yield
