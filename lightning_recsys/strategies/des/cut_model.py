"""A model that several processes hold together: what each one has of it, and how it becomes whole again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from lightning_recsys.checkpoints import StoredRows, StoredTensor
from lightning_recsys.embeddings import EmbeddingBagCollection, LocalBackend, TableBackend, Ticket
from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.embeddings.replication import gather_over_ranks, no_gradients, num_replicas
from lightning_recsys.models.layers import Cut, FieldLayer, Sends
from lightning_recsys.placement import FieldCost, FieldPlan
from lightning_recsys.stores.backend import StoreBackend
from lightning_recsys.stores.dynamic.rows import DynamicRows
from lightning_recsys.stores.mapped import MappedStores
from lightning_recsys.strategies.common.stored_rows import rows_of

M = TypeVar("M", bound=nn.Module)

INSTEAD = "or train it with another strategy: ddp, het, shadowsync"


@dataclass(frozen=True)
class NewRows:
    """The handling of collections that have no rows (``device="meta"``).

    Args:
        seed: Seed of the rows' first values; the same on all processes.
        dynamic: Make a row when it is first trained; ``None`` makes all of them at once.
        folder: Where stores of dynamic rows keep their files.
    """

    seed: int
    dynamic: DynamicRows | None = None
    folder: Path | None = None


class OwnRows(StoreBackend):
    """Rows in stores of this process's own, trained with the mean gradient of all processes that have the same.

    Args:
        replica_group: The processes that have the same rows.
        **kwargs: Further arguments of :class:`StoreBackend`.
    """

    def __init__(self, *args: Any, replica_group: ProcessGroup, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._replica_group = replica_group

    def apply_gradients(self, tickets: Sequence[Ticket], grad_BFD: Tensor, *, lr: float) -> None:
        """Those of all groups, where there are several."""
        if num_replicas(self._replica_group) > 1:
            sparse, grad_BFD = gather_over_ranks(Ticket.joined(tickets).sparse, grad_BFD, self._replica_group)
            if not len(grad_BFD):  # nobody has looked anything up
                return
            tickets = [Ticket(sparse)]
        super().apply_gradients(tickets, grad_BFD, lr=lr)

    def join_update(self, *, lr: float) -> None:
        """Those of other groups, where there are several."""
        if num_replicas(self._replica_group) > 1:
            sparse, grad_BFD = no_gradients(self.layout, torch.device("cpu"))
            self.apply_gradients([Ticket(sparse)], grad_BFD, lr=lr)


class CutModel:
    """A model, cut by fields in place until :meth:`make_whole`.

    Args:
        model: Its partitionable parts (:func:`partitionable`) are cut; everything else stays whole.
        parts: The partitionable parts, by their path.
        plan: Which process of the group has which fields.
        group: The processes that hold the model together; the order of the plan.
        replica_group: The processes that have the same fields in other groups.
        device: The device of the model.
        rows: What becomes of collections that have no rows (``device="meta"``).
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Mapping[str, nn.Module],
        *,
        plan: FieldPlan,
        group: ProcessGroup,
        replica_group: ProcessGroup,
        device: torch.device,
        rows: NewRows,
    ) -> None:
        self._model = model
        self._device = device
        self._owners = plan.owners
        self._group = group
        position = group.rank()
        for name, part in parts.items():
            features = feature_names(part)
            fields = [i for i, feature in enumerate(features) if self._owners[feature] == position]
            part.partition(fields, group)  # type: ignore[operator]
            for place, collection in _modules(part, EmbeddingBagCollection):
                if collection.whole_tables is None:
                    raise TypeError(
                        f"{_describe(name, part)}.partition has left {place!r} whole: it must cut every collection that"
                        " the module has."
                    )
        self.collections = {
            name: module for name, module in _modules(model, EmbeddingBagCollection) if module.whole_tables is not None
        }
        self._layers = {name: module for name, module in _modules(model, FieldLayer) if module.share is not None}
        for _, backend in _modules(model, LocalBackend):
            backend.replica_group = replica_group
        self._bring_rows(rows, replica_group)
        self.own_features = [feature for feature, owner in self._owners.items() if owner == position]

    def _bring_rows(self, rows: NewRows, replica_group: ProcessGroup) -> None:
        """For collections without rows: make them, or stores that make each when it is first trained."""
        for name, collection in self.collections.items():
            backend = collection.embedding_bags
            if not isinstance(backend, LocalBackend) or not backend.is_meta:
                continue
            if rows.dynamic is None:
                backend.make_rows(seed=rows.seed, device=self._device)
                continue
            assert rows.folder is not None
            starts = TableLayout(collection.whole_tables or ()).table_starts
            keys = tuple(starts[table.name] for table in collection.tables)
            bound = OwnRows.create(
                name or "embeddings",
                collection.layout,
                collection.optimizer,
                servers=[MappedStores(rows.folder)],
                seed=rows.seed,
                dynamic=replace(rows.dynamic, first_keys=keys),
                replica_group=replica_group,
            )
            collection.bind(bound)

    @property
    def sends(self) -> dict[str, Sends]:
        """The bytes that each layer exchanges in a step, by its path."""
        return {name: sends for name, layer in self._layers.items() if (sends := layer.sends) is not None}

    @property
    def cuts(self) -> dict[str, tuple[nn.Parameter, Cut]]:
        """This process's parts of cut parameters, by their names in the model."""
        return {
            f"{place}.{name}" if place else name: (layer.get_parameter(name), cut)
            for place, layer in self._layers.items()
            for name, cut in layer.cuts.items()
        }

    def whole_state(self) -> dict[str, Tensor]:
        """The entries that this process's state dict lacks: whole parameters, the steps of all tables. Collective."""
        state = {name: self._join(part.data, cut) for name, (part, cut) in self.cuts.items()}
        for place, collection in self.collections.items():
            backend = cast(TableBackend, collection.embedding_bags)
            for table in collection.whole_tables or ():
                state[f"{place}.embedding_bags.{table.name}.step"] = torch.tensor(backend.step, device="cpu")
        return state

    def stored_tensors(self) -> dict[str, StoredTensor | StoredRows]:
        """The rows that are here and their optimizer state, by their keys in the state dict."""
        tensors: dict[str, StoredTensor | StoredRows] = {}
        for place, collection in self.collections.items():
            backend = cast(TableBackend, collection.embedding_bags)
            tensors |= rows_of(f"{place}.embedding_bags", backend)
        return tensors

    def whole_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """An optimizer's state dict with the state of whole parameters. Collective.

        A model without optimizer has something in its place whose state dict is empty.
        """
        if "state" not in state:
            return state
        entries: dict[int, dict[str, Any]] = state["state"]
        wanted = {
            (number, name): value.dtype
            for number, (part, _) in self._cuts_of(optimizer).items()
            for name, value in entries.get(number, {}).items()
            if isinstance(value, Tensor) and value.shape == part.shape and value.dim()
        }
        # An optimizer may keep no state for a parameter of which nothing is here.
        everybody: list[dict[tuple[int, str], torch.dtype]] = [{}] * self._group.size()
        dist.all_gather_object(everybody, wanted, group=self._group)
        wanted = {key: dtype for one in everybody for key, dtype in one.items()}
        entries = {number: dict(values) for number, values in entries.items()}
        for (number, name), dtype in sorted(wanted.items()):
            part, cut = self._cuts_of(optimizer)[number]
            own = entries.setdefault(number, {}).get(name)
            own = own if isinstance(own, Tensor) else torch.zeros_like(part, dtype=dtype)
            entries[number][name] = self._join(own, cut)
        return state | {"state": entries}

    def own_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """The reverse: this process's part of a whole state dict."""
        if "state" not in state:
            return state
        entries: dict[int, dict[str, Any]] = dict(state["state"])
        for number, (_, cut) in self._cuts_of(optimizer).items():
            entries[number] = {
                name: cut.take(value) if isinstance(value, Tensor) and value.shape == cut.shape else value
                for name, value in entries.get(number, {}).items()
            }
        return state | {"state": {number: values for number, values in entries.items() if values}}

    def make_whole(self, *, complete: bool) -> None:
        """Every process gets all weights and rows back.

        Args:
            complete: Ask the other processes for theirs, which do this at the same time. Otherwise what they had is
                not a number here.
        """
        for place, layer in self._layers.items():
            parts = {name: (layer.get_parameter(name).data, cut) for name, cut in layer.cuts.items()}
            layer.make_whole(
                {
                    name: self._join(part, cut) if complete else cut.put(part, fill=float("nan"))
                    for name, (part, cut) in parts.items()
                }
            )
            self._layers = {name: other for name, other in self._layers.items() if name != place}
        for collection in self.collections.values():
            bound = collection.embedding_bags
            if isinstance(bound, OwnRows):
                collection.unbind(copy_rows=False)
                for store in bound.stores:
                    store.close()
            collection.make_whole(partial(self._fetch, collection, complete=complete))
        self.collections = {}
        for _, backend in _modules(self._model, LocalBackend):
            backend.replica_group = None

    def _fetch(self, collection: EmbeddingBagCollection, table: str, name: str, *, complete: bool) -> Tensor:
        backend = cast(TableBackend, collection.embedding_bags)
        config = next(other for other in collection.tables if other.name == table)
        owner = self._owners[config.feature_names[0]]
        if owner == self._group.rank():
            values = backend.read(table, name)
        else:
            shape = (config.num_embeddings, *backend.row_shapes[name])
            values = torch.full(shape, float("nan"), device=self._device, dtype=backend.dtype_of(name))
        if complete and self._group.size() > 1:
            dist.broadcast(values, group=self._group, group_src=owner)
        return values

    def _cuts_of(self, optimizer: Optimizer) -> dict[int, tuple[nn.Parameter, Cut]]:
        """Cut parameters by their numbers in an optimizer's state dict."""
        by_id = {id(part): (part, cut) for part, cut in self.cuts.values()}
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return {i: by_id[id(parameter)] for i, parameter in enumerate(parameters) if id(parameter) in by_id}

    def _join(self, part: Tensor, cut: Cut) -> Tensor:
        whole = cut.put(part)
        self._group.allreduce([whole]).wait()
        return whole


