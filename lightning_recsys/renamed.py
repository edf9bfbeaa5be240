"""Names that have changed: whoever uses an old one is told the new one."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def renamed_arguments(**new_names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function so that an old keyword argument raises a ``TypeError`` that names the new one.

    Args:
        **new_names: Old name of an argument -> its new one.

    >>> @renamed_arguments(learning_rate="lr")
    ... def step(*, lr): ...
    >>> step(learning_rate=0.1)
    Traceback (most recent call last):
    TypeError: step: learning_rate is called lr now.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        name = function.__qualname__.removesuffix(".__init__").removesuffix(".__new__")

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for old in new_names.keys() & kwargs.keys():
                raise TypeError(f"{name}: {old} is called {new_names[old]} now.")
            return function(*args, **kwargs)

        call.renamed = new_names  # type: ignore[attr-defined]  # for :func:`new_name`
        return call

    return decorate


def new_name(kind: type, old: str) -> str | None:
    """What the constructor of a class calls an argument that it called ``old``; ``None`` if it never did."""
    constructors = (getattr(base, name) for base in kind.__mro__ for name in ("__init__", "__new__"))
    renamed = (getattr(constructor, "renamed", {}) for constructor in constructors)
    return next((names[old] for names in renamed if old in names), None)


def renamed_names(module: str, **new_names: str) -> Callable[[str], Any]:
    """A module's ``__getattr__`` for names that it had: an old one raises an ``ImportError`` that names the new one.

    It is an ``ImportError`` because ``from module import name`` replaces the text of an ``AttributeError``.

    Args:
        module: The module's ``__name__``.
        **new_names: Old name -> its new one.
    """

    def __getattr__(name: str) -> NoReturn:
        if name in new_names:
            raise ImportError(f"{module}.{name} is called {new_names[name]} now.", name=module)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return __getattr__
