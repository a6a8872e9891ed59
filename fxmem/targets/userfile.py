"""Targets that are the user's own code: ``model.py[:NAME]``, ``package.module[:NAME]``, a callable."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from fxmem.errors import FxmemError, SourceError
from fxmem.targets.made import Made, nearest

_ALONE = "run the file alone with Python to see the whole traceback, or use --debug"
_PRIVATE = "_fxmem_target_"
_FXMEM = Path(__file__).resolve().parents[1]
_WANTED = "a function model(), an nn.Module instance, or one nn.Module class"


class Surroundings:
    """Where a target's code finds its sibling modules; leaves no trace in the process.

    Re-enterable: code that imports a sibling late, in ``forward``, finds the same modules.
    What the user's code prints goes to stderr, because stdout belongs to the report.
    """

    def __init__(self, folder: Path, *, private: bool) -> None:
        self.folder = folder
        self._private = private
        self._modules: dict[str, ModuleType] = {}

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Scope in which the target's code runs."""
        bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
        shadowed = {name: sys.modules[name] for name in self._modules if name in sys.modules}
        sys.modules.update(self._modules)
        sys.path.insert(0, str(self.folder))
        importlib.invalidate_caches()
        before = set(sys.modules) - set(self._modules)
        try:
            with contextlib.redirect_stdout(sys.stderr):
                yield
        finally:
            if self._private:
                self._withdraw(before)
            sys.modules.update(shadowed)
            sys.path.remove(str(self.folder))
            sys.dont_write_bytecode = bytecode

    def _withdraw(self, before: set[str]) -> None:
        """Take the folder's modules out of ``sys.modules``: another target may have a sibling of that name."""
        for name in set(sys.modules) - before:
            if name.startswith(_PRIVATE) or self.owns(getattr(sys.modules[name], "__file__", None)):
                self._modules[name] = sys.modules.pop(name)

    def owns(self, file: str | None) -> bool:
        """Whether the file is the user's: in the folder, and not in an environment that lies there."""
        if not file:
            return False
        path = Path(file).resolve()
        if not path.is_relative_to(self.folder):
            return False
        inside = path.relative_to(self.folder).parts
        return not {"site-packages", "dist-packages"} & set(inside) and not path.is_relative_to(
            Path(__file__).parents[1]
        )


def from_file(path: Path, attribute: str | None, arguments: Mapping[str, object]) -> Made:
    """Run a file and its factory. The caller holds the scope in which models have no weights.

    Raises:
        SourceError: The file is missing or broken, or defines no single model.
    """
    where = str(path)
    if path.is_dir():
        raise SourceError("this is a folder", where=where, hint=f"name the file in it, as {path / 'model.py'}")
    if not path.is_file():
        raise SourceError("there is no such file", where=where, hint=_similar_files(path))
    surroundings = Surroundings(path.resolve().parent, private=True)
    with surroundings():
        with explained(surroundings, where, "importing the file"):
            module = _execute(path.resolve())
        return _from_namespace(module, attribute, arguments, surroundings, where)


def from_package(name: str, attribute: str | None, arguments: Mapping[str, object]) -> Made:
    """Import a module of an installed package, or of the current folder, and run its factory.

    Raises:
        SourceError: It cannot be imported, or defines no single model.
    """
    surroundings = Surroundings(Path.cwd(), private=False)
    with surroundings():
        with explained(surroundings, name, "importing the module"):
            found = _found(name)
        if not found:
            raise SourceError(
                f"no module {name!r} can be imported",
                hint="a file is named with its suffix (model.py:factory), a package as package.module:factory",
            )
        with explained(surroundings, name, "importing the module"):
            module = importlib.import_module(name)
        return _from_namespace(module, attribute, arguments, surroundings, name)


def _found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, but what it imports is not
        return False


def from_callable(factory: Callable[..., object], arguments: Mapping[str, object]) -> Made:
    """Run a factory, or an ``nn.Module`` class, given from Python."""
    name = f"{getattr(factory, '__module__', '')}:{getattr(factory, '__qualname__', repr(factory))}"
    surroundings = Surroundings(Path.cwd(), private=False)
    return Made(module=_called(factory, arguments, surroundings, name), name=name)


def _execute(path: Path) -> ModuleType:
    name = _PRIVATE + path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        hint = "fxmem needs the model's code, not its weights: a file that ends in .py and has model()"
        raise SourceError("this is no Python file", where=str(path), hint=hint)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    spec.loader.exec_module(module)
    return module


def _from_namespace(
    module: ModuleType, attribute: str | None, arguments: Mapping[str, object], surroundings: Surroundings, where: str
) -> Made:
    factory = _named(module, attribute, where) if attribute else _only_candidate(module, where)
    for helper in ("inputs", "loss", "steps"):
        if not callable(getattr(module, helper, lambda: None)):
            raise SourceError(
                f"{helper} is no function", where=where, hint=f"define {helper} as a function, or rename it"
            )
    return Made(
        module=_called(factory, arguments, surroundings, where),
        name=f"{where}:{attribute}" if attribute else where,
        inputs=getattr(module, "inputs", None),
        loss=getattr(module, "loss", None),
        steps=getattr(module, "steps", None),
        scope=surroundings,
    )


def _named(module: ModuleType, attribute: str, where: str) -> object:
    found: object = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            known = [name for name in vars(found) if not name.startswith("_")]
            hint = nearest(part, known) or f"it defines {_listed(_public(module) or known)}"
            raise SourceError(f"it defines no {attribute!r}", where=where, hint=hint)
        found = getattr(found, part)
    return found