def partitionable(model: nn.Module, *, whole: Sequence[str] = ()) -> dict[str, nn.Module]:
    """The outermost modules that say how they are cut by field, by path; every collection is in one of them.

    Args:
        model: The model to look through.
        whole: Paths of plain embedding modules that every process keeps as a whole.

    Raises:
        TypeError: a collection's owner does not say how it is cut, or might say it wrongly; a plain embedding module;
            a compiled one with tables or layers that are cut.
        ValueError: ``whole`` names something else.
    """
    plain = {name for kind in (nn.Embedding, nn.EmbeddingBag) for name, _ in _modules(model, kind)}
    if unknown := sorted(set(whole) - plain):
        raise ValueError(
            f"strategy.whole={unknown} names no plain embedding module of the model; it has {sorted(plain)}."
        )
    if left := sorted(plain - set(whole)):
        raise TypeError(
            f"the plain embedding modules {left} cannot be cut by field, for nobody knows what becomes of their rows."
            f" Use an EmbeddingBagCollection, name small ones in strategy.whole, {INSTEAD}."
        )
    _refuse_compiled(model)
    found: dict[str, nn.Module] = {}
    _search("", model, found)
    for name, part in found.items():
        feature_names(part, name)
    return found


def _refuse_compiled(model: nn.Module) -> None:
    if not any(True for _ in _modules(model, EmbeddingBagCollection)):
        return
    for name, module in model.named_modules():
        # A wrapper, a module compiled in place, a task as Lightning unwraps it.
        compiled = ("_orig_mod", "_compiled_call_impl", "_compiler_ctx")
        if any(getattr(module, attribute, None) is not None for attribute in compiled) and any(
            isinstance(below, EmbeddingBagCollection | FieldLayer) for below in module.modules()
        ):
            raise TypeError(
                f"{repr(name) if name else 'the model itself'} is compiled, and torch.compile can follow neither"
                " lookups in tables nor what layers send that are cut by field: compile modules without either, such"
                " as those behind the first layer of the deep part."
            )


