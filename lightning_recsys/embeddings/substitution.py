"""Somebody's own ``nn.Embedding`` and ``nn.EmbeddingBag``, served from stores while a strategy trains the model."""

# Shape suffixes: N ids of a call, B bags, D embedding dim.

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from lightning_recsys.embeddings import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    PoolingType,
    SparseFeatures,
    TableBackend,
    Ticket,
)
from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.optim import RowOptimizer

_TABLE, _FEATURE = "rows", "ids"


def substitute_embeddings(
    module: nn.Module, *, optimizer: RowOptimizer | None = None, min_rows: int | None = None, names: Sequence[str] = ()
) -> Substitution:
    """Put modules that look rows up in stores in the place of plain ``nn.Embedding`` and ``nn.EmbeddingBag``.

    Chosen are those with at least ``min_rows`` rows and those that are named; subclasses never, which may do other
    things than torch's modules. Their weights leave ``parameters()``: the
    rows are trained by ``optimizer``, with no part in gradient clipping. State dicts keep their keys and shapes.

    Args:
        module: The module whose submodules are looked at.
        optimizer: The update rule of the rows. ``None`` where :meth:`Substitution.train_by` says it later for each
            module, before a backend is bound.
        min_rows: Smallest table to take; by default none is taken for its size.
        names: Paths of modules, as ``named_modules`` gives them.

    Raises:
        KeyError: a name is no plain embedding module of ``module``.
        ValueError: a chosen module does what a store cannot; says the module's path and what it is.

    >>> model = nn.Sequential(nn.Embedding(1000, 8), nn.Flatten(), nn.Linear(16, 1))
    >>> from lightning_recsys.optim import RowSGD
    >>> substitution = substitute_embeddings(model, optimizer=RowSGD(), min_rows=100)
    >>> list(substitution.collections), list(model.state_dict())
    (['0'], ['0.weight', '2.weight', '2.bias'])
    >>> substitution.restore()
    >>> model[0]
    Embedding(1000, 8)
    """
    found = {path: x for path, x in module.named_modules(remove_duplicate=False) if path and type(x) in _KINDS}
    unknown = [name for name in names if name not in found]
    if unknown:
        raise KeyError(f"{unknown} are no nn.Embedding or nn.EmbeddingBag of the module, which has {list(found)}.")
    chosen: dict[nn.Module, list[str]] = {}  # a module may stand in several places
    named = [found[name] for name in names]
    for path, plain in found.items():
        if any(plain is x for x in named) or (min_rows is not None and plain.num_embeddings >= min_rows):
            chosen.setdefault(plain, []).append(path)
    for plain, paths in chosen.items():
        if reason := _refusal(module, plain, paths):
            raise ValueError(
                f"{paths[0]} cannot be served from stores: {reason}. Change it, or leave it to the dense optimizer by "
                "naming the modules to take (names=...) or by a higher min_rows."
            )
    substitutes = {}
    for plain, paths in chosen.items():
        substitutes[paths[0]] = _KINDS[type(plain)](paths[0], plain, optimizer)
        for path in paths:
            _put(module, path, substitutes[paths[0]])
    return Substitution(module, list(chosen.values()), substitutes)


