"""The dense part of a model on servers: workers push gradients, and pull what all of them made of the parameters."""

# Shape suffixes: N elements of a store's vector, P parameters in it.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from pytorch_lightning.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_recsys.optim import RowOptimizer, RowSWAP
from lightning_recsys.optim.swap import GROUP_PERIOD, GROUP_STEP, PERIOD, discount_of, discount_state_
from lightning_recsys.optim.torch_rules import UNKNOWN_SETTINGS, row_rule_of, unknown_settings
from lightning_recsys.stores.dense_store import STEP
from lightning_recsys.stores.interfaces import DenseStore, Stores
from lightning_recsys.stores.versions import CHANGE, VERSION, StalenessHistogram
from lightning_recsys.sync import StalenessNormalization

STORE = "dense-part"  # no path of a module can be the same


class Kept(NamedTuple):
    """The checkpoint's entry for a parameter beside its values and its optimizer's state.

    Args:
        version: Number of updates by all workers.
        change: Root mean square of the last one; 0 where the staleness rule does not ask for it.
    """

    version: int
    change: float


class ServedParameters:
    """Parameters of one group of an optimizer, in one server's store with their versions and optimizer state.

    Every worker's gradient is an update of its own, by the optimizer's rule, which the store applies to what it has
    then; no lock, no order. A parameter without a gradient is left as it is, as the optimizer would leave it.

    Args:
        optimizer: The optimizer that the group belongs to.
        index: Number of the group in the optimizer, with the learning rate of the next push. The group itself may be
            another one later: an optimizer that loads a state makes new ones.
        parameters: The parameters of the group that lie on this server.
        name: Name of the store.
    """

    store: DenseStore

    def __init__(self, optimizer: Optimizer, index: int, parameters: Sequence[nn.Parameter], name: str) -> None:
        self._optimizer, self._index, self._name = optimizer, index, name
        self.parameters = list(parameters)
        self._rule = dense_rule(optimizer, optimizer.param_groups[index])
        self._parts = [x.numel() for x in self.parameters]
        self._has_changes = False  # whether this worker made a store that keeps them
        self._versions_P: Tensor | None = None  # that the next gradients are computed at, once something was pulled

    def create(self, server: Stores, normalization: StalenessNormalization, kept: Mapping[nn.Parameter, Kept]) -> None:
        """Make the store, with this worker's parameters and optimizer state, in place of an earlier run's.

        Args:
            server: The server on which the store is made.
            normalization: The rule for how much of a stale gradient counts.
            kept: State of parameters whose training goes on; the optimizer's own steps, where it counts them, go first.
        """
        with suppress(KeyError):
            server.remove(self._name)
        self.store = server.create_dense_store(
            self._name, _joined(self.parameters), optimizer=self._rule, normalization=normalization, parts=self._parts
        )
        states = [self._optimizer.state.get(x, {}) for x in self.parameters]
        for key in self._state_names:
            if any(key in state for state in states):  # Adam has none of parameters that never had a gradient
                pairs = zip(self.parameters, states, strict=True)
                self.store.write(key, _joined([state.get(key, torch.zeros_like(x)) for x, state in pairs]))
        known = [kept.get(x, Kept(0, 0.0)) for x in self.parameters]
        steps = [int(state.get("step", before.version)) for before, state in zip(known, states, strict=True)]
        self.store.write(VERSION, torch.tensor(steps))
        self._has_changes = normalization.uses_changes
        if self._has_changes:
            self.store.write(CHANGE, torch.tensor([before.change for before in known]))
        if (discount := discount_of(self._optimizer)) is not None:
            _, period = discount.position(self._optimizer, self._group)
            self.store.write(PERIOD, torch.full((len(self._parts),), float(period)))

    def open(self, server: Stores) -> None:
        """Find the store that another worker made."""
        self.store = server.dense_store(self._name)

    def assign(self) -> None:
        """Let the server have this worker's parameters; the optimizer state and versions there stay."""
        self.store.assign(_joined(self.parameters))

    @property
    def has_gradients(self) -> bool:
        """Whether there is something to push."""
        return any(x.grad is not None for x in self.parameters)

    def push(self, step: int | None = None) -> Callable[[], int]:
        """Send the gradients, with the versions that they were computed at, and let go of them.

        Args:
            step: The number of this push among those of all workers; ``None`` lets the store count it.

        Returns:
            Waits for the number of the push, and returns it.

        Raises:
            ValueError: more than the learning rate has changed since the store was made.
        """
        trained_P = torch.tensor([x.grad is not None for x in self.parameters])
        grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        marks = None if trained_P.all() else trained_P
        options: dict[str, Any] = {"versions": self._versions_P, "trained": marks, "step": step}
        return self.store.push_gradient(_joined(grads), lr=self._lr(), **options)

    @property
    def _group(self) -> dict[str, Any]:
        return self._optimizer.param_groups[self._index]

    def _lr(self) -> float:
        group = self._group
        rule = dense_rule(self._optimizer, group)
        if rule != self._rule:
            raise ValueError(
                f"strategy=async_ps: servers train by the rule that an optimizer had when training started, and only"
                f" its lr may change. Group {self._index} of {type(self._optimizer).__name__} had {self._rule} and has"
                f" {rule} now. Schedulers that move betas or momentum (OneCycleLR, CyclicLR) take"
                " cycle_momentum=False, which leaves them alone."
            )
        return float(group["lr"])

    def begin_pull(self) -> Callable[[], None]:
        """Ask for what the server has, own updates included; returns what waits for it and takes it.

        A parameter that has a gradient already, as in the midst of an accumulation, keeps the version that this was
        computed at: the gradient is as stale as the oldest of its summands.
        """
        answer = self.store.begin_versioned_pull()

        def take() -> None:
            values_N, versions_P = answer()
            if self._versions_P is not None:
                waiting_P = torch.tensor([x.grad is not None for x in self.parameters])
                versions_P = torch.where(waiting_P, self._versions_P, versions_P)
            self._versions_P = versions_P
            for parameter, part in zip(self.parameters, torch.split(values_N, self._parts), strict=True):
                parameter.data.copy_(part.view(parameter.shape))

        return take

    def pull_state(self, period: int | None) -> None:
        """Put the server's optimizer state into the optimizer, as if it had made all the updates itself.

        Args:
            period: SWAP's present period, up to which torch's optimizer has discounted all of its state, and a server
                that of the parameters which it has trained since; ``None`` without SWAP.
        """
        versions = self.store.read(VERSION).tolist()
        factors = torch.ones(len(versions))
        if isinstance(self._rule, RowSWAP) and period is not None:
            factors = self._rule.factors(self.store.read(PERIOD), period)
        stored = {key: torch.split(self.store.read(key), self._parts) for key in self._state_names}
        for number, (parameter, version) in enumerate(zip(self.parameters, versions, strict=True)):
            if not version:  # the optimizer has no state of what it never trained
                continue
            own = {key: parts[number].clone() for key, parts in stored.items()}
            if isinstance(self._rule, RowSWAP):
                rows = {key: value.unsqueeze(0) for key, value in own.items()}
                discount_state_(self._rule.inner, rows, factors[number : number + 1], lr=1.0)
            there = {key: value.view(parameter.shape).to(parameter.device) for key, value in own.items()}
            self._optimizer.state[parameter] |= there | {"step": torch.tensor(float(version))}

    def kept(self) -> dict[nn.Parameter, Kept]:
        """The checkpoint's entries beside the optimizer's state, by parameter; for the worker that made the store."""
        versions = self.store.read(VERSION).tolist()
        changes = self.store.read(CHANGE).tolist() if self._has_changes else [0.0] * len(versions)
        return dict(zip(self.parameters, map(Kept, versions, changes), strict=True))

    @property
    def _state_names(self) -> list[str]:
        return [name for name in self._rule.initial_state(torch.zeros(1, 1)) if name != PERIOD]


