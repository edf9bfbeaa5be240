"""The attributes that a cut model was made of besides its parameters and arguments: they may change during training."""

from __future__ import annotations

import io
import logging
import pickle
import weakref
from collections.abc import Collection, Iterable, Mapping
from operator import attrgetter
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lightning_recsys.partition.lookups import is_lookup
from lightning_recsys.partition.tracer import kind_of

SMALL_BYTES = 1 << 20  # the content of smaller tensors is compared, of larger ones sums; no other value may be larger
_COLUMNS = 1021  # of words, over each of which a large tensor is summed: prime, so rows that change places are seen
_MANY = 1000  # a container of more is compared by what it is and how many it has: this is done at every step
_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device})
_FIXED = (FunctionType, type, ModuleType, logging.Logger, weakref.ref)  # one is never another, and has no numbers
_OF_LIGHTNING = frozenset(vars(pl.LightningModule()))


class Watch:
    """The attributes that the parts of a model were made of, and whether they are still so.

    Args:
        model: The model that was traced.
        reads: Attributes that its forward reads: paths of modules, and names.
        buffers: Names of the buffers of parts that are elsewhere. Other buffers are this process's own, and only
            another tensor in the place of one counts as a change.
        trained: The parameters that group servers train. What is written to one here counts as little.
    """

    def __init__(
        self,
        model: nn.Module,
        reads: Iterable[tuple[str, str]],
        *,
        buffers: Iterable[str],
        trained: Collection[nn.Parameter],
    ) -> None:
        modules = dict(model.named_modules(remove_duplicate=False))
        self._model, self._buffers = model, frozenset(buffers)
        of_rows = {x for module in modules.values() if is_lookup(module) for x in module.parameters()}
        self._elsewhere = {*trained, *of_rows}
        self._apart = {*modules.values(), *self._elsewhere}
        self._reads = [
            (f"{path}.{name}" if path else name, modules[path], name)
            for path, name in sorted(reads)
            if path in modules and not (isinstance(modules[path], pl.LightningModule) and name in _OF_LIGHTNING)
        ]
        self._seen: dict[str, object] = {}

    def look(self, arguments: Mapping[str, Any]) -> set[str]:
        """The names of what has changed since the last look, the last :meth:`excuse` of buffers, or the first.

        Raises:
            ValueError: the forward reads something that cannot be watched.
        """
        before, self._seen = self._seen, self._now(arguments)
        names = before.keys() | self._seen.keys() if before else ()
        return {name for name in names if before.get(name, self) != self._seen.get(name, self)}

    def changed_buffers(self) -> set[str]:
        """The names of those buffers of parts elsewhere that have changed since then; a look still tells them."""
        return {name for name, x in self._of_buffers().items() if name in self._buffers and self._seen.get(name) != x}

    def excuse(self, *, but: Collection[str]) -> None:
        """Buffers have just been written by who looks, and no change of them counts but of those of these names."""
        if self._seen:
            self._seen.update((name, x) for name, x in self._of_buffers().items() if name not in but)

    def _now(self, arguments: Mapping[str, Any]) -> dict[str, object]:
        found = {name: self._of_attribute(name, module, own) for name, module, own in self._reads}
        found |= {path: Same(module) for path, module in self._model.named_modules(remove_duplicate=False)}
        found |= self._of_buffers()
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            found[name] = Same(parameter) if parameter in self._elsewhere else _content(parameter)
        return found | {f"the argument {name}": kind_of(value) for name, value in arguments.items()}

    def _of_attribute(self, name: str, module: nn.Module, own: str) -> object:
        try:
            value = attrgetter(own)(module)
        except AttributeError:  # it was taken away
            return None
        try:
            return fingerprint(value, apart=self._apart)
        except ValueError as error:
            raise ValueError(
                f"strategy=hierarchical: the model's forward reads {name} ({type(value).__name__}), and a change of it"
                f" in the midst of training could not be seen: {error}. Keep what the forward needs of it in attributes"
                " of the model, as numbers, tensors or plain objects, or use strategy=shadowsync."
            ) from error

    def _of_buffers(self) -> dict[str, object]:
        return {
            name: _content(buffer) if name in self._buffers else Same(buffer)
            for name, buffer in self._model.named_buffers(remove_duplicate=False)
        }


def fingerprint(value: Any, *, apart: Collection[Any] = ()) -> object:
    """Something that equals itself as long as nobody changes the value, or anything in it.

    Args:
        value: Anything that can be pickled, functions and classes of whatever kind included. It stays alive as long as
            the result, so that no other object can be taken for it.
        apart: Modules and tensors that count as the same whatever happens to them.

    Raises:
        ValueError: the value cannot be pickled, or has more than :data:`SMALL_BYTES` besides its tensors and arrays.
    """
    if type(value) in _PLAIN:
        return type(value), repr(value)  # by which a NaN equals itself
    page = _Page()
    writer = _Writer(page, apart)
    try:
        writer.dump(value)
    except Exception as error:  # whatever the classes of users raise
        raise ValueError(str(error) or type(error).__name__) from error
    return page.getvalue(), writer.aside


class Same:
    """Equals only what holds the same object."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other._value is self._value

    __hash__ = None  # type: ignore[assignment]


class _Page(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() + len(data) > SMALL_BYTES:
            raise ValueError(f"it has more than {SMALL_BYTES} bytes")
        return super().write(data)


class _Writer(pickle.Pickler):
    """Writes a value down, and lays aside what is compared otherwise."""

    def __init__(self, page: _Page, apart: Collection[Any]) -> None:
        super().__init__(page, protocol=5)
        self.aside: list[object] = []
        self._apart = apart

    def persistent_id(self, obj: Any) -> int | None:
        found = None if type(obj) in _PLAIN else self._otherwise(obj)
        if found is None:
            return None
        self.aside.append(found)
        return len(self.aside)

    def _otherwise(self, obj: Any) -> object:
        if isinstance(obj, _FIXED) or (isinstance(obj, nn.Module | Tensor) and obj in self._apart):
            return Same(obj)
        if isinstance(obj, dict | list | tuple | set | frozenset) and len(obj) > _MANY:
            return Same(obj), len(obj)
        if isinstance(obj, Tensor):
            return _content(obj)
        if isinstance(obj, np.ndarray) and not obj.dtype.hasobject:
            return Same(obj), obj.shape, obj.dtype, _digest(np.ascontiguousarray(obj).reshape(-1).view(np.uint8))
        return None


def _content(tensor: Tensor) -> object:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return Same(tensor), tensor._version
    whole = tensor.detach().contiguous().reshape(-1)
    content = _digest(whole.view(torch.uint8).numpy()) if len(whole) else b""
    return Same(tensor), tuple(tensor.shape), tensor.dtype, content


def _digest(content: np.ndarray[Any, Any]) -> bytes:
    """Bytes as they are, or if there are many the sums of their columns: 100 MB take some 10 ms."""
    if len(content) <= SMALL_BYTES:
        return content.tobytes()
    end = len(content) // (8 * _COLUMNS) * 8 * _COLUMNS
    sums = content[:end].view(np.int64).reshape(-1, _COLUMNS).sum(0)
    return bytes(sums.tobytes() + content[end:].tobytes())
