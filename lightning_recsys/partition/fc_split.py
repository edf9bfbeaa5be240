"""Fully connected layers in pieces, so that several group servers can compute one of them."""

# Shape suffixes: B batch, I inputs, O outputs, P pieces.

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from lightning_recsys.partition.pieces import Cut

By = Literal["output", "input"]
# Each number of the result is made of one number of the input, and there are no weights.
ELEMENTWISE: tuple[type[nn.Module], ...] = (
    nn.ReLU,
    nn.GELU,
    nn.Sigmoid,
    nn.SiLU,
    nn.Tanh,
    nn.ELU,
    nn.LeakyReLU,
    nn.Hardtanh,
    nn.Softplus,
    nn.Dropout,
    nn.Identity,
)


@dataclass(frozen=True)
class LayerSplit:
    """How to split one fully connected layer.

    Args:
        path: Path of the layer in its model, as ``named_modules`` gives it.
        by: ``output``, the paper's vertical split: each piece computes some of the outputs, which are then side by
            side. ``input``, its horizontal split: each piece multiplies some of the inputs, and the results are added.
        num_pieces: Number of pieces, whose sizes are as even as can be.

    Raises:
        ValueError: there are fewer than 2 pieces, or ``by`` is neither.
    """

    path: str
    by: By
    num_pieces: int

    def __post_init__(self) -> None:
        if self.num_pieces < 2 or self.by not in ("output", "input"):
            raise ValueError(f"a layer is split by output or by input into at least 2 pieces, got {self}.")


@dataclass(frozen=True, eq=False)
class SplitModel:
    """A model of which some layers are in pieces.

    Args:
        model: Shares everything else with the whole model, and computes the same when it is called; made to be traced.
        pieces: For each parameter of a piece, by its key in the state dict, the whole parameter's key and what of it
            the piece has.
    """

    model: nn.Module
    pieces: Mapping[str, tuple[str, Cut]]

    def whole_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """From tensors by the split model's keys to those by the whole one's: weights, gradients, optimizer state."""
        whole: dict[str, Tensor] = {}
        for key, tensor in state.items():
            name, cut = self.pieces.get(key, (key, None))
            if cut is None:
                whole[name] = tensor
                continue
            target = whole.setdefault(name, tensor.new_empty(cut.shape))
            target.index_copy_(cut.dim, cut.index.to(tensor.device), tensor)
        return whole

    def piece_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The reverse of :meth:`whole_state`."""
        cut = {key: part.take(state[name]) for key, (name, part) in self.pieces.items() if name in state}
        split = {name for name, _ in self.pieces.values()}
        return {key: tensor for key, tensor in state.items() if key not in split} | cut


def split_layers(model: nn.Module, splits: Iterable[LayerSplit]) -> SplitModel:
    """A model whose named layers are in pieces, with the same values, beside the whole one, which stays as it is.

    A layer can be split by output if it is a ``torch.nn.Linear`` or says of each parameter which dimension its outputs
    are along (``output_dims``); by input if it is a ``torch.nn.Linear``. Where one that is split by output is followed
    by one that is split by input into as many pieces, with nothing but elementwise layers between, each piece of the
    second reads what the piece of the first makes, once the model is traced: nothing is brought together in between.

    Args:
        model: The whole model.
        splits: Its layers to split.

    Raises:
        ValueError: a path is not there or twice, its layer cannot be split like that, or shares a parameter.
    """
    wanted = list(splits)
    paths = [split.path for split in wanted]
    if len(set(paths)) < len(paths):
        raise ValueError(f"each layer can be split once, got {paths}.")
    root, pieces = model, {}
    for split in wanted:
        if reason := refusal(model, split):
            raise ValueError(reason)
        container = SplitLayer(model.get_submodule(split.path), split)
        root = _with_module(root, split.path.split("."), container)
        for number, cuts in enumerate(container.cuts):
            for name, cut in cuts.items():
                pieces[f"{split.path}.pieces.{number}.{name}"] = (f"{split.path}.{name}", cut)
    return SplitModel(root, pieces)


def output_dims(layer: nn.Module) -> Mapping[str, int] | None:
    """For each parameter the dimension along which a layer's outputs are; ``None`` if it cannot be split by them."""
    if isinstance(layer, nn.Linear):
        return {"weight": 0, "bias": 0}
    dims: Mapping[str, int] | None = getattr(layer, "output_dims", None)
    return dims


