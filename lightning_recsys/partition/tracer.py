"""The recording of a model's calls by ``torch.fx``, with what they depend on besides their arguments."""

from __future__ import annotations

import inspect
import operator
import re
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import Proxy
from torch.utils._pytree import tree_map_only

from lightning_recsys.partition.lookups import is_lookup

_CONSTANT = re.compile(r"_tensor_constant\d+")  # the names that torch.fx gives to tensors that a forward makes
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"forward"}
_DICTS = (dict, OrderedDict, defaultdict)  # whose items a forward looks up, and does nothing else with
_DEVICES = ("cpu", "cuda")


class LostByTracingError(ValueError):
    """A forward does what a traced model would not do again.

    Args:
        reason: What it does.
        change: What to do about it.
    """

    def __init__(self, reason: str, change: str) -> None:
        super().__init__(reason)
        self.change = change

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (*self.args, self.change)


class LooksIntoArgumentError(fx.proxy.TraceError):
    """A forward iterates over an argument of which nothing is known."""


@dataclass(frozen=True, eq=False)
class Recorded:
    """The record of one pass through a model's ``forward``.

    Args:
        graph: Its calls. A tensor that was made without gradients has none in the graph either.
        reads: Attributes that the calls were made of: paths of modules, and names. Parameters, buffers and submodules
            are not among them; they are in the graph. All attributes of modules that are one call each are. Of a
            LightningModule's trainer, too, by names such as ``trainer.current_epoch``.
        constants: Tensors that the pass made of no argument; they are attributes of the model under these names.
    """

    graph: fx.Graph
    reads: frozenset[tuple[str, str]]
    constants: Mapping[str, Tensor]