def _search(name: str, module: nn.Module, found: dict[str, nn.Module]) -> None:
    if isinstance(module, EmbeddingBagCollection):
        owner = name.rpartition(".")[0] or "the model itself"
        raise TypeError(
            f"the collection {name!r} cannot be cut by field: {owner} does not say what becomes of its rows. Give its"
            f" class a method partition(fields, group) (docs/cut_by_fields.md), {INSTEAD}."
        )
    if not any(True for _ in _modules(module, EmbeddingBagCollection)):
        return
    if hasattr(module, "partition"):
        order = [cls for cls in type(module).__mro__ if {"partition", "forward"} & vars(cls).keys()]
        if "partition" not in vars(order[0]):
            raise TypeError(
                f"{_describe(name, module)} has a forward of its own, but the partition of a class that it extends,"
                f" which may not fit. Give it a method partition(fields, group) of its own (docs/cut_by_fields.md),"
                f" {INSTEAD}."
            )
        found[name] = module
        return
    for child, below in module.named_children():
        _search(f"{name}.{child}" if name else child, below, found)


def feature_names(part: nn.Module, name: str = "") -> tuple[str, ...]:
    """The features of a partitionable module's collections, by the positions that its ``partition`` takes.

    Raises:
        TypeError: its collections have not the same features in the same order.
    """
    per_collection = {place: collection.feature_names for place, collection in _modules(part, EmbeddingBagCollection)}
    if len(set(per_collection.values())) > 1:
        raise TypeError(
            f"{_describe(name, part)} has collections of different features, so its fields have no positions:"
            f" { {place: list(names) for place, names in per_collection.items()} }."
        )
    return next(iter(per_collection.values()))