class Substitution:
    """Modules that were replaced, until :meth:`restore`.

    Attributes:
        collections: For each replaced module, by its path, the collection of one table that serves it. A strategy
            binds a backend to each; what is unbound cannot be looked up.
        placeholders: The parameters that stand for the weights of replaced modules, with their paths. They are empty
            but while they are shown.
    """

    def __init__(
        self, module: nn.Module, paths: Sequence[Sequence[str]], substitutes: Mapping[str, SubstituteModule]
    ) -> None:
        self._module = module
        self._paths = paths
        self._substitutes = substitutes
        self.collections = {path: substitute.collection for path, substitute in substitutes.items()}
        self.placeholders = {substitute.own_placeholder: path for path, substitute in substitutes.items()}

    @contextmanager
    def shown_as_parameters(self) -> Iterator[None]:
        """Meanwhile placeholders are the weights: by name, shape, numbers and ``requires_grad``, in no further memory.

        An optimizer that is made meanwhile, of all parameters or of some that are chosen by whatever the weights have,
        so has the placeholder where it would have the weight. What is done to the weights meanwhile, new numbers or
        another ``requires_grad``, is done to the rows, before a backend is bound.

        Raises:
            ValueError: something was done to a weight that cannot be done to rows; says its path and what.
        """
        for substitute in self._substitutes.values():
            substitute.show_placeholder()
        try:
            with _StateWithoutMemory(self.placeholders):
                yield
            for substitute in self._substitutes.values():
                substitute.take_over()
        finally:
            for substitute in self._substitutes.values():
                substitute.hide_placeholder()

    def empty_state(self, optimizers: Sequence[Optimizer]) -> None:
        """Make the state empty that optimizers had at once for a weight, as Adagrad of torch has; rows have their own.

        Args:
            optimizers: Those that were made while the placeholders were shown.
        """
        for optimizer in optimizers:
            for placeholder in self.placeholders.keys() & optimizer.state.keys():
                state = optimizer.state[placeholder]
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.dim() == placeholder.dim():
                        state[name] = torch.empty_like(placeholder, dtype=value.dtype)

    def kept_weights(self, optimizers: Sequence[Optimizer]) -> dict[str, Optimizer]:
        """The optimizers that have the very weight of a replaced module, by its path: they were made before it was."""
        weights = {substitute.plain.weight: path for path, substitute in self._substitutes.items()}
        return {
            weights[parameter]: optimizer
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter in weights
        }

    def owners(self, optimizers: Sequence[Optimizer]) -> dict[str, list[tuple[Optimizer, int]]]:
        """The optimizers that have each module, by its path, each with the place of the parameter group that does."""
        found: dict[str, list[tuple[Optimizer, int]]] = {path: [] for path in self.collections}
        for optimizer in optimizers:
            for index, group in enumerate(optimizer.param_groups):
                for path in (self.placeholders.get(x) for x in group["params"]):
                    if path is not None:
                        found[path].append((optimizer, index))
        return found

    def train_by(self, path: str, rule: RowOptimizer, *, frozen_for: str | None = None) -> None:
        """Train the rows of a module by a rule from now on; before a backend is bound.

        Args:
            path: Path of the module.
            rule: The update rule.
            frozen_for: Why the rows, which are frozen, are to remain so: the error of whoever lets them train.
        """
        self._substitutes[path].train_by(rule, frozen_for=frozen_for)

    def attach_to(self, optimizers: Sequence[Optimizer], *, takes_rate_of_owner: Container[str] = ()) -> None:
        """Update the rows at the steps of the optimizer that has the module, at rates that its schedules scale.

        Rows of a module that is in none follow the first one. Without this an update runs inside each backward pass,
        once for every time that a module was called.

        Args:
            optimizers: The optimizers of the model.
            takes_rate_of_owner: Paths of modules whose rows are trained at the learning rate of their parameter group
                itself, not at the rule's, scaled as that is.
        """
        for path, owners in self.owners(optimizers).items():
            optimizer, group = owners[-1] if owners else (optimizers[0], 0)
            takes_rate = bool(owners) and path in takes_rate_of_owner
            self.collections[path].attach_to(optimizer, own_group=False, group=group, takes_rate=takes_rate)

    def row_state(self) -> dict[str, dict[str, Any]]:
        """The state of the rows' optimizer, which state dicts leave out: by path and name, with the number of updates.

        The latter is ``step``; it belongs into a checkpoint beside the state dict.
        """
        return {path: substitute.row_state() for path, substitute in self._substitutes.items()}

    def load_row_state(self, saved: Mapping[str, Mapping[str, Any]], *, writes: bool = True) -> list[str]:
        """The reverse of :meth:`row_state`; every process that has these modules calls this.

        Args:
            saved: What :meth:`row_state` returned, perhaps of other modules or another rule.
            writes: Whether this process is the one that brings the state to the stores.

        Returns:
            Paths of modules that were saved with no state such as their rows' rule has: theirs stays as it is.
        """
        return [
            path
            for path, substitute in self._substitutes.items()
            if not substitute.load_row_state(saved.get(path, {}), writes=writes)
        ]

    def restore(self) -> None:
        """Put the user's modules back; unbind the collections first, which copies the trained rows into them."""
        for paths, substitute in zip(self._paths, self._substitutes.values(), strict=True):
            substitute.release()
            for path in paths:
                _put(self._module, path, substitute.plain)
        self._paths, self._substitutes = [], {}


