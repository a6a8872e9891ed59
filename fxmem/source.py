"""Turns a target into a module on fake tensors, and says how to make its inputs.

A target is a file (``model.py``, ``model.py:factory``), an importable factory
(``package.module:factory``), a model by name (``torchvision:``, ``timm:``, ``hf:``), or an
``nn.Module`` or callable given from Python.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from fxmem.errors import FxmemError, InputError, SourceError
from fxmem.fakes import REAL_LIMIT, blank, blank_parameter
from fxmem.targets import found, hf, prepare, userfile, zoo
from fxmem.targets.made import Arguments, Made, default_dtype, torch_dtype
from fxmem.weightless import Devices, borrowed, building
from fxmem.workload import Workload

_EXAMPLES = {"hf": "hf:gpt2", "torchvision": "torchvision:resnet50", "timm": "timm:vit_small_patch16_224"}
Target = str | nn.Module | Callable[..., object]


class Kind(str, enum.Enum):
    """Where a target comes from."""

    FILE = "file"
    PACKAGE = "package"
    TORCHVISION = "torchvision"
    TIMM = "timm"
    HF = "hf"
    LIVE = "live"
    """An ``nn.Module`` given from Python, with weights."""

    __str__ = str.__str__


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What the model is called with. Large tensors are fake, small ones real."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    target: Tensor | None = None
    """What the default loss compares with."""
    host: frozenset[int] = frozenset()
    """``id`` of each tensor that stays on the host, because it was made with ``device="cpu"``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A model without weights, ready to be traced any number of times."""

    module: nn.Module
    kind: Kind
    name: str
    inputs: Callable[[int], Inputs]
    """Batch size to inputs."""
    steps: Callable[[int], list[Inputs]] | None
    """Batch size to the inputs of each step, where the user's ``steps(batch)`` makes them differ."""
    loss: Callable[[Any], Tensor] | None
    """The user's ``loss(output)``."""
    live: bool
    """Whether the module belongs to the caller and has weights."""
    opened: Callable[[], AbstractContextManager[nn.Module]]
    """Scope of one trace: parameters are fresh fake tensors without gradients, the user's code finds its
    modules, and all that the trace changes in the module is put back at the end."""
    wrappers: tuple[str, ...] = ()
    """What changes how modules run on a GPU and is not imitated, a phrase each."""
    notes: tuple[str, ...] = ()
    """What the user named and what changes nothing, a sentence each."""

    @property
    def file(self) -> str:
        """The user's file, for a message that says what to write there."""
        return f"{self.name.rpartition('.py')[0]}.py" if self.kind is Kind.FILE else "a file of your own"


def load(
    target: Target,
    workload: Workload,
    fake_mode: FakeTensorMode,
    *,
    inputs: Callable[[int], object] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
) -> Source:
    """Build the model that a target names.

    Args:
        target: See the module's docstring.
        workload: Gives model arguments, dtype, layout, checkpointing and ``--input``.
        fake_mode: Owns all fake tensors; not active.
        inputs: Called with the batch size, instead of what the target defines.
        loss: Called with the output, instead of what the target defines.

    Raises:
        SourceError: The target cannot be found or built; the message says where and what next.
        InputError: No inputs are known for the model.
    """
    if isinstance(target, nn.Module):
        if workload.model_args:
            raise SourceError("model arguments need a factory, but the target is a module that exists already")
        kind, made = Kind.LIVE, Made(module=target, name=type(target).__name__)
    else:
        with building(fake_mode):
            kind, made = _made(target, workload)
            _check(made)
            _settle(made.module, fake_mode)
            _prepare(made, workload, kind)
    module = getattr(made.module, "_orig_mod", made.module)  # torch.compile: the eager module inside
    _check(made)
    wrappers = _wrappers(made.module)
    live = kind is Kind.LIVE
    steps = None if inputs is not None or workload.inputs else made.steps
    made = dataclasses.replace(
        made, module=module, inputs=inputs or made.inputs, loss=loss or made.loss, steps=steps
    )  # fmt: skip
    if workload.training and made.loss is not None:
        userfile.check_loss(made.loss, made.name)
    return Source(
        module=module,
        kind=kind,
        name=made.name,
        inputs=_inputs(made, workload, fake_mode),
        steps=_step_inputs(made, workload, fake_mode) if made.steps is not None else None,
        loss=made.loss,
        live=live,
        opened=lambda: _opened(made, workload, fake_mode, live=live),
        wrappers=wrappers,
        notes=found.ignored(made, workload),
    )