class PushedParameters:
    """All that the optimizers of a run train, on servers.

    Parameters are dealt out whole, the largest first, each to the server with the fewest elements so far.

    Args:
        optimizers: The run's optimizers, which are torch's.
        num_servers: Number of servers.
        num_workers: Number of workers that train it.
        names: The parameters' names in the model, for messages.

    Raises:
        TypeError: stores have no such rule, or a parameter is not float32.
        ValueError: a parameter is in two optimizers, or twice in one.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        num_servers: int = 1,
        *,
        num_workers: int = 1,
        names: Mapping[nn.Parameter, str] | None = None,
    ) -> None:
        self._optimizers = list(optimizers)
        self._num_workers, self._names = num_workers, names or {}
        self._served: list[tuple[int, Optimizer, ServedParameters]] = []  # with the number of the server
        # What requires a gradient now; a single worker may thaw or add others, which it trains itself.
        self._parameters = [x for optimizer in optimizers for group in optimizer.param_groups for x in _trained(group)]
        self._refuse_shared()
        self._refuse_other_types()
        servers = _deal(self._parameters, num_servers)
        for optimizer in optimizers:
            for index, group in enumerate(optimizer.param_groups):
                for server in range(num_servers):
                    here = [x for x in _trained(group) if servers[x] == server]
                    if here:
                        name = f"{STORE}-{len(self._served)}"
                        self._served.append((server, optimizer, ServedParameters(optimizer, index, here, name)))

    def _refuse_shared(self) -> None:
        """Each occurrence would train a copy on the servers, and each pull take the updates of one of them back."""
        owners: dict[nn.Parameter, int] = {}
        for number, optimizer in enumerate(self._optimizers):
            for parameter in (x for group in optimizer.param_groups for x in _trained(group)):
                if parameter in owners:
                    raise ValueError(
                        f"strategy=async_ps: {self._name_of(parameter)} is in optimizer {owners[parameter]} of"
                        f" configure_optimizers and again in optimizer {number}, and servers keep one rule and one"
                        " state for a parameter. Let it occur once."
                    )
                owners[parameter] = number

    def _refuse_other_types(self) -> None:
        """Servers would train a float32 copy, with less precision or more than the trainer was asked for."""
        for parameter in self._parameters:
            if parameter.dtype != torch.float32:
                raise TypeError(
                    f"strategy=async_ps: servers keep dense parameters in float32, and {self._name_of(parameter)} is"
                    f" {parameter.dtype}. Use trainer.precision=32-true, or bf16-mixed, which leaves parameters alone."
                )

    def _name_of(self, parameter: nn.Parameter) -> str:
        return self._names.get(parameter, f"a parameter of shape {list(parameter.shape)}")

    def create(
        self, servers: Sequence[Stores], normalization: StalenessNormalization, kept: Sequence[Kept] = ()
    ) -> None:
        """Make the stores from this worker's model and optimizers.

        Args:
            servers: The servers, as many as the class was told.
            normalization: The rule for how much of a stale gradient counts.
            kept: State that :meth:`kept` returned, where training goes on.
        """
        known = dict(zip(self._parameters, kept, strict=True)) if len(kept) == len(self._parameters) else {}
        for server, _, served in self._served:
            served.create(servers[server], normalization, known)
        for optimizer in self._optimizers:
            discount, parts = discount_of(optimizer), self._of(optimizer)
            if discount is not None and parts:
                step = max(discount.position(optimizer, group)[0] for group in optimizer.param_groups)
                parts[0].store.write(STEP, torch.tensor([step]))

    def open(self, servers: Sequence[Stores]) -> None:
        """Find the stores that another worker made."""
        for server, _, served in self._served:
            served.open(servers[server])

    def step(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        """Compute gradients, send them, and take what the servers have in return.

        The optimizer itself steps without gradients: what waits for its step, such as embedding rows, has it.

        Raises:
            ValueError: there are gradients of parameters that are on no server, with several workers; or more than an
                optimizer's learning rate has changed.
        """
        output = closure()
        self._push(optimizer)
        self._refuse_unserved(optimizer)
        optimizer.step()
        self._pull([optimizer])
        return output

    def _push(self, optimizer: Optimizer) -> None:
        """Send the gradients of an optimizer; its first store counts the push, of all workers, and tells the number.

        Only a period that is a number of pushes depends on that number: where there is none, nobody waits for it. A
        worker that dies behind the first store has made a push that counts, and the other stores lack its gradients.
        """
        discount, parts = discount_of(optimizer), self._of(optimizer)
        waits = discount is not None and discount.periods.period is not None
        number: Callable[[], int] | None = None
        for served in parts:
            if number is None and (discount is not None or served.has_gradients):
                number = served.push()
            elif number is not None and served.has_gradients:
                served.push(number() if waits else 0)

    def _refuse_unserved(self, optimizer: Optimizer) -> None:
        """The optimizer would train them in this worker alone, and every worker its own."""
        if self._num_workers == 1:
            return
        for parameter in (x for group in optimizer.param_groups for x in group["params"]):
            if parameter.grad is not None and parameter.numel():
                raise ValueError(
                    f"strategy=async_ps: {self._name_of(parameter)} has a gradient, and is on no server: it came to"
                    f" {type(optimizer).__name__}, or was frozen, when training started. Give the optimizer all that it"
                    " is to train from the start, with requires_grad=True (a learning rate of 0 leaves it as it is),"
                    " or use strategy=shadowsync."
                )

    def flush(self) -> None:
        """Return when this worker's gradients are applied."""
        for *_, served in self._served:
            served.store.flush()

    def pull(self) -> None:
        """Take the parameters that the servers have."""
        self._pull(self._optimizers)

    def _pull(self, optimizers: Sequence[Optimizer]) -> None:
        asked = [served.begin_pull() for _, owner, served in self._served if owner in optimizers]
        for take in asked:  # all are asked before one is waited for
            take()

    def assign(self) -> None:
        """Let the servers have this worker's parameters; the optimizer state there stays."""
        for *_, served in self._served:
            served.assign()

    def pull_state(self, optimizer: Optimizer) -> None:
        """Take an optimizer's state from the servers, for a checkpoint."""
        discount, parts, period = discount_of(optimizer), self._of(optimizer), None
        if discount is not None and parts:
            step = int(parts[0].store.read(STEP))
            period = discount.periods.at(step)
            for group in optimizer.param_groups:
                group[GROUP_STEP], group[GROUP_PERIOD] = step, period
        for served in parts:
            served.pull_state(period)

    def kept(self) -> list[Kept]:
        """The checkpoint's entry for each parameter, in the optimizers' order; for the worker that made the stores."""
        found: dict[nn.Parameter, Kept] = {}
        for *_, served in self._served:
            found |= served.kept()
        return [found[x] for x in self._parameters]

    @property
    def observed(self) -> StalenessHistogram:
        """The staleness of this worker's gradients, as far as the stores have told of it."""
        seen = StalenessHistogram()
        for *_, served in self._served:
            seen.update(served.store.observed)
        return seen

    def _of(self, optimizer: Optimizer) -> list[ServedParameters]:
        return [served for _, owner, served in self._served if owner is optimizer]