class SubstituteModule(nn.Module):
    """The stand-in for a plain embedding module, with its state-dict key ``weight``.

    Args:
        path: Path of the module that is replaced, as ``named_modules`` gives it.
        plain: The module of torch whose place the collection takes.
        optimizer: The update rule of the rows.
    """

    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None

    def __init__(self, path: str, plain: Any, optimizer: RowOptimizer | None) -> None:
        super().__init__()
        self.path = path
        self.num_embeddings, self.embedding_dim = plain.num_embeddings, plain.embedding_dim
        self.padding_idx = plain.padding_idx
        pooling = PoolingType(getattr(plain, "mode", "sum"))
        table = EmbeddingBagConfig(_TABLE, self.num_embeddings, self.embedding_dim, (_FEATURE,), pooling, init_std=0.0)
        collection = EmbeddingBagCollection([table], optimizer=optimizer, device="meta")
        collection.trainable = plain.weight.requires_grad
        collection.training = plain.training
        # Keeps an optimizer over parameters() working where there is no other parameter, and their number as it was.
        self.placeholder = nn.Parameter(torch.empty(0, self.embedding_dim), requires_grad=False)
        # In a tuple they are no submodules, and the user's keys stay as they are.
        self._hidden: tuple[Any, EmbeddingBagCollection, nn.Parameter] = plain, collection, self.placeholder
        self._hidden_data = self.placeholder.data  # what the placeholder has while it is not shown: nothing
        self.train_by(collection.optimizer)
        self.training = plain.training
        self._keep_padding_row(plain.weight.detach())
        self._guard = plain.register_forward_pre_hook(self._refuse_plain_call)

    @property
    def plain(self) -> Any:
        """The user's module."""
        return self._hidden[0]

    @property
    def collection(self) -> EmbeddingBagCollection:
        """Serves the rows."""
        return self._hidden[1]

    def train_by(self, rule: RowOptimizer, *, frozen_for: str | None = None) -> None:
        """See :meth:`Substitution.train_by`."""
        self.collection.optimizer, self._frozen_for = rule, frozen_for
        self.collection.embedding_bags = _PlainRows(self.path, self.plain, self.collection.layout, rule)

    @property
    def own_placeholder(self) -> nn.Parameter:
        """The parameter that stands for the weight, by whichever name."""
        return self._hidden[2]

    def show_placeholder(self) -> None:
        """See :meth:`Substitution.shown_as_parameters`: the placeholder has the memory of the user's weight."""
        del self._parameters["placeholder"]
        self._parameters["weight"] = self.own_placeholder
        self._hidden_data = self.own_placeholder.data
        self.own_placeholder.data = self.plain.weight.data
        self.own_placeholder.requires_grad_(self.collection.trainable)

    def take_over(self) -> None:
        """Let the rows be what was made of the weight while it was shown: a backend gets them from the user's module.

        Raises:
            ValueError: says what was done to the weight that cannot be done to rows.
        """
        shown, weight = self.own_placeholder, self.plain.weight.data
        if reason := self._refusal_to_take_over():
            raise ValueError(
                f"{self.path} is served from stores during this run, and configure_optimizers {reason}. It may write to"
                f" {self.path}.weight, and freeze it; leave the rest to __init__, or take the module out of what the"
                " strategy serves (names=... or a higher min_rows)."
            )
        if shown.data_ptr() != weight.data_ptr():  # somebody has set shown.data
            weight.copy_(shown.data)
        self._keep_padding_row(weight)
        self.collection.trainable = shown.requires_grad

    def _refusal_to_take_over(self) -> str | None:
        shown, weight = self.own_placeholder, self.plain.weight.data
        if self._parameters.get("weight") is not shown:
            return "puts another parameter in the place of its weight"
        if (shown.shape, shown.dtype) != (weight.shape, weight.dtype):
            was, now = (f"{list(x.shape)} {x.dtype}" for x in (weight, shown))
            return f"makes its weight {now}, which was {was}"
        if shown._backward_hooks or shown._post_accumulate_grad_hooks:
            return "puts hooks on its weight, which would not run"
        return None

    def hide_placeholder(self) -> None:
        """The reverse of :meth:`show_placeholder`.

        ``DistributedDataParallel`` would wait for the gradient of what asks for one, and would send what is not empty.
        """
        self._parameters.pop("weight", None)
        self._parameters["placeholder"] = self.own_placeholder
        self.own_placeholder.requires_grad_(False)
        self.own_placeholder.data = self._hidden_data

    def release(self) -> None:
        """Let the user's module be called again, in the mode of this one, and frozen as its rows are."""
        self._guard.remove()
        self.plain.train(self.training)
        self.plain.weight.requires_grad_(self.collection.trainable)

    def train(self, mode: bool = True) -> SubstituteModule:
        """Train or evaluate, the collection too, which is no submodule."""
        super().train(mode)
        self.collection.train(mode)
        return self

    def requires_grad_(self, requires_grad: bool = True) -> SubstituteModule:
        """Freeze the rows, or let them train again.

        Raises:
            ValueError: the rows have no rule to train by.
        """
        if requires_grad and self._frozen_for is not None:
            raise ValueError(f"{self.path} was frozen when training began. {self._frozen_for}")
        self.collection.requires_grad_(requires_grad)
        if "weight" in self._parameters:  # shown
            self.own_placeholder.requires_grad_(requires_grad)
        return self

    def row_state(self) -> dict[str, Any]:
        """Each state of the rows' optimizer by its name, and ``step``, the number of updates."""
        rows = self._rows
        return {name: rows.read(_TABLE, name) for name in self._state_shapes} | {"step": rows.step}

    def load_row_state(self, saved: Mapping[str, Any], *, writes: bool) -> bool:
        """The reverse of :meth:`row_state`; returns whether the state is such as the rows' rule has."""
        rows, expected = self._rows, self._state_shapes
        if {name: value.shape for name, value in saved.items() if name != "step"} != expected:
            return False
        with rows.replacing_rows():
            for name in expected if writes else ():
                rows.write(_TABLE, name, saved[name])
            rows.step = saved.get("step", 0)
        return True

    @property
    def _state_shapes(self) -> dict[str, torch.Size]:
        shapes = self._rows.row_shapes.items()
        return {name: torch.Size((self.num_embeddings, *shape)) for name, shape in shapes if name != "weight"}

    def _refuse_plain_call(self, *_: Any) -> None:
        raise RuntimeError(
            f"{self.path} is served from stores during this run, and its module was called through a reference that "
            "is no submodule (an attribute of a list, say): those rows would not train. Call it as a submodule."
        )

    def _keep_padding_row(self, weight: Tensor) -> None:
        """The padding row is looked up and never trained: a copy will do."""
        self._padding_row = None if self.padding_idx is None else weight[self.padding_idx].clone()

    def _look_up(self, sparse: SparseFeatures) -> Tensor:
        """One vector for each bag: ``[B, D]``."""
        try:
            pooled_B1D: Tensor = self.collection(sparse)
        except (IndexError, ValueError) as error:
            raise type(error)(f"{self.path}: {error}") from error
        return pooled_B1D.squeeze(1)

    def _is_padding(self, ids_N: Tensor) -> Tensor | None:
        return None if self.padding_idx is None else ids_N == self.padding_idx

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self._rows.read(_TABLE, "weight")

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key, expected = f"{prefix}weight", [self.num_embeddings, self.embedding_dim]
        saved = state_dict.get(key)
        if saved is None:
            missing_keys.append(key)
        elif list(saved.shape) != expected:
            error_msgs.append(f"size mismatch for {key}: the checkpoint has {list(saved.shape)}, the table {expected}.")
        else:
            # A plain state dict has no state of the rows' optimizer: it starts afresh, as that of new rows does.
            with self._rows.replacing_rows():
                for name, values in _with_fresh_state(saved, self.collection.optimizer).items():
                    self._rows.write(_TABLE, name, values)
                self._rows.step = 0
            self._keep_padding_row(saved)
        unexpected_keys.extend(x for x in state_dict if strict and x.startswith(prefix) and x != key)

    @property
    def _rows(self) -> TableBackend:
        backend = self.collection.embedding_bags
        assert isinstance(backend, TableBackend)
        return backend

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and name not in self._parameters:
            raise AttributeError(
                f"{self.path}.weight is in stores during this run, and not here: configure_optimizers may name it, "
                "penalties and other code may not. Leave it out of those, or take the module out of what the strategy "
                "serves (names=... or a higher min_rows)."
            )
        return super().__getattr__(name)

    def extra_repr(self) -> str:
        """The description that the plain module gives of itself."""
        return f"{self.num_embeddings}, {self.embedding_dim}, served from stores"


