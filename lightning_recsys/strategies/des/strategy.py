"""Distributed equivalent substitution: layers with many weights cut by field, all processes on the same batch."""

from __future__ import annotations

import copyreg
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, get_args

import numpy as np
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from lightning_fabric.utilities.seed import _collect_rng_states, _set_rng_states
from pytorch_lightning.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.distributed_c10d import _get_default_group
from torch.distributed.utils import _sync_module_states
from torch.optim import Optimizer
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_recsys.checkpoints import StoredRows, StoredTensor
from lightning_recsys.data.module import CTRDataModule
from lightning_recsys.launchers.folders import RunFolder
from lightning_recsys.launchers.sidecars import folder_for_stores
from lightning_recsys.placement import FieldMethod, FieldPlan, place_fields
from lightning_recsys.stores.dynamic.rows import DynamicRows
from lightning_recsys.strategies.common.averaged_copies import averaging_callbacks
from lightning_recsys.strategies.common.base import RecsysStrategy
from lightning_recsys.strategies.common.means import meet_buffers
from lightning_recsys.strategies.common.samples import sample_features
from lightning_recsys.strategies.common.settings import require_kind, require_one_of, require_paths, require_whole
from lightning_recsys.strategies.common.workers.ranks import count_ranks
from lightning_recsys.strategies.des.cut_model import INSTEAD, CutModel, NewRows, field_costs, partitionable
from lightning_recsys.strategies.des.fingerprints import SameInputs, fingerprint

log = logging.getLogger(f"pytorch_lightning.{__name__}")  # which has a handler in worker processes, too

BUCKET_BYTES = 250 << 20  # of a broadcast
SAMPLED_BATCHES = 4


