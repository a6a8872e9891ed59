"""Hand-made tapes: a builder whose calls read like the run that they stand for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import accumulate

from fxmem.tape import ModuleInfo, Op, Phase, Ref, Role, Storage, Tape, TensorMeta

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "uint8": 1}
Shape = tuple[int, ...]


class TapeBuilder:
    """Writes a tape call by call; tensors are known by name.

    >>> b = TapeBuilder(batch=2)
    >>> tape = b.keep("w", (3,)).step().op("relu.default", reads=["w"], makes={"y": (2, 3)}).free("y").build()
    >>> tape.events
    (0, 1, -2)
    """

    def __init__(self, batch: int = 1, *, training: bool = False) -> None:
        self._batch, self._training = batch, training
        self._storages: list[Storage] = []
        self._ops: list[Op] = []
        self._events: list[int] = []
        self._starts: list[int] = []
        self._modules: list[ModuleInfo] = []
        self._metas: dict[str, TensorMeta] = {}
        self._shapes: dict[str, Shape] = {}

    def module(self, path: str, kind: str = "Module", parameters: int = 0, parameter_bytes: int = 0) -> TapeBuilder:
        """List a module."""
        info = ModuleInfo(path=path, kind=kind, parameters=parameters, parameter_bytes=parameter_bytes)
        self._modules.append(info)
        return self

    def keep(
        self, name: str, shape: Shape, role: Role = Role.PARAMETER, *, module: str = "", dtype: str = "float32"
    ) -> TapeBuilder:
        """Move a tensor to the device in the setup, by an operator of its own."""
        start = len(self._events)
        meta = self._allocate(name, shape, dtype, role, module=module, op=None, label=name)
        self._append("to_device", start, step=0, phase=Phase.SETUP, module=module, outputs=(meta,))
        return self

    def step(self) -> TapeBuilder:
        """Begin the next step."""
        self._starts.append(len(self._events))
        return self

    def op(
        self,
        name: str,
        *,
        reads: Iterable[str] = (),
        writes: Iterable[str] = (),
        makes: Mapping[str, Shape] | None = None,
        role: Role = Role.TEMPORARY,
        dtype: str = "float32",
        scratch: int = 0,
        frees: Iterable[str] = (),
        module: str = "",
        phase: Phase = Phase.FORWARD,
        args: tuple[object, ...] | None = None,
        kwargs: tuple[tuple[str, object], ...] = (),
        flops: int = 0,
    ) -> TapeBuilder:
        """Call an operator; ``scratch`` bytes are a workspace, ``frees`` die while it runs."""
        start, index = len(self._events), len(self._ops)
        inputs = tuple(self._metas[read] for read in reads)
        written = tuple(self._metas[write] for write in writes)
        if scratch:
            self._allocate(f"scratch{index}", (scratch,), "uint8", Role.WORKSPACE, module=module, op=index)
        made = tuple(
            self._allocate(key, shape, dtype, role, module=module, op=index) for key, shape in (makes or {}).items()
        )
        for dead in (*frees, *([f"scratch{index}"] if scratch else [])):
            self.free(dead)
        refs = tuple(Ref(position) for position in range(len(inputs)))
        self._append(
            name, start, step=len(self._starts), phase=phase, module=module, inputs=inputs + written,
            outputs=written + made, args=refs if args is None else args, kwargs=kwargs, flops=flops,
        )  # fmt: skip
        return self

    def free(self, *names: str) -> TapeBuilder:
        """Let tensors die."""
        self._events.extend(~self._metas[name].storage for name in names)
        return self

    def build(self, *, notes: tuple[str, ...] = (), unmodelled: tuple[str, ...] = ()) -> Tape:
        """Finish the tape."""
        return Tape(
            batch=self._batch, steps=len(self._starts), storages=tuple(self._storages), ops=tuple(self._ops),
            events=tuple(self._events), step_starts=tuple(self._starts), modules=tuple(self._modules),
            training=self._training, torch_version="2.9.0", notes=notes, unmodelled=unmodelled,
        )  # fmt: skip

    def storage(self, name: str) -> int:
        """The index of the storage that the name stands for."""
        return self._metas[name].storage

    def _allocate(
        self, name: str, shape: Shape, dtype: str, role: Role, *, module: str, op: int | None, label: str = ""
    ) -> TensorMeta:
        index = len(self._storages)
        nbytes = math.prod(shape) * ITEM_BYTES[dtype]
        self._storages.append(
            Storage(nbytes=nbytes, role=role, shape=shape, dtype=dtype, op=op, name=label, module=module)
        )
        self._events.append(index)
        self._metas[name] = TensorMeta(index, shape, contiguous(shape), dtype)
        return self._metas[name]

    def _append(
        self, name: str, start: int, *, step: int, phase: Phase, module: str,
        inputs: tuple[TensorMeta, ...] = (), outputs: tuple[TensorMeta, ...] = (),
        args: tuple[object, ...] = (), kwargs: tuple[tuple[str, object], ...] = (), flops: int = 0,
    ) -> None:  # fmt: skip
        source = f"model.py:{len(self._ops)}" if step else ""
        self._ops.append(
            Op(
                name=name,
                step=step,
                phase=phase,
                module=module,
                source=source,
                start=start,
                stop=len(self._events),
                inputs=inputs,
                outputs=outputs,
                args=args,
                kwargs=kwargs,
                flops=flops,
            )
        )


def contiguous(shape: Shape) -> Shape:
    """Row-major strides, in elements."""
    return tuple(accumulate(reversed(shape[1:]), lambda x, y: x * y, initial=1))[::-1] if shape else ()


def mlp(batch: int, *, steps: int = 2, width: int = 8) -> Tape:
    """Train two linear layers with momentum SGD: 8 -> ``width`` -> 4 features."""
    b = TapeBuilder(batch, training=True)
    b.module("", "MLP", 12 * width, 48 * width).module("fc1", "Linear", 8 * width, 32 * width)
    b.module("fc2", "Linear", 4 * width, 16 * width)
    b.keep("w1", (width, 8), module="fc1").keep("w2", (4, width), module="fc2")
    b.keep("x", (batch, 8), Role.INPUT)
    for step in range(1, steps + 1):
        b.step()
        b.op("mm.default", reads=["x", "w1"], makes={f"h{step}": (batch, width)}, role=Role.ACTIVATION, module="fc1",
             flops=2 * batch * 8 * width)  # fmt: skip
        b.op("mm.default", reads=[f"h{step}", "w2"], makes={f"y{step}": (batch, 4)}, role=Role.OUTPUT, module="fc2",
             flops=2 * batch * 4 * width, scratch=64)  # fmt: skip
        if step > 1:
            b.free(f"y{step - 1}")
        b.op("ones_like.default", reads=[f"y{step}"], makes={"dy": (batch, 4)}, phase=Phase.BACKWARD)
        b.op("mm.default", reads=["dy", f"h{step}"], makes={"g2": (4, width)}, role=Role.GRADIENT, module="fc2",
             phase=Phase.BACKWARD, flops=2 * batch * 4 * width)  # fmt: skip
        b.op("mm.default", reads=["dy", "w2"], makes={"dh": (batch, width)}, module="fc2", phase=Phase.BACKWARD,
             flops=2 * batch * 4 * width)  # fmt: skip
        b.free("dy", f"h{step}")
        b.op("mm.default", reads=["dh", "x"], makes={"g1": (width, 8)}, role=Role.GRADIENT, module="fc1",
             phase=Phase.BACKWARD, flops=2 * batch * 8 * width)  # fmt: skip
        b.free("dh")
        if step == 1:
            b.op("zeros_like.default", reads=["g1"], makes={"m1": (width, 8)}, role=Role.OPTIMIZER_STATE,
                 phase=Phase.OPTIMIZER)  # fmt: skip
        b.op("_foreach_add_.List", reads=["g1", "m1"], writes=["w1", "m1"], phase=Phase.OPTIMIZER)
        b.op("_foreach_add_.List", reads=["g2"], writes=["w2"], phase=Phase.OPTIMIZER)
        b.free("g1", "g2")
    return b.build(notes=("the loss is the output's mean",))