class ServedStep:
    """Stands in for an optimizer during one step, so that Lightning's closure and hooks run as they always do."""

    def __init__(self, optimizer: Optimizer, dense: PushedParameters) -> None:
        self._optimizer, self._dense = optimizer, dense

    def step(self, closure: Callable[[], Any]) -> Any:
        """The servers' step."""
        return self._dense.step(self._optimizer, closure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def refuse_gradient_scaler(precision: Precision) -> None:
    """A scaler looks at the gradients that an optimizer steps with, and here they are on their way to the servers.

    Raises:
        ValueError: the precision has one.
    """
    if getattr(precision, "scaler", None) is not None:
        raise ValueError(
            f"strategy=async_ps does not go with trainer.precision={getattr(precision, 'precision', '16-mixed')}, which"
            " scales the loss and takes the scale from the gradients within the optimizer's step, and here the servers"
            " make that step. Use trainer.precision=bf16-mixed, which needs no scale, or 32-true."
        )


def dense_rule(optimizer: Optimizer, group: dict[str, Any]) -> RowOptimizer:
    """The update rule of a group of parameters, as stores know it; each push brings its own learning rate.

    Raises:
        TypeError: stores have no rule that does what the optimizer does.

    >>> parameter = nn.Parameter(torch.zeros(3))
    >>> optimizer = torch.optim.Adam([parameter], lr=0.01, betas=(0.8, 0.99))
    >>> dense_rule(optimizer, optimizer.param_groups[0])
    RowAdam(lr=1.0, weight_decay=0, decay_all_rows=False, beta1=0.8, beta2=0.99, eps=1e-08)
    """
    discount = discount_of(optimizer)
    if any(hook is not discount for hook in optimizer._optimizer_step_pre_hooks.values()):
        raise TypeError(
            f"strategy=async_ps trains the dense part where it is stored, and hooks before the steps of"
            f" {type(optimizer).__name__} (register_step_pre_hook) would find neither gradients nor state. Leave them"
            " out (SWAP's own is taken), or use strategy=shadowsync, whose workers step themselves."
        )
    rule = row_rule_of(optimizer, group, lr=1.0)
    if rule is None:
        options = "".join(f", {name}={value}" for name, value in unknown_settings(group).items())
        raise TypeError(
            f"strategy=async_ps trains the dense part where it is stored, by torch.optim.SGD, Adagrad or Adam without"
            f" {', '.join(UNKNOWN_SETTINGS)}; got {type(optimizer).__name__}(lr={group['lr']}{options}). Choose one of"
            " these, or strategy=shadowsync, whose workers train the dense part with any optimizer."
        )
    return rule


def _trained(group: dict[str, Any]) -> Iterator[nn.Parameter]:
    return (x for x in group["params"] if x.requires_grad and x.numel())


def _deal(parameters: Sequence[nn.Parameter], num_servers: int) -> dict[nn.Parameter, int]:
    """The server of each parameter; the same on all ranks."""
    loads, servers = [0] * num_servers, {}
    for parameter in sorted(parameters, key=lambda x: -x.numel()):
        server = loads.index(min(loads))
        servers[parameter] = server
        loads[server] += parameter.numel()
    return servers


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors behind each other, sparse ones with their zeros: float32 ``[N]``."""
    dense = (x.detach().to_dense() for x in tensors)
    return torch.cat([x.reshape(-1).to("cpu", torch.float32) for x in dense])