def _only_candidate(module: ModuleType, where: str) -> object:
    model = getattr(module, "model", None)
    if callable(model):
        return model
    own = {n: x for n, x in vars(module).items() if not n.startswith("_")}
    instances = {n: x for n, x in own.items() if isinstance(x, nn.Module)}
    classes = {n: x for n, x in own.items() if _is_module_class(x) and x.__module__ == module.__name__}
    for candidates in (instances, classes):
        if len(candidates) == 1:
            return next(iter(candidates.values()))
        if candidates:
            raise SourceError(
                f"it defines several models: {_listed(candidates)}",
                where=where,
                hint=f"name one: {where}:{list(candidates)[-1]}, or define a function model() that returns it",
            )
    raise SourceError(
        f"no model found: fxmem looked for {_WANTED}; the file defines {_listed(_public(module))}",
        where=where,
        hint=f"define model(), or name a factory: {where}:NAME",
    )


def _is_module_class(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, nn.Module)


def _public(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not inspect.ismodule(value)
        and getattr(value, "__module__", module.__name__) == module.__name__
    ]


def _listed(names: Any) -> str:
    names = list(names)
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "nothing"


def _called(factory: Any, arguments: Mapping[str, object], surroundings: Surroundings, where: str) -> nn.Module:
    if isinstance(factory, nn.Module):
        if arguments:
            raise SourceError(
                f"the model is an instance, so --model-arg {next(iter(arguments))} has nothing to go to",
                where=where,
                hint="name a function or a class instead",
            )
        return factory
    if not callable(factory):
        raise SourceError(
            f"the model is {_described(factory)}, not a function, an nn.Module or a class of it", where=where
        )
    check_arguments(factory, arguments, where)
    label = f"calling {getattr(factory, '__name__', 'the factory')}()"
    with explained(surroundings, where, label):
        made = factory(**arguments)
    if not isinstance(made, nn.Module):
        raise SourceError(
            f"{getattr(factory, '__name__', 'the factory')}() returned {_described(made)}, not an nn.Module",
            where=where,
            hint="return the module alone" if isinstance(made, (tuple, list, dict)) else "return the module",
        )
    return made


def check_arguments(factory: Callable[..., object], arguments: Mapping[str, object], where: str) -> None:
    """Hold ``--model-arg`` against a factory's signature.

    Raises:
        SourceError: A name is unknown, or a required argument is missing.
    """
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return
    name = getattr(factory, "__name__", "the factory")
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for key in arguments:
            if key not in parameters:
                takes = f"it takes {', '.join(parameters)}" if parameters else "it takes no arguments"
                raise SourceError(
                    f"{name}() has no argument {key!r}", where=where, hint=nearest(key, parameters) or takes
                )
    missing = [
        p.name
        for p in parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in arguments
    ]
    if missing:
        raise SourceError(
            f"{name}() needs {', '.join(missing)}",
            where=where,
            hint="give " + " ".join(f"--model-arg {n}=VALUE" for n in missing) + ", or write a model() that passes it",
        )


def check_loss(loss: Callable[..., object], where: str) -> None:
    """Hold ``loss(output)`` against its signature.

    Raises:
        SourceError: It cannot be called with the output alone.
    """
    try:
        signature = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
    except (TypeError, ValueError):  # some builtins have none
        return
    try:
        signature.bind(None)
    except TypeError:
        raise SourceError(
            f"loss{signature} cannot be called with the model's output alone",
            where=where,
            hint="write it as loss(output), and make in it what the output is compared with",
        ) from None


@contextlib.contextmanager
def explained(surroundings: Surroundings | None, where: str, doing: str, hint: str = "") -> Iterator[None]:
    """Turns an exception of the user's code into a message that names the line.

    Args:
        surroundings: Whose lines are the user's.
        where: The place, if no line is the user's.
        doing: What was being done: ``importing the file``.
        hint: What to do next, if the exception does not say it.

    Raises:
        SourceError: The body raised.
    """
    try:
        yield
    except FxmemError:
        raise
    except SyntaxError as error:
        place = f"{error.filename}:{error.lineno}" if error.filename else where
        raise SourceError(f"syntax error: {error.msg}", where=place, hint="correct the line") from error
    except (Exception, SystemExit) as error:
        line = user_line(error, surroundings) or where
        raise SourceError(
            f"{doing} raised {type(error).__name__}: {first_lines(str(error))}",
            where=line,
            hint=_hint_for(error) or hint or _ALONE,
        ) from error


def user_line(error: BaseException, surroundings: Surroundings | None) -> str | None:
    """``file:line`` of the innermost frame in the user's code, else of the innermost outside fxmem and torch."""
    own = other = None
    traceback = error.__traceback__
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        place = f"{file}:{traceback.tb_lineno}"
        if surroundings is not None and surroundings.owns(file):
            own = place
        elif not file.startswith("<") and not {"fxmem", "torch", "importlib", "contextlib.py"} & set(Path(file).parts):
            other = place
        traceback = traceback.tb_next
    return own or other


def _hint_for(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"install {error.name}, or run fxmem in the environment in which the model runs"
    if type(error).__name__ in ("DataDependentOutputException", "DynamicOutputShapeException"):
        return "it reads values of a large tensor or of a weight; fxmem builds models without them"
    return ""


def first_lines(text: str) -> str:
    """The beginning of a message, on one line."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return " ".join(line.strip() for line in lines[:3]) or "(no message)"


def _described(value: object) -> str:
    name = type(value).__name__
    if isinstance(value, (tuple, list)):
        return f"a {name} of {len(value)}"
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _similar_files(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"the folder {folder} does not exist either"
    files = sorted(p.name for p in folder.glob("*.py"))
    return nearest(path.name, files) or (f"the folder has {_listed(files)}" if files else "its folder has no .py file")