class SubstituteEmbedding(SubstituteModule):
    """In the place of an ``nn.Embedding``: ids of any shape ``[*]`` to vectors ``[*, D]``."""

    def forward(self, input: Tensor) -> Tensor:
        """Look up one row for each id."""
        ids_N = input.reshape(-1).long()
        padding = self._is_padding(ids_N)
        if padding is None:
            return self._look_up(SparseFeatures((_FEATURE,), ids_N)).view(*input.shape, self.embedding_dim)
        assert self._padding_row is not None
        looked_up = self._look_up(SparseFeatures((_FEATURE,), ids_N[~padding]))
        row = self._padding_row.to(looked_up)
        vectors_ND = row.expand(ids_N.numel(), -1).index_put((torch.nonzero(~padding).squeeze(1),), looked_up)
        return vectors_ND.view(*input.shape, self.embedding_dim)


class SubstituteEmbeddingBag(SubstituteModule):
    """In the place of an ``nn.EmbeddingBag`` that sums or averages: bags to ``[B, D]``."""

    def __init__(self, path: str, plain: Any, optimizer: RowOptimizer | None) -> None:
        super().__init__(path, plain, optimizer)
        self.mode: str = plain.mode
        self.include_last_offset: bool = plain.include_last_offset

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Pool each bag, given as a row of ``input`` ``[B, L]`` or as ``input`` ``[N]`` with offsets.

        Raises:
            ValueError: ``input`` and ``offsets`` do not go together, or the weights do not go with them.
        """
        ids_N = input.reshape(-1).long()
        offsets = self._bag_offsets(input, offsets)
        weights_N = self._checked_weights(input, per_sample_weights)
        padding = self._is_padding(ids_N)
        if padding is not None:
            kept = ~padding
            offsets = torch.cat([offsets.new_zeros(1), kept.cumsum(0)])[offsets]
            ids_N, weights_N = ids_N[kept], None if weights_N is None else weights_N[kept]
        return self._look_up(SparseFeatures((_FEATURE,), ids_N, offsets=offsets, weights=weights_N))

    def _bag_offsets(self, input: Tensor, offsets: Tensor | None) -> Tensor:
        """Starts of the bags, and the end of the last: int64 ``[B + 1]``."""
        if input.dim() == 2 and offsets is None:
            return torch.arange(input.shape[0] + 1, device=input.device) * input.shape[1]
        if input.dim() != 1 or offsets is None or offsets.dim() != 1:
            raise ValueError(
                f"{self.path}: input must be [B, L] without offsets, or [N] with flat offsets; got "
                f"{list(input.shape)} and {None if offsets is None else list(offsets.shape)}."
            )
        ends = offsets.new_full((0 if self.include_last_offset else 1,), input.numel())
        return torch.cat([offsets, ends]).long()

    def _checked_weights(self, input: Tensor, weights: Tensor | None) -> Tensor | None:
        if weights is None:
            return None
        if self.mode != "sum":
            raise ValueError(f"{self.path}: per_sample_weights need mode='sum', and it is {self.mode!r}.")
        if weights.shape != input.shape or weights.requires_grad:
            raise ValueError(
                f"{self.path}: per_sample_weights must have the input's shape {list(input.shape)} and ask for no "
                f"gradient (a store gives them none); got {list(weights.shape)}, requires_grad={weights.requires_grad}."
            )
        return weights.reshape(-1).float()


_KINDS: dict[type[nn.Module], Callable[[str, Any, RowOptimizer | None], SubstituteModule]] = {
    nn.Embedding: SubstituteEmbedding,
    nn.EmbeddingBag: SubstituteEmbeddingBag,
}


class _StateWithoutMemory(TorchFunctionMode):
    """Meanwhile state that an optimizer makes at once for a placeholder has the weight's shape, and one number.

    ``torch.optim.Adagrad`` does so. The rows have their state in the stores, and in a worker there may be no room for
    what nobody is going to use.
    """

    def __init__(self, placeholders: Mapping[nn.Parameter, str]) -> None:
        super().__init__()
        self._placeholders = placeholders

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.full_like and args and isinstance(args[0], nn.Parameter) and args[0] in self._placeholders:
            weight, *others = args
            return func(weight[:1, :1], *others, **(kwargs or {})).expand(weight.shape)
        return func(*args, **(kwargs or {}))


class _PlainRows(TableBackend):
    """The weight of the user's module: where a bound backend gets its first rows, and puts the trained ones."""

    def __init__(self, path: str, plain: Any, layout: TableLayout, optimizer: RowOptimizer) -> None:
        super().__init__(layout, optimizer)
        self._path = path
        self._hidden = (plain,)
        self.step = 0

    def lookup(self, sparse: SparseFeatures) -> tuple[Tensor, Ticket]:
        raise RuntimeError(f"{self._path} was prepared for stores and none is bound to it: bind() its collection.")

    def apply_gradients(self, tickets: Sequence[Ticket], grad_BFD: Tensor, *, lr: float) -> None:
        self.lookup(tickets[0].sparse)

    def read(self, table: str, name: str) -> Tensor:
        return _with_fresh_state(self._hidden[0].weight.data, self.optimizer)[name]

    def write(self, table: str, name: str, values: Tensor) -> None:
        if name == "weight":  # the user's module has no place for more
            self._hidden[0].weight.data.copy_(values)

    def copy_from(self, other: TableBackend) -> None:
        self.write(_TABLE, "weight", other.read(_TABLE, "weight"))


