"""One net of a group: parts that a group server computes, as steps of autograd in a trainer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.optim import Optimizer

from lightning_recsys.compression import CodecTraffic
from lightning_recsys.parameter_server.parts.remote_parts import RemoteParts, TokenLostError
from lightning_recsys.partition.parts import Part
from lightning_recsys.stores.versions import StalenessHistogram

log = logging.getLogger(f"pytorch_lightning.{__name__}")  # which has a handler in worker processes, too


class Net:
    """Computes parts on group servers, and has them trained.

    Args:
        servers: The servers of its group, by device.
        optimizer: The optimizer of the run, with the present learning rate.
        groups: For each part, which of the optimizer's groups are its own.

    Attributes:
        servers: As given.
        staleness: What each update of a part had missed of the updates of other nets.
        lost: Backward passes that a group server could not make, for it was started anew meanwhile.
    """

    def __init__(
        self, servers: Mapping[str, RemoteParts], optimizer: Optimizer, groups: Mapping[str, Sequence[int]]
    ) -> None:
        self.staleness = StalenessHistogram()
        self.lost = 0
        self.servers, self._optimizer, self._groups = servers, optimizer, groups
        # Without an input that requires a gradient autograd would leave a part's backward pass out, though the part
        # has parameters.
        self._anchor = torch.zeros((), requires_grad=True)

    @property
    def traffic(self) -> CodecTraffic:
        """The bytes that this net has encoded and decoded."""
        total = CodecTraffic()
        for server in self.servers.values():
            total.add(server.traffic)
        return total

    def run(self, part: Part, inputs: tuple[Any, ...]) -> Callable[[], tuple[Tensor, ...]]:
        """Have a part computed: a :data:`~lightning_recsys.partition.parts.Runner`."""
        if not torch.is_grad_enabled():
            asked = self.servers[part.device].forward(part.name, inputs, wanted=[False] * len(inputs), keep=False)
            return lambda: tuple(asked()[1])
        passes = _Passes(self, part)
        asked_for: Tensor = _Ask.apply(passes, self._anchor, *inputs)  # type: ignore[no-untyped-call]

        def answer() -> tuple[Tensor, ...]:
            outputs: tuple[Tensor, ...] = _Answer.apply(passes, asked_for)  # type: ignore[no-untyped-call]
            return outputs

        return answer

    def backward(
        self, part: Part, token: int, grads: Sequence[Tensor | None]
    ) -> Callable[[], tuple[list[Tensor | None], int]]:
        """Do as :meth:`RemoteParts.backward`."""
        settings = [_numbers(self._optimizer.param_groups[number]) for number in self._groups[part.name]]
        return self.servers[part.device].backward(part.name, token, grads, settings=settings)

    def gradients(self, part: Part, answer: Callable[[], tuple[list[Tensor | None], int]]) -> list[Tensor | None]:
        """Those of a part's inputs, once its server has answered; a lost forward pass is counted, and gives none."""
        try:
            found, staleness = answer()
        except TokenLostError as error:
            self.lost += 1
            log.warning("A batch is lost for a part of the model, and for what lies before it: %s", error)
            return [None] * len(part.inputs)
        self.staleness.add(torch.tensor([[staleness, 1]]))
        return found


@dataclass(eq=False)
class _Passes:
    """The forward pass of a part, and its backward pass.

    Args:
        net: The net that makes the passes.
        part: The part that is computed.
        forward: Has the answer to the forward pass, once it is asked for.
        token: Token of the forward pass, by which the backward pass is asked for.
        backward: Has the answer to the backward pass, once that is asked for.
    """

    net: Net
    part: Part
    forward: Callable[[], tuple[int, list[Tensor]]] | None = None
    token: int = 0
    backward: Callable[[], tuple[list[Tensor | None], int]] | None = None


class _Ask(torch.autograd.Function):
    """Asks for a forward pass; :class:`_Answer` waits for it. In the backward pass they change places.

    Autograd goes back first to what was computed last. Where several parts are asked for before any of them is waited
    for, it therefore comes to the ``_Answer`` of each, which ask for the backward passes, before it comes to an
    ``_Ask``, which waits; and what the trainer has computed meanwhile comes in between. So servers compute side by
    side in both directions.
    """

    @staticmethod
    def forward(ctx: Any, passes: _Passes, anchor: Tensor, *inputs: Tensor) -> Tensor:
        ctx.passes = passes
        server, name = passes.net.servers[passes.part.device], passes.part.name
        passes.forward = server.forward(name, inputs, wanted=ctx.needs_input_grad[2:], keep=True)
        return anchor.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        answer = ctx.passes.backward
        assert answer is not None, "asked for by _Answer"
        return None, None, *ctx.passes.net.gradients(ctx.passes.part, answer)


class _Answer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passes: _Passes, asked_for: Tensor) -> tuple[Tensor, ...]:
        ctx.passes = passes
        assert passes.forward is not None, "asked for by _Ask"
        passes.token, outputs = passes.forward()
        passes.forward = None
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x in outputs if not (x.is_floating_point() or x.is_complex())))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        ctx.passes.backward = ctx.passes.net.backward(ctx.passes.part, ctx.passes.token, grads)
        return None, torch.zeros(())


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an optimizer's group that a schedule may move."""
    found: dict[str, Any] = {}
    for name, value in group.items():
        plain = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if isinstance(plain, int | float) and not isinstance(plain, bool):
            found[name] = plain
        elif isinstance(plain, tuple | list) and plain and all(isinstance(x, int | float) for x in plain):
            found[name] = [float(x) for x in plain]
    return found


class CutForward:
    """Stands in the place of a module's ``forward`` while group servers have its parameters.

    Args:
        module: The module whose ``forward`` is replaced.
        function: The function that is called instead.
    """

    def __init__(self, module: torch.nn.Module, function: Callable[..., Any]) -> None:
        self._module, self._function = module, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's result."""
        return self._function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the module computes by itself."""
        copied = memo.get(id(self._module), self._module)
        return type(copied).forward.__get__(copied)
