"""A process that asks cuDNN which plan PyTorch would take, and how much workspace it needs.

Started by :mod:`fxmem.cudnn.process`. It loads libcudnn by ``ctypes`` and speaks its graph API
("backend API"), giving every heuristics, engine and plan descriptor a description of the device
instead of a handle (``CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR``, cuDNN 9.8 and later), so no GPU is
needed; :mod:`fxmem.cudnn.driver` stands in for the driver that a few engines ask.

The steps are those of ``run_single_conv`` in aten/src/ATen/native/cudnn/Conv_v8.cpp with
``cudnn.benchmark`` off (seen call by call at the interface with torch 2.14.1): the heuristic's
configurations in order, and the first that ``filterEngineConfigs`` does not drop. Numbers are the
enumerators of cudnn_graph_v9.h (cuDNN 9.24).

Standard input: one JSON line ``{"library", "device", "questions"}``, a question being ``[direction,
dtype, x, w, stride, padding, dilation, channels_last, tf32]``. Standard output: one JSON line
``{"version"}`` or ``{"error"}``, then one line an answer: bytes, or ``null`` where no plan builds.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

from fxmem.cudnn.driver import install

_DATA_TYPE, _INT64, _FLOAT, _MODE, _HEUR_MODE, _NOTE, _DESCRIPTOR, _CHAR = 1, 3, 4, 7, 8, 11, 15, 24
"""``cudnnBackendAttributeType_t``."""

_CONVOLUTION, _ENGINE, _CONFIG, _HEURISTICS, _GRAPH, _TENSOR, _DEVICE = 1, 2, 3, 4, 15, 17, 38
"""``cudnnBackendDescriptorType_t``."""

_DTYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 9}
"""``cudnnDataType_t``."""

_OPERATIONS = {
    "forward": (10, (704, 705, 703), (702, 700, 701)),
    "wgrad": (11, (716, 717, 715), (714, 712, 713)),
    "dgrad": (12, (710, 711, 709), (708, 706, 707)),
}
"""Descriptor type; attributes of x, y and w (gradients or not); of the convolution, alpha and beta."""

_TENSOR_CORE, _DOWN_CONVERT = 0, 1
"""``cudnnBackendNumericalNote_t``; ``filterEngineConfigs`` looks at these two unless deterministic."""

_ALIGNMENT = 32
"""Bytes: ``getAlignment`` of Conv_v8.cpp stops there, the caching allocator's blocks lie on 512."""

_INSTANT, _FALLBACK = 0, 2
"""``cudnnBackendHeurMode_t``."""


class _Refused(Exception):
    """cuDNN answered a call with another status than success."""


class _Session:
    """The loaded library, the device and the descriptors of one question."""

    def __init__(self, library: str, device: str) -> None:
        self.driver = install(device)
        self.lib = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        self.lib.cudnnGetVersion.restype = ctypes.c_size_t
        self.owned: list[ctypes.c_void_p] = []
        self.device = self.create(_DEVICE)
        self.put(self.device, 2702, _CHAR, ctypes.create_string_buffer(device.encode()), len(device))
        self.finish(self.device)
        self.owned.clear()

    def __enter__(self) -> _Session:  # noqa: PYI034 - Self needs Python 3.11
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for descriptor in reversed(self.owned):
            self.lib.cudnnBackendDestroyDescriptor(descriptor)
        self.owned.clear()

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.lib, name)(*arguments)
        if status != 0:
            raise _Refused(f"{name}: status {status}")

    def create(self, kind: int) -> ctypes.c_void_p:
        descriptor = ctypes.c_void_p()
        self.call("cudnnBackendCreateDescriptor", kind, ctypes.byref(descriptor))
        self.owned.append(descriptor)
        return descriptor

    def put(self, descriptor: ctypes.c_void_p, name: int, kind: int, values: Any, count: int = 1) -> None:
        at = ctypes.byref(values)
        self.call("cudnnBackendSetAttribute", descriptor, name, kind, ctypes.c_int64(count), at)

    def put_ints(self, descriptor: ctypes.c_void_p, name: int, values: Sequence[int]) -> None:
        self.put(descriptor, name, _INT64, (ctypes.c_int64 * len(values))(*values), len(values))

    def put_enum(self, descriptor: ctypes.c_void_p, name: int, kind: int, value: int) -> None:
        self.put(descriptor, name, kind, ctypes.c_int(value))

    def get(self, descriptor: ctypes.c_void_p, name: int, kind: int, values: Any, count: int) -> int:
        """Returns how many values there are."""
        got = ctypes.c_int64()
        at = None if values is None else ctypes.byref(values)
        self.call("cudnnBackendGetAttribute", descriptor, name, kind, ctypes.c_int64(count), ctypes.byref(got), at)
        return got.value

    def finish(self, descriptor: ctypes.c_void_p, device_attribute: int | None = None) -> None:
        if device_attribute is not None:
            self.put(descriptor, device_attribute, _DESCRIPTOR, self.device)
        self.call("cudnnBackendFinalize", descriptor)


def strides(shape: Sequence[int], channels_last: bool) -> list[int]:
    """Strides of a dense tensor, as ``fixSizeOneDimStride`` of ATen leaves them."""
    spatial = range(len(shape) - 1, 1, -1)
    order = (1, *spatial, 0) if channels_last else (*spatial, 1, 0)
    result, step = [0] * len(shape), 1
    for d in order:
        result[d] = step
        step *= shape[d]
    return result