def _with_fresh_state(weight: Tensor, optimizer: RowOptimizer) -> dict[str, Tensor]:
    return {"weight": weight, **optimizer.initial_state(weight)}


def _refusal(module: nn.Module, plain: Any, paths: Sequence[str]) -> str | None:
    """Why a store cannot serve this module, or ``None``."""
    if getattr(plain, "mode", "sum") == "max":
        return "mode='max' is not a sum of rows"
    if plain.max_norm is not None:
        return f"max_norm={plain.max_norm} changes rows when they are looked up"
    if plain.scale_grad_by_freq:
        return "scale_grad_by_freq=True scales gradients by counts of one worker's batch"
    if plain.weight.dtype != torch.float32:
        return f"its weight is {plain.weight.dtype}, and rows are float32"
    if plain._forward_hooks or plain._forward_pre_hooks or plain._backward_hooks or plain._backward_pre_hooks:
        return "it has hooks, which would not run"
    if plain.weight._backward_hooks or plain.weight._post_accumulate_grad_hooks:
        return "its weight has hooks, which would not run"
    others = [
        f"{path}.{name}"
        for path, other in module.named_modules()
        for name, parameter in other.named_parameters(recurse=False)
        if parameter is plain.weight and other is not plain
    ]
    return f"its weight is tied to {', '.join(others)}" if others else None


def _put(module: nn.Module, path: str, new: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(module.get_submodule(parent), name, new)
