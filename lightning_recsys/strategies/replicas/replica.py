"""One trainer's copy of the dense part, in memory that all its workers train in."""

from __future__ import annotations

import copy
import inspect
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_recsys.optim.swap import discount_of

LINE_BYTES = 64  # tensors start at cache lines, as torch's own do: some kernels round otherwise where they do not


class Replica:
    """The trained parameters of a model, as views of one flat float32 vector.

    A parameter keeps its identity, its gradient and its hooks; only ``parameter.data`` moves. What lies between two
    parameters (they start at cache lines) is zero, and averaging leaves it so.

    Args:
        named_parameters: Those that a trainer trains, in the same order on every worker.

    Attributes:
        size: Number of elements of the vector, gaps included.
        flat: The vector; there is none before :meth:`attach` was called.

    Raises:
        TypeError: a parameter is not float32.
    """

    flat: Tensor

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._parameters: list[tuple[str, nn.Parameter, int]] = []
        self.size = 0
        for name, parameter in named_parameters:
            if parameter.dtype != torch.float32:
                raise TypeError(
                    f"replicas are kept and averaged in float32, but {name} is {parameter.dtype}. Use"
                    " trainer.precision=32-true, or bf16-mixed, which computes in bfloat16 and leaves parameters alone."
                )
            self._parameters.append((name, parameter, self.size))
            self.size += _whole_lines(4 * parameter.numel()) // 4

    def values(self) -> Tensor:
        """The values of the parameters, as a vector like :attr:`flat`, wherever the parameters lie."""
        values = torch.zeros(self.size)
        for _, parameter, start in self._parameters:
            values[start : start + parameter.numel()] = parameter.detach().flatten()
        return values

    def attach(self, flat: Tensor) -> None:
        """Move the parameters into ``flat``, float32 ``[size]``, with their values."""
        for _, parameter, start in self._parameters:
            view = flat[start : start + parameter.numel()].view(parameter.shape)
            view.copy_(parameter.data)
            parameter.data = view
        self.flat = flat

    def bring_back(self, *, is_shared: bool) -> None:
        """Move parameters whose ``data`` was replaced, as SAM and swaps of weights do, into the vector again.

        Args:
            is_shared: Other workers train in the vector as well, and nobody knows whose values count.

        Raises:
            ValueError: it is shared, or a parameter has another type or shape than before.
        """
        for name, parameter, start in self._parameters:
            if not parameter.numel() or parameter.data_ptr() == self.flat.data_ptr() + 4 * start:
                continue
            view = self.flat[start : start + parameter.numel()]
            if is_shared or parameter.dtype != torch.float32 or view.numel() != parameter.numel():
                raise ValueError(
                    f"{name}.data was replaced while training, by {list(parameter.shape)} of {parameter.dtype}:"
                    " strategy=shadowsync averages the memory that it had, and with strategy.workers_per_trainer above"
                    f" 1 other workers train in that. Write to it in place, as {name}.data.copy_(...) does."
                )
            view = view.view(parameter.shape)
            view.copy_(parameter.data)
            parameter.data = view

    def detach(self) -> None:
        """Give every parameter memory of its own again."""
        for _, parameter, _ in self._parameters:
            parameter.data = parameter.data.clone()

    def assign(self, values: Tensor) -> None:
        """Give every parameter its part of a vector like :attr:`flat`, wherever the parameters lie."""
        for _, parameter, start in self._parameters:
            parameter.data.copy_(values[start : start + parameter.numel()].view(parameter.shape))

    def merge_changes(self, values: Tensor) -> None:
        """Copy the parameters that differ from :attr:`flat`, detached as they are, into a vector like it."""
        for _, parameter, start in self._parameters:
            own, part = parameter.data.flatten().float(), slice(start, start + parameter.numel())
            if not torch.equal(own.view(torch.int32), self.flat[part].view(torch.int32)):  # a NaN equals itself
                values[part] = own

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the vector."""
        return tensor.untyped_storage().data_ptr() == self.flat.untyped_storage().data_ptr()


def share(tensors: Mapping[str, Tensor], *, team_size: int) -> dict[str, Tensor]:
    """Tensors in memory that each team of consecutive ranks shares; all ranks of the default group call this together.

    The memory has no name in the file system, so it goes with the last process that maps it, however that ends.

    Args:
        tensors: By name, alike on all ranks in shape and dtype; the values are those of each team's first rank.
        team_size: Ranks per team; a team is on one machine. With 1 the tensors stay where they are.
    """
    if team_size == 1:
        return dict(tensors)
    starts, end = {}, 0
    for name, tensor in tensors.items():
        starts[name] = end
        end += _whole_lines(tensor.nbytes)
    with file_of_team(team_size=team_size) as path:
        leads = dist.get_rank() % team_size == 0
        if leads:
            os.truncate(path, max(end, LINE_BYTES))
        dist.barrier()
        memory = torch.from_file(path, shared=True, size=end, dtype=torch.uint8)
        shared = {
            name: memory[start : start + tensors[name].nbytes].view(tensors[name].dtype).view(tensors[name].shape)
            for name, start in starts.items()
        }
        if leads:
            for name, tensor in tensors.items():
                shared[name].copy_(tensor)
    return shared


@contextmanager
def file_of_team(*, team_size: int) -> Iterator[str]:
    """A path by which each team of consecutive ranks can open a file of its own, until the block ends.

    The file has no name, so it goes with the last process that has it open. All ranks of the default group call this
    together, and leave it together.
    """
    rank = dist.get_rank()
    paths = [""] * dist.get_world_size()  # of the first ranks' files, as other processes find them
    file = os.memfd_create("lightning_recsys") if rank % team_size == 0 else None
    try:
        dist.all_gather_object(paths, f"/proc/{os.getpid()}/fd/{file}")
        yield paths[rank - rank % team_size]
        dist.barrier()
    finally:
        if file is not None:
            os.close(file)


def share_optimizer_state(optimizers: Sequence[Optimizer], *, team_size: int) -> None:
    """Let all workers of a trainer read and write the first one's optimizer state; all ranks call this together.

    torch's optimizers make their state at their first step. Here it is made before, so that there is something to
    share. From then on ``step`` counts the updates of all workers, and so do the periods of SWAP, at whose ends one
    worker discounts what all accumulate. State that is no tensor stays each worker's own.

    Raises:
        TypeError: an optimizer's state cannot be made before its first step.
    """
    for optimizer in optimizers:
        make_state(optimizer, setting="strategy.workers_per_trainer above 1")
    owners = {
        f"{i}.{j}.{name}": (state, name)
        for i, optimizer in enumerate(optimizers)
        for j, state in enumerate(optimizer.state.get(x, {}) for x in _parameters(optimizer))
        for name in sorted(state)
        if isinstance(state[name], Tensor)
    }
    for i, optimizer in enumerate(optimizers if team_size > 1 else ()):
        if (discount := discount_of(optimizer)) is not None:
            counts = discount.share(optimizer)
            owners |= {f"{i}.{name}": (counts, name) for name in counts}
    if owners and team_size > 1:
        shared = share({key: state[name] for key, (state, name) in owners.items()}, team_size=team_size)
        for key, (state, name) in owners.items():
            state[name] = shared[key]


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def make_state(optimizer: Optimizer, *, setting: str) -> None:
    """Give every parameter that is trained the state that it has before its first step.

    The optimizer itself takes no step: nothing of it moves, and none of its hooks is called.

    Args:
        optimizer: One of torch's optimizers.
        setting: What needs the state to be there, for messages.

    Raises:
        TypeError: training would not be as without, or the state cannot be made without a real gradient.
    """
    fresh = [x for x in _parameters(optimizer) if x.requires_grad and not optimizer.state.get(x)]
    try:
        for parameter, state in zip(fresh, _initial_states(optimizer, fresh), strict=True):
            optimizer.state[parameter].update(state)
        same = all(_trains_alike(optimizer, group, fresh) for group in optimizer.param_groups)
    except Exception as error:
        raise TypeError(_cannot_share(optimizer, setting, f"it does not make it without training ({error})")) from error
    if not same:
        raise TypeError(
            _cannot_share(optimizer, setting, "its first step is not like the others, as that of SGD with dampening")
        )


def _cannot_share(optimizer: Optimizer, setting: str, reason: str) -> str:
    return (
        f"{setting} needs the state of {type(optimizer).__name__} in shared memory before the first step, but {reason}."
        " Use another optimizer, another setting of it, or another strategy."
    )


def _initial_states(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """The state of each parameter before its first step, as an optimizer like this one makes it.

    torch's optimizers have a method for it, which ``step`` calls first of all. Where there is none, or where it leaves
    the state to the step, as SGD's does, a step with zero gradients and no decay makes it, and step counts are zeroed.
    """
    twin, copies = twin_of(optimizer, parameters)
    for one in copies:
        one.grad = torch.zeros_like(one)
    if callable(method := getattr(twin, "_init_group", None)):
        for group in twin.param_groups:
            method(group, *([] for _ in range(len(inspect.signature(method).parameters) - 1)))
    if any(not twin.state.get(one) for one in copies):
        for group in twin.param_groups:
            group["weight_decay"] = 0.0  # it would count as a gradient, and be in the momentum from then on
        twin.step()
        for state in twin.state.values():
            if "step" in state:
                state["step"] *= 0
    return [dict(twin.state.get(one, {})) for one in copies]


def _trains_alike(optimizer: Optimizer, group: dict[str, Any], fresh: Sequence[nn.Parameter]) -> bool:
    """Whether two steps from the state that was made, of the group's smallest parameter, end where two without end."""
    own = [x for x in group["params"] if x.numel() and any(x is one for one in fresh)]
    if not own:
        return True
    parameter = min(own, key=torch.numel)
    generator, ends = torch.Generator().manual_seed(0), []
    grads = [torch.randn(parameter.shape, generator=generator).to(parameter) for _ in range(2)]
    states: list[dict[str, Any]] = [{}, copy.deepcopy(optimizer.state[parameter])]
    for state in states:
        twin, (tried,) = twin_of(optimizer, [parameter])
        if state:
            twin.state[tried] = state
        for grad in grads:
            tried.grad = grad.clone()
            twin.step()
        ends.append(tried.data)
    without, with_state = ends
    # fused kernels may round otherwise where memory begins elsewhere
    return torch.allclose(without, with_state, rtol=1e-5, atol=1e-7)