def output_shape(question: Sequence[Any]) -> list[int]:
    """The shape of y, from a question."""
    _, _, x, w, stride, padding, dilation = question[:7]
    spatial = [
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, k, s, p, d in zip(x[2:], w[2:], stride, padding, dilation, strict=True)
    ]
    return [x[0], w[0], *spatial]


def _tensor(session: _Session, name: str, shape: Sequence[int], dtype: int, channels_last: bool) -> ctypes.c_void_p:
    tensor = session.create(_TENSOR)
    session.put_enum(tensor, 901, _DATA_TYPE, dtype)
    session.put_ints(tensor, 902, shape)
    session.put_ints(tensor, 903, strides(shape, channels_last))
    session.put_ints(tensor, 906, [ord(name)])
    session.put_ints(tensor, 900, [_ALIGNMENT])
    session.finish(tensor)
    return tensor


def _graph(session: _Session, question: Sequence[Any]) -> ctypes.c_void_p:
    """``build_opgraph``: one operation, nothing fused; half precision computes in float."""
    direction, dtype, x, w, stride, padding, dilation, channels_last = question[:8]
    number = _DTYPES[dtype]
    kind, tensors, (conv_name, alpha, beta) = _OPERATIONS[direction]
    convolution = session.create(_CONVOLUTION)
    session.put_enum(convolution, 100, _DATA_TYPE, number if dtype == "float64" else _DTYPES["float32"])
    session.put_enum(convolution, 101, _MODE, 1)
    session.put_ints(convolution, 106, [len(stride)])
    for attribute, values in ((105, padding), (104, padding), (102, dilation), (103, stride)):
        session.put_ints(convolution, attribute, values)
    session.finish(convolution)
    operation = session.create(kind)
    shapes = (("x", x), ("y", output_shape(question)), ("w", w))
    for attribute, (letter, shape) in zip(tensors, shapes, strict=True):
        session.put(operation, attribute, _DESCRIPTOR, _tensor(session, letter, shape, number, channels_last))
    session.put(operation, conv_name, _DESCRIPTOR, convolution)
    session.put(operation, alpha, _FLOAT, ctypes.c_float(1.0))
    session.put(operation, beta, _FLOAT, ctypes.c_float(0.0))
    session.finish(operation)
    graph = session.create(_GRAPH)
    session.put(graph, 801, _DESCRIPTOR, operation)
    session.finish(graph)
    return graph


def _configurations(session: _Session, graph: ctypes.c_void_p) -> Iterator[ctypes.c_void_p]:
    """The heuristic's candidates in PyTorch's order: its first, all, then those of the fallback."""
    for mode, most in ((_INSTANT, 1), (_INSTANT, None), (_FALLBACK, None)):
        try:
            heuristics = session.create(_HEURISTICS)
            session.put(heuristics, 201, _DESCRIPTOR, graph)
            session.put_enum(heuristics, 200, _HEUR_MODE, mode)
            session.finish(heuristics, 204)
            count = most or session.get(heuristics, 202, _DESCRIPTOR, None, 0)
            found = (ctypes.c_void_p * count)(*[session.create(_CONFIG).value for _ in range(count)])
            count = session.get(heuristics, 202, _DESCRIPTOR, found, count) if count else 0
        except _Refused:
            continue
        yield from (ctypes.c_void_p(value) for value in found[:count])


def _wanted(session: _Session, configuration: ctypes.c_void_p, full_float: bool) -> bool:
    """``filterEngineConfigs`` with ``deterministic`` off."""
    engine = session.create(_ENGINE)
    session.get(configuration, 300, _DESCRIPTOR, engine, 1)
    notes = (ctypes.c_int * 16)()
    count = session.get(engine, 1303, _NOTE, notes, 16)
    has = set(notes[:count])
    return _DOWN_CONVERT not in has and not (full_float and _TENSOR_CORE in has)


def workspace(session: _Session, question: Sequence[Any]) -> int | None:
    """Bytes that the chosen configuration asks for; ``None``: there is none.

    A configuration knows its workspace, so its plan is not built: that would compile a kernel for some
    engines, a second each. No plan of a configuration that the heuristic offers first was ever refused.
    """
    full_float = question[1] == "float32" and not question[8]
    with session:
        for configuration in _configurations(session, _graph(session, question)):
            try:
                if _wanted(session, configuration, full_float):
                    nbytes = ctypes.c_int64()
                    session.get(configuration, 303, _INT64, nbytes, 1)
                    return nbytes.value
            except _Refused:  # noqa: PERF203 - the next candidate counts
                continue
    return None


def main() -> None:
    """Answer what stands on standard input."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the process that asked
    asked = json.loads(sys.stdin.readline())
    try:
        session = _Session(asked["library"], asked["device"])
    except (OSError, AttributeError, _Refused) as error:
        _say({"error": str(error)})
        return
    _say({"version": session.lib.cudnnGetVersion()})
    for question in asked["questions"]:
        try:
            _say(workspace(session, question))
        except _Refused:  # noqa: PERF203 - the next question counts
            _say(None)
    os._exit(0)  # without the libraries' own clean-up, which would call the stand-in driver


def _say(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()
