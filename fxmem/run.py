"""The reference loop that design part 1 describes, run once under the recorder.

It is the plain script that people write. Names stay bound as they would there: output and
loss live until the next step rebinds them, inputs are made once and stay.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

from fxmem.errors import TraceError, UsageError
from fxmem.optimizers import make_optimizer
from fxmem.recording.modulepath import module_paths
from fxmem.recording.recorder import Recorder, tensors_in
from fxmem.source import Inputs, Source
from fxmem.tape import Phase, Role
from fxmem.workload import Mode, Workload, ZeroGrad


def run(source: Source, inputs: list[Inputs], workload: Workload, recorder: Recorder, steps: int) -> None:
    """Move model and inputs to the device and run the steps.

    Args:
        source: Model on fake parameters, and its loss.
        inputs: Made for the batch size to record: one that stays, or one for each step, which the loop
            empties as it goes. Their number then is the number of steps.
        workload: What to run.
        recorder: Active dispatch mode that writes the run down.
        steps: Steps to run, where there is one input.
    """
    model = source.module
    model.train(workload.training)
    _to_device(model, recorder)
    feed = _Feed(inputs, recorder)
    steps = steps if feed.stays else len(inputs)
    with module_paths(model, recorder):
        loop(source, feed, workload, recorder, steps)


class Marks(Protocol):
    """What the loop tells whoever watches it."""

    phase: Phase

    def begin_step(self, step: int) -> None:
        """Step 1, 2, ... begins."""

    def end_steps(self) -> None:
        """The last one is over; output and loss are still bound."""

    def name_gradients(self, params: Iterable[nn.Parameter]) -> None:
        """The backward pass is over."""

    def name_optimizer_state(self, state: Mapping[Any, Any], params: Iterable[nn.Parameter]) -> None:
        """The optimizer has made its step."""


class Feed(Protocol):
    """Where the loop gets its inputs."""

    def next(self) -> Inputs:
        """The inputs of the step that begins."""


def loop(source: Source, feed: Feed, workload: Workload, marks: Marks, steps: int) -> None:
    """The steps, on whatever device the model and its inputs are.

    Args:
        source: Model and loss.
        feed: Its inputs.
        workload: What to run.
        marks: Is told what happens.
        steps: How many.
    """
    with _collected_at_steps():
        if workload.mode is Mode.TRAINING:
            _train(source, feed, workload, marks, steps)
        elif workload.mode is Mode.GENERATION:
            _generate(source, feed, workload, marks, steps)
        else:
            _infer(source, feed, workload, marks, steps)


# ------------------------------------------------------------------ setup
def _to_device(model: nn.Module, recorder: Recorder) -> None:
    """Adopt parameters and buffers in the order in which ``Module.to`` copies them."""
    seen: set[int] = set()

    def visit(module: nn.Module, path: str) -> None:
        for name, child in module._modules.items():
            if child is not None:
                visit(child, f"{path}.{name}" if path else name)
        for role, table in ((Role.PARAMETER, module._parameters), (Role.BUFFER, module._buffers)):
            for name, tensor in table.items():
                if tensor is not None and id(tensor) not in seen and tensor.layout is torch.strided:
                    seen.add(id(tensor))
                    recorder.ledger.adopt(tensor, role, f"{path}.{name}" if path else name, path)
        if isinstance(module, nn.RNNBase):  # as its _apply does
            recorder.module_stack.append(path)
            module._init_flat_weights()
            recorder.module_stack.pop()

    visit(model, "")


class _Feed:
    """Hands each step its inputs: always the same, or as a data loader would."""

    def __init__(self, inputs: list[Inputs], recorder: Recorder) -> None:
        self.stays = len(inputs) == 1
        self._inputs = inputs
        self._recorder = recorder
        if self.stays:
            _adopt_inputs(inputs[0], recorder)

    def next(self) -> Inputs:
        """The inputs of the step that begins."""
        if self.stays:
            return self._inputs[0]
        _adopt_inputs(self._inputs[0], self._recorder)
        return self._inputs.pop(0)


def _adopt_inputs(inputs: Inputs, recorder: Recorder) -> None:
    named = [(f"args[{i}]", a) for i, a in enumerate(inputs.args)]
    named += list(inputs.kwargs.items())
    named.append(("target", inputs.target))
    seen: set[int] = set()
    for name, tree in named:
        for tensor in tensors_in(tree):
            if id(tensor) not in seen and id(tensor) not in inputs.host and tensor.layout is torch.strided:
                seen.add(id(tensor))
                recorder.ledger.adopt(tensor, Role.INPUT, name)


@contextlib.contextmanager
def _collected_at_steps() -> Iterator[None]:
    """Take the cycle collector's timing out of the run: it would differ from run to run."""
    was_enabled = gc.isenabled()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


# ------------------------------------------------------------------ loops
def _cast(workload: Workload) -> contextlib.AbstractContextManager[Any]:
    if workload.amp is None:
        return contextlib.nullcontext()
    return torch.autocast("cuda", dtype=getattr(torch, workload.amp))


