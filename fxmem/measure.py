"""Runs the reference loop for real on a GPU and reads the allocator: one process, one batch size.

``python -m fxmem.measure REQUEST RESULT``: reads a request that :mod:`fxmem.calibrate` wrote and writes
what it measured as JSON. A process of its own, so that a context, loaded kernels and an out of memory are
this run's alone.
"""

from __future__ import annotations

import ast
import enum
import gc
import json
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxmem import nvml
from fxmem.errors import FxmemError
from fxmem.run import loop
from fxmem.source import Inputs, load_real
from fxmem.tape import Phase
from fxmem.workload import ConvWorkspace, InputSpec, Workload


def request_text(target: str, workload: Workload, device: str, repeats: int) -> str:
    """What the process is asked, as a Python literal.

    Args:
        target: The target's text.
        workload: What to run, with its batch size.
        device: ``cuda:0``.
        repeats: Runs in this process.
    """
    options = {item.name: getattr(workload, item.name) for item in fields(workload)}
    options |= {name: option.value for name, option in options.items() if isinstance(option, enum.Enum)}
    options["inputs"] = [tuple(spec) for spec in workload.inputs]
    return repr({"target": target, "workload": options, "device": device, "repeats": repeats})


def read_request(text: str) -> tuple[str, Workload, str, int]:
    """The opposite of :func:`request_text`."""
    asked: dict[str, Any] = ast.literal_eval(text)
    options = dict(asked["workload"])
    options["conv_workspace"] = ConvWorkspace(options["conv_workspace"])
    options["inputs"] = tuple(InputSpec(*spec) for spec in options["inputs"])
    return asked["target"], Workload(**options), asked["device"], asked["repeats"]


class _Meter:
    """Watches the loop: the allocator's peaks of each step, and what is left at its end."""

    def __init__(self, device: torch.device) -> None:
        self.phase = Phase.SETUP
        self.device = device
        self.steps: list[dict[str, int]] = []
        self.running = False

    def begin_step(self, step: int) -> None:  # noqa: ARG002 - its number does not matter
        self.end_steps()
        self.running = True

    def end_steps(self) -> None:
        torch.cuda.synchronize(self.device)
        if self.running:
            self.steps.append(
                {
                    "allocated_bytes": torch.cuda.max_memory_allocated(self.device),
                    "reserved_bytes": torch.cuda.max_memory_reserved(self.device),
                    "left_bytes": torch.cuda.memory_allocated(self.device),
                }
            )
        self.running = False
        torch.cuda.reset_peak_memory_stats(self.device)

    def name_gradients(self, params: Iterable[nn.Parameter]) -> None:
        """Needs no names."""

    def name_optimizer_state(self, state: Mapping[Any, Any], params: Iterable[nn.Parameter]) -> None:
        """Likewise."""


class _Feed:
    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs

    def next(self) -> Inputs:
        return self._inputs


def measure(target: str, workload: Workload, device: torch.device) -> dict[str, Any]:
    """One run of the reference loop.

    Args:
        target: The target's text.
        workload: What to run.
        device: The GPU.

    Returns:
        Bytes of each part, of each step, and the peaks over the whole run.
    """
    source = load_real(target, workload)
    _emptied(device)
    base = torch.cuda.memory_allocated(device)
    with source.opened() as model:
        model.train(workload.training)
        model.to(device)
        loaded = torch.cuda.memory_allocated(device) - base
        inputs = _moved(source.inputs(workload.batch), device)
        given = torch.cuda.memory_allocated(device) - base - loaded
        setup = {
            "allocated_bytes": torch.cuda.max_memory_allocated(device),
            "reserved_bytes": torch.cuda.max_memory_reserved(device),
        }
        meter = _Meter(device)
        loop(source, _Feed(inputs), workload, meter, workload.step_count)
    return {
        "model_bytes": loaded, "inputs_bytes": given, "workspaces_bytes": _workspaces(device), "steps": meter.steps,
        "left_bytes": meter.steps[-1]["left_bytes"],
        **{name: max(part[name] for part in (setup, *meter.steps)) for name in setup},
        "retries": torch.cuda.memory_stats(device).get("num_alloc_retries", 0),
    }  # fmt: skip


def _moved(inputs: Inputs, device: torch.device) -> Inputs:
    """On the device, as a loop would move them; a tensor used twice stays one."""
    memo: dict[int, Tensor] = {}

    def move(tensor: Tensor) -> Tensor:
        if id(tensor) not in memo:
            memo[id(tensor)] = tensor.to(device)
        return memo[id(tensor)]

    args, kwargs, target = pytree.tree_map_only(Tensor, move, (inputs.args, inputs.kwargs, inputs.target))
    return Inputs(args=args, kwargs=kwargs, target=target)


def _workspaces(device: torch.device) -> int:
    """What cuBLAS keeps: the difference that giving it back makes."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated(device)


def _emptied(device: torch.device) -> None:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    torch.cuda.reset_accumulated_memory_stats(device)


def _gpu(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name, "arch": f"sm_{properties.major}{properties.minor}",
        "sm_count": properties.multi_processor_count, "capacity_bytes": properties.total_memory,
        "phantom": properties.name.startswith("Phantom"),
    }  # fmt: skip


def _environment(device: torch.device) -> dict[str, Any]:
    return {
        "gpu": _gpu(device), "driver": nvml.driver_version(), "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(), "torch": torch.__version__,
    }  # fmt: skip


def _device_bytes(device: torch.device) -> dict[str, Any]:
    """What the process holds now, and what of it is not the allocator's: context, kernels, libraries."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    held = None if uuid is None else nvml.process_memory(f"GPU-{uuid}")
    if held is None:
        return {"device_bytes": None, "context_bytes": None, "device_source": "NVML does not name this process"}
    context = held.nbytes - torch.cuda.memory_reserved(device)
    return {"device_bytes": held.nbytes, "context_bytes": context, "device_source": held.source}


def main(request: Path, result: Path) -> None:
    """Measure what the request asks for; an out of memory is an answer too."""
    target, workload, name, repeats = read_request(request.read_text(encoding="utf-8"))
    device = torch.device(name)
    answer: dict[str, Any] = {"status": "measured", "repeats": []}
    try:
        torch.cuda.set_device(device)
        torch.cuda.init()
        free, total = torch.cuda.mem_get_info(device)
        answer |= _environment(device) | {"free_bytes": free, "total_bytes": total}
        for _ in range(repeats):
            run = measure(target, workload, device)
            answer["repeats"].append(run | _device_bytes(device))
    except torch.cuda.OutOfMemoryError as error:
        answer |= {"status": "oom", "reason": str(error).split("\n")[0][:300]}
    except FxmemError as error:
        answer |= {"status": "failed", "reason": str(error)}
    except Exception as error:  # noqa: BLE001 - whatever the user's model raises is the answer
        answer |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:300]}
    result.write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
