"""Test accuracy of suite ``graph`` beside PyG's layers: one grid of settings for both, chosen by validation alone."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from benchmarks.harness.bars import Bar
from benchmarks.harness.parts import Measured
from benchmarks.harness.report import Columns
from benchmarks.peers.pyg_sage import PyGSAGE
from torch import nn

from lightning_recsys.data.graph import NodeData, NodeDataModule, read_nodes
from lightning_recsys.data.graph.nodes import UNLABELED
from lightning_recsys.models import GraphSAGE
from lightning_recsys.optim import RowAdagrad, RowAdam

Layers = Literal["GraphSAGE", "PyG"]
Setting = dict[str, Any]

# The rule of nodes' rows and words: ours, and that of the peer's dense matrices.
RULES: dict[str, tuple[Callable[..., Any], Callable[..., torch.optim.Optimizer]]] = {
    "adagrad": (RowAdagrad, torch.optim.Adagrad),
    "adam": (RowAdam, torch.optim.Adam),
}
INPUTS: dict[str, dict[str, bool]] = {"rows of nodes": {"features": False}, "words": {"node_ids": False}}

log = logging.getLogger("benchmark")


def measure(
    *,
    data: Mapping[str, Mapping[str, Any]],
    grid: Mapping[str, Sequence[Any]],
    seeds: int,
    hidden: int,
    root: str,
) -> Measured:
    """Train both on each graph, with its words and with nodes' rows alone.

    The settings in the grid are tried one after the other, each with the best values of those before. What is best is
    told by the cross entropy of validation nodes: their accuracy is the same for settings whose losses differ by half.
    Test nodes are looked at once, for the settings that were chosen in the end.

    Args:
        data: Files in ``graphs``, and for each ``num_neighbors`` and ``batch_size``; ``chosen_by``: the seeds, from 0,
            whose trainings choose the settings; ``epochs`` of a training, at most, of which the one with the lowest
            validation loss is tested; ``patience``: epochs without a better one after which a training ends.
        grid: Values of ``lr`` (of Adam on the dense part), ``rows`` (rule of the rows and its rate), ``weight_decay``
            (of the rows) and ``dropout`` (between layers), the first of each to begin with.
        seeds: Trainings of each, from seed 0; each has test nodes of its own.
        hidden: Width of layers and rows.
        root: Folder of the data sets.
    """
    lines: list[list[str]] = []
    bars: list[Bar] = []
    for name, options in data.items():
        options = dict(options)
        choosing = range(options.pop("chosen_by"))
        limits = {name: options.pop(name) for name in ("epochs", "patience")}
        nodes = read_nodes(Path(root) / "graphs" / f"{name}.npz", "npz")
        modules = [[_module(fold, inputs, options) for fold in folds(nodes, seeds)] for inputs in INPUTS.values()]
        for inputs, of_seeds in zip(INPUTS, modules, strict=True):
            tested: dict[Layers, list[float]] = {}
            for layers in ("GraphSAGE", "PyG"):

                def train(seed: int, setting: Setting) -> Training:
                    return Training(of_seeds[seed], layers, setting, seed=seed, hidden=hidden, **limits)  # noqa: B023

                setting, trained = choose(grid, train, choosing)
                trained += [train(seed, setting) for seed in range(len(trained), seeds)]
                tested[layers] = [100 * training.test() for training in trained]
                validated = statistics.mean(training.loss for training in trained)
                shown = ", ".join(f"{key} {_shown(value)}" for key, value in setting.items())
                lines.append([name, inputs, layers, shown, f"{validated:.3f}", _mean(tested[layers])])
                log.info(" | ".join(lines[-1]))
            below = [pyg - ours for pyg, ours in zip(tested["PyG"], tested["GraphSAGE"], strict=True)]
            error = statistics.stdev(below) / math.sqrt(seeds) if seeds > 1 else None
            title = f"points below PyG's layers, {name}, {inputs}"
            bars.append(Bar(title, statistics.mean(below), "at most", 1.0, standard_error=error))
    header = ("graph", "from", "layers", "chosen", "validation loss", "test accuracy, percent")
    return [Columns("classes of nodes", header, lines)], bars


def folds(nodes: NodeData, count: int) -> list[NodeData]:
    """The same nodes with several splits, each with a fifth to test that no other has; all share validation nodes.

    So no node that choices were made by is a test node anywhere.
    """
    order = np.random.default_rng(0).permutation(np.flatnonzero(nodes.labels != UNLABELED))
    validation, *parts = np.array_split(order, 5)
    found = []
    for i, test in enumerate(parts[:count]):
        train = np.concatenate(parts[:i] + parts[i + 1 :])
        splits = {"train": train, "validation": validation, "test": test}
        found.append(replace(nodes, splits={name: np.sort(part) for name, part in splits.items()}))  # type: ignore[arg-type]
    return found


def _module(nodes: NodeData, inputs: Mapping[str, bool], options: Mapping[str, Any]) -> NodeDataModule:
    module = NodeDataModule(nodes, eval_num_neighbors=(-1, -1), prefetch_batches=0, **inputs, **options)  # type: ignore[arg-type]
    module.setup()
    return module


def choose(
    grid: Mapping[str, Sequence[Any]], train: Callable[[int, Setting], Training], seeds: Sequence[int]
) -> tuple[Setting, list[Training]]:
    """The best setting by the mean validation loss of some seeds, and its trainings.

    Args:
        grid: As in :func:`measure`.
        train: Trains a seed with a setting.
        seeds: Those that choose.
    """
    trained: dict[Hashable, list[Training]] = {}

    def trainings(setting: Setting) -> list[Training]:
        key = str(setting)
        if key not in trained:
            trained[key] = [train(seed, setting) for seed in seeds]
        return trained[key]

    def score(setting: Setting) -> float:
        return statistics.mean(training.loss for training in trainings(setting))

    best = {name: values[0] for name, values in grid.items()}
    for name, values in grid.items():
        best = min(({**best, name: value} for value in values), key=score)
    return best, trainings(best)


class Training:
    """One training; its model is as it was after its best epoch.

    Args:
        nodes: What is learned.
        layers: Whose.
        setting: One value of each of the grid's.
        seed: Of weights, orders and neighbours.
        epochs: At most.
        patience: Epochs without a better one after which it ends.
        hidden: Width of layers and rows.

    Attributes:
        loss: Cross entropy of the validation nodes.
    """

    def __init__(
        self,
        nodes: NodeDataModule,
        layers: Layers,
        setting: Setting,
        *,
        seed: int,
        epochs: int,
        patience: int,
        hidden: int,
    ) -> None:
        torch.manual_seed(seed)
        self._nodes = nodes
        self._net, optimizers = _network(nodes, layers, setting, hidden)
        loader: Any = nodes.train_dataloader()
        self.loss, best_epoch, best = math.inf, 0, {}
        for epoch in range(epochs):
            loader.set_epoch(seed * epochs + epoch)
            for batch in loader:
                training_loss = F.cross_entropy(self._scores(batch), batch.labels)
                for optimizer in optimizers:
                    optimizer.zero_grad()
                training_loss.backward()
                for optimizer in optimizers:
                    optimizer.step()
            if (loss := float(F.cross_entropy(*self._evaluated(nodes.val_dataloader())))) < self.loss:
                self.loss, best_epoch = loss, epoch
                best = {name: x.clone() for name, x in self._net.state_dict().items()}
            elif epoch - best_epoch >= patience:
                break
        self._net.load_state_dict(best)

    def test(self) -> float:
        """Share of the test nodes whose class is right."""
        scores, labels = self._evaluated(self._nodes.test_dataloader())
        return float((scores.argmax(1) == labels).float().mean())

    def _scores(self, batch: Any) -> torch.Tensor:
        scores: torch.Tensor = self._net(batch.dense, batch.nodes, batch.sparse, batch.neighborhood.blocks)
        return scores

    @torch.no_grad()
    def _evaluated(self, loader: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self._net.eval()
        scores, labels = zip(*((self._scores(batch), batch.labels) for batch in loader), strict=True)
        self._net.train()
        return torch.cat(scores), torch.cat(labels)


def _network(
    nodes: NodeDataModule, layers: Layers, setting: Setting, hidden: int
) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    common: dict[str, Any] = {"num_classes": nodes.num_classes, "hidden": hidden, "dropout": setting["dropout"]}
    rule, rate = setting["rows"]
    ours, peers = RULES[rule]
    rows = {"lr": rate, "weight_decay": setting["weight_decay"]}
    if layers == "GraphSAGE":
        options = {"embedding_dim": hidden, "pooling": "mean", "row_optimizer": ours(**rows)}
        net: nn.Module = GraphSAGE(0, nodes.fields, **common, **options)
        return net, [torch.optim.Adam(net.parameters(), lr=setting["lr"])]
    net = PyGSAGE(nodes.fields, **common)
    others = [x for x in net.parameters() if not any(x is own for own in net.inputs)]
    return net, [torch.optim.Adam(others, lr=setting["lr"]), peers(net.inputs, **rows)]


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, Sequence) else f"{value:g}"


def _mean(values: Sequence[float]) -> str:
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"
