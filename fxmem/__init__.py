"""GPU memory of PyTorch models, without a GPU: peak, breakdown, largest batch.

>>> import fxmem
>>> fxmem.find_device("t4").arch
'sm_75'

Names are imported when they are first used, so that ``import fxmem.tape`` loads no torch.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fxmem.api import estimate, max_batch, trace
    from fxmem.batching import MemoryBudget
    from fxmem.device import Device, all_devices, find_device
    from fxmem.errors import DoesNotFitError, FxmemError
    from fxmem.estimate import Estimate
    from fxmem.preflight import preflight
    from fxmem.report import render
    from fxmem.tape import Tape
    from fxmem.workload import ConvWorkspace, InputSpec, Mode, Vary, Workload

__version__ = "0.1.0"

__all__ = [
    "ConvWorkspace",
    "Device",
    "DoesNotFitError",
    "Estimate",
    "FxmemError",
    "InputSpec",
    "MemoryBudget",
    "Mode",
    "Tape",
    "Vary",
    "Workload",
    "all_devices",
    "estimate",
    "find_device",
    "max_batch",
    "preflight",
    "render",
    "trace",
]

_HOME = {
    "estimate": "fxmem.api",
    "max_batch": "fxmem.api",
    "trace": "fxmem.api",
    "Device": "fxmem.device",
    "all_devices": "fxmem.device",
    "find_device": "fxmem.device",
    "DoesNotFitError": "fxmem.errors",
    "FxmemError": "fxmem.errors",
    "MemoryBudget": "fxmem.batching",
    "preflight": "fxmem.preflight",
    "render": "fxmem.report",
    "Estimate": "fxmem.estimate",
    "Tape": "fxmem.tape",
    "ConvWorkspace": "fxmem.workload",
    "InputSpec": "fxmem.workload",
    "Mode": "fxmem.workload",
    "Vary": "fxmem.workload",
    "Workload": "fxmem.workload",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'fxmem' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps ``fxmem.estimate`` the function, although a submodule has the same name.

    Importing ``fxmem.estimate`` makes Python bind the submodule to that attribute, and the
    meaning of the name would depend on what was imported before.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (isinstance(value, ModuleType) and name in _HOME):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
