"""How a job travels to worker processes: by pickle, and what to say where that is not possible."""

from __future__ import annotations

import inspect
import io
import marshal
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import CellType, FunctionType, SimpleNamespace
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

MAX_DEPTH = 20  # of what is looked into for the part that cannot travel
REMEDY = (
    "Model, data module, callbacks and loggers travel to the worker processes by pickle. Open files, sockets and locks"
    " cannot, nor can classes that were defined in a function: create them in `setup`, which the workers call, or"
    " define the class in a module."
)
COMPILED = (
    "A task that was compiled as a whole, by torch.compile(task), does not travel to the worker processes. Compile its"
    " layers in `configure_model`, which the workers call: `self.layers.compile()`."
)
PARAMETRIZED = (
    "Parametrizations (weight_norm, spectral_norm) are registered in `configure_model`, which the workers call;"
    " strategy=hierarchical trains no parametrized modules."
)


class JobPickler(pickle.Pickler):
    """Sends functions that were defined in a function, and lambdas, by their code, and parameters with their hooks.

    pickle sends the name of a function, under which the receiver imports it. These have none that could be imported;
    their code goes with what they close over, and their globals are those of their module in the worker. It is read by
    the same Python that has written it.
    """

    def reducer_override(self, obj: Any) -> Any:
        """The answer to ``pickle``: how to make a local function, and then fill it, for it may close over itself.

        A parameter's hooks, which torch leaves out, are added to it afterwards, too: they may refer to its model.
        """
        if isinstance(obj, nn.Parameter):
            if not _has_hooks(obj):
                return NotImplemented
            make, arguments = obj.__reduce_ex__(2)  # type: ignore[no-untyped-call]
            hooks = obj._backward_hooks, obj._post_accumulate_grad_hooks
            return make, arguments, hooks, None, None, _add_hooks
        if not isinstance(obj, FunctionType) or not _is_local(obj):
            return NotImplemented
        code = marshal.dumps(obj.__code__)
        cells = [_content(cell) for cell in obj.__closure__ or ()]
        names = {"__module__": obj.__module__, "__qualname__": obj.__qualname__}
        state = (cells, obj.__defaults__, obj.__kwdefaults__, names, obj.__dict__)
        return _make_function, (code, obj.__globals__["__name__"], len(cells)), state, None, None, _fill_function


def save_job(job: object, path: Path, *, parts: Mapping[str, object]) -> None:
    """Write a job where ``torch.load`` finds it.

    Args:
        job: The object that travels to the workers.
        path: The file that it is written to.
        parts: What the job is made of, by the names that a user knows them by; for the message of an error.

    Raises:
        TypeError: something in it cannot travel; says what.
    """
    try:
        torch.save(job, path, pickle_module=SimpleNamespace(Pickler=JobPickler, __name__=__name__))
    except Exception as error:
        if (message := _describe(error, parts)) is None:  # a full disk, say
            raise
        raise TypeError(message) from error


def parts_of(trainer: pl.Trainer | None, function: Callable[..., Any], args: Sequence[Any]) -> dict[str, object]:
    """The parts of a launch, by name; those that others refer to come last."""
    signature = inspect.signature(function).parameters
    parts = {name: value for name, value in zip(signature, args, strict=False) if value is not None}
    if trainer is not None:
        connected: Any = trainer  # whose attributes are set by connectors
        parts |= {f"trainer.callbacks[{i}]": callback for i, callback in enumerate(connected.callbacks)}
        parts |= {f"trainer.loggers[{i}]": logger for i, logger in enumerate(connected.loggers)}
        parts |= {"trainer.profiler": connected.profiler, "trainer.precision_plugin": connected.precision_plugin}
        parts |= {"trainer.strategy": connected.strategy, "trainer": trainer}
    return parts


