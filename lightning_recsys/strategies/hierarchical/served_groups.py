"""Hierarchical Training's dense part: a replica for each group, on group servers that compute and train it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import pytorch_lightning as pl
from torch import Tensor
from torch.optim import Optimizer

from lightning_recsys.checkpoints import read_own
from lightning_recsys.compression import Compression, TopK
from lightning_recsys.launchers import ServerSpec
from lightning_recsys.parameter_server.client import Connection
from lightning_recsys.parameter_server.remote import RemoteStores
from lightning_recsys.strategies.common.settings import (
    chosen_algorithm,
    refuse_meaningless,
    require_kind,
    require_number,
    require_one_of,
    require_whole,
)
from lightning_recsys.strategies.common.workers.ranks import check_ranks, placed_ranks, started_ranks, take_ranks
from lightning_recsys.strategies.hierarchical.bringing import Planned, plan_ahead
from lightning_recsys.strategies.hierarchical.cut.eight_bit import FCForward
from lightning_recsys.strategies.hierarchical.groups import Groups
from lightning_recsys.strategies.hierarchical.planning import (
    FCSplits,
    OperatorPlacement,
    PlacementMethod,
    check_splits,
)
from lightning_recsys.strategies.hierarchical.refusals import (
    cut_module,
    refuse_hooked,
    refuse_optimizers,
    refuse_parametrized,
    refuse_trainer,
    refuse_without_forward,
)
from lightning_recsys.strategies.hierarchical.run import NetRun
from lightning_recsys.strategies.parts import DensePart
from lightning_recsys.strategies.replicas.rounds import SYNC
from lightning_recsys.sync import SyncAlgorithm, Topology

if TYPE_CHECKING:
    from lightning_recsys.strategies.common.base import RecsysStrategy

GROUP = "group"  # the kind of the servers that compute the model
PROGRAM = "lightning_recsys.strategies.hierarchical.servers.group_server"
PAUSE_SECONDS = 0.1  # from one question of a net whose group is drained to the next
ANSWER_SECONDS = 60.0  # for a group server to compute something, before it is asked again

CHECKPOINT_KEY = "hierarchical"


class ServedGroups(DensePart):
    """Groups of nets, each with one dense replica that its group servers compute and train, without a lock.

    Args:
        num_groups: Number of groups, each of which has a replica of the dense part; ``auto`` for as many as there are
            processes for.
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

    Raises:
        ValueError: an argument is out of range, or does not go with another.
        TypeError: an argument is of another type.

    Communication: per step and part on a server, inputs and gradients of outputs to it, outputs and gradients of inputs
    back. Between groups, per round and server, its share of the replica and of the centre.
    Reference: Huang et al. 2021, "Hierarchical Training: scaling deep recommendation models on large CPU clusters".
    """

    asynchronous = True
    wraps_model = False
    float32_only = True
    takes_replacements = True

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
        module: str | None = None,
        operator_placement: OperatorPlacement | PlacementMethod = "auto",
        fc_splits: FCSplits = "none",
        fc_forward: FCForward = "float32",
        compression: str | Mapping[str, str] = "none",
        top_k_fraction: float = 0.1,
        error_feedback: bool = True,
    ) -> None:
        require_number("top_k_fraction", top_k_fraction)
        require_kind("error_feedback", error_feedback, bool, "true or false")
        self.operator_compression = Compression.from_option(
            compression, top_k_fraction=top_k_fraction, error_feedback=error_feedback
        )
        self.operator_placement = (
            operator_placement
            if isinstance(operator_placement, OperatorPlacement)
            else OperatorPlacement(operator_placement)
        )
        self._follows_ranks = num_groups == "auto"
        num_groups = 1 if num_groups == "auto" else num_groups  # until the processes are known
        Groups(num_groups, trainers_per_group, nets_per_trainer, servers_per_group)  # which checks them
        require_whole("num_sync_servers", num_sync_servers)
        require_kind("module", module, str, "a module's path, such as 'model'", optional=True)
        options = {"alpha": alpha, "eta": eta, "block_momentum": block_momentum, "nesterov": nesterov}
        self.algorithm = chosen_algorithm(ServedGroups, algorithm, options, interval=interval)
        has_one_group = num_groups == 1 and not self._follows_ranks
        if has_one_group or self.algorithm.topology is not Topology.CENTRAL:
            why = "without several groups and an algorithm with a centre (easgd), which sync servers would hold"
            refuse_meaningless(ServedGroups, {"num_sync_servers": num_sync_servers}, why)
        if not isinstance(self.operator_compression.gradients, TopK):
            why = "where strategy.compression does not have gradients: topk"
            refuse_meaningless(ServedGroups, {"top_k_fraction": top_k_fraction}, why)
        check_splits(fc_splits, self.operator_placement, num_servers=servers_per_group)
        require_one_of("fc_forward", fc_forward, get_args(FCForward))
        self.fc_forward = fc_forward
        self.fc_splits: FCSplits = fc_splits if isinstance(fc_splits, str) else dict(fc_splits)
        self.num_groups = num_groups
        self.trainers_per_group = trainers_per_group
        self.servers_per_group = servers_per_group
        self.nets_per_trainer = nets_per_trainer
        self.interval = interval
        self.num_sync_servers = num_sync_servers
        self.module = module
        super().__init__()

    def _reset(self) -> None:
        super()._reset()
        self._run: NetRun | None = None  # from the start of training to the end of the run
        self.planned: Planned | None = None  # on rank 0, where there was something to plan by before the first batch
        # This group's own parameters, of the checkpoint that the run goes on from.
        self.restored: dict[str, Tensor] = {}
        self.agreed_stops, self.agreed_changes = 0, 0  # where this process joins a run: those that were before

    def attach(self, strategy: RecsysStrategy) -> None:  # noqa: D102 - inherited
        super().attach(strategy)
        if strategy.servers is not None:
            raise ValueError(
                f"strategy.servers={list(strategy.servers)}: group servers compute parts of the run's own model, which"
                " does not travel over a network, so they are started with the run. Leave strategy.servers out."
            )

    # --- Who is who --------------------------------------------------------------------------------------------------

    @property
    def groups(self) -> Groups:
        """Which rank and which server belong to which group; known once a ``Trainer`` has the strategy."""
        sizes = self.num_groups, self.trainers_per_group, self.nets_per_trainer, self.servers_per_group
        return Groups(*sizes, num_nodes=self.strategy.num_nodes, nodes=placed_ranks(self.strategy))

    @property
    def leads_at_first(self) -> bool:
        """Whether this rank brings the model to its group's servers: the group's first one, of the start of the run."""
        return self.strategy.joining is None and self.strategy.global_rank in self.groups.leaders

    @property
    def has_center(self) -> bool:
        """Whether sync servers have a centre, towards which groups move."""
        return self.num_groups > 1 and self.algorithm.topology is Topology.CENTRAL

    @property
    def num_replicas(self) -> int:
        """Number of copies of the dense part that are trained; rank 0 is of the first group."""
        return self.num_groups

    def take_ranks(self) -> None:
        """Take as many processes as the groups need, or have as many groups as there are processes for."""
        if self._follows_ranks:
            nets_per_group = self.trainers_per_group * self.nets_per_trainer
            self.num_groups = max(started_ranks(self.strategy) // nets_per_group, 1)
        groups = self.groups
        needed = groups.ranks_per_node if groups.nodes is None else groups.world_size
        settings = (
            f"strategy.num_groups={self.num_groups} with strategy.trainers_per_group={self.trainers_per_group} and"
            f" strategy.nets_per_trainer={self.nets_per_trainer}"
        )
        take_ranks(self.strategy, needed)
        check_ranks(self.strategy, needed, settings=settings, what="groups")

    def servers(self) -> list[ServerSpec]:
        """The groups' own servers, and sync servers where several groups have a centre."""
        groups = self.groups
        options = {"num_nets": groups.nets_per_group}
        specs = [
            ServerSpec(GROUP, index, PROGRAM, options, groups.node_of(group), ranks=groups.ranks_of(group))
            for group in range(self.num_groups)
            for index in groups.servers_of(group)
        ]
        if self.has_center:
            specs += [ServerSpec(SYNC, index) for index in range(self.num_sync_servers)]
        return specs

    def group_connections(self) -> list[Connection]:
        """To the servers of this rank's group, in the order of their numbers."""
        servers = self.strategy.run_servers.connect(GROUP, by_messages=True, timeout=ANSWER_SECONDS)
        own = self.groups.servers_of(self.groups.group_of(self.strategy.global_rank))
        return [cast(RemoteStores, servers[number]).connection for number in own]

    # --- Training ----------------------------------------------------------------------------------------------------

    def refuse(self, trainer: pl.Trainer) -> None:
        """Refuse settings that do not go with parts on servers.

        Raises:
            ValueError: a setting of the trainer does not.
        """
        refuse_trainer(trainer, self.strategy.precision_plugin)

    def prepare(self) -> None:
        """Refuse a model that cannot be trained in parts, or for which there is no room.

        Raises:
            ValueError: the task, its model or its optimizers do not go with parts on servers.
            OperatorRoomError: a group has no room for the model.
        """
        task = self.strategy.task
        refuse_optimizers(task, self.strategy.optimizers, cut=self.module)
        cut = cut_module(task, self.module)
        refuse_without_forward(task, cut)
        refuse_parametrized(cut)
        if self.strategy.is_global_zero:
            self.planned = plan_ahead(self, task, cut)

    def agreed(self) -> dict[str, Any]:
        """How often all have stopped, and changes of the model that servers have; the model itself is with these."""
        assert self._run is not None
        stops, changes = self._run.counts
        return {"stops": stops, "changes": changes}

    def agree(self, agreed: Mapping[str, Any]) -> None:  # noqa: D102 - inherited
        self.agreed_stops, self.agreed_changes = agreed["stops"], agreed["changes"]

    def begin(self) -> None:
        """Have the model cut at its first forward pass, which shows what goes into it."""
        task = self.strategy.task
        (optimizer,) = self.strategy.optimizers
        cut = cut_module(task, self.module)
        refuse_hooked(cut)
        self._run = NetRun(self, task, cut, optimizer)
        if self.strategy.dealer is not None:
            self.strategy.dealer.pauses = self._run.is_drained

    def begin_batch(self, batch_idx: int) -> None:
        """Wait while this net's group is drained, unless the others then train its share of the epoch."""
        assert self._run is not None
        strategy = self.strategy
        while strategy.dealer is None and self._run.is_drained() and not strategy.run_servers.is_asked_to_end():
            time.sleep(PAUSE_SECONDS)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any], make: Callable[..., Any]) -> Any:
        """Let the backward pass update the parts; the optimizer itself steps for the rows."""

        def compute() -> Any:
            assert self._run is not None
            self._run.begin_step()
            output = closure()
            self._refuse_own_gradients(optimizer)
            return output

        return make(optimizer, compute)

    def _refuse_own_gradients(self, optimizer: Optimizer) -> None:
        for parameter in (x for group in optimizer.param_groups for x in group["params"]):
            if parameter.grad is not None and parameter.numel():
                names = {id(x): name for name, x in self.strategy.task.named_parameters()}
                if self._run is not None and not self._run.was_called:
                    cut = type(cut_module(self.strategy.task, self.module)).__name__
                    raise ValueError(
                        f"strategy=hierarchical cuts the forward of {cut}, which {type(self.strategy.task).__name__}"
                        f".training_step did not call, and {names.get(id(parameter), 'a parameter')} has a gradient all"
                        f" the same: the step calls modules of {cut} by themselves. Call the whole module in the step,"
                        " name another one with strategy.module, or use strategy=shadowsync."
                    )
                raise ValueError(
                    f"strategy=hierarchical: {names.get(id(parameter), 'a parameter')} has a gradient from outside the"
                    " model's forward pass, such as a penalty on weights, and this process trains no dense parameters."
                    " Use the optimizer's weight_decay, or strategy=shadowsync."
                )

    # --- One set of weights ------------------------------------------------------------------------------------------

    def settle(self, flush_rows: Callable[[], None], *, goes_on: bool) -> None:
        """Bring the weights of the moment into every rank's model: the mean over groups. All ranks call this."""
        flush_rows()
        if self._run is not None:
            self._run.settle(goes_on=goes_on)

    def show(self) -> None:
        """Take the replica of this rank's group as its servers have it just now; they train on meanwhile."""
        if self._run is not None:
            self._run.show()

    def finish(self) -> None:
        """Bring the trained model into this process, and the optimizer's state with it.

        Under a launcher that is not ours the process lives on, and may save a checkpoint when the servers are gone.
        """
        if self._run is not None:
            self._run.end()

    # --- Checkpoints -------------------------------------------------------------------------------------------------

    def fill(self, optimizer: Optimizer) -> None:
        """Take the optimizer's state from this group's servers."""
        if self._run is not None:
            self._run.pull_state()

    @property
    def is_spread(self) -> bool:  # noqa: D102 - inherited
        return self._run is not None and self._run.trains and self.num_groups > 1

    def own_state(self) -> dict[str, Any]:
        """Each group's own replica and optimizer state; its first rank adds them."""
        if self._run is None or not self._run.leads or not self._run.own_replica:
            return {}
        return {
            CHECKPOINT_KEY: {
                "group": self.groups.group_of(self.strategy.global_rank),
                "num_groups": self.num_groups,
                "replica": self._run.own_replica,
                "optimizer_states": [x.state_dict() for x in self.strategy.optimizers],
            }
        }

    def load_own(self, path: Any, loaded: dict[str, Any], *, weights_only: bool) -> None:
        """Take what this group had; in a run of another number of groups all start from their mean."""
        if self.num_groups == 1:
            return
        group = self.groups.group_of(self.strategy.global_rank)
        wanted = {"group": group, "num_groups": self.num_groups}
        kept = read_own(path, CHECKPOINT_KEY, wanted, expected=group, weights_only=weights_only)
        if kept is not None:
            loaded["optimizer_states"] = kept["optimizer_states"]  # instead of the first group's
            self.restored = kept["replica"]

    # --- Telemetry and the end ---------------------------------------------------------------------------------------

    def telemetry(self) -> dict[str, Any]:
        """Staleness within the group and rounds between groups; see ``docs/settings/hierarchical.md`` for each name."""
        return {} if self._run is None else self._run.telemetry()

    def stop(self) -> None:
        """Give the model its own forward pass again."""
        if self._run is not None:
            self._run.restore_forward()
        super().stop()