def field_costs(parts: Mapping[str, nn.Module], lookups: Mapping[str, float]) -> list[FieldCost]:
    """The cost of each field to its process; fields that share a table are one.

    Args:
        parts: As :func:`partitionable` found them.
        lookups: Mean number of ids of a field in an example; 1 where it is not named.
    """
    together: dict[str, tuple[str, ...]] = {}  # by feature: all that share tables with it, and itself
    num_bytes: dict[str, int] = {}
    floats: dict[str, float] = {}
    for part in parts.values():
        for _, collection in _modules(part, EmbeddingBagCollection):
            backend = cast(TableBackend, collection.embedding_bags)
            row_bytes = sum(
                backend.dtype_of(name).itemsize * torch.Size(shape).numel()
                for name, shape in backend.row_shapes.items()
            )
            for table in collection.tables:
                first = table.feature_names[0]
                num_bytes[first] = num_bytes.get(first, 0) + table.num_embeddings * row_bytes
                for feature in table.feature_names:
                    floats[feature] = floats.get(feature, 0.0) + lookups.get(feature, 1.0) * table.embedding_dim
                joined = tuple(dict.fromkeys(x for name in table.feature_names for x in together.get(name, (name,))))
                together |= dict.fromkeys(joined, joined)
    return [
        FieldCost(names, sum(num_bytes.get(name, 0) for name in names), sum(floats[name] for name in names))
        for names in dict.fromkeys(together.values())
    ]


def _modules(model: nn.Module, kind: type[M]) -> Iterator[tuple[str, M]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, kind))


def _describe(name: str, module: nn.Module) -> str:
    return f"{type(module).__name__} ({name!r})" if name else type(module).__name__
