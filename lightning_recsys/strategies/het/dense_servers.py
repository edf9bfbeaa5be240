"""The dense part of a model on servers: workers push gradients, and pull what all of them made of the parameters."""

# Shape suffixes: P parameters of a group, R rows of the store that has them.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.optim import Optimizer

from lightning_recsys.embeddings import EmbeddingBagConfig
from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.optim import RowAdagrad, RowAdam, RowOptimizer, RowSGD
from lightning_recsys.stores.interfaces import EmbeddingStore, Stores

STORE = "dense-part"  # no path of a module can be the same
ROW_WIDTH = 256  # a store has rows; so many parameters lie in one


class ServedParameters:
    """The parameters of one group of an optimizer, in a store with their optimizer state.

    Every worker's gradient is an update of its own, by the optimizer's rule, which the server applies to what it has
    then; no lock, no order.

    Args:
        optimizer: Whose group it is.
        group: Its parameters, and the learning rate of the next push.

    Attributes:
        rule: The optimizer's rule, as servers know it.

    Raises:
        TypeError: servers have no such rule.
    """

    store: EmbeddingStore

    def __init__(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        self._optimizer, self._group = optimizer, group
        self.parameters: list[nn.Parameter] = [x for x in group["params"] if x.requires_grad]
        self.rule = row_rule(optimizer, group)
        num_rows = -(-sum(x.numel() for x in self.parameters) // ROW_WIDTH)
        self.layout = TableLayout((EmbeddingBagConfig("parameters", num_rows, ROW_WIDTH, ("all",), init_std=0.0),))
        self._rows_R = torch.arange(num_rows)

    def create(self, server: Stores, name: str) -> None:
        """Make the store, with this worker's parameters and optimizer state, in place of an earlier run's."""
        with suppress(KeyError):
            server.remove(name)
        self.store = server.create_embedding_store(name, self.layout, self.rule, seed=0)
        self.assign()
        states = [self._optimizer.state.get(x, {}) for x in self.parameters]
        for key in self._state_names:
            if any(key in state for state in states):  # Adam has none of parameters that never had a gradient
                pairs = zip(self.parameters, states, strict=True)
                self.store.write(key, 0, self._joined([state.get(key, torch.zeros_like(x)) for x, state in pairs]))
        self.store.step = max((int(state.get("step", 0)) for state in states), default=0)

    def open(self, server: Stores, name: str) -> None:
        """Find the store that another worker made."""
        self.store = server.embedding_store(name)

    def assign(self) -> None:
        """Let the server have this worker's parameters; the optimizer state there stays."""
        self.store.write("weight", 0, self._joined(self.parameters))

    def push(self) -> None:
        """Send the gradients, and let go of them; a parameter without one counts as one whose gradient is 0."""
        grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        self.store.apply_row_gradients(self._rows_R, self._joined(grads), lr=float(self._group["lr"]))

    def pull(self) -> None:
        """Take what the server has, own updates included."""
        self._scatter(self.store.lookup(self._rows_R), [x.data for x in self.parameters])

    def pull_state(self) -> None:
        """Put the server's optimizer state into the optimizer, as if it had made all the updates itself."""
        step = float(self.store.step)
        for key in self._state_names:
            values = [torch.empty_like(x) for x in self.parameters]
            self._scatter(self.store.read(key, 0, len(self._rows_R)), values)
            for parameter, value in zip(self.parameters, values, strict=True):
                self._optimizer.state[parameter] |= {key: value, "step": torch.tensor(step)}

    @property
    def _state_names(self) -> list[str]:
        return list(self.rule.initial_state(torch.zeros(1, ROW_WIDTH)))

    def _joined(self, tensors: Sequence[Tensor]) -> Tensor:
        """Tensors behind each other, in rows: float32 ``[R, ROW_WIDTH]``."""
        flat_P = torch.cat([x.detach().reshape(-1).to("cpu", torch.float32) for x in tensors])
        return pad(flat_P, (0, len(self._rows_R) * ROW_WIDTH - flat_P.numel())).view(-1, ROW_WIDTH)

    def _scatter(self, rows: Tensor, tensors: Sequence[Tensor]) -> None:
        flat, start = rows.reshape(-1), 0
        for tensor in tensors:
            tensor.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
            start += tensor.numel()


class ServedDensePart:
    """All that the optimizers of a run train, on servers.

    Args:
        optimizers: Torch's.

    Raises:
        TypeError: servers have no such rule.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._served: dict[Optimizer, list[ServedParameters]] = {
            optimizer: [
                ServedParameters(optimizer, group)
                for group in optimizer.param_groups
                if any(x.requires_grad for x in group["params"])
            ]
            for optimizer in optimizers
        }

    def bind(self, servers: Sequence[Stores], *, first: bool) -> None:
        """Make the stores, or find them, dealt out to the servers in turn."""
        for number, served in enumerate(self._all()):
            server = servers[number % len(servers)]
            (served.create if first else served.open)(server, f"{STORE}-{number}")

    def step(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        """Compute gradients, send them, and take what the servers have in return.

        The optimizer itself steps without gradients: what waits for its step, such as embedding rows, has it.
        """
        output = closure()
        for served in self._served[optimizer]:
            served.push()
        optimizer.step()
        for served in self._served[optimizer]:
            served.pull()
        return output

    def flush(self) -> None:
        """Return when this worker's gradients are applied."""
        for served in self._all():
            served.store.flush()

    def pull(self) -> None:
        """Take the parameters that the servers have."""
        for served in self._all():
            served.pull()

    def assign(self) -> None:
        """Let the servers have this worker's parameters; the optimizer state there stays."""
        for served in self._all():
            served.assign()

    def pull_state(self, optimizer: Optimizer) -> None:
        """Take an optimizer's state from the servers, for a checkpoint."""
        for served in self._served[optimizer]:
            served.pull_state()

    def _all(self) -> Iterator[ServedParameters]:
        for served in self._served.values():
            yield from served


class ServedStep:
    """Stands in for an optimizer during one step, so that Lightning's closure and hooks run as they always do."""

    def __init__(self, optimizer: Optimizer, dense: ServedDensePart) -> None:
        self._optimizer, self._dense = optimizer, dense

    def step(self, closure: Callable[[], Any]) -> Any:
        """The servers' step."""
        return self._dense.step(self._optimizer, closure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def row_rule(optimizer: Optimizer, group: dict[str, Any]) -> RowOptimizer:
    """The update rule of a group of parameters, as servers know it; each push brings its own learning rate.

    Raises:
        TypeError: there is none.

    >>> parameter = nn.Parameter(torch.zeros(3))
    >>> optimizer = torch.optim.Adam([parameter], lr=0.01, betas=(0.8, 0.99))
    >>> row_rule(optimizer, optimizer.param_groups[0])
    RowAdam(lr=1.0, beta1=0.8, beta2=0.99, eps=1e-08)
    """
    found = _RULES.get(type(optimizer))
    extras = ("momentum", "weight_decay", "lr_decay", "amsgrad", "maximize")
    used = {name: group[name] for name in extras if group.get(name)}
    if found is None or used:
        options = "".join(f", {name}={value}" for name, value in used.items())
        raise TypeError(
            f"strategy.algorithm=ps has the servers train the dense part, by torch.optim.SGD, Adagrad or Adam without"
            f" {', '.join(extras)}; got {type(optimizer).__name__}(lr={group['lr']}{options}). Choose one of these, or"
            " another algorithm, whose workers train the dense part with any optimizer."
        )
    return found(group)


_RULES: dict[type[Optimizer], Callable[[dict[str, Any]], RowOptimizer]] = {
    torch.optim.SGD: lambda group: RowSGD(1.0),
    torch.optim.Adagrad: lambda group: RowAdagrad(
        1.0, eps=group["eps"], initial_accumulator=group["initial_accumulator_value"]
    ),
    torch.optim.Adam: lambda group: RowAdam(1.0, group["betas"][0], group["betas"][1], group["eps"]),
}
