"""Hierarchical Training: few dense replicas, each trained by a group of trainers and computed by group servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from lightning_recsys.compression import make_codec
from lightning_recsys.strategies.common.settings import require_whole
from lightning_recsys.strategies.hierarchical.cut.eight_bit import FCForward
from lightning_recsys.strategies.hierarchical.planning import FCSplits, OperatorPlacement, PlacementMethod
from lightning_recsys.strategies.hierarchical.served_groups import ServedGroups
from lightning_recsys.strategies.served import ServedStrategy
from lightning_recsys.sync import SyncAlgorithm


class HierarchicalStrategy(ServedStrategy):
    """Groups of trainers, each with one dense replica that its group servers compute and train; rows on servers.

    Every rank is a *net* of one trainer. It reads batches, looks rows up and drives the step; operators with parameters
    are computed by the servers of its group, which update them as soon as their gradients are there, without a lock
    between nets (Hogwild), by the LightningModule's own optimizer with its present learning rate. Each server keeps its
    share of the replica together with those of other groups in the background.

    Args:
        num_groups: Number of groups, each of which has a replica of the dense part; ``auto`` for as many as there are
            processes for: those that an engine, torchrun or SLURM has started, or ``Trainer(devices=...)``.
        trainers_per_group: Number of trainers that train one group's replica.
        servers_per_group: Group servers, over which a replica is cut by operators.
        nets_per_trainer: Ranks of a trainer, all on one node.
        algorithm: What keeps groups together: ``easgd``, ``ma``, ``bmuf``, a name registered with
            :func:`~lightning_recsys.sync.register_algorithm`, or an algorithm.
        alpha: Elastic parameter, in ``(0, 1]``: how far a round moves a replica; ``None`` is the algorithm's default.
        interval: Seconds from one round to the next; by default as often as 1.75 % of a core allows.
        eta: BMUF's step size; ``None`` is its default, 1.
        block_momentum: BMUF's momentum; ``None`` is its default, 0.
        nesterov: BMUF's look-ahead; ``None`` is its default, off.
        num_sync_servers: Servers for the centre, where there are several groups.
        min_workers: Nets may die as long as so many are left.
        max_replacements: How many nets that died are replaced by other processes, in all. Default: none.
        module: Path of the module that is cut, which has all trained parameters of the dense part and is called once in
            a training step. Default: the task's ``model``, or the task itself where it has none.
        operator_placement: Where operators are computed: a method's name, or
            :class:`~lightning_recsys.strategies.hierarchical.OperatorPlacement`, by which a plan can be read and saved.
        fc_splits: Which fully connected layers are computed by several group servers, in a piece on each: ``none``,
            ``auto`` (some, where that makes the predicted step shorter), or a mapping of layers' paths in the module
            that is cut to ``output`` or ``input``.
        fc_forward: In what group servers compute fully connected layers (``nn.Linear``) forward: ``float32``, or
            ``int8`` as the paper's Model-B. Gradients, and what is trained, stay in float32, and so does validation.
        compression: How activations and gradients travel between trainers and group servers: ``none`` or ``bf16``, or a
            mapping with ``activations`` (none, bf16, int8) and ``gradients`` (none, bf16, topk).
        top_k_fraction: Share of the elements that ``topk`` sends.
        error_feedback: Whether ``topk`` keeps back what it has not sent, for each net and part, and adds it to the next
            gradient, which is that of other examples; ``False`` leaves it out.
        row_compression: How embedding rows and their gradients travel: ``none`` or ``bf16``.
        **kwargs: As for :class:`~lightning_recsys.strategies.served.ServedStrategy`, such as
            ``table_placement``; not ``servers``.

    Raises:
        ValueError: an argument is out of range; as training starts, a setting that needs gradients before they are
            applied, or a model that cannot be traced.
        TypeError: an argument is of another type.
        OperatorRoomError: a group has no room for the model, as training starts, or at the first batch where nobody
            knows before what the model is called with.

    Communication: per step and part on a server, inputs and gradients of outputs to it, outputs and gradients of inputs
    back; rows as under ShadowSync. Between groups, per round and server, its share of the replica and of the centre.
    Reference: Huang et al. 2021, "Hierarchical Training: scaling deep recommendation models on large CPU clusters".
    Differs from the paper: nets are processes, not threads; updates of one part take turns; the residual of an example
    is added to the example at its place in the next batch (section 4.2 does not say where it goes).

    >>> from pytorch_lightning import Trainer
    >>> strategy = HierarchicalStrategy(num_groups=2, trainers_per_group=2)
    >>> Trainer(strategy=strategy, accelerator="cpu", logger=False, enable_checkpointing=False).world_size
    4
    """

    strategy_name = "hierarchical"
    asynchronous = True
    wraps_model = False
    dense: ServedGroups

    def __init__(
        self,
        *,
        num_groups: int | Literal["auto"] = 1,
        trainers_per_group: int = 1,
        servers_per_group: int = 1,
        nets_per_trainer: int = 1,
        algorithm: str | SyncAlgorithm = "easgd",
        alpha: float | None = None,
        interval: float | None = None,
        eta: float | None = None,
        block_momentum: float | None = None,
        nesterov: bool | None = None,
        num_sync_servers: int = 1,
        min_workers: int = 1,
        max_replacements: int = 0,
        module: str | None = None,
        operator_placement: OperatorPlacement | PlacementMethod = "auto",
        fc_splits: FCSplits = "none",
        fc_forward: FCForward = "float32",
        compression: str | Mapping[str, str] = "none",
        top_k_fraction: float = 0.1,
        error_feedback: bool = True,
        row_compression: str = "none",
        **kwargs: Any,
    ) -> None:
        make_codec(row_compression, "rows", setting="strategy.row_compression")  # which checks it
        self.dense = ServedGroups(
            num_groups=num_groups,
            trainers_per_group=trainers_per_group,
            servers_per_group=servers_per_group,
            nets_per_trainer=nets_per_trainer,
            algorithm=algorithm,
            alpha=alpha,
            interval=interval,
            eta=eta,
            block_momentum=block_momentum,
            nesterov=nesterov,
            num_sync_servers=num_sync_servers,
            module=module,
            operator_placement=operator_placement,
            fc_splits=fc_splits,
            fc_forward=fc_forward,
            compression=compression,
            top_k_fraction=top_k_fraction,
            error_feedback=error_feedback,
        )
        super().__init__(compression=row_compression, **kwargs)
        require_whole("min_workers", min_workers)
        require_whole("max_replacements", max_replacements, at_least=0, hint="0 replaces none.")
        self.min_workers, self.max_replacements = min_workers, max_replacements
