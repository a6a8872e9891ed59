"""Which module's forward is running: kept on the recorder's stack while the model runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from fxmem.recording.recorder import Recorder


@contextlib.contextmanager
def module_paths(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Keep the recorder's module stack: which module's forward is running."""
    paths = {id(module): path for path, module in model.named_modules()}
    stack = recorder.module_stack
    original: Callable[..., Any] = nn.Module.__call__

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        stack.append(paths.get(id(self), stack[-1]))
        try:
            return original(self, *args, **kwargs)
        except BaseException:
            recorder.failed_in = recorder.failed_in or stack[-1]
            raise
        finally:
            stack.pop()

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]
