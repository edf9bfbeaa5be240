"""The rows of a model that lie in stores, as checkpoints see them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from lightning_recsys.checkpoints import StoredRows, StoredTensor
from lightning_recsys.embeddings import TableBackend
from lightning_recsys.optim.swap import PERIOD
from lightning_recsys.stores.backend import StoreBackend
from lightning_recsys.stores.dynamic.tables import IDS

T = TypeVar("T")


def dense_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """A model's parameters by name, without those that hold the rows of its collections and their optimizer state."""
    rows = {id(x) for backend in _backends_of(model).values() for x in backend.parameters()}
    return ((name, x) for name, x in model.named_parameters() if id(x) not in rows)


def row_keys(model: nn.Module) -> set[str]:
    """The keys under which a model's state dict holds the rows of its collections and their optimizer state."""
    return {
        f"{place}.{table.name}.{name}"
        for place, backend in _backends_of(model, at_every_path=True).items()
        for table in backend.layout.tables
        for name in (*backend.row_shapes, IDS)
    }


def rows_of(
    place: str, backend: TableBackend, *, rank: int = 0, world_size: int = 1
) -> dict[str, StoredTensor | StoredRows]:
    """A backend's rows and their optimizer state, as one of the ranks that share them saves and loads them.

    Args:
        place: Path of the backend in the model, with which the keys begin.
        backend: Whose rows they are.
        rank: Which of the ranks.
        world_size: How many there are.
    """
    share: Any = {"rank": rank, "world_size": world_size}
    if isinstance(backend, StoreBackend) and (dynamic := backend.dynamic) is not None:
        access: Any = {"read": dynamic.read, "write": dynamic.write, "clear": dynamic.clear}
        tables = tuple(dynamic.tables)
        options: Any = {**access, **share, "optional": {PERIOD}, "weight_dtype": backend.dtype_of("weight")}
        return {place: StoredRows(tables=tables, row_shapes=backend.row_shapes, live_ids=dynamic.live_ids, **options)}
    return {
        f"{place}.{table.name}.{name}": StoredTensor(
            shape=torch.Size((table.num_embeddings, *row_shape)),
            dtype=backend.dtype_of(name),
            read=partial(backend.read_rows, table.name, name),
            write=partial(backend.write_rows, table.name, name),
            optional=name == PERIOD,  # a checkpoint of another rule has none
            **share,
        )
        for table in backend.layout.tables
        for name, row_shape in backend.row_shapes.items()
    }


def stored_tensors(model: nn.Module, *, rank: int, world_size: int) -> dict[str, StoredTensor | StoredRows]:
    """Rows and their optimizer state in stores, by their keys in the state dict, as one of several ranks saves them."""
    found: dict[str, StoredTensor | StoredRows] = {}
    for place, backend in _backends_of(model).items():
        if isinstance(backend, StoreBackend):
            found |= rows_of(place, backend, rank=rank, world_size=world_size)
    return found


def at_every_path(model: nn.Module, tensors: Mapping[str, T]) -> dict[str, T]:
    """Rows under all keys that the model's state dict has for them: several, where modules share a collection.

    Args:
        model: Whose rows they are.
        tensors: By keys that begin with a backend's first path, as :func:`stored_tensors` has them; others stay.
    """
    first = {backend: place for place, backend in _backends_of(model).items()}
    return dict(tensors) | {
        place + key.removeprefix(own): value
        for place, backend in _backends_of(model, at_every_path=True).items()
        for own in [first[backend]]
        for key, value in tensors.items()
        if key == own or key.startswith(f"{own}.")
    }


@contextmanager
def rows_left_out(model: nn.Module) -> Iterator[None]:
    """Meanwhile the model's state dict has no rows of collections, and misses none."""
    before = [(backend, backend.has_rows_in_state_dict) for backend in _backends_of(model).values()]
    for backend, _ in before:
        backend.has_rows_in_state_dict = False
    try:
        yield
    finally:
        for backend, had_rows in before:
            backend.has_rows_in_state_dict = had_rows


@contextmanager
def rows_replaced(model: nn.Module) -> Iterator[None]:
    """Meanwhile the rows of a model are written from outside; every rank does this."""
    with ExitStack() as stack:
        for backend in _backends_of(model).values():
            stack.enter_context(backend.replacing_rows())
        yield


def _backends_of(model: nn.Module, *, at_every_path: bool = False) -> dict[str, TableBackend]:
    modules = model.named_modules(remove_duplicate=not at_every_path)
    return {path: module for path, module in modules if isinstance(module, TableBackend)}
