"""Callbacks that average weights, while the rows of a model are in stores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import AveragedModel

from lightning_recsys.embeddings import EmbeddingBagCollection
from lightning_recsys.embeddings.substitution import SubstituteModule
from lightning_recsys.stores.backend import StoreBackend
from lightning_recsys.strategies.common.means import take_mean
from lightning_recsys.strategies.common.stored_rows import rows_left_out


def averaging_callbacks(trainer: pl.Trainer) -> list[pl.Callback]:
    """The callbacks of a trainer that keep an averaged copy of the model."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    return [x for x in callbacks if isinstance(x, WeightAveraging | StochasticWeightAveraging)]


def averaged_copies(trainer: pl.Trainer) -> list[nn.Module]:
    """The copies that :func:`averaging_callbacks` have made, as the model is: without what they are wrapped in."""
    kept = (getattr(callback, "_average_model", None) for callback in averaging_callbacks(trainer))
    return [x.module if isinstance(x, AveragedModel) else x for x in kept if x is not None]


class AveragedCopies:
    """Averaged copies of a model, made before its rows went to stores.

    Lightning pairs the parameters of model and copy by their order. A table that stores serve has no parameters, so a
    copy of it would shift all that follow. The copies therefore have the model's own table modules: their dense part is
    averaged, and rows are as trained, in the copy as in the model. Their state dicts have no rows meanwhile; a
    checkpoint gets these from the stores.

    Args:
        trainer: The trainer whose callbacks have the copies; its model has tables that stores serve.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._model: nn.Module = trainer.lightning_module
        self._hooks: list[Any] = []  # of the copies' state dicts
        modules = self._model.named_modules(remove_duplicate=False)
        self._paths = [path for path, module in modules if _is_served(module)]  # of tables in the model
        self._share()
        for copy in averaged_copies(trainer) if self._paths else ():
            self._leave_rows_out(copy)

    def meet(self) -> None:
        """Take the mean of every rank's copies, which have averaged different replicas; all ranks call this.

        The mean of averages is the average of means: it goes with the mean of the replicas, which validation sees.

        Communication: that of :func:`take_mean`, for each copy.
        """
        for copy in averaged_copies(self._trainer):
            dense = (x for x in (*copy.parameters(), *copy.buffers()) if x.is_floating_point() and x.numel())
            take_mean(dense, device=self._trainer.strategy.root_device)  # where ranks can talk; a copy may be elsewhere

    def release(self) -> None:
        """Give the copies the tables that the model has now, whose rows are its own again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._share()

    def _leave_rows_out(self, copy: nn.Module) -> None:
        meanwhile = ExitStack()

        def before(module: nn.Module, *_: Any) -> None:
            meanwhile.enter_context(rows_left_out(module))

        def after(*_: Any) -> None:
            meanwhile.close()

        self._hooks.append(copy.register_state_dict_pre_hook(before))  # type: ignore[no-untyped-call]
        self._hooks.append(copy.register_state_dict_post_hook(after))  # type: ignore[no-untyped-call]

    def _share(self) -> None:
        for copy in averaged_copies(self._trainer):
            for path in self._paths:
                copy.set_submodule(path, self._model.get_submodule(path))


@contextmanager
def copies_without_rows(trainer: pl.Trainer) -> Iterator[None]:
    """Meanwhile a model and its averaged copies are loaded without their rows."""
    with ExitStack() as stack:
        for module in (trainer.lightning_module, *averaged_copies(trainer)):
            stack.enter_context(rows_left_out(module))
        yield


def refuse_averages_in_shared_memory(trainer: pl.Trainer, *, setting: str) -> None:
    """Several workers would each swap their own average into the one replica that they share.

    Args:
        trainer: The trainer, whose workers share a replica.
        setting: The setting of the strategy that made them share it, for the message.

    Raises:
        ValueError: a callback swaps weights while the workers evaluate.
    """
    for callback in averaging_callbacks(trainer):
        if isinstance(callback, WeightAveraging):
            raise ValueError(
                f"callback {type(callback).__name__} swaps its average into the model to validate it, and with"
                f" {setting} the workers of a trainer share the memory of one model. Set"
                " strategy.workers_per_trainer=1, or use StochasticWeightAveraging, which changes the model at the end"
                " only."
            )


def refuse_statistics_after_averaging(trainer: pl.Trainer) -> None:
    """The pass that gathers them trains nothing, and workers that run free put other weights in place meanwhile.

    Raises:
        ValueError: ``StochasticWeightAveraging`` of a model with batch norms.
    """
    averaging = [x for x in averaging_callbacks(trainer) if isinstance(x, StochasticWeightAveraging)]
    if averaging and any(isinstance(module, _BatchNorm) for module in trainer.lightning_module.modules()):
        raise ValueError(
            "callback StochasticWeightAveraging makes another pass over the data for the statistics of batch norms,"
            " with weights that workers which run free do not keep meanwhile. Use WeightAveraging, which averages the"
            " statistics as well, a model without batch norms, or a strategy whose workers go in step (ddp, het)."
        )


def _is_served(module: nn.Module) -> bool:
    if isinstance(module, EmbeddingBagCollection):
        return isinstance(module.embedding_bags, StoreBackend)
    return isinstance(module, SubstituteModule)