class DESStrategy(RecsysStrategy):
    r"""Synchronous training whose traffic does not grow with the model: each process has the weights of its own fields.

    All processes of a group see the same batch, of which each reads its own fields' columns. Tables, first-order
    weights, the first layer's blocks and cross weights of a field, with their optimizer state, are on one process. It
    computes a partial result from them, and the sum of all partial results, an all-reduce in the forward pass, is what
    the whole layer gives. From there on all processes compute the same: no gradient is sent, and the other layers stay
    the same on all of them.

    The model's layers say how they are cut, by a method ``partition(fields, group)``; a model that has embedding tables
    and does not say it is refused.

    Args:
        field_placement: How fields are dealt out: ``mod``, the ``i``-th to process ``i mod n``, or ``balanced``, by
            bytes of rows and by lookups at once, as counted in a few of the training batches.
        num_replicas: Groups of processes, of equally many. Each holds the whole model and sees batches of its own;
            dense gradients and rows' gradients are averaged over the groups. Ranks that follow each other are a group,
            so that with one group for each machine partial results never leave it.
        whole: Paths of plain ``nn.Embedding`` and ``nn.EmbeddingBag`` modules that every process is to have as a whole.
            Without being named they are refused.
        dynamic_rows: For collections made with ``device="meta"``: each process makes a row of its fields when it is
            first trained, in a hash table, so that fields may have any number of ids. Default: all rows are made.
        **kwargs: Further arguments of :class:`~lightning_recsys.strategies.common.base.RecsysStrategy`.

    Attributes:
        plan: Which process of a group has which fields, while a run is set up.

    Raises:
        ValueError: an argument is out of range.
        TypeError: an argument is of another type.

    Communication: what :attr:`sends` lists, for each batch; with several groups an all-reduce of the gradients of whole
    parameters, one of a process's own parts of others, and an all-gather of its rows' gradients.
    Reference: Rong et al. 2020, "Distributed equivalent substitution training for large-scale recommender systems".
    Differs from the paper: cross networks and DLRM as well; groups of processes; hash tables only where asked for.

    >>> from pytorch_lightning import Trainer
    >>> trainer = Trainer(strategy=DESStrategy(field_placement="balanced"), accelerator="cpu", devices=2, logger=False)
    >>> trainer.strategy.distributed_sampler_kwargs
    {'num_replicas': 1, 'rank': 0}
    """

    strategy_name = "des"
    wraps_model = False

    def __init__(
        self,
        *,
        field_placement: FieldMethod = "mod",
        num_replicas: int = 1,
        whole: Sequence[str] = (),
        dynamic_rows: DynamicRows | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        require_one_of("field_placement", field_placement, get_args(FieldMethod))
        require_whole("num_replicas", num_replicas, hint="1 is one group of all processes.")
        require_paths("whole", whole)
        require_kind("dynamic_rows", dynamic_rows, DynamicRows, "a DynamicRows(...)", optional=True)
        if num_replicas > 1 and dynamic_rows is not None and dynamic_rows.expire_after is not None:
            raise ValueError(
                f"strategy.dynamic_rows.expire_after={dynamic_rows.expire_after} needs strategy.num_replicas=1, got"
                f" {num_replicas}: groups validate on examples of their own, so each would forget other rows."
            )
        self.field_placement: FieldMethod = field_placement
        self.num_replicas = num_replicas
        self.whole = tuple(whole)
        self.dynamic_rows = dynamic_rows

    def _reset(self) -> None:
        super()._reset()
        self.plan: FieldPlan | None = None
        self._cut: CutModel | None = None
        self._group: ProcessGroup | None = None  # who holds the model together with this process
        self._counterparts: ProcessGroup | None = None  # who has the same part of it, in other groups
        self._data: CTRDataModule | None = None
        self._counting = ExitStack()  # while metrics count once what all processes of a group have seen
        self._inputs: SameInputs | None = None  # that all processes of the group have, while a run is set up
        self._shares_random_numbers = False

    # --- Who is who --------------------------------------------------------------------------------------------------

    @property
    def group_size(self) -> int:
        """Processes that hold one model together.

        Raises:
            ValueError: the processes do not make up equal groups.
        """
        processes = count_ranks(self)
        size, rest = divmod(processes, self.num_replicas)
        if rest or not size:
            raise ValueError(
                f"{processes} processes (trainer.devices times trainer.num_nodes) do not make up strategy.num_replicas="
                f"{self.num_replicas} equal groups. Choose a number that divides them."
            )
        return size

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Batches are dealt out to groups: all processes of one see the same."""
        return {"num_replicas": self.num_replicas, "rank": self.global_rank // self.group_size}

    @property
    def sees_own_examples(self) -> bool:  # noqa: D102 - inherited
        return self.global_rank % self.group_size == 0

    def _make_groups(self) -> tuple[ProcessGroup, ProcessGroup]:
        copyreg.pickle(ProcessGroup, _itself)  # a string stands for the object itself
        size, world = self.group_size, self.world_size
        self._group = _subgroup([range(first, first + size) for first in range(0, world, size)])
        self._counterparts = _subgroup([range(place, world, size) for place in range(size)])
        return self._group, self._counterparts

    def _end_groups(self) -> None:
        """Gloo keeps a thread awake for each group."""
        if self._group is None or not self.succeeded or not dist.is_initialized():
            return
        self.barrier("nobody talks to a group any more")
        for group in (self._group, self._counterparts):
            if group is not _get_default_group():
                dist.destroy_process_group(group)
        self._group = self._counterparts = None

    # --- The model ---------------------------------------------------------------------------------------------------

    def bind_backends(self) -> None:
        """Start all processes from rank 0's model, then keep this one's share.

        Raises:
            TypeError: the task trains on a graph.
        """
        module, trainer = self.task, self.task.trainer
        if getattr(module, "joins_examples", False):
            raise TypeError(
                f"strategy=des cuts layers by field, and {type(module).__name__} joins nodes with their neighbours in"
                " layers that have no fields: use strategy=het, shadowsync, async_ps or ddp."
            )
        parts = partitionable(module, whole=self.whole)
        if parts and trainer.state.fn == TrainerFn.FITTING:
            _refuse_averages(trainer)
        group, counterparts = self._make_groups()
        self._inputs = SameInputs(group)
        self.model_to_device()
        everything = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
        missing = [name for name, parameter in module.named_parameters() if parameter.is_meta]
        if self.dynamic_rows is not None and not missing:
            raise ValueError(
                'strategy.dynamic_rows makes the rows of collections that have none (device="meta"), and the model has'
                ' no such. Make them with device="meta" (+embeddings.device=meta in the recipes), or leave'
                " strategy.dynamic_rows out."
            )
        _sync_module_states(module, _get_default_group(), BUCKET_BYTES, src=0, params_and_buffers_to_ignore=missing)
        self.plan = place_fields(
            field_costs(parts, self._count_lookups(trainer)), self.group_size, method=self.field_placement
        )
        seed = self.broadcast(torch.initial_seed() % 2**31)
        # No other process opens the files of dynamic rows: without a name they go with this one, however it ends.
        with nullcontext() if self.dynamic_rows is None else RunFolder(folder_for_stores(self.store_folder)) as folder:
            self._cut = CutModel(
                module,
                parts,
                plan=self.plan,
                group=group,
                replica_group=counterparts,
                device=self.root_device,
                rows=NewRows(seed=seed, dynamic=self.dynamic_rows, folder=folder),
            )
        # Lightning would broadcast rank 0's parameters once more, which are other ones by now.
        module._ddp_params_and_buffers_to_ignore = everything  # type: ignore[assignment]
        self._say_plan()
        self._counting.enter_context(_metrics_over(counterparts))
        self._select_columns(trainer)
        self.precision_plugin.clip_grad_by_norm = self._clip_grad_by_norm  # type: ignore[method-assign]

    def _count_lookups(self, trainer: pl.Trainer) -> dict[str, float]:
        """Mean number of ids of each field in an example, from a few training batches; the same on all ranks."""
        ids, examples = Counter[str](), Counter[str]()
        if self.field_placement == "balanced" and self.is_global_zero and trainer.state.fn == TrainerFn.FITTING:
            for sparse in sample_features(trainer, SAMPLED_BATCHES):
                ids.update(dict(zip(sparse.keys, np.diff(sparse.feature_bounds()).tolist(), strict=True)))
                examples.update(dict.fromkeys(sparse.keys, sparse.batch_size))
        means: dict[str, float] = self.broadcast({name: ids[name] / max(examples[name], 1) for name in ids})
        return means

    def _say_plan(self) -> None:
        assert self._cut is not None
        if not self._cut.collections:
            log.warning("strategy=des: the model has no embedding tables, so every process trains all of it.")
            return
        rows = [f"{'layer':<32}  {'operation':<22}  {'float32 numbers':>24}"]
        for name, sends in self._cut.sends.items():
            amount = f"{sends.floats} per example"
            amount += f" + {sends.floats_per_batch}" if sends.floats_per_batch else ""
            rows.append(
                f"{name:<32}  {sends.operation + (', and gradients' if sends.gradients else ''):<22}  {amount:>24}"
            )
        if self.is_global_zero:
            log.info("Fields of each process:\n%s\nSent for each batch:\n%s", self.plan, "\n".join(rows))

    def _select_columns(self, trainer: pl.Trainer) -> None:
        data = trainer.datamodule  # type: ignore[attr-defined]  # set by a connector
        if isinstance(data, CTRDataModule) and self._cut is not None and self._cut.collections and not self.whole:
            own = [name for name in data.fields if name in self._cut.own_features]
            data.select_fields(own or list(data.fields)[:1])  # one column at least: it says how many examples there are
            self._data = data

    def unbind_backends(self) -> None:
        """Give the model all its weights and rows again: from the other processes, unless the run has failed."""
        if self._inputs is not None:
            self._inputs.close()
            self._inputs = None
        if self._cut is not None:
            self._cut.make_whole(complete=self.succeeded and dist.is_initialized())
            del self.task._ddp_params_and_buffers_to_ignore
            vars(self.precision_plugin).pop("clip_grad_by_norm", None)
            self._cut = None
        self._counting.close()
        if self._data is not None:
            self._data.select_fields(None)
        self._end_groups()

    def configure_ddp(self) -> None:
        """Nothing: all processes have started from one model, and no gradient goes between those of a group."""

    def binds_rows(self) -> bool:  # noqa: D102 - inherited
        return True

    @property
    def sends(self) -> dict[str, Any]:
        """The exchange of each layer in a step (:class:`~lightning_recsys.models.layers.Sends`), by its path."""
        return {} if self._cut is None else dict(self._cut.sends)

    # --- Training ----------------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Take care that all processes will see the same batches and draw the same random numbers."""
        super().on_train_start()
        self._shares_random_numbers = False
        if self._inputs is not None:
            self._inputs.compare_anew()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """At the start of a run and of each epoch, share rank 0's random numbers: dropout must be the same."""
        super().on_train_batch_start(batch, batch_idx)
        if batch_idx == 0 or not self._shares_random_numbers:  # a run may go on in the middle of an epoch
            self._shares_random_numbers = True
            _set_rng_states(self.broadcast(_collect_rng_states(include_cuda=self.root_device.type == "cuda")))

    def on_validation_start(self) -> None:
        """Make sure that all processes evaluate one model."""
        if self.lightning_module is not None and self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            self._keep_equal()

    def on_train_end(self) -> None:
        """Make sure that all processes have trained one model."""
        super().on_train_end()
        self._keep_equal()

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch; the first one of each loop and epoch must be the same on all processes of a group.

        So must be what the model looks up for it, which a step may have drawn itself.

        Raises:
            ValueError: the processes of a group have different batches.
        """
        if self._cut is not None and self._inputs is not None:
            trainer = self.task.trainer
            place = (trainer.state.stage, trainer.current_epoch, dataloader_idx)
            self._inputs.compare(batch, place, list(self._cut.collections.values()))
        return super().batch_to_device(batch, device, dataloader_idx)

    def post_backward(self, closure_loss: Tensor) -> None:
        """Average the dense gradients over the groups, once for each update."""
        super().post_backward(closure_loss)
        if self.num_replicas == 1 or self.task.trainer.fit_loop._should_accumulate():
            return
        own = self._own_parts
        trained = [x for x in self.task.parameters() if x.requires_grad and x.numel()]
        # Apart: where a number lies in a message decides in which order it is added up, and that of whole parameters
        # must be the same for all processes of a group, whose parts of the others differ in size.
        for kind in (False, True):
            together = [x for x in trained if (id(x) in own) is kind]
            if together:
                self._average(together)

    def _average(self, parameters: list[nn.Parameter]) -> None:
        """Average the gradients of parameters, of which the batch of a group may not have used some.

        A gradient that is missing counts as zeros, unless it is missing in all groups. The message has for each
        parameter whether there is one, behind all gradients.
        """
        grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in parameters]
        is_there = [x.grad is not None for x in parameters]
        flat = torch.cat([*(grad.reshape(-1) for grad in grads), grads[0].new_tensor(is_there)])
        dist.all_reduce(flat, group=self._counterparts)
        *sums, num_there = torch.split(flat, [*(x.numel() for x in grads), len(grads)])
        for number, (parameter, total) in enumerate(zip(parameters, sums, strict=True)):
            if is_there[number] or num_there[number] > 0:
                parameter.grad = grads[number].copy_(total.div_(self.num_replicas).view_as(parameter))

    @property
    def _own_parts(self) -> set[int]:
        """The parameters that are cut, by ``id``: each process has another part of them."""
        return set() if self._cut is None else {id(part) for part, _ in self._cut.cuts.values()}

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """By the norm of all gradients: those of cut parameters are here in part only."""
        parameters = list(self.precision_plugin.main_params(optimizer))
        own = self._own_parts
        grads = [(id(x) in own, x.grad) for x in parameters if x.grad is not None]
        squares = [
            torch.nn.utils.get_total_norm([grad for is_cut, grad in grads if is_cut is kind]).square()
            for kind in (True, False)
        ]
        cut = squares[0].to(self.root_device)
        dist.all_reduce(cut, group=self._group)
        norm = (cut + squares[1].to(self.root_device)).sqrt()
        torch.nn.utils.clip_grads_with_norm_(parameters, clip_val, norm)

    def _keep_equal(self) -> None:
        """Compare what every process has as a whole; take rank 0's weights and the mean of buffers if it differs."""
        if self._cut is None:
            return
        own = self._own_parts
        shared = [x.data for x in self.task.parameters() if x.requires_grad and id(x) not in own]
        buffers = list(self.task.buffers())
        prints: list[int] = [0] * self.world_size
        dist.all_gather_object(prints, fingerprint([*shared, *(buffers if self.num_replicas == 1 else ())]))
        if len(set(prints)) > 1:
            log.warning(
                "strategy=des: layers that should be the same on all processes differ, so rank 0's are taken. The"
                " processors of this run do not round alike, a callback draws random numbers on some ranks only,"
                " a method partition(fields, group) of the model leaves out a layer that sees a process's own fields,"
                " or a step takes a norm of all weights or gradients itself, of which each process has a part: clip by"
                " trainer.gradient_clip_val or self.clip_gradients(optimizer, ...), which take the whole norm."
            )
            for tensor in shared:
                dist.broadcast(tensor, src=0)
        if len(set(prints)) > 1 or self.num_replicas > 1:
            meet_buffers(self.task)

    # --- Metrics and checkpoints -------------------------------------------------------------------------------------

    def reduce(self, tensor: Tensor, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean") -> Tensor:
        """Reduce over the groups; what the processes of one group have counted is the same and counts once."""
        return super().reduce(tensor, self._counterparts if group is None else group, reduce_op)

    @contextmanager
    def counting_once(self) -> Iterator[None]:  # noqa: D102 - inherited
        _, counterparts = self._make_groups()  # those of the run have ended with it
        with _metrics_over(counterparts):
            yield
        self._end_groups()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's tensors, whole, without rows; all processes call this."""
        state = super().lightning_module_state_dict()
        if self._cut is None:
            return state
        return state | self._cut.whole_state()

    @property
    def saves_folders(self) -> bool:  # noqa: D102 - inherited
        return self._cut is not None and bool(self._cut.collections)

    def stored_tensors(self) -> Mapping[str, StoredTensor | StoredRows]:  # noqa: D102 - inherited
        return {} if self._cut is None else self._cut.stored_tensors()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """An optimizer's state as of one process; all processes call this."""
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        state = super().optimizer_state(optimizer)
        return state if self._cut is None else self._cut.whole_optimizer_state(optimizer, state)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this process's part."""
        assert self._cut is not None
        states = zip(self.optimizers, checkpoint["optimizer_states"], strict=True)
        own = [self._cut.own_optimizer_state(optimizer, state) for optimizer, state in states]
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": own})


def _itself(group: ProcessGroup) -> str:
    """The result of ``copy.deepcopy`` for a process group: the same one, as a copy of a model talks to the same ranks.

    Models hold groups during a run, and callbacks copy themselves or these. Pickling still fails.
    """
    return group.group_name


def _refuse_averages(trainer: pl.Trainer) -> None:
    """Callbacks pair a copy of the whole model, made before it is cut, with parts of it.

    Raises:
        TypeError: the trainer has such a callback.
    """
    for callback in averaging_callbacks(trainer):
        raise TypeError(
            f"callback {type(callback).__name__} averages a copy of the whole model, and strategy=des cuts the model by"
            f" field: leave the callback out, {INSTEAD}."
        )


def _subgroup(members: Sequence[Sequence[int]]) -> ProcessGroup:
    """This rank's group, of all that there are; the default one where that has the same ranks."""
    if len(members) == 1:
        return _get_default_group()
    make: Any = dist.new_subgroups_by_enumeration
    group: ProcessGroup = make([list(ranks) for ranks in members])[0]
    return group


@contextmanager
def _metrics_over(group: ProcessGroup | None) -> Iterator[None]:
    """Meanwhile metrics, of whoever has them, come together over this group, unless they have one of their own."""
    own = Metric._sync_dist

    def over_group(metric: Metric, gather: Any = gather_all_tensors, process_group: Any = None) -> None:
        own(metric, gather, process_group or metric.process_group or group)

    Metric._sync_dist = over_group  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Metric._sync_dist = own  # type: ignore[method-assign]
