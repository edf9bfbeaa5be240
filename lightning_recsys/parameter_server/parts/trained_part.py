"""A part of a model that several nets train at once, without a lock between those that read it and who writes it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_recsys.parameter_server.parts.update_undo import UpdateUndo

Settings = Mapping[str, Any]
"""Numbers of one of an optimizer's groups, such as its learning rate, by their names."""


@dataclass(frozen=True, eq=False)
class Graph:
    """The tensors that a forward pass keeps for its backward pass.

    Args:
        inputs: Inputs of the part in that pass.
        outputs: Outputs that the part computed from them.
        version: Version of the part before the pass.
    """

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    version: int

    @property
    def num_bytes(self) -> int:
        """Bytes of inputs and outputs; what lies between them is not counted."""
        return sum(tensor.nbytes for tensor in (*self.inputs, *self.outputs))


class TrainedPart:
    """Computes a part of a model, forward and backward, and trains its parameters with an optimizer of their own.

    Any number of threads may compute at the same time. An update takes place as soon as its gradients are there, in
    the memory that others read meanwhile (Hogwild): a backward pass may find other parameters than its forward pass.
    Two updates take turns, since an optimizer of torch's keeps its gradients with the parameters.

    Args:
        module: ``forward(*inputs)`` returns a tuple of tensors. Its modules stay in the mode that they are in.
        optimizer: Over some of its parameters; ``None`` where it trains none. It is changed to train the same memory by
            other names, so that updates are not mistaken for mistakes by torch, which counts what happens to a tensor
            between a forward and a backward pass.
        version: Number of updates to go on from; by default none.
        undo: Puts back what a step has changed that raises; where it lies in memory that outlives the process, also
            what a killed one has changed. By default nothing is put back.

    Attributes:
        version: Updates so far; a tensor, int64 ``[1]``, which may lie in memory that outlives the process.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | None,
        *,
        version: Tensor | None = None,
        undo: UpdateUndo | None = None,
    ) -> None:
        self.version = torch.zeros(1, dtype=torch.int64) if version is None else version
        self._module = module
        self._optimizer = optimizer
        self._undo = undo
        self._parameters: list[nn.Parameter] = []  # that are trained, as the module knows them,
        self._written: list[nn.Parameter] = []  # and as the optimizer does
        self._writing = threading.Lock()
        for group in () if optimizer is None else optimizer.param_groups:
            own = [x for x in group["params"] if x.requires_grad]
            names = [nn.Parameter(x.data) for x in own]
            for parameter, name in zip(own, names, strict=True):
                optimizer.state[name] = optimizer.state.pop(parameter, {})  # type: ignore[union-attr]
            group["params"] = names
            self._parameters += own
            self._written += names

    def change(self, module: nn.Module, *, with_buffers: bool) -> None:
        """Compute by another module from now on, with the parameters and buffers that this part has.

        A parameter of the module that has numbers gives them to the part's own. A forward pass of before can still have
        its backward pass, since the parameters are the same objects.

        Args:
            module: Has parameters and buffers of the same names; their numbers may be left out (``meta``), and are for
                parameters that the part trains.
            with_buffers: Take the numbers of those of its buffers that have some.
        """
        own = dict(self._module.named_parameters(remove_duplicate=False))
        for name, parameter in list(module.named_parameters(remove_duplicate=False)):
            path, _, last = name.rpartition(".")
            module.get_submodule(path)._parameters[last] = own[name]
            if not parameter.is_meta:
                own[name].data.copy_(parameter.data)
        buffers = dict(self._module.named_buffers(remove_duplicate=False))
        for name, buffer in list(module.named_buffers(remove_duplicate=False)):
            path, _, last = name.rpartition(".")
            module.get_submodule(path)._buffers[last] = buffers[name]
            if with_buffers and not buffer.is_meta:
                buffers[name].data.copy_(buffer)
        self._module = module

    def forward(self, inputs: Sequence[Tensor], *, wanted: Sequence[bool], keep: bool) -> Graph:
        """Compute the part.

        Args:
            inputs: Inputs of the part.
            wanted: For each input, whether it is to get a gradient.
            keep: Whether a backward pass may follow, so that its graph is kept.

        Raises:
            TypeError: the part returns something else than tensors.
        """
        version = int(self.version)  # before parameters are read: an update that comes meanwhile counts as missed
        with torch.set_grad_enabled(keep):
            given = [x.requires_grad_() if keep and want else x for x, want in zip(inputs, wanted, strict=True)]
            outputs = self._module(*given)
        if not isinstance(outputs, tuple) or not all(isinstance(x, Tensor) for x in outputs):
            raise TypeError(f"a part must return a tuple of tensors, got {type(outputs).__name__}")
        return Graph(given, outputs, version)

    def backward(
        self, graph: Graph, grads: Sequence[Tensor | None], settings: Sequence[Settings]
    ) -> tuple[list[Tensor | None], int]:
        """Update the parameters by the gradients of the outputs.

        Args:
            graph: What the forward pass left; it can be used once.
            grads: One for each output; ``None`` where the loss does not depend on it.
            settings: Hyperparameters of each of the optimizer's groups, as they are now.

        Returns:
            The gradients of the inputs, where they were wanted and the outputs depend on them, and the staleness:
            updates of others since the forward pass read the parameters.

        Raises:
            ValueError: gradients or settings are not such as belong to the part.
        """
        outputs, own = self._with_gradient(graph, grads)
        self._check_settings(settings)
        wanted = [x for x in graph.inputs if x.requires_grad]
        found: Sequence[Tensor | None] = [None] * (len(wanted) + len(self._parameters))
        if outputs and (wanted or self._parameters):
            found = torch.autograd.grad(outputs, [*wanted, *self._parameters], own, allow_unused=True)
        staleness = self._update(found[len(wanted) :], settings, graph.version)
        of_inputs = iter(found[: len(wanted)])
        return [next(of_inputs) if x.requires_grad else None for x in graph.inputs], staleness

    def _with_gradient(self, graph: Graph, grads: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
        if len(grads) != len(graph.outputs):
            raise ValueError(f"the part has {len(graph.outputs)} outputs, got gradients of {len(grads)}")
        pairs = [(x, grad) for x, grad in zip(graph.outputs, grads, strict=True) if grad is not None]
        for number, (output, grad) in enumerate(pairs):
            if output.shape != grad.shape or output.dtype != grad.dtype:
                raise ValueError(
                    f"gradient {number} must be {output.dtype} of shape {list(output.shape)}, got {grad.dtype} of"
                    f" shape {list(grad.shape)}"
                )
        pairs = [(x, grad) for x, grad in pairs if x.requires_grad]
        return [x for x, _ in pairs], [grad for _, grad in pairs]

    def _check_settings(self, settings: Sequence[Settings]) -> None:
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        if len(settings) != len(groups):
            raise ValueError(f"the part's optimizer has {len(groups)} groups, got settings for {len(settings)}")
        for group, new in zip(groups, settings, strict=True):
            if unknown := sorted(new.keys() - group.keys() | new.keys() & {"params"}):
                raise ValueError(f"the part's optimizer has no settings {unknown!s:.200}")

    def _update(self, grads: Sequence[Tensor | None], settings: Sequence[Settings], version: int) -> int:
        with self._writing:
            staleness = int(self.version) - version
            if self._optimizer is None or all(grad is None for grad in grads):
                return staleness
            for group, new in zip(self._optimizer.param_groups, settings, strict=True):
                group.update(new)
            for parameter, grad in zip(self._written, grads, strict=True):
                parameter.grad = grad
            if self._undo is not None:
                self._undo.begin()
            try:
                self._optimizer.step()
            except BaseException:
                if self._undo is not None:
                    self._undo.recover()
                raise
            self._optimizer.zero_grad(set_to_none=True)
            self.version += 1  # the moment from which the update counts
            return staleness