def _wrappers(root: nn.Module) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for module in root.modules():
        name = type(module).__name__
        if name == "OptimizedModule" or hasattr(
            inspect.getattr_static(type(module), "forward", None), "_torchdynamo_orig_callable"
        ):
            found[f"torch.compile (module {name}): estimated as eager code"] = None
        elif name in ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"):
            found[f"several GPUs (module {name}): estimated on one"] = None
    return tuple(found)


def load_real(target: str, workload: Workload) -> Source:
    """Build the model that a target names, with weights, on the CPU: for a run that is measured.

    Args:
        target: As for :func:`load`, but no module.
        workload: Likewise.

    Raises:
        SourceError: The target cannot be found or built.
    """
    kind, made = _made(target, workload)
    _check(made)
    _prepare(made, workload, kind)
    make = _maker(made, workload)

    def inputs(batch: int) -> Inputs:
        with made.scope():
            arguments = make(batch)
        return Inputs(args=arguments.args, kwargs=arguments.kwargs, target=arguments.target)

    @contextlib.contextmanager
    def opened() -> Iterator[nn.Module]:
        with made.scope():
            yield made.module

    return Source(
        module=made.module, kind=kind, name=made.name, inputs=inputs, steps=None, loss=made.loss, live=False,
        opened=opened,
    )  # fmt: skip


def _made(target: str | Callable[..., object], workload: Workload) -> tuple[Kind, Made]:
    arguments = dict(workload.model_args)
    if not isinstance(target, str):
        return Kind.PACKAGE, userfile.from_callable(target, arguments)
    prefix, _, name = target.partition(":")
    match prefix:
        case "hf" | "torchvision" | "timm" if not name:
            raise SourceError("the target names no model", where=target, hint=f"for example {_EXAMPLES[prefix]}")
        case "hf":
            return Kind.HF, hf.from_hf(name, workload)
        case "torchvision" | "timm":
            make = zoo.from_timm if prefix == "timm" else zoo.from_torchvision
            with default_dtype(torch_dtype(workload.dtype)):  # what .half() gives
                return Kind(prefix), make(name, arguments)
    path, colon, attribute = target.rpartition(":")
    if target.endswith(".py") or ("/" in target and not colon):
        return Kind.FILE, userfile.from_file(Path(target), None, arguments)
    if path.endswith(".py"):
        return Kind.FILE, userfile.from_file(Path(path), attribute, arguments)
    package, name = (path, attribute) if colon else (target, "")
    if all(part.isidentifier() for part in package.split(".")):
        return Kind.PACKAGE, userfile.from_package(package, name or None, arguments)
    raise SourceError(
        f"{target!r} is no target",
        hint="give model.py, model.py:factory, package.module:factory, torchvision:NAME, timm:NAME or hf:TYPE",
    )


def _check(made: Made) -> None:
    if isinstance(made.module, torch.jit.ScriptModule):
        raise SourceError(
            "the model is TorchScript, which fxmem cannot trace", where=made.name, hint="give the eager model"
        )
    parameters: list[tuple[str, Any]] = list(made.module.named_parameters())
    lazy = [name for name, p in parameters if is_lazy(p)]
    if lazy:
        raise SourceError(
            f"{lazy[0]} has no shape yet (a lazy module)",
            where=made.name,
            hint="give the layer its size: Linear(in, out) instead of LazyLinear(out)",
        )


def _settle(module: nn.Module, fake_mode: FakeTensorMode) -> None:
    """Make fake what went past ``nn.Parameter``, and give buffers on the meta device a place."""
    memo: dict[int, Tensor] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and not isinstance(parameter, FakeTensor):
                if id(parameter) not in memo:
                    memo[id(parameter)] = blank_parameter(parameter, fake_mode, parameter.requires_grad)
                part._parameters[name] = memo[id(parameter)]  # type: ignore[assignment]
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.device.type == "meta":
                part._buffers[name] = memo.setdefault(id(buffer), blank(buffer, fake_mode))


def _prepare(made: Made, workload: Workload, kind: Kind) -> None:
    module, dtype = made.module, torch_dtype(workload.dtype)
    if kind in (Kind.FILE, Kind.PACKAGE, Kind.LIVE) and dtype != torch.float32:
        prepare.cast(module, dtype)
    if workload.checkpoint:
        prepare.checkpointing(module, made.name)
    if workload.channels_last:
        prepare.channels_last(module)


@contextlib.contextmanager
def _opened(made: Made, workload: Workload, fake_mode: FakeTensorMode, *, live: bool) -> Iterator[nn.Module]:
    with made.scope(), borrowed(made.module, fake_mode):
        if live:
            with building(fake_mode):
                _prepare(made, workload, Kind.LIVE)
        yield made.module


