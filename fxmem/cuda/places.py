"""Where tensors are: ``.device``, ``.to("cuda")``, ``device=`` arguments, ``torch.cuda``.

All tensors of a fake run are CPU tensors to torch. The recorder knows which storages are
notionally on the device; this module translates between the two: what user code reads
(``x.device``, ``x.is_cuda``, ``torch.cuda.is_available()``) speaks of the GPU, what torch
is called with (``device="cuda"``) is made ``cpu`` and tells the recorder the place.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import _device_constructors

from fxmem.cuda.foreach import foreach_functions
from fxmem.device import Device
from fxmem.fakes import Generator
from fxmem.recording.recorder import Recorder

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
CUDA_TYPE = torch.device("cuda")


def _asks_cuda(value: object) -> bool | None:
    """True for a CUDA device, False for the CPU, None for what names neither."""
    if isinstance(value, torch.device):
        kind = value.type
    elif isinstance(value, str):
        kind = value.split(":", 1)[0]
    elif isinstance(value, int) and not isinstance(value, bool):
        kind = "cuda"
    else:
        return None
    return {"cuda": True, "cpu": False}.get(kind)


def _as_given(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


class Places(TorchFunctionMode):
    """Function mode that rewrites device arguments and notes where results go."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        self._factories: frozenset[Any] = frozenset(_device_constructors())
        self._special: dict[Any, Callable[..., Any]] = {
            torch.Tensor.to: self._to,
            torch.Tensor.cuda: self._cuda,
            torch.Tensor.cpu: self._cpu,
            torch.as_tensor: self._as_tensor,
            torch.asarray: self._as_tensor,
            torch._C._nn._parse_to: _as_given,  # Module.to: the moves follow, tensor by tensor
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = self._called(func, args, kwargs)
        if self.recorder.rewritten.pending:
            self.recorder.rewritten.settle()
        return out

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        special = self._special.get(func)
        if special is not None:
            return special(func, args, kwargs or {})
        if func in self._factories:
            return self._factory(func, args, kwargs or {})
        if kwargs:
            if kwargs.get("device") is not None:
                return self._placed(func, args, kwargs)
            return func(*args, **kwargs)
        return func(*args)

    def _factory(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cuda = _asks_cuda(kwargs.get("device"))
        if kwargs.get("device") is not None and cuda is None:
            return func(*args, **kwargs)
        if cuda is not None:
            kwargs = {**kwargs, "device": CPU}
        kwargs.pop("pin_memory", None)
        recorder = self.recorder
        before = recorder.factory_on_device, recorder.place
        recorder.factory_on_device = recorder.place = bool(cuda)
        try:
            return func(*args, **kwargs)
        finally:
            recorder.factory_on_device, recorder.place = before

    def _placed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cuda = _asks_cuda(kwargs["device"])
        if cuda is None:
            return func(*args, **kwargs)
        with self._going(cuda):
            return func(*args, **{**kwargs, "device": CPU})

    @contextlib.contextmanager
    def _going(self, cuda: bool) -> Iterator[None]:
        before = self.recorder.place
        self.recorder.place = cuda
        try:
            yield
        finally:
            self.recorder.place = before

    def _to(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor, rest = args[0], list(args[1:])
        cuda: bool | None = None
        for i, value in enumerate(rest):
            if isinstance(value, torch.Tensor):
                cuda = self.recorder.on_device(value)
            elif (asked := _asks_cuda(value)) is not None and not (i > 0 and isinstance(value, int)):
                cuda, rest[i] = asked, CPU
        if (asked := _asks_cuda(kwargs.get("device"))) is not None:
            cuda, kwargs = asked, {**kwargs, "device": CPU}
        return self._move(func, tensor, cuda, rest, kwargs)

    def _as_tensor(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``torch.as_tensor`` dispatches nothing for data that is no tensor: the copy to the device is said here."""
        cuda = _asks_cuda(kwargs.get("device"))
        if args and isinstance(args[0], torch.Tensor) and not kwargs.get("copy"):
            dtype = kwargs.get("dtype") or (args[1] if len(args) > 1 else args[0].dtype)
            return self._move(torch.Tensor.to, args[0], cuda, [dtype], {})
        out = self._factory(func, args, kwargs)
        if cuda and not self.recorder.on_device(out):
            with self._going(True):
                out = torch.ops.aten.lift_fresh.default(out)
        return out

    def _cuda(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._move(torch.Tensor.to, args[0], True, [CPU], {})

    def _cpu(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._move(torch.Tensor.to, args[0], False, [CPU], {})

    def _move(self, func: Any, tensor: torch.Tensor, cuda: bool | None, rest: list[Any], kwargs: dict[str, Any]) -> Any:
        if cuda is None or cuda == self.recorder.on_device(tensor):
            return func(tensor, *rest, **kwargs)
        with self._going(cuda):
            return func(tensor, *rest, **{**kwargs, "copy": True})


def _attributes(recorder: Recorder) -> list[tuple[type, str, Any]]:
    """Class attributes to replace while the personality is on."""
    fake_device: Any = FakeTensor.device

    def device_of_fake(t: Any) -> torch.device:
        if recorder.busy or t.fake_mode.in_kernel_invocation or t.fake_device.type != "cpu":
            device: torch.device = fake_device.fget(t)
            return device
        return CUDA if recorder.on_device(t) else CPU

    base_device: Any = torch._C.TensorBase.device

    def device_of_real(t: torch.Tensor) -> torch.device:
        device: torch.device = base_device.__get__(t)
        return CUDA if device.type == "cpu" and not recorder.busy and recorder.on_device(t) else device

    def is_cuda(t: torch.Tensor) -> bool:
        return not recorder.busy and recorder.on_device(t)

    def is_cpu(t: torch.Tensor) -> bool:
        return not is_cuda(t)

    def get_device(t: torch.Tensor) -> int:
        return 0 if is_cuda(t) else -1

    return [
        (FakeTensor, "device", property(device_of_fake)),
        (torch.Tensor, "device", property(device_of_real)),
        (torch.Tensor, "is_cuda", property(is_cuda)),
        (torch.Tensor, "is_cpu", property(is_cpu)),
        (torch.Tensor, "get_device", get_device),
    ]


class _Stream:
    """Stands for a CUDA stream or event: everything is done at once."""

    def __init__(self, *_: object, **__: object) -> None:
        self.cuda_stream = 0
        self.device = CUDA

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: True if name == "query" else 0.0 if name == "elapsed_time" else None

    def __enter__(self) -> object:
        return self

    def __exit__(self, *_: object) -> None:
        return None


def _counted_stream(recorder: Recorder) -> type[_Stream]:
    """``torch.cuda.Stream``: a stream of one's own has its own free blocks in the allocator, which is said."""

    class Stream(_Stream):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            recorder.unmodelled[
                "streams of the program's own: each keeps free blocks of its own, reserved memory grows"
            ] = None

    return Stream


class _IdleStream(_Stream):
    def is_capturing(self) -> bool:
        return False


def _module_functions(device: Device) -> list[tuple[Any, str, Any]]:
    """Functions of ``torch`` and ``torch.cuda`` to replace: answers as on the target GPU."""
    major, minor = divmod(int(device.arch.removeprefix("sm_").rstrip("af")), 10)
    capacity = device.capacity_bytes or 1 << 40
    properties = types.SimpleNamespace(
        name=device.title, major=major, minor=minor, total_memory=capacity,
        multi_processor_count=device.sm_count or 1, warp_size=32,
    )  # fmt: skip

    def nothing(*_: object, **__: object) -> None:
        return None

    def zero(*_: object, **__: object) -> int:
        return 0

    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_, **__: major >= 8,
        "device_count": lambda: 1,
        "current_device": zero,
        "get_device_name": lambda *_: device.title,
        "get_device_capability": lambda *_: (major, minor),
        "get_device_properties": lambda *_: properties,
        "mem_get_info": lambda *_: (capacity, capacity),
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": nothing,
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "is_current_stream_capturing": lambda: False,
        **dict.fromkeys(("current_stream", "default_stream", "Stream", "Event", "stream", "device"), _Stream),
        "memory_stats": lambda *_: {},
    }
    for name in ("init", "_lazy_init", "set_device", "synchronize", "empty_cache", "reset_peak_memory_stats",
                 "manual_seed", "manual_seed_all", "ipc_collect"):  # fmt: skip
        answers[name] = nothing
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        answers[name] = zero
    return [(torch.cuda, name, value) for name, value in answers.items()] + _accelerator_functions()


def _accelerator_functions() -> list[tuple[Any, str, Any]]:
    """``torch.accelerator``, which also optimizers ask: CUDA is there, nothing is being captured."""
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_accelerator": lambda check_available=False: CUDA_TYPE,
        "current_device_index": lambda: 0,
        "current_device_idx": lambda: 0,
        "current_stream": _IdleStream,
    }
    for name in ("set_device_index", "set_device_idx", "set_stream", "synchronize"):
        answers[name] = lambda *_, **__: None
    return [(torch.accelerator, name, value) for name, value in answers.items()]


def _autocast_functions() -> list[tuple[Any, str, Any]]:
    """``torch.autocast("cuda")`` and its queries, on the CPU's autocast state."""

    def as_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            args = tuple("cpu" if a == "cuda" else a for a in args)
            if not kwargs and not any(isinstance(a, str) for a in args):
                args = ("cpu", *args)  # without a device type the question is about CUDA
            kwargs = {k: "cpu" if isinstance(v, str) and v == "cuda" else v for k, v in kwargs.items()}
            return function(*args, **kwargs)

        return call

    original: Any = torch.autocast.__init__

    def init(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.float16
        original(self, device_type, dtype, enabled, cache_enabled)

    names = ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype")
    patches: list[tuple[Any, str, Any]] = [(torch.autocast, "__init__", init)]
    patches += [(torch, name, as_cpu(getattr(torch, name))) for name in names]
    patches.append((torch, "get_autocast_gpu_dtype", lambda: torch.get_autocast_dtype("cpu")))
    return patches


class _NoGrad:
    """Stands for the guard of ``torch.inference_mode``: there composite operators would reach the recorder whole."""

    def __init__(self, mode: bool = True) -> None:
        self._mode = mode
        self._before: list[bool] = []

    def __enter__(self) -> None:
        self._before.append(torch.is_grad_enabled())
        if self._mode:
            torch.set_grad_enabled(False)

    def __exit__(self, *_: object) -> None:
        torch.set_grad_enabled(self._before.pop())


_MISSING = object()


@contextlib.contextmanager
def replaced(patches: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes of classes and modules; put back what was there, also after an error."""
    before = [(owner, name, vars(owner).get(name, _MISSING)) for owner, name, _ in patches]
    try:
        for owner, name, value in patches:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(before):
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def _in_backward(recorder: Recorder, places: Places) -> list[tuple[Any, str, Any]]:
    """Keep the mode on in the engine: user code runs in there too (checkpoints, custom functions).

    ``torch.autograd.backward`` is overridable, so that the mode is off while it runs; the engine
    takes the state of its caller.
    """
    original: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        with places:
            return recorder.numbering.run(lambda: original(outputs, *args, **kwargs), outputs)

    return [(torch.autograd, "_engine_run_backward", run)]


def _in_hooks(places: Places) -> list[tuple[Any, str, Any]]:
    """Keep the mode on in the user's hooks on saved tensors (``save_on_cpu``): the call that saves has it off."""
    hooks = torch.autograd.graph.saved_tensors_hooks
    original: Any = hooks.__enter__

    def placed(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call(x: Any) -> Any:
            if places in _get_current_function_mode_stack():  # in the engine; twice would place results twice
                return hook(x)
            with places:
                return hook(x)

        return call

    def enter(own: Any) -> Any:
        pair = own.pack_hook, own.unpack_hook
        own.pack_hook, own.unpack_hook = map(placed, pair)
        try:
            return original(own)
        finally:
            own.pack_hook, own.unpack_hook = pair

    return [(hooks, "__enter__", enter)]


@contextlib.contextmanager
def gpu_places(recorder: Recorder, device: Device) -> Iterator[None]:
    """Make code inside believe that device tensors are on ``device``."""
    places = Places(recorder)
    patches = [*_attributes(recorder), *_module_functions(device), *_autocast_functions(), *foreach_functions()]
    patches += [
        *_in_backward(recorder, places),
        *_in_hooks(places),
        (torch._C, "_InferenceMode", _NoGrad),
        (torch, "Generator", Generator),
        (torch.cuda, "Stream", _counted_stream(recorder)),
        (torch.Tensor, "record_stream", lambda *_: None),  # all streams are one here
    ]
    with replaced(patches), places:
        yield
