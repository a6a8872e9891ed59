"""The dry run at start-up: says that the workload does not fit before the first request does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from fxmem.api import AnyTarget, estimate
from fxmem.batch import Limits
from fxmem.device import Device, as_device
from fxmem.errors import DoesNotFitError, UsageError
from fxmem.estimate import Estimate
from fxmem.units import format_size

__all__ = ["preflight", "this_gpu"]


def preflight(
    target: AnyTarget,
    inputs: Any = None,
    *,
    device: Device | str | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    safety: float = 1.0,
    reserve_bytes: int = 0,
    **options: Any,
) -> Estimate:
    """Make sure that a workload fits before it runs.

    Args:
        target: As for :func:`fxmem.estimate`.
        inputs: Likewise.
        device: What it will run on; ``None``: the GPU of this process, with the memory that is free now.
        loss: Called with the output in training.
        safety: Share of the device's memory that may be used.
        reserve_bytes: Left to others besides.
        **options: As for :func:`fxmem.estimate`: ``batch=8``, ``mode=Mode.TRAINING``, ...

    Returns:
        The estimate, where it fits by the figures. What they leave out is in its ``coverage``, and as a condition
        in its ``str()``: the CUDA context where it is unknown, and all that is not modelled.

    Raises:
        DoesNotFitError: It does not: what it needs, what there is, by how much, what to change.
        UsageError: No device is given and this process has no GPU.

    >>> from torch import nn
    >>> preflight(nn.Linear(8, 4), lambda batch: torch.zeros(batch, 8), device="1GiB", batch=2).fits
    True
    """
    gpu = this_gpu() if device is None else as_device(device)
    if gpu.capacity_bytes is None:
        raise UsageError("a check needs a limit", where="device", hint="name a GPU or a size such as 24GiB")
    limits = Limits(
        capacity_bytes=gpu.capacity_bytes, context_bytes=gpu.context_bytes, safety=safety, reserve_bytes=reserve_bytes
    )
    have = limits.allocator_bytes + (gpu.context_bytes or 0)
    small = replace(gpu, capacity_bytes=max(have, 1))
    found = estimate(target, inputs, device=small, loss=loss, safety=1.0, **options)
    if not found.fits:
        raise _does_not_fit(found, gpu, have)
    return found


def this_gpu(index: int | None = None) -> Device:
    """The GPU of this process, as far as its memory is free now.

    Args:
        index: Its number; ``None``: the current one.

    Raises:
        UsageError: There is none.
    """
    if not torch.cuda.is_available():
        raise UsageError("this process has no GPU", where="device", hint="name the device: t4, a100-80gb, 24GiB")
    free, _ = torch.cuda.mem_get_info(index)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    return Device(
        name=properties.name,
        title=properties.name,
        arch=f"sm_{properties.major}{properties.minor}",
        # What this process has cached serves it again; its context has been taken from the free memory already.
        capacity_bytes=free + torch.cuda.memory_reserved(index),
        sm_count=properties.multi_processor_count,
        context_bytes=0,
        source="free memory now (torch.cuda.mem_get_info)",
        context_source="already taken",
    )


def _does_not_fit(found: Estimate, gpu: Device, have: int) -> DoesNotFitError:
    peak = found.peak
    need = peak.reserved_bytes if peak.device_bytes is None else peak.device_bytes
    best = None if found.max_batch is None else found.max_batch.batch
    missing = ["the CUDA context, which is unknown"] if peak.device_bytes is None else []
    missing += ["what is not modelled"] if found.coverage.lower_bound else []
    without = f" (without {' and '.join(missing)})" if missing else ""
    changes = [f"take a batch of at most {best}{without}"] if best else []
    if found.mode == "training":
        changes.append("save activations (checkpoint=True, amp='bfloat16', accumulate=2 with half the batch)")
    changes.append("take a device with more memory")
    return DoesNotFitError(
        f"batch {found.batch} needs {format_size(need)}{without}, {gpu.name} has {format_size(have)}:"
        f" {'at least ' if missing else ''}{format_size(need - have)} too much",
        where=found.target,
        hint=", or ".join(changes),
        need_bytes=need,
        have_bytes=have,
        largest_batch=best,
    )
