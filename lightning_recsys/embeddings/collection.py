"""The embedding tables of a model, as one module."""

# Shape suffixes: B batch, F features, D embedding dim.

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypedDict, TypeGuard

import torch
from torch import Tensor, nn

from lightning_recsys.embeddings.backend import Backend, LocalBackend, TableBackend
from lightning_recsys.embeddings.config import EmbeddingBagConfig, PoolingType, RowDtype
from lightning_recsys.embeddings.int64_ids import NUM_IDS, are_below, as_int64, as_int64s
from lightning_recsys.embeddings.kernels import KernelName, TableLayout
from lightning_recsys.embeddings.sparse_features import SparseFeatures, bags_cover_ids, ids_are_inside
from lightning_recsys.embeddings.ticket import Ticket
from lightning_recsys.optim import RowOptimizer, RowWiseAdagrad
from lightning_recsys.optim.torch_rules import base_lr, leave_out


class EmbeddingOptions(TypedDict, total=False):
    """The options that a model passes on to its collections.

    ``row_optimizer`` trains the rows, ``first_order_optimizer`` those of width-1 tables (default: the same);
    ``kernel``, ``check_ids`` and ``device`` as in :class:`EmbeddingBagCollection`; ``pooling`` of multi-hot fields;
    ``dtype`` in which rows are kept, as in :class:`EmbeddingBagConfig`.
    """

    row_optimizer: RowOptimizer
    first_order_optimizer: RowOptimizer
    kernel: KernelName
    check_ids: bool
    pooling: PoolingType
    device: str | None
    dtype: RowDtype


