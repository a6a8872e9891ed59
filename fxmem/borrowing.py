"""Borrow a live module for a trace: fake tensors in, and everything back at the end."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from fxmem.fakes import stand_in

_OPENED = (nn.Module, Optimizer, dict, list, set, deque)
"""What keeps its identity while tensors inside it are replaced."""


@contextlib.contextmanager
def borrowed(module: nn.Module, fake_mode: FakeTensorMode) -> Iterator[nn.Module]:
    """Scope in which a module that has weights can be traced as if it had been built without.

    Parameters are replaced by fake ones, buffers and plain tensor attributes by copies (real if
    small). On exit everything is as before, also after an error: tensors, gradients, hooks, flags,
    and the contents of lists, dictionaries and sets that the module holds.
    """
    loan = _Loan(fake_mode)
    try:
        with _disable_current_modes(), torch.no_grad():
            for part in module.modules():
                loan.take(part)
            loan.copies.clear()  # a copy lives as long as the module keeps it
        yield module
    finally:
        loan.give_back()


def _refill(container: Any, fill: Callable[[Any], object], contents: Any) -> None:
    container.clear()
    fill(contents)


class _Loan:
    """What was replaced where. Lives as long as one :func:`borrowed`."""

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        self.fake_mode = fake_mode
        self.undo: list[Callable[[], object]] = []
        self.seen: dict[int, object] = {}  # keeps what it names alive, so that ids stay unique
        self.copies: dict[int, Tensor] = {}

    def take(self, value: Any) -> Any:
        """What stands in for ``value``; containers and modules keep their identity."""
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, tuple):
            new = [self.take(x) for x in value]
            changed = any(a is not b for a, b in zip(new, value, strict=True))
            return (type(value)(*new) if hasattr(value, "_fields") else type(value)(new)) if changed else value
        if id(value) not in self.seen and isinstance(value, (*_OPENED, FunctionType)):
            self.seen[id(value)] = value
            self._contents(value)
        return value

    def give_back(self) -> None:
        """Undo everything, last change first."""
        while self.undo:
            self.undo.pop()()

    def _tensor(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self.copies:
            self.seen[id(tensor)] = tensor
            self.copies[id(tensor)] = stand_in(tensor, self.fake_mode)
            for hooks in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks):
                for hook in list((hooks or {}).values()):
                    self.take(hook)
        return self.copies[id(tensor)]

    def _contents(self, value: Any) -> None:
        if isinstance(value, nn.Module):
            self._mapping(vars(value))
            vars(value).pop("_compiled_call_impl", None)  # Module.compile(): the trace runs the eager forward
            self.take(getattr(type(value), "forward", None))  # a class made in a function: its closure
        elif isinstance(value, Optimizer):  # one that steps in a hook on a gradient
            self._mapping(vars(value))
        elif isinstance(value, dict):
            self._mapping(value)
        elif isinstance(value, (list, deque)):
            saved = list(value)
            self.undo.append(functools.partial(_refill, value, value.extend, saved))
            for i, x in enumerate(saved):
                value[i] = self.take(x)
        elif isinstance(value, set):
            members = set(value)
            self.undo.append(functools.partial(_refill, value, value.update, members))
            replaced = {self.take(x) for x in members}
            value.clear()
            value.update(replaced)
        else:
            self._closure(value)

    def _mapping(self, value: dict[Any, Any]) -> None:
        saved = dict(value)
        self.undo.append(functools.partial(_refill, value, value.update, saved))
        if any(isinstance(key, Tensor) for key in saved):  # an optimizer for each parameter, its state
            _refill(value, value.update, {self.take(key): self.take(x) for key, x in saved.items()})
            return
        for key, x in saved.items():
            new = self.take(x)
            if new is not x:
                value[key] = new

    def _closure(self, function: FunctionType) -> None:
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty cell
                old = cell.cell_contents
                if isinstance(old, (Tensor, tuple, *_OPENED, FunctionType)):
                    new = self.take(old)
                    if new is not old:
                        cell.cell_contents = new
                        self.undo.append(functools.partial(setattr, cell, "cell_contents", old))