class SplitLayer(nn.Module):
    """The pieces of one fully connected layer; each is a layer of the same class.

    Args:
        layer: The whole layer, of which the pieces have copies.
        split: Says how the layer is cut.
    """

    def __init__(self, layer: nn.Module, split: LayerSplit) -> None:
        super().__init__()
        dims = output_dims(layer) if split.by == "output" else {"weight": 1}
        assert dims is not None
        width = num_outputs(layer) if split.by == "output" else num_inputs(layer)
        sizes = [width // split.num_pieces + (i < width % split.num_pieces) for i in range(split.num_pieces)]
        self._whole = (layer,)  # in a tuple it is no submodule
        self.by, self.bounds = split.by, (0, *accumulate(sizes))
        self.cuts: list[dict[str, Cut]] = []
        self.pieces = nn.ModuleList(self._piece(layer, dims, start, stop) for start, stop in pairwise(self.bounds))
        self.train(layer.training)

    def _piece(self, layer: nn.Module, dims: Mapping[str, int], start: int, stop: int) -> nn.Module:
        """A layer with the positions ``start`` to ``stop``; the first has the whole bias where inputs are split."""
        piece = copy.copy(layer)
        piece._parameters = {}
        cuts = {}
        for name, parameter in layer.named_parameters(recurse=False):
            dim, positions = dims.get(name), torch.arange(start, stop)
            if dim is None and start:
                piece.register_parameter(name, None)
                continue
            if dim is None:
                dim, positions = 0, torch.arange(len(parameter))
            cuts[name] = Cut(dim, positions, parameter.shape)
            values = cuts[name].take(parameter.detach())
            piece.register_parameter(name, nn.Parameter(values, requires_grad=parameter.requires_grad))
        for name in layer._parameters.keys() - piece._parameters.keys():
            piece.register_parameter(name, None)
        if isinstance(piece, nn.Linear):
            piece.out_features, piece.in_features = piece.weight.shape
        self.cuts.append(cuts)
        return piece

    def __getattr__(self, name: str) -> Any:
        """The settings that a model reads of its layer, besides the weights, which the pieces have."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            (whole,) = self.__dict__.get("_whole", (None,))
            if whole is None or name in whole._parameters:
                raise
            return getattr(whole, name)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Compute as the whole layer does, to the rounding of another order of summation."""
        if self.by == "output":
            return _side_by_side(self.bounds, *[piece(*inputs) for piece in self.pieces])
        (x_BI,) = inputs
        return _total(*[piece(_columns(x_BI, self.bounds, i)) for i, piece in enumerate(self.pieces)])


@fx.wrap
def _side_by_side(bounds: tuple[int, ...], *parts: Tensor) -> Tensor:
    return torch.cat(parts, -1)


@fx.wrap
def _columns(x_BI: Tensor, bounds: tuple[int, ...], piece: int) -> Tensor:
    return x_BI[..., bounds[piece] : bounds[piece + 1]]


@fx.wrap
def _total(*parts: Tensor) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def co_partition(model: nn.Module, graph: fx.Graph) -> None:
    """Let pieces read pieces, in place: drop what brings outputs together only to part them again the same way.

    Args:
        model: The model that was traced.
        graph: The calls that tracing recorded, which are changed in place.
    """
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is _side_by_side:
            _pass_on(model, graph, node)


def _pass_on(model: nn.Module, graph: fx.Graph, gather: fx.Node) -> None:
    chain: list[fx.Node] = []
    last = gather
    while len(last.users) == 1 and is_elementwise(model, user := next(iter(last.users))):
        chain.append(user)
        last = user
    bounds, *parts = gather.args
    columns = list(last.users)
    if not columns or any(user.target is not _columns or user.args[1] != bounds for user in columns):
        return
    for column in columns:
        piece = parts[column.args[2]]  # type: ignore[index]
        assert isinstance(piece, fx.Node)
        made = {gather: piece}
        for before, node in pairwise([gather, *chain]):
            with graph.inserting_before(column):
                made[node] = graph.node_copy(node, lambda _, value=made[before]: value)  # type: ignore[misc]
        column.replace_all_uses_with(made[last])
        graph.erase_node(column)
    for node in [*reversed(chain), gather]:
        graph.erase_node(node)


def is_elementwise(model: nn.Module, node: fx.Node) -> bool:
    """Whether a call makes each number from one number of one tensor, without weights."""
    return (
        node.op == "call_module"
        and len(node.all_input_nodes) == 1
        and isinstance(model.get_submodule(str(node.target)), ELEMENTWISE)
    )


def refusal(model: nn.Module, split: LayerSplit) -> str | None:
    """Why a layer cannot be split like that; ``None`` if it can."""
    layer = dict(model.named_modules(remove_duplicate=False)).get(split.path)
    if layer is None or not split.path:
        return f"the model has no layer {split.path!r} to split."
    can = isinstance(layer, nn.Linear) or (split.by == "output" and output_dims(layer) is not None)
    if not can or next(layer.children(), None) is not None or next(layer.buffers(), None) is not None:
        return f"{split.path} ({type(layer).__name__}) cannot be split by {split.by}."
    own = {id(parameter) for parameter in layer.parameters()}
    shared = [name for name, x in model.named_parameters(remove_duplicate=False) if id(x) in own]
    if len(shared) > len(own):
        return f"{split.path} shares parameters with another module ({shared}), so it cannot be split."
    width = num_outputs(layer) if split.by == "output" else num_inputs(layer)
    if split.num_pieces > width:
        return f"{split.path} has {width} {split.by}s, too few for {split.num_pieces} pieces."
    return None


def num_outputs(layer: nn.Module) -> int:
    """Numbers of each example that come out of a layer that can be split."""
    return layer.get_parameter("weight").shape[(output_dims(layer) or {})["weight"]]


def num_inputs(layer: nn.Module) -> int:
    """Numbers of each example that go into it."""
    return sum(x.numel() for x in layer.parameters() if x.dim() > 1) // num_outputs(layer)


def _with_module(parent: nn.Module, path: Sequence[str], module: nn.Module) -> nn.Module:
    """A copy of a module that shares all of its submodules but the one at a path."""
    twin = copy.copy(parent)
    twin._modules = dict(parent._modules)
    child = parent.get_submodule(path[0])
    twin._modules[path[0]] = _with_module(child, path[1:], module) if len(path) > 1 else module
    return twin
