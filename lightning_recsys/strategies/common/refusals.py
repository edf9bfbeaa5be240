"""The parts of a trainer that no strategy takes, since they would go wrong later, and less clearly."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import BatchSizeFinder, LearningRateFinder
from pytorch_lightning.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from lightning_recsys.strategies.common.averaged_copies import refuse_statistics_after_averaging

if TYPE_CHECKING:
    from lightning_recsys.strategies.common.base import RecsysStrategy


def refuse_to_fit(strategy: RecsysStrategy, trainer: pl.Trainer) -> None:
    """Refuse what would go wrong in a fit, ahead of it.

    Raises:
        ValueError: a lazy module has seen no batch, or a setting or a callback makes workers wait that run free.
        TypeError: a callback trains on trial.
    """
    refuse_without_shape(trainer.lightning_module)
    if not strategy.wraps_model or strategy.server_specs():
        refuse_tuners(trainer, strategy=type(strategy).__name__)
    if strategy.asynchronous:
        if strategy._layer_sync is not None:
            raise ValueError("trainer.sync_batchnorm=True makes every worker wait for all others at every layer.")
        refuse_statistics_after_averaging(trainer)


def refuse_tuners(trainer: pl.Trainer, *, strategy: str) -> None:
    """Refuse callbacks that set the run up a second time; rows on servers and cut models are set up once.

    Args:
        trainer: The trainer that is about to fit.
        strategy: Name of its class, for the message.

    Raises:
        TypeError: the trainer has such a callback.
    """
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    for callback in callbacks:
        if isinstance(callback, BatchSizeFinder | LearningRateFinder):
            raise TypeError(
                f"callback {type(callback).__name__} trains on trial and puts weights and optimizers back, which"
                f" {strategy} cannot. Find the value on one device (strategy=auto) and set it."
            )


def refuse_without_shape(module: nn.Module) -> None:
    """Refuse lazy modules that have seen no batch: workers start from equal parameters, and these have no numbers yet.

    Args:
        module: The task, as it is when ``configure_model`` is over.

    Raises:
        ValueError: a parameter or a buffer has no shape.
    """
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        if is_lazy(tensor):
            owner = type(module.get_submodule(name.rpartition(".")[0])).__name__
            raise ValueError(
                f"{name} has no shape before {owner} has seen a batch, and workers start from equal parameters. Make"
                " the layer with its sizes, or run one batch through the model before fit."
            )


def refuse_other_namespace(*objects: object) -> None:
    """Classes of ``lightning.pytorch`` are not those of ``pytorch_lightning``, and half of what they do gets lost."""
    for thing in objects:
        if any(base.__module__.partition(".")[0] == "lightning" for base in type(thing).__mro__):
            raise TypeError(
                f"{type(thing).__name__} is built on lightning.pytorch, this package and your trainer on"
                " pytorch_lightning; they do not mix. Import it from pytorch_lightning instead."
            )


def refuse_other_namespace_in(trainer: pl.Trainer) -> None:
    """The same for all that a trainer holds."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # all set by connectors
    data, profiler = trainer.datamodule, trainer.profiler  # type: ignore[attr-defined]
    refuse_other_namespace(*callbacks, *trainer.loggers, data, profiler)


def without_defaults(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Further arguments of a strategy without those that have the default that Lightning or torch gives them.

    ``LightningCLI`` hands over every argument that a class and its bases have, whether a config names it or not.
    """
    parameters = {**inspect.signature(DistributedDataParallel).parameters, **inspect.signature(DDPStrategy).parameters}
    defaults = {name: x.default for name, x in parameters.items() if name != "start_method"}
    missing = object()
    return {
        name: value
        for name, value in arguments.items()
        if not (
            value is (default := defaults.get(name, missing)) or (type(value) is type(default) and value == default)
        )
    }


def refuse_arguments(strategy: RecsysStrategy, arguments: Mapping[str, object]) -> None:
    """Refuse further arguments of a strategy that nobody would read.

    Args:
        strategy: The strategy that is being made.
        arguments: By name, what its own classes leave to Lightning's ``DDPStrategy``, which passes what it does not
            know to ``DistributedDataParallel``, where the model is wrapped in that.

    Raises:
        TypeError: nobody has an argument of such a name, the model is not wrapped, or it is a start method.
    """
    kind = type(strategy)
    if "start_method" in arguments:
        raise TypeError(f"{kind.__name__} starts its workers from a fork server. Leave strategy.start_method out.")
    of_lightning = set(inspect.signature(DDPStrategy).parameters) - {"kwargs"}
    of_ddp = set(inspect.signature(DistributedDataParallel).parameters) - {"module", "device_ids"}  # Lightning's
    of_strategy = {x for base in kind.__mro__ if "__init__" in vars(base) for x in inspect.signature(base).parameters}
    of_strategy -= {"args", "kwargs", "start_method"}
    for name in arguments.keys() - of_lightning - of_ddp:
        near = get_close_matches(name, sorted(of_strategy | of_ddp if strategy.wraps_model else of_strategy), n=1)
        remedy = f"Did you mean {near[0]}?" if near else f"It has {', '.join(sorted(of_strategy - of_lightning))}."
        raise TypeError(f"{kind.__name__} has no argument {name}. {remedy}")
    for_wrapping = of_ddp | {name for name in of_lightning if name.startswith(("ddp_", "model_averaging"))}
    given = [name for name, value in arguments.items() if name in of_ddp or value is not None]
    useless = [name for name in given if name in for_wrapping]
    if useless and not strategy.wraps_model:
        raise TypeError(f"{kind.__name__} does not use DistributedDataParallel, so it has no use for {useless}.")


def refuse_settings_of_servers(strategy: RecsysStrategy) -> None:
    """Refuse what only servers could heed, of a strategy that wants none.

    Raises:
        ValueError: ``servers`` or ``compression`` is given.
    """
    name = type(strategy).__name__
    if strategy.servers is not None:
        raise ValueError(
            f"strategy.servers={list(strategy.servers)}: {name} keeps nothing on servers. Leave strategy.servers out."
        )
    if strategy.compression != "none":
        raise ValueError(
            f"strategy.compression={strategy.compression}: {name} sends no rows to servers. Leave strategy.compression"
            " out."
        )