class EmbeddingBagCollection(nn.Module):
    r"""Pooled lookups in embedding tables of one width, trained by a fused sparse optimizer of its own.

    .. math:: \text{out}_{b,f} = \textstyle\sum_{j \in \text{bag}(b,f)} w_j\, E_{t(f)}[\text{id}_j]

    divided by the bag's length for mean pooling. The rows are no business of ``configure_optimizers``: their update
    runs inside the backward pass or, once :meth:`attach_to` has named an optimizer, at that optimizer's step.

    Args:
        tables: The tables; all of one ``embedding_dim`` and ``dtype``. (Use one collection per width.)
        optimizer: The update rule of the rows.
        kernel: ``fbgemm``, ``numba``, ``torch``, or ``auto`` for the fastest that can serve these tables.
        check_ids: Check every id and every bag before any memory is touched. Without it a wrong one reads and writes
            memory that is not its own.
        device: Where the rows are made. ``meta`` makes none: for tables larger than the machine, which a strategy
            keeps in stores (:meth:`bind`).

    Shape:
        - input: :class:`SparseFeatures` of ``B`` examples that has at least the collection's features.
        - output: float32 ``[B, F, D]``, features in the order of the tables' ``feature_names``.

    Raises:
        ValueError: no table, tables of several widths or dtypes, a name used twice, or a kernel that cannot serve
            them.

    State dict: ``embedding_bags.<table>.weight`` ``[N, D]``, beside it the optimizer's state
    (``embedding_bags.<table>.sum``, ...), the same for every kernel.

    >>> from lightning_recsys.optim import RowSGD
    >>> table = EmbeddingBagConfig("movies", 100, 4, ("movie",), init_std=0.0)
    >>> collection = EmbeddingBagCollection([table], optimizer=RowSGD(lr=1.0))
    >>> ids = SparseFeatures(("movie",), torch.tensor([7, 8]))
    >>> collection(ids).sum().backward()
    >>> collection(ids).tolist()
    [[[-1.0, -1.0, -1.0, -1.0]], [[-1.0, -1.0, -1.0, -1.0]]]
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        *,
        optimizer: RowOptimizer | None = None,
        kernel: KernelName = "auto",
        check_ids: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        _check_tables(tables)
        self._serve(tables)
        self.optimizer = optimizer or RowWiseAdagrad()
        self.check_ids = check_ids
        self.embedding_dim = self.layout.embedding_dim
        self.whole_tables: tuple[EmbeddingBagConfig, ...] | None = None
        self.trainable = True
        self._attached: weakref.ref[torch.optim.Optimizer] | None = None
        self._group_index: int | None = None
        self._scaling_group = 0
        self._rate_when_attached = 0.0
        self._pending: list[tuple[Ticket, Tensor]] = []
        self._own: tuple[Backend, ...] = ()  # the rows from before bind(); in a tuple they are no submodule
        self._gradient_scale = 1.0
        self.embedding_bags: Backend = LocalBackend(self.layout, self.optimizer, kernel=kernel, device=device)

    def _serve(self, tables: Sequence[EmbeddingBagConfig]) -> None:
        self.tables = tuple(tables)
        self.layout = layout = TableLayout(self.tables)
        self.feature_names = tuple(feature for table in self.tables for feature in table.feature_names)
        self._limits = torch.from_numpy(as_int64s(table.num_embeddings for table in layout.feature_tables))
        self._means = [table.pooling is PoolingType.MEAN for table in layout.feature_tables]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, sparse: SparseFeatures) -> Tensor:
        """Look up and pool; see the class for shapes. Under ``torch.compile`` it runs as it is, between two graphs.

        Raises:
            IndexError: an id is negative or not below its table's ``num_embeddings`` (unless ``check_ids=False``).
            ValueError: lengths or offsets do not cover the ids (unless ``check_ids=False``).
            KeyError: a feature is missing from ``sparse``.
        """
        resolved, backend = self.resolve(sparse), self.embedding_bags
        has_graph = torch.is_grad_enabled()
        trains = self.trainable and has_graph
        ticket = Ticket(resolved)
        with torch.no_grad():
            if not self.tables:  # other processes have them all
                pooled_BFD = torch.zeros(sparse.batch_size, 0, self.embedding_dim, device=sparse.device)
            elif trains:
                pooled_BFD, ticket = backend.lookup(resolved)
            elif self.training or has_graph:
                pooled_BFD = backend.lookup_frozen(resolved)
            else:  # evaluation wants no copies that may be old
                pooled_BFD = backend.lookup_fresh(resolved)
        if trains:
            pooled_BFD.requires_grad_()
            # Only this lookup's graph holds the ticket, so that its backend sees when no gradient can come any more.
            on_gradient = partial(self._on_gradient, ticket)
            pooled_BFD.register_post_accumulate_grad_hook(on_gradient)  # type: ignore[no-untyped-call]
        return pooled_BFD

    def prefetch(self, sparse: SparseFeatures) -> None:
        """Announce the batch that is looked up next, while the present one still computes.

        Where rows travel over a network they set out at once; elsewhere nothing happens, nor does it where no gradients
        will follow (``trainable=False``). A batch that is announced but never looked up does no harm.

        Raises:
            IndexError: as :meth:`forward`.
            KeyError: as :meth:`forward`.
        """
        if self.trainable:
            self.embedding_bags.prefetch(self.resolve(sparse))

    def announce(self, sparse: SparseFeatures, *, ahead: int) -> None:
        """Tell of a batch that is to be looked up for training; a cache then keeps the rows that are needed soonest.

        No row travels for it. A batch that is announced but never looked up does no harm.

        Args:
            sparse: As for :meth:`forward`.
            ahead: How many batches that were announced before are still to come before it; others are no longer
                expected.

        Raises:
            IndexError: as :meth:`forward`.
            KeyError: as :meth:`forward`.
        """
        if self.trainable:
            self.embedding_bags.announce(self.resolve(sparse), ahead=ahead)

    def resolve(self, sparse: SparseFeatures) -> SparseFeatures:
        """The input of a backend: this collection's features in its order, ids checked, means folded into weights.

        Raises:
            IndexError: as :meth:`forward`.
            KeyError: as :meth:`forward`.
        """
        sparse = sparse.select(self.feature_names)
        if self.check_ids:
            self._check_ids(sparse)
        if sparse.is_single_hot:
            return sparse
        lengths, offsets, weights = sparse.bag_lengths(), sparse.bag_offsets(), sparse.weights
        if any(self._means):
            is_mean = torch.tensor(self._means, device=sparse.device).repeat_interleave(sparse.batch_size)
            shares = torch.where(is_mean, lengths, 1).float().reciprocal().repeat_interleave(lengths)
            weights = shares if weights is None else weights * shares
        return SparseFeatures(sparse.keys, sparse.values, lengths=lengths, offsets=offsets, weights=weights)

    def partition(self, fields: Sequence[int]) -> None:
        """Keep the tables of some features only, until :meth:`make_whole`: those are all that :meth:`forward` returns.

        Args:
            fields: Positions in ``feature_names``. Without any of them, the result is ``[B, 0, D]``.

        Raises:
            ValueError: features that share a table are parted.
            RuntimeError: the collection is cut already, or its rows are in another backend.
        """
        own = self.embedding_bags
        if self.whole_tables is not None or not isinstance(own, LocalBackend):
            raise RuntimeError("the collection cannot be cut: it is cut already, or bound to another backend.")
        self.apply_pending()
        names = {self.feature_names[field] for field in fields}
        for table in self.tables:
            if 0 < len(names.intersection(table.feature_names)) < len(table.feature_names):
                raise ValueError(
                    f"the features {list(table.feature_names)} share table {table.name!r}: keep them together."
                )
        self.whole_tables = self.tables
        self._was_meta, self._kernel_name = own.is_meta, own.kernel_name
        self._serve([table for table in self.tables if names.issuperset(table.feature_names)])
        self.embedding_bags = own.keep(self.tables)

    def make_whole(self, fetch: Callable[[str, str], Tensor]) -> None:
        """Undo :meth:`partition`; a collection that had no rows (``device="meta"``) has none again.

        Args:
            fetch: Returns a table's ``weight``, or a state by its name, wherever they are; asked for each table in
                order.
        """
        assert self.whole_tables is not None
        self._pending.clear()  # of a step that does not come, as the run is over
        cut = self.embedding_bags
        assert isinstance(cut, TableBackend)
        self._serve(self.whole_tables)
        self.whole_tables = None
        whole = LocalBackend(self.layout, self.optimizer, kernel=self._kernel_name, device="meta")
        if not self._was_meta:
            for name in whole.row_shapes:
                whole._hold(torch.cat([fetch(table.name, name) for table in self.tables]), name)
            whole.kernel = whole._choose_kernel()
        whole.step = cut.step
        self.embedding_bags = whole

    def bind(self, backend: TableBackend, *, copy_rows: bool = True, gradient_scale: float = 1.0) -> None:
        """Serve the tables from another backend, such as one over stores, until :meth:`unbind`.

        Args:
            backend: The backend to use, with the same tables and update rule.
            copy_rows: Write this collection's rows and their optimizer state to it. Where several processes bind to
                the same stores, one of them copies and the others wait for it. Of rows on ``meta`` there is nothing to
                copy but the number of updates, as a checkpoint has set it.
            gradient_scale: What the backend gets of a gradient. With ``1 / n`` the updates of ``n`` processes that
                train in step make up one with the mean gradient, as dense parameters get it.

        Raises:
            ValueError: the backend has other tables or another rule.
            RuntimeError: another backend is bound already.
        """
        if self._own:
            raise RuntimeError("a backend is bound to this collection already: unbind() it first.")
        if (backend.layout, backend.optimizer) != (self.layout, self.optimizer):
            raise ValueError(
                f"the backend serves {backend.layout.tables} with {backend.optimizer}, the collection has "
                f"{self.tables} with {self.optimizer}."
            )
        self.apply_pending()
        own = self.embedding_bags
        if copy_rows and _has_rows(own):
            backend.copy_from(own)
            backend.flush()
        elif copy_rows and isinstance(own, TableBackend) and own.step:
            backend.step = own.step
        self._own, self.embedding_bags, self._gradient_scale = (own,), backend, gradient_scale

    def unbind(self, *, copy_rows: bool = True) -> None:
        """Go back to the collection's own rows; nothing happens where no backend is bound.

        Gradients that wait for a step are dropped, as dense ones are which no step has taken when a run ends.

        Args:
            copy_rows: Take the trained rows and their state along, where the collection had rows of its own. Without it
                the backend is not asked for anything, as after a failure that it may have been part of.
        """
        if not self._own:
            return
        self._pending.clear()
        bound, (own,) = self.embedding_bags, self._own
        if copy_rows and _has_rows(own):
            assert isinstance(bound, TableBackend)
            bound.flush()
            own.copy_from(bound)
        self.embedding_bags, self._own, self._gradient_scale = own, (), 1.0

    def flush(self) -> None:
        """Return when the rows have every update that was handed on; a remote store applies them meanwhile."""
        self.embedding_bags.flush()

    def requires_grad_(self, requires_grad: bool = True) -> EmbeddingBagCollection:
        """Freeze the rows, or let them train again: sets ``trainable``.

        The parameters themselves ask for no gradient in either case, so code that freezes a model parameter by
        parameter does not reach them: call this, or set ``trainable``.
        """
        self.trainable = requires_grad
        return self

    @property
    def lr(self) -> float:
        """The step size of the next update: the attached optimizer's groups decide, else the row optimizer."""
        if (attached := self.attached_to) is None:
            return self.optimizer.lr
        if self._group_index is not None:
            return float(attached.param_groups[self._group_index]["lr"])
        start = self._rate_when_attached
        return self.optimizer.lr * (float(attached.param_groups[self._scaling_group]["lr"]) / start if start else 1.0)

    def attach_to(
        self, optimizer: torch.optim.Optimizer, *, own_group: bool = True, group: int = 0, takes_rate: bool = False
    ) -> None:
        """Follow a dense optimizer: its schedules drive the rows' learning rate, its step triggers their update.

        Adds an empty parameter group that carries the rows' learning rate, so that any scheduler on ``optimizer``
        scales it, learning-rate monitors show it and optimizer checkpoints hold it. From then on gradients wait for
        ``optimizer.step()``: with gradient accumulation all micro-batches make one update, as for dense parameters.
        ``optimizer.zero_grad()`` drops them, as it does dense gradients. A later call follows the new optimizer, as a
        second ``fit`` of the same module needs.

        The rows' own parameters, which ``module.parameters()`` has while they are in this process, are taken out of the
        optimizer: checkpoints of it so fit wherever the rows are.

        Schedulers that are made later know the rows' group. One that was made before could not bear another group, nor
        could LBFGS: the rows' learning rate is then scaled as that of one of its groups is.

        Args:
            optimizer: The dense optimizer to follow.
            own_group: Whether the rows get a parameter group of their own; ``False`` adds none in any case.
            group: Place of the parameter group to follow, where the rows have none of their own.
            takes_rate: Whether that group's learning rate is the rows' own, whatever their rule says.
        """
        leave_out(optimizer, self.embedding_bags.parameters())
        self._group_index = group if takes_rate else None
        has_scheduler = any("initial_lr" in x for x in optimizer.param_groups)  # which schedulers note
        takes_groups = not has_scheduler and not isinstance(optimizer, torch.optim.LBFGS)
        if own_group and not takes_rate and takes_groups:
            names: dict[str, Any] = {"param_names": []} if "param_names" in optimizer.param_groups[0] else {}
            optimizer.add_param_group({"params": [], "lr": self.optimizer.lr, **names})
            self._group_index = len(optimizer.param_groups) - 1
        self._scaling_group = group
        self._rate_when_attached = base_lr(optimizer.param_groups[group])
        self._attached = weakref.ref(optimizer)
        optimizer.register_step_post_hook(self._on_step)
        self._follow_zero_grad(optimizer)

    def _follow_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop what waits for a step whenever the optimizer's gradients are set to zero; torch has no hook for that.

        The optimizer's copies, and those of this module, do without: torch does not copy attributes of optimizers.
        """
        followed, own = weakref.ref(optimizer), weakref.ref(self)
        before = vars(optimizer).get("zero_grad")  # that of another collection, which is no method of the optimizer

        def zero_grad(set_to_none: bool = True) -> None:
            target, collection = followed(), own()
            assert target is not None
            if before is not None:
                before(set_to_none)
            else:
                type(target).zero_grad(target, set_to_none)
            if collection is not None and collection.attached_to is target:
                collection._pending.clear()

        vars(optimizer)["zero_grad"] = zero_grad
        _hand_zero_grad_on()

    def _on_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.attached_to is not optimizer:
            return
        if self._pending or not self.trainable:
            self.apply_pending()
        else:  # this rank's batches have not needed the tables; those of others may have
            self.embedding_bags.join_update(lr=self.lr)

    @property
    def attached_to(self) -> torch.optim.Optimizer | None:
        """The optimizer for whose step gradients wait; without one the backward pass updates the rows."""
        return None if self._attached is None else self._attached()

    def apply_pending(self) -> None:
        """Update the rows with the gradients that wait for a step; nothing happens where there are none."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        tickets = [ticket for ticket, _ in pending]
        grads = pending[0][1] if len(pending) == 1 else torch.cat([grad for _, grad in pending])
        self.embedding_bags.apply_gradients(tickets, grads, lr=self.lr)

    def _on_gradient(self, ticket: Ticket, pooled_BFD: Tensor) -> None:
        grad_BFD, pooled_BFD.grad = pooled_BFD.grad, None
        assert grad_BFD is not None
        if self._gradient_scale != 1.0:
            grad_BFD = grad_BFD * self._gradient_scale  # which may be shared with a hook or the graph
        self._pending.append((ticket, grad_BFD))
        if self.attached_to is None:
            self.apply_pending()

    def _check_ids(self, sparse: SparseFeatures) -> None:
        if not sparse.is_single_hot and not bags_cover_ids(sparse):
            num_ids = sparse.values.numel()
            raise ValueError(
                f"the bags of {list(sparse.keys)} do not cover their {num_ids} ids: offsets must rise from 0 to"
                f" {num_ids}, lengths must not be negative and add up to {num_ids}."
            )
        if not ids_are_inside(sparse, self._limits):
            self._raise_wrong_id(sparse)

    def _raise_wrong_id(self, sparse: SparseFeatures) -> None:
        bounds = sparse.feature_bounds()
        for f, (feature, table) in enumerate(zip(self.feature_names, self.layout.feature_tables, strict=True)):
            ids = sparse.values[bounds[f] : bounds[f + 1]]
            wrong = ids[~are_below(ids, torch.tensor(as_int64(table.num_embeddings)))]
            if wrong.numel():
                raise IndexError(
                    f"table {table.name!r}, feature {feature!r}: id {int(wrong[0])} is outside "
                    f"[0, {table.num_embeddings}) ({wrong.numel()} of the batch's {ids.numel()} ids are)."
                )

    def __getstate__(self) -> dict[str, Any]:
        # A copy in another process or a deep copy follows no optimizer; gradients in flight stay where they are.
        return self.__dict__ | {"_attached": None, "_group_index": None, "_pending": []}


