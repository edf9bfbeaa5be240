"""A model some of whose fully connected layers are in pieces, beside the whole one that checkpoints have."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_recsys.partition.fc_split import LayerSplit, split_layers
from lightning_recsys.strategies.hierarchical.servers.group_parts import GroupParts
from lightning_recsys.strategies.replicas.replica import optimizer_like


class CutLayers:
    """The pieces of a model's layers, with an optimizer of theirs; weights and states go there and back.

    Args:
        whole: The model, which keeps its own parameters.
        splits: Its layers to split; none leaves the model, and the optimizer, as they are.
        optimizer: The optimizer of the whole model. Its rule must treat each number of a parameter by itself.

    Attributes:
        model: The model with the pieces in it, which is then traced.
        optimizer: An optimizer with pieces in the place of the parameters that they are of, and their shares of the
            state.
        trained: Names of the whole model's parameters that the optimizer trains.

    Raises:
        ValueError: a layer is not there or cannot be split.
        TypeError: the optimizer looks at whole matrices.
    """

    def __init__(self, whole: nn.Module, splits: Iterable[LayerSplit], optimizer: Optimizer) -> None:
        splits = list(splits)
        self._split = split_layers(whole, splits)
        self._paths = {split.path for split in splits}  # of the layers in pieces
        self.model = self._split.model
        self._whole = dict(whole.named_parameters())
        in_optimizer = {x for group in optimizer.param_groups for x in group["params"] if x.requires_grad}
        named = whole.named_parameters(remove_duplicate=False)
        self.trained = frozenset(name for name, x in named if x in in_optimizer)
        parameters = self.model.named_parameters()
        self._pieces = {name: x for name, x in parameters if name in self._split.pieces}
        self._whole_optimizer = self.optimizer = optimizer
        if self._pieces:
            if isinstance(optimizer, torch.optim.Muon):
                raise _looks_at_matrices(optimizer)
            self.optimizer = self._with_pieces(optimizer)

    def _with_pieces(self, optimizer: Optimizer) -> Optimizer:
        pieces: dict[nn.Parameter, list[nn.Parameter]] = {}
        state: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        for name, piece in self._pieces.items():
            whole_name, cut = self._split.pieces[name]
            whole = self._whole[whole_name]
            pieces.setdefault(whole, []).append(piece)
            for key, value in optimizer.state.get(whole, {}).items():
                own = cut.take(value) if isinstance(value, Tensor) and value.shape == whole.shape else value
                state[piece][key] = own.clone() if own is value and isinstance(own, Tensor) else own
        state.update({x: dict(y) for x, y in optimizer.state.items() if x not in pieces})
        groups = [
            group | {"params": [y for x in group["params"] for y in pieces.get(x, [x])]}
            for group in optimizer.param_groups
        ]
        return optimizer_like(optimizer, groups, state)

    @property
    def is_split(self) -> bool:
        """Whether a layer is in pieces."""
        return bool(self._pieces)

    def piece_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """From tensors by the whole model's names to those by the names of this one's parameters."""
        return self._split.piece_state(state)

    def whole_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The reverse of :meth:`piece_state`."""
        return self._split.whole_state(state)

    def whole_reads(self, reads: Iterable[tuple[str, str]]) -> frozenset[tuple[str, str]]:
        """The attributes that this one's forward reads, by the paths of the whole model's modules."""
        layers = {f"{path}.pieces.": path for path in self._paths}
        return frozenset(
            (next((layers[start] for start in layers if path.startswith(start)), path), name) for path, name in reads
        )

    def follow(self, whole: nn.Module, changed: Iterable[str]) -> None:
        """Take what has changed of the whole model; the modules around pieces are copies, with attributes of their own.

        Args:
            whole: The whole model.
            changed: Names of its modules, attributes and tensors that have changed.

        Raises:
            ValueError: a layer in pieces has changed, or a module of another class is around one.
        """
        if in_pieces := {x for x in changed if x in self._paths or x.rpartition(".")[0] in self._paths}:
            raise ValueError(f"it is of a layer in pieces ({min(in_pieces)}).")
        if self._pieces:
            self._follow(whole, self.model, "")
            self.give_model()

    def _follow(self, module: nn.Module, twin: nn.Module, path: str) -> None:
        if type(twin) is not type(module):
            raise ValueError(f"{path[:-1]} has a layer in pieces, and is a {type(module).__name__} now.")
        copies = twin._modules
        vars(twin).clear()
        vars(twin).update(vars(module), _modules=dict(module._modules))
        for name, child in module.named_children():
            own = f"{path}{name}"
            is_around = any(x.startswith(f"{own}.") for x in self._paths)
            if is_around:
                self._follow(child, copies[name], f"{own}.")  # type: ignore[arg-type]
            if is_around or own in self._paths:
                twin._modules[name] = copies[name]

    def check(self, parts: GroupParts) -> None:
        """Refuse states that cannot be cut as their parameters are.

        Raises:
            TypeError: there is one.
        """
        own = set(self._pieces.values())
        for parameter, _, state in parts.states().values():
            if parameter in own and state.numel() > 1 and state.shape != parameter.shape:
                raise _looks_at_matrices(self._whole_optimizer)

    @torch.no_grad()
    def give_model(self) -> None:
        """From the whole model's parameters to the pieces."""
        for name, value in self._split.piece_state(self._whole).items():
            if name in self._pieces:
                self._pieces[name].copy_(value)

    @torch.no_grad()
    def take_model(self) -> None:
        """From the pieces to the whole model's parameters; those that nobody trains are only ever written there."""
        for name, value in self._split.whole_state(self._pieces).items():
            if name in self.trained:
                self._whole[name].copy_(value)

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """The state of a parameter that a part has, to be written to; :meth:`take_state` brings pieces together."""
        is_piece = any(parameter is piece for piece in self._pieces.values())
        state: dict[str, Any] = (self.optimizer if is_piece else self._whole_optimizer).state[parameter]
        return state

    def take_state(self) -> None:
        """From the states of the pieces to those of the whole parameters."""
        states = {name: self.optimizer.state.get(piece, {}) for name, piece in self._pieces.items()}
        for key in {key for state in states.values() for key in state}:
            found = {name: state[key] for name, state in states.items() if isinstance(state.get(key), Tensor)}
            cut = {name: x for name, x in found.items() if x.shape == self._pieces[name].shape}
            once = {self._split.pieces[name][0]: x.clone() for name, x in found.items() if name not in cut}
            for name, value in (once | self._split.whole_state(cut)).items():
                self._whole_optimizer.state[self._whole[name]][key] = value


def _looks_at_matrices(optimizer: Optimizer) -> TypeError:
    return TypeError(
        f"strategy.fc_splits: {type(optimizer).__name__} does not treat each number of a parameter by itself, so pieces"
        " of a layer would not be trained as the whole one. Use strategy.fc_splits=none."
    )