def twin_of(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> tuple[Any, list[nn.Parameter]]:
    """An optimizer with the same settings over copies of some parameters, without state, hooks or schedulers."""
    copies = {x: nn.Parameter(x.detach().clone()) for x in parameters}
    groups = [
        group | {"params": [copies[x] for x in group["params"] if x in copies]} for group in optimizer.param_groups
    ]
    return optimizer_like(optimizer, groups, {}), list(copies.values())


def optimizer_like(
    optimizer: Optimizer, groups: list[dict[str, Any]], state: Mapping[Any, dict[str, Any]]
) -> Optimizer:
    """An optimizer with other parameters, by the same rule: of the same class, with the same attributes of its own."""
    made = object.__new__(type(optimizer))
    made.__setstate__({"defaults": {**optimizer.defaults}, "state": defaultdict(dict, state), "param_groups": groups})
    vars(made).update(own_attributes(optimizer))
    return made


def own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """The attributes that an optimizer's class keeps in the object, beside those that every optimizer has.

    Methods that others have replaced in the object, as schedulers and embedding collections do, are left out.
    """
    every = vars(torch.optim.SGD([torch.zeros(1)])).keys() | {"_opt_called", "_step_count"}
    methods = {name for name in vars(optimizer) if callable(getattr(type(optimizer), name, None))}
    return {name: value for name, value in vars(optimizer).items() if name not in every | methods}


def _whole_lines(num_bytes: int) -> int:
    return -(-num_bytes // LINE_BYTES) * LINE_BYTES