def _hand_zero_grad_on() -> None:
    """Have Lightning's wrappers of optimizers hand ``zero_grad`` on to the optimizer, as they do ``step``.

    What ``self.optimizers()`` returns in manual optimization derives from the optimizer's class, and runs that class's
    ``zero_grad`` itself: the one that an optimizer object has of its own would not be called.
    """
    lightning = sys.modules.get("pytorch_lightning.core.optimizer")  # where it is not imported nobody has a wrapper
    if lightning is not None:
        lightning.LightningOptimizer.zero_grad = _zero_grad_of_wrapped


def _zero_grad_of_wrapped(wrapper: Any, set_to_none: bool = True) -> None:
    wrapper.optimizer.zero_grad(set_to_none)


def _has_rows(backend: Backend) -> TypeGuard[TableBackend]:
    return isinstance(backend, TableBackend) and not backend.is_meta


def _check_tables(tables: Sequence[EmbeddingBagConfig]) -> None:
    if not tables:
        raise ValueError("tables must hold at least one EmbeddingBagConfig, got none.")
    dims = sorted({table.embedding_dim for table in tables})
    if len(dims) > 1:
        raise ValueError(
            f"tables of one collection must share an embedding_dim, got {dims}: use one collection for each."
        )
    if len({table.dtype for table in tables}) > 1:
        raise ValueError(
            f"tables of one collection must share a dtype, got {[f'{x.name}: {x.dtype}' for x in tables]}: use one "
            "collection for each."
        )
    if (num_ids := sum(table.num_embeddings for table in tables)) > NUM_IDS:
        raise ValueError(
            f"tables of one collection must have at most 2**64 - 1 ids together, got {num_ids}: give several features "
            "one table (feature_names), or use a collection for each."
        )
    names = Counter(table.name for table in tables)
    features = Counter(feature for table in tables for feature in table.feature_names)
    for what, counts in (("table", names), ("feature", features)):
        repeated = [name for name, count in counts.items() if count > 1]
        if repeated:
            raise ValueError(f"{what} names must be unique in a collection, got {repeated} more than once.")