# ------------------------------------------------------------------ inputs
def _inputs(made: Made, workload: Workload, fake_mode: FakeTensorMode) -> Callable[[int], Inputs]:
    make = _maker(made, workload)

    def inputs(batch: int) -> Inputs:
        with made.scope(), building(fake_mode) as devices:
            return _finished(make(batch), devices, fake_mode)

    return inputs


def _step_inputs(made: Made, workload: Workload, fake_mode: FakeTensorMode) -> Callable[[int], list[Inputs]]:
    """The user's ``steps(batch)``: a sequence of what ``inputs(batch)`` may return."""

    def steps(batch: int) -> list[Inputs]:
        with made.scope(), building(fake_mode) as devices:
            given: Any = _called(made.steps, batch, made, workload, "steps")
            return [_finished(_settled(one, made, workload), devices, fake_mode) for one in given]

    return steps


def _maker(made: Made, workload: Workload) -> Callable[[int], Arguments]:
    """``--input`` first, then the user's ``inputs(batch)``, then what is known of the model's family."""
    if workload.inputs:
        return lambda batch: found.from_specs(workload.inputs, workload, batch)
    if made.inputs is not None:
        return lambda batch: _settled(_called(made.inputs, batch, made, workload, "inputs"), made, workload)
    return found.finder(made.module, workload)


def _called(function: Any, batch: int, made: Made, workload: Workload, name: str) -> object:
    """What the user's ``inputs(batch)`` or ``steps(batch)`` returns."""
    surroundings = made.scope if isinstance(made.scope, userfile.Surroundings) else None
    try:
        # The same values in every run, where the model's control flow reads them.
        with default_dtype(found.float_dtype(workload)), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            return function(batch, **_asked(function, workload))
    except FxmemError:
        raise
    except Exception as error:
        raise InputError(
            f"{name}({batch}) raised {type(error).__name__}: {userfile.first_lines(str(error))}",
            where=userfile.user_line(error, surroundings) or made.name,
            hint=f"inputs(batch) takes the batch size; {found.ARE_ARGUMENTS}; steps(batch) gives a list of such",
        ) from error


def _asked(function: Callable[..., object], workload: Workload) -> dict[str, int]:
    """What ``inputs(batch, seq, image)`` asks for by name; its own defaults hold where the user names no size."""
    named, parameters = found.named_axes(workload), inspect.signature(function).parameters
    return {
        name: getattr(workload, name)
        for name in ("seq", "image")
        if name in parameters and (name in named or parameters[name].default is inspect.Parameter.empty)
    }


def _settled(result: object, made: Made, workload: Workload) -> Arguments:
    return _converted(_as_arguments(result, made), workload, found.float_dtype(workload))


def _as_arguments(result: object, made: Made) -> Arguments:
    match result:
        case None:
            raise InputError(
                "inputs(batch) returned None",
                where=made.name,
                hint=found.ARE_ARGUMENTS,
            )
        case Arguments():
            return result
        case Mapping():
            return Arguments((), {str(k): v for k, v in result.items()})
        case tuple() | list():
            return Arguments(tuple(result), {})
        case _:
            return Arguments((result,), {})


def _converted(arguments: Arguments, workload: Workload, dtype: torch.dtype) -> Arguments:
    """The user's tensors in the workload's dtype and layout; a tensor used twice stays one tensor."""
    memo: dict[int, Tensor] = {}

    def convert(tensor: Tensor) -> Tensor:
        if id(tensor) not in memo:
            new = tensor
            if dtype != torch.float32 and tensor.dtype in (torch.float32, torch.float64):
                new = new.to(dtype)
            if workload.channels_last and new.dim() == 4 and new.is_floating_point():
                new = new.to(memory_format=torch.channels_last)
            memo[id(tensor)] = new
        return memo[id(tensor)]

    args, kwargs = pytree.tree_map_only(Tensor, convert, (arguments.args, arguments.kwargs))
    return Arguments(args, kwargs, arguments.target)


def _finished(arguments: Arguments, devices: Devices, fake_mode: FakeTensorMode) -> Inputs:
    memo: dict[int, Tensor] = {}
    host: set[int] = set()

    def finish(tensor: Tensor) -> Tensor:
        if id(tensor) not in memo:
            new = tensor
            if not isinstance(tensor, FakeTensor) and (tensor.numel() > REAL_LIMIT or tensor.device.type != "cpu"):
                new = blank(tensor, fake_mode)
            memo[id(tensor)] = new
            if devices.on_host(tensor):
                host.add(id(new))
        return memo[id(tensor)]

    args, kwargs, target = pytree.tree_map_only(Tensor, finish, tuple(arguments))
    if len(host) == len(memo):  # `device = "cuda" if torch.cuda.is_available() else "cpu"`, and here it is not
        host.clear()
    return Inputs(args=args, kwargs=kwargs, target=target, host=frozenset(host))