def _describe(error: Exception, parts: Mapping[str, object]) -> str | None:
    everything = {id(part) for part in parts.values()}
    for name, part in parts.items():
        elsewhere = everything - {id(part)}
        if not _travels(part, elsewhere):
            where, what = _innermost(name, part, elsewhere)
            return (
                f"{where} ({type(what).__name__}) cannot travel to the worker processes: {error}. {_remedy(part, what)}"
            )
    return None


def _remedy(part: object, inner: object) -> str:
    """The advice about a part of the job that does not travel because of its contents."""
    if any(getattr(x, "_compiler_ctx", None) is not None for x in (part, inner)):
        return COMPILED
    return PARAMETRIZED if isinstance(inner, nn.Module) and is_parametrized(inner) else REMEDY


def _innermost(path: str, thing: object, elsewhere: set[int]) -> tuple[str, object]:
    """The smallest part of something that cannot travel which cannot either, and its path."""
    for _ in range(MAX_DEPTH):
        elsewhere = elsewhere | {id(thing)}
        for inner, content in _contents(path, thing):
            if not _travels(content, elsewhere):
                path, thing = inner, content
                break
        else:
            break
    return path, thing


def _contents(path: str, thing: object) -> Iterator[tuple[str, object]]:
    if isinstance(thing, Mapping):
        yield from ((f"{path}[{key!r}]", value) for key, value in thing.items())
    elif isinstance(thing, list | tuple):
        yield from ((f"{path}[{i}]", value) for i, value in enumerate(thing))
    elif not isinstance(thing, type | FunctionType):
        try:
            reduced = thing.__reduce_ex__(2)
        except Exception:  # this is the one
            return
        if isinstance(reduced, str):
            return
        made, arguments, *rest = reduced
        state = rest[0] if rest else None
        if isinstance(thing, nn.Module) and isinstance(state, dict):
            state = state | state.get("_modules", {}) | {"_modules": None}
        if isinstance(state, dict):
            yield from ((f"{path}.{name}", value) for name, value in state.items())
        yield from ((path, x) for x in (made, *arguments, state) if not isinstance(x, dict))


def _travels(thing: object, elsewhere: set[int]) -> bool:
    """Whether something can be pickled, but for other parts of the job that it refers to."""

    class Probe(JobPickler):
        def persistent_id(self, obj: Any) -> str | None:
            plain = isinstance(obj, Tensor) and not _has_hooks(obj)
            return "elsewhere" if id(obj) in elsewhere or plain else None

    try:
        Probe(io.BytesIO()).dump(thing)
    except Exception:
        return False
    return True


def _has_hooks(tensor: Tensor) -> bool:
    """Whether a parameter has hooks that run when it gets a gradient; those of other tensors do not travel."""
    return isinstance(tensor, nn.Parameter) and bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def _add_hooks(parameter: nn.Parameter, hooks: tuple[Any, Any]) -> None:
    parameter._backward_hooks, parameter._post_accumulate_grad_hooks = hooks


def _is_local(function: FunctionType) -> bool:
    """Whether a function has no name of its own in a module that a worker can import, and its module is one."""
    module = sys.modules.get(function.__globals__["__name__"])  # a decorated function says the name of another one
    named = "<locals>" not in function.__qualname__ and "<lambda>" not in function.__qualname__
    if named or module is None or vars(module) is not function.__globals__:
        return False
    return module.__name__ != "__main__" or hasattr(module, "__file__")


def _content(cell: CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # not filled yet
        return ()


def _make_function(code: bytes, module: str, num_cells: int) -> FunctionType:
    cells = tuple(CellType() for _ in range(num_cells))
    return FunctionType(marshal.loads(code), vars(import_module(module)), closure=cells)  # noqa: S302 - our own bytes


def _fill_function(function: FunctionType, state: tuple[Any, ...]) -> None:
    cells, function.__defaults__, function.__kwdefaults__, names, attributes = state
    for name, value in names.items():
        setattr(function, name, value)
    for cell, content in zip(function.__closure__ or (), cells, strict=True):
        if content:
            (cell.cell_contents,) = content
    vars(function).update(attributes)
