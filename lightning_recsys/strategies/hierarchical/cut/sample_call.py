"""The call of a module by a training step, found out before training begins."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities.seed import isolate_rng
from torch import nn

from lightning_recsys.strategies.common.samples import sample_batches

log = logging.getLogger(__name__)


class _CalledError(BaseException):
    """A training step has come to the call; no step takes it for an error of its own."""

    def __init__(self, arguments: list[Any]) -> None:
        super().__init__()
        self.arguments = arguments


def sample_call(task: pl.LightningModule, module: nn.Module) -> list[Any] | None:
    """The arguments of a module in the first training step.

    The step is run for one sample batch as far as that call. Nothing is computed behind it, no batch is taken from the
    loader, and random generators stay where they are.

    Args:
        task: The LightningModule of a trainer that is about to fit.
        module: The module that the training step calls.

    Returns:
        ``None`` where there is no batch without iterating over a loader, or the step does not come to the call.
    """
    with isolate_rng():  # which puts nothing back where an exception leaves it
        return _sample_call(task, module)


def _sample_call(task: pl.LightningModule, module: nn.Module) -> list[Any] | None:
    own = module.forward

    def called(*args: Any, **kwargs: Any) -> Any:
        raise _CalledError(positional(own, args, kwargs))

    try:
        batches = sample_batches(task.trainer, 1)
        if not batches:
            return None
        with forward_replaced(module, called):
            batch = task._on_before_batch_transfer(batches[0], dataloader_idx=0)
            batch = task.trainer.strategy.batch_to_device(batch, dataloader_idx=0)
            takes_number = len(inspect.signature(task.training_step).parameters) > 1
            task.training_step(*((batch, 0) if takes_number else (batch,)))
    except _CalledError as call:
        return call.arguments
    except Exception as error:  # the first batch shows what is wrong, or that nothing is
        log.debug("No sample of the calls of %s: %s: %s", type(module).__name__, type(error).__name__, error)
    return None


@contextmanager
def forward_replaced(module: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """Meanwhile a module computes by another function; it gets back its own, of its class or of the object alone."""
    own = vars(module).get("forward")
    module.forward = function
    try:
        yield
    finally:
        vars(module).pop("forward", None)
        if own is not None:
            module.forward = own


def positional(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments of a call by their order."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return list(bound.arguments.values())