class Tracer(fx.Tracer):
    """Records calls of a model once.

    Args:
        whole: Paths of modules to keep as one call each.
        sample: Arguments of one call. Dicts, tuples and lists are recorded item by item, ``None``, bools and strings
            are taken as they are. ``None`` where no sample is known.

    Attributes:
        failed: The innermost module in whose forward the recording has failed, with its path.
    """

    proxy_buffer_attributes = True

    def __init__(self, whole: Sequence[str], sample: Sequence[Any] | None) -> None:
        super().__init__()
        self.failed: tuple[str, nn.Module] | None = None
        self._whole, self._sample = frozenset(whole), sample
        self._items: list[fx.Node] = []  # of containers among the arguments
        self._taken_whole: dict[fx.Node, str] = {}  # arguments, and items of them, that are no tensors: their types
        self._without_gradient: list[fx.Node] = []
        self._autocast = _autocast()

    def record(self, model: nn.Module) -> Recorded:
        """The trace of a pass through the model's ``forward``; the model keeps its attributes.

        Raises:
            LostByTracingError: the forward changes attributes, or computes under ``torch.autocast``.
        """
        give_constants(model, {})
        before = {module: dict(vars(module)) for module in model.modules()}
        read: set[tuple[nn.Module, str]] = set()
        try:
            with torch.enable_grad(), _reads_noted(read):
                graph = self.trace(model)
        finally:
            constants = {name: x for name, x in vars(model).items() if _CONSTANT.fullmatch(name)}
            written = [(module, name) for module, own in before.items() for name in _restore(module, own)]
        give_constants(model, constants)
        paths = {module: path for path, module in model.named_modules()}
        if written:
            module, name = written[0]
            self.failed = paths[module], module
            raise LostByTracingError(
                f"its forward changes {name}, which a traced model would not do again.",
                "Return what is to be kept, or keep tensors in buffers and change them in place.",
            )
        for node in reversed(self._items):
            if not node.users:
                graph.erase_node(node)
        _detach(graph, self._without_gradient)
        called = {str(node.target) for node in graph.nodes if node.op == "call_module"}
        modules = [model.get_submodule(path) for path in called]
        leaves = [x for module in modules if not is_lookup(module) for x in module.modules()]
        read |= {(module, name) for module in leaves for name in vars(module)}
        reads = {(paths[module], name) for module, name in read if module in paths and _is_own(module, name)}
        return Recorded(graph, frozenset(reads), constants)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:  # noqa: D102 - inherited
        return (
            is_lookup(m)
            or module_qualified_name in self._whole
            or next(m.children(), None) is None
            or super().is_leaf_module(m, module_qualified_name)
        )

    def call_module(  # noqa: D102 - inherited
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed = self.failed or (self.path_of_module(m), m)
            raise

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:  # noqa: D102 - inherited
        node = super().create_node(kind, target, *args, **kwargs)
        if _autocast() != self._autocast:
            raise LostByTracingError(
                "its forward uses torch.autocast, and group servers compute in float32.",
                "Leave torch.autocast out, or convert tensors with .to().",
            )
        if not torch.is_grad_enabled() and kind.startswith("call"):
            self._without_gradient.append(node)
        return node

    def create_args_for_root(  # noqa: D102 - inherited
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        function, args = super().create_args_for_root(root_fn, is_module, concrete_args)
        if self._sample is not None:
            sample = named_arguments(self.root, self._sample)
            args[1:] = [self._known(arg, sample[arg.node.target.lstrip("*")]) for arg in args[1:]]
        return function, args

    def iter(self, obj: Proxy) -> Iterator[Any]:  # noqa: D102 - inherited
        if self._sample is None and obj.node.op == "placeholder":
            raise LooksIntoArgumentError(f"it looks into its argument {obj.node.name}.")
        if (name := self._taken_whole.get(_container(obj.node))) is not None:
            raise LostByTracingError(
                f"it goes over the items of an argument of the type {name}, into which a traced model cannot look.",
                "Call the model with a dict, a tuple or a list in its place.",
            )
        return super().iter(obj)

    def keys(self, obj: Proxy) -> Any:  # noqa: D102 - inherited
        return self.iter(obj) if obj.node.op == "placeholder" else super().keys(obj)

    def _known(self, arg: Any, value: Any) -> Any:
        """An argument that a forward can look into as it does into the sample's."""
        if value is None or isinstance(value, bool | str):
            return value
        if type(value) in _DICTS and all(isinstance(key, str | int) for key in value):
            return {key: self._known(self._item(arg, key), x) for key, x in value.items()}
        if type(value) in (tuple, list):
            return type(value)(self._known(self._item(arg, i), x) for i, x in enumerate(value))
        if isinstance(value, tuple) and hasattr(value, "_make"):
            return value._make(self._known(self._item(arg, i), x) for i, x in enumerate(value))
        if not isinstance(value, Tensor):
            self._taken_whole[arg.node] = type(value).__name__
        return arg

    def _item(self, arg: Any, key: Any) -> Any:
        item = self.create_proxy("call_function", operator.getitem, (arg, key), {})
        self._items.append(item.node)
        return item


def _container(node: fx.Node) -> fx.Node:
    """The thing that a forward iterates over: a value, or one whose keys, values or items it has asked for."""
    asks = node.op == "call_method" and node.target in ("keys", "values", "items")
    return node.all_input_nodes[0] if asks else node


def kind_of(value: Any) -> object:
    """The signature of an argument for :class:`Tracer`: calls of the same kind can be made by one graph.

    >>> kind_of({"x": torch.ones(2), "mask": None}) == kind_of({"x": torch.ones(3), "mask": None})
    True
    >>> kind_of((torch.ones(2), True)) == kind_of((torch.ones(2), False))
    False
    """
    if value is None or isinstance(value, bool | str):
        return value
    if type(value) in _DICTS:
        return type(value), tuple((key, kind_of(x)) for key, x in value.items())
    if isinstance(value, tuple | list):
        return type(value), tuple(map(kind_of, value))
    return Tensor if isinstance(value, Tensor) else type(value)


def named_arguments(model: nn.Module, arguments: Sequence[Any]) -> dict[str, Any]:
    """Arguments of a model's ``forward`` by name, from those that are given in the order of its signature."""
    signature = inspect.signature(partial(type(model).forward, model))
    bound = inspect.BoundArguments(signature, OrderedDict(zip(signature.parameters, arguments, strict=False)))
    bound.apply_defaults()
    return bound.arguments


@fx.wrap
def detached(value: Any) -> Any:
    """The same, where no gradient goes back."""
    return tree_map_only(Tensor, Tensor.detach, value)


def _detach(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Let no gradient into what was computed where gradients were switched off, nor into parameters that it reads."""
    inside = set(nodes)
    for node in nodes:
        for source in [x for x in node.all_input_nodes if x not in inside]:
            with graph.inserting_before(node):
                cut = graph.call_function(detached, (source,))
            cut.meta = node.meta | {"is_wrapped": True}  # or a pickled graph would be traced through it
            node.replace_input_with(source, cut)
            inside.add(cut)
        if node.op == "call_module":  # which has parameters of its own
            with graph.inserting_after(node):
                cut = graph.call_function(detached, (node,))
            cut.meta = node.meta | {"is_wrapped": True}  # or a pickled graph would be traced through it
            node.replace_all_uses_with(cut, delete_user_cb=lambda user, own=cut: user is not own)  # type: ignore[misc]
            inside.add(cut)


def give_constants(model: nn.Module, constants: Mapping[str, Tensor]) -> None:
    """Let a model have these tensors under the names that ``torch.fx`` gives, and no others."""
    for name in [name for name in vars(model) if _CONSTANT.fullmatch(name)]:
        delattr(model, name)
    for name, tensor in constants.items():
        setattr(model, name, tensor)


def _restore(module: nn.Module, before: Mapping[str, Any]) -> list[str]:
    """Give a module its attributes back, and tell the names of those that were others."""
    now = vars(module)
    changed = [name for name in {**before, **now} if not _CONSTANT.fullmatch(name)]
    changed = [name for name in changed if now.get(name, _restore) is not before.get(name, _restore)]
    for name in changed:
        now.pop(name, None)
    now.update((name, before[name]) for name in changed if name in before)
    return changed


@contextmanager
def _reads_noted(into: set[tuple[nn.Module, str]]) -> Iterator[None]:
    """Note each attribute that this thread reads of a module meanwhile."""
    thread = threading.get_ident()

    def read(module: nn.Module, name: str) -> Any:
        if threading.get_ident() != thread:
            return object.__getattribute__(module, name)
        into.add((module, name))
        value = object.__getattribute__(module, name)
        if name == "_trainer" and value is not None and hasattr(type(module), "trainer"):
            return _Trainer(value, lambda own: into.add((module, f"trainer.{own}")))
        return value

    nn.Module.__getattribute__ = read  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        del nn.Module.__getattribute__


class _Trainer:
    """Stands for the trainer of a LightningModule, and notes what is read of it."""

    def __init__(self, trainer: Any, note: Callable[[str], None]) -> None:
        self.__trainer, self.__note = trainer, note

    def __getattr__(self, name: str) -> Any:
        self.__note(name)
        return getattr(self.__trainer, name)


def _is_own(module: nn.Module, name: str) -> bool:
    """Whether an attribute is one that the module's class, or its user, has given it, and no function."""
    if name in _OF_EVERY_MODULE or _CONSTANT.fullmatch(name) or name.startswith("__"):
        return False
    if name.startswith("trainer."):
        return not name.startswith("trainer._")
    if name in vars(module):
        return True
    of_class = getattr(type(module), name, None)
    return of_class is not None and not callable(of_class) and not hasattr(of_class, "__get__")


def _autocast() -> tuple[Any, ...]:
    return tuple((torch.is_autocast_enabled(x), torch.get_autocast_dtype(x)) for x in _DEVICES)
