"""One net's part in a run: its group's servers compute the model, and all ranks get one set of weights when asked."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_recsys.placement.operators import TRAINER
from lightning_recsys.strategies.common.means import meet_buffers, take_mean
from lightning_recsys.strategies.common.workers.living import living_ranks
from lightning_recsys.strategies.hierarchical.bringing import Bringing, Brought
from lightning_recsys.strategies.hierarchical.cut.remote_forward import CutForward
from lightning_recsys.strategies.hierarchical.cut.sample_call import forward_replaced, positional
from lightning_recsys.strategies.hierarchical.cut.watching import Watch
from lightning_recsys.strategies.hierarchical.leader import GroupServers
from lightning_recsys.strategies.hierarchical.refusals import refuse_autocast, refuse_switched, switches

if TYPE_CHECKING:
    from lightning_recsys.strategies.hierarchical.served_groups import ServedGroups

LOOK_SECONDS = 1.0  # from one look whether the group is drained to the next

log = logging.getLogger(f"pytorch_lightning.{__name__}")  # which has a handler in worker processes, too


class NetRun:
    """A net that trains, from the start of training to its end.

    Args:
        dense: The dense part of this rank.
        task: The LightningModule.
        cut: The module that is cut. Its ``forward`` is replaced until :meth:`restore_forward`.
        optimizer: The optimizer of the run.

    Attributes:
        own_replica: This group's parameters, where the module has the mean over groups; on the group's first rank.
    """

    def __init__(self, dense: ServedGroups, task: pl.LightningModule, cut: nn.Module, optimizer: Optimizer) -> None:
        self.own_replica: dict[str, Tensor] = {}
        self._dense, self._task, self._optimizer = dense, task, optimizer
        self._cut = cut
        self._own_forward: Callable[..., Any] = cut.forward
        self._replacing = ExitStack()  # gives the module its own forward pass back
        self._replace_forward()
        self._brought: Brought | None = None  # from the first batch on
        self._is_over = False  # the weights are back in the module for good
        self._bringing: Bringing | None = None  # which has brought it
        self._switches: dict[str, bool] = {}  # of that module, as group servers have them
        self._watch: Watch | None = None  # of that module, from the first batch on
        self._trains_as_evaluated = not cut.training  # as the user has left it, which Lightning keeps
        self.leads = False  # this is the first of its group's nets, of those that live; from the first batch on
        self._calls = 0  # forward passes since the last step
        self._shows = False  # the module has the weights of the moment
        self._rounds: dict[str, float] = {}  # numbers of the rounds between groups, as far as they are known
        self._training = list(range(dense.num_groups))  # groups of which a net lives
        self._stops = dense.agreed_stops  # how often all have stopped for one set of weights
        self._is_drained, self._next_look = False, 0.0  # as of the last look at the group's servers; when to look again

    @property
    def trains(self) -> bool:
        """Whether group servers have the weights."""
        return self._brought is not None and not self._is_over

    def is_drained(self) -> bool:
        """Whether this net's group is drained for maintenance, so that nothing is trained by it; asks now and then."""
        if not self.trains or not self._dense.has_center:
            return False
        if (now := time.monotonic()) > self._next_look:
            was = self._is_drained
            self._look(waits=was)
            if self._is_drained and not was:  # the servers hear at once that this net waits
                self._look(waits=True)
            self._next_look = now + LOOK_SECONDS
        return self._is_drained

    def _look(self, *, waits: bool) -> None:
        servers = self._dense.group_connections()
        told = [server.request("look", arguments={"waits": waits}).value for server in servers]
        self._is_drained = any(told)

    def _replace_forward(self) -> None:
        self._replacing.enter_context(forward_replaced(self._cut, CutForward(self._cut, self._forward)))

    @property
    def was_called(self) -> bool:
        """Whether the module that is cut has been called in this step."""
        return self._calls > 0

    def begin_step(self) -> None:
        """The next forward pass is that of another step."""
        self._calls = 0

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the module that is cut."""
        evaluates = not self._cut.training and not (self._trains_as_evaluated and self._task.trainer.training)
        if evaluates and (self._shows or self._brought is None):
            return self._own_forward(*args, **kwargs)
        if evaluates:
            raise ValueError(
                "strategy=hierarchical: the model was put into evaluation mode within training, where only group"
                " servers have its weights. Evaluate it in validation_step."
            )
        refuse_autocast()
        self._shows = False
        sample = positional(self._own_forward, args, kwargs)
        if self._brought is None:
            self._brought = self._bring(sample)
            self._switches = switches(self._cut)
        refuse_switched(self._switches, self._cut)
        self._follow(sample)
        self._calls += torch.is_grad_enabled()
        if self._calls > 1:
            raise ValueError(
                "strategy=hierarchical: the training step calls the model twice before one optimizer step, which group"
                " servers would take for two updates. Join what the two calls are to compute in one batch."
            )
        return self._brought.partitioned(*args, **kwargs)

    def _follow(self, sample: Sequence[Any]) -> None:
        """Cut the model once more where something that its parts were made of has changed since the last batch."""
        assert self._brought is not None
        assert self._bringing is not None
        arguments = dict(zip(inspect.signature(self._own_forward).parameters, sample, strict=True))
        if self._watch is None:
            self._watch = self._look_first(self._brought, arguments)
        changed = self._watch.look(arguments)
        if changed:
            with self._whole():
                self._brought = self._bringing.follow(self._brought, sample, changed)
            self._watch = self._look_first(self._brought, arguments)
            log.info("Group servers follow a change of what the cut model reads: %s.", ", ".join(sorted(changed)))

    def _look_first(self, brought: Brought, arguments: Mapping[str, Any]) -> Watch:
        served = [module for own in brought.served.values() for module in own.values()]
        buffers = (name for module in served for name, _ in module.named_buffers(remove_duplicate=False))
        watch = Watch(self._cut, brought.reads, buffers=buffers, trained=self._trained())
        watch.look(arguments)
        return watch

    def _trained(self) -> set[nn.Parameter]:
        return {x for group in self._optimizer.param_groups for x in group["params"] if x.requires_grad}

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Meanwhile the module computes by itself, and no random generator moves."""
        self.restore_forward()
        try:
            with isolate_rng():
                yield
        finally:
            self._replace_forward()

    def _bring(self, sample: Sequence[Any]) -> Brought:
        """Cut the model, and bring its parts to the group servers."""
        self._bringing = Bringing(self._dense, self._cut, self._optimizer)
        with self._whole():
            brought = self._bringing.bring(sample)
        self.leads = self._dense.leads_at_first
        if self._dense.strategy.joining is None:
            self._begin_sync(brought.servers)
        return brought

    @property
    def counts(self) -> tuple[int, int]:
        """How often all have stopped for one set of weights; the changes of the model that this net has followed."""
        return self._stops, 0 if self._bringing is None else self._bringing.num_changes

    # --- One set of weights ------------------------------------------------------------------------------------------

    def settle(self, *, goes_on: bool) -> None:
        """Bring the weights of the moment into every rank's model: the mean over groups. All ranks call this.

        Args:
            goes_on: Training does, so that groups go on towards each other.
        """
        brought = self._brought
        if brought is None or self._is_over:
            return
        has_trained = torch.tensor(not self._shows, dtype=torch.int64)
        dist.all_reduce(has_trained)  # which returns when everybody has stopped training
        self._elect()
        if not has_trained:
            return  # what was validated is saved: meanwhile the groups go on towards each other
        self._stops += 1
        kept = self._changed_buffers()
        self._end_sync(brought.servers)
        if self.leads:
            if self._dense.has_center:
                # Before the weights are taken, and for all that follows. A drained group does not come back meanwhile:
                # only a net that waits has it do so.
                self._look(waits=False)
            self._take_replica(brought, kept)
        self._dense.strategy.barrier("no round is under way")
        self._meet(brought, kept)
        if self._is_drained and self.own_replica:  # it comes back as the others are then
            self._keep_replica()
        if self._watch is not None:
            self._watch.excuse(but=kept)
        self._shows = True
        if goes_on:
            self._begin_sync(brought.servers)

    def _take_replica(self, brought: Brought, kept: Collection[str]) -> None:
        brought.servers.pull_model(keep=kept)
        if self._dense.num_groups > 1:
            self._keep_replica()

    def _keep_replica(self) -> None:
        self.own_replica = {name: x.detach().clone() for name, x in self._cut.named_parameters()}

    def show(self) -> None:
        """Take this group's replica into the model, as its servers have it just now, if this rank leads the group."""
        if self._brought is not None and self.leads and not self._shows:
            kept = self._changed_buffers()
            self._brought.servers.pull_model(keep=kept)
            if self._watch is not None:
                self._watch.excuse(but=kept)

    def _changed_buffers(self) -> set[str]:
        """The buffers of servers that a callback has changed here: the next batch brings its numbers to the servers."""
        return set() if self._watch is None else self._watch.changed_buffers()

    def _elect(self) -> None:
        """Behind a meeting: take over from the first net of this group where that has died.

        Where none of a group lives, the launcher has ended its servers: what nobody trains would hold the centre back.
        """
        dense, living = self._dense, living_ranks()
        groups = dense.groups
        first = min(x for x in living if groups.group_of(x) == groups.group_of(dense.strategy.global_rank))
        self.leads = first == dense.strategy.global_rank
        training = sorted({groups.group_of(x) for x in living})
        for group in set(self._training) - set(training) if dense.strategy.is_global_zero else ():
            log.warning("Group %d has no net left: its replica counts no more, and the other groups go on.", group)
        self._training = training

    def _begin_sync(self, servers: GroupServers) -> None:
        """Have this group's servers make rounds from now on.

        All nets of a group tell them, and they heed the first: the leader may have died just now, and where groups
        average among themselves none would make a round until all stop next.
        """
        servers.begin_sync(self._stops, self._training)

    def _end_sync(self, servers: GroupServers) -> None:
        """Return when this group's servers make no rounds.

        Groups that average among themselves stop in the same round, so each of them is told by all of its nets: the
        others would wait for one whose first net has died just now.
        """
        if self.leads:
            self._rounds = servers.end_sync() or self._rounds
        elif not self._dense.has_center:
            servers.end_sync()

    def _meet(self, brought: Brought, kept: Collection[str]) -> None:
        """Give all ranks the mean of what the groups' first ranks have."""
        # Running values of a part on a server are its first rank's to bring, too; other ranks have them from the start.
        remote = (part.module.buffers() for part in brought.partitioned.parts if part.device != TRAINER)
        served = {x for buffers in remote for x in buffers if x.is_floating_point()}
        in_optimizer = self._trained()
        trained = [x.data for x in self._task.parameters() if x in in_optimizer and x.numel()]
        buffers = [x for x in self._task.buffers() if x in served]
        # What all have alike, as callbacks set buffers, comes out of a mean in double precision with the same bits.
        for tensors, dtype in ((trained, None), (buffers, torch.float64)):
            while not (
                take_mean(tensors, counts=self.leads and not self._is_drained, dtype=dtype)
                or take_mean(tensors, counts=self.leads, dtype=dtype)  # drained groups count where no others are left
            ):
                self._elect()  # the first net of every group has died just now: the next one brings the weights
                if self.leads:
                    self._take_replica(brought, kept)
        meet_buffers(self._task)

    def pull_state(self) -> None:
        """Bring the state that this group's servers keep for the optimizer into the optimizer, on its first rank."""
        if self._brought is not None and self.leads and not self._is_over:
            self._brought.servers.pull_state()

    def end(self) -> None:
        """Train no more: the model is in this process, as it was settled, and the optimizer's state with it."""
        self.pull_state()
        self.restore_forward()
        self._is_over = True

    def restore_forward(self) -> None:
        """Let the module compute by itself again."""
        self._replacing.close()

    def telemetry(self) -> dict[str, Any]:
        """Staleness within the group, rounds between groups, and what compression saved and took."""
        values: dict[str, Any] = {}
        if self._brought is not None:
            net = self._brought.net
            if len(net.staleness):
                values["staleness/group"] = net.staleness
            if net.lost:
                values["group/lost_passes"] = float(net.lost)
            if saved := net.traffic.raw_bytes - net.traffic.encoded_bytes:
                values["compression/saved_bytes"] = float(saved)
                values["compression/cpu_seconds"] = net.traffic.cpu_seconds
        if self._rounds:  # as of the last time that weights were brought together
            values["sync/rounds"] = self._rounds["rounds"] / max(self._rounds["seconds"], 1e-9)
        return values