def _infer(source: Source, feed: Feed, workload: Workload, recorder: Marks, steps: int) -> None:
    model = source.module
    recorder.phase = Phase.FORWARD
    for step in range(1, steps + 1):
        recorder.begin_step(step)
        inputs = feed.next()
        with torch.no_grad(), _cast(workload):
            y = model(*inputs.args, **inputs.kwargs)  # noqa: F841 - bound until the next step
        gc.collect(0)
    recorder.end_steps()


def _train(source: Source, feed: Feed, workload: Workload, recorder: Marks, steps: int) -> None:
    model = source.module
    params = list(model.parameters())
    zero_at = workload.zero_grad
    optimizer = make_optimizer(workload.optimizer, params, foreach=workload.foreach)
    zero_grad = (model if optimizer is None else optimizer).zero_grad
    scaler = torch.amp.GradScaler("cuda", enabled=workload.amp == "float16")
    for step in range(1, steps + 1):
        recorder.begin_step(step)
        inputs = feed.next()
        for micro_batch in range(workload.accumulate):
            recorder.phase = Phase.FORWARD
            with _cast(workload):
                y = model(*inputs.args, **inputs.kwargs)
                loss = _checked(source.loss(y)) if source.loss is not None else default_loss(y, inputs.target)
            if zero_at is ZeroGrad.BEFORE_BACKWARD and micro_batch == 0:
                zero_grad(set_to_none=True)
            scaled = scaler.scale(loss)
            recorder.phase = Phase.BACKWARD
            scaled.backward()
            del scaled
            recorder.name_gradients(params)
        recorder.phase = Phase.OPTIMIZER
        if workload.clip:
            if optimizer is not None:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(params, 1.0)
        if optimizer is not None:
            scaler.step(optimizer)
            scaler.update()
            recorder.name_optimizer_state(optimizer.state, params)
        if zero_at is not ZeroGrad.BEFORE_BACKWARD:
            zero_grad(set_to_none=zero_at is ZeroGrad.AFTER_STEP)
        gc.collect(0)
    recorder.end_steps()


def _generate(source: Source, feed: Feed, workload: Workload, recorder: Marks, steps: int) -> None:
    model = source.module
    if not hasattr(model, "generate"):
        raise UsageError(
            f"{type(model).__name__} has no generate()", hint="use --mode inference, or a target with generate()"
        )
    recorder.phase = Phase.FORWARD
    for step in range(1, steps + 1):
        recorder.begin_step(step)
        inputs = feed.next()
        left = [workload.new_tokens]

        def stop(ids: torch.Tensor, _scores: Any, **_: Any) -> torch.Tensor:
            left[0] -= 1  # noqa: B023 - used within this iteration
            if left[0] <= 0:  # noqa: B023
                raise _Generated
            return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)

        with contextlib.suppress(_Generated), torch.no_grad(), _cast(workload):
            generate: Any = model.generate
            generate(
                *inputs.args, **inputs.kwargs, max_new_tokens=workload.new_tokens, do_sample=False,
                pad_token_id=1, eos_token_id=2, stopping_criteria=[stop],
            )  # fmt: skip
        gc.collect(0)
    recorder.end_steps()


class _Generated(Exception):  # not an error: ends the token loop from the host
    pass


def default_loss(y: Any, target: torch.Tensor | None) -> torch.Tensor:
    """The loss where the target has none: see design part 1."""
    own = getattr(y, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    if isinstance(y, dict):
        floating = [t for t in y.values() if isinstance(t, torch.Tensor) and t.is_floating_point()]
        if {"loss_classifier", "bbox_regression", "classification"} & set(y):
            return sum(floating)  # type: ignore[return-value]
        if not floating:
            raise _no_loss(y)
        y = floating[0]
    if isinstance(y, (tuple, list)):
        if target is not None and all(isinstance(t, torch.Tensor) for t in y):  # auxiliary heads
            weighted = [functional.cross_entropy(t, target) * w for t, w in zip(y, (1.0, 0.3, 0.3), strict=False)]
            return sum(weighted)  # type: ignore[return-value]
        y = y[0] if y else None
    if not isinstance(y, torch.Tensor):
        raise _no_loss(y)
    if target is not None and y.dim() == 2:
        return functional.cross_entropy(y, target)
    mean: torch.Tensor = y.float().mean()
    return mean


def _no_loss(y: object) -> TraceError:
    return TraceError(
        f"the output (of type {type(y).__name__}) has no loss that is known",
        hint="define loss(output) in the model's file, or give loss= from Python",
    )


def _checked(loss: object) -> torch.Tensor:
    """The user's loss, if a backward pass can start there."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss
    kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
    raise TraceError(
        f"loss(output) returned {kind}", hint="return a scalar tensor, as loss.mean() is, that requires grad"
    )
