"""Asynchronous SGD over parameter servers, with staleness counted and normalised where updates are applied."""

from __future__ import annotations

from typing import Any

from lightning_recsys.strategies.async_ps.served_dense import ServedDense
from lightning_recsys.strategies.common.settings import require_whole
from lightning_recsys.strategies.served import ServedStrategy
from lightning_recsys.sync import StalenessNormalization, StalenessRule


class AsyncParameterServerStrategy(ServedStrategy):
    r"""Dense parameters and rows on servers; each worker pulls, computes and pushes gradients, and waits for no other.

    A step looks rows up, computes, pushes the gradients of rows and dense parameters with the versions that they were
    computed at, and pulls the dense parameters as they then are. Each gradient is an update of its own, applied where
    the parameter lies by the LightningModule's own optimizer rule with its present learning rate, and multiplied by
    what its staleness leaves of it.

    Args:
        normalization: What a stale gradient counts: a rule's name, or
            :class:`~lightning_recsys.sync.StalenessNormalization` with its numbers. The default leaves gradients alone
            up to a staleness of 1 000, so that clusters of fewer workers train as plain asynchronous SGD does.
        min_workers: Workers may die as long as so many are left.
        max_replacements: How many workers that died are replaced by other processes, in all. Default: none.
        **kwargs: Further arguments of :class:`~lightning_recsys.strategies.served.ServedStrategy`; dense
            parameters are spread over ``num_embedding_servers`` as well.

    Raises:
        ValueError: an argument is out of range.
        TypeError: as training starts, an optimizer with a rule that stores do not have.

    Communication: per step, the batch's ids to the servers and its rows with their versions back; gradients of rows and
    of all dense parameters to the servers, and all dense parameters back. Nobody waits for another worker. In shared
    memory nothing is sent.
    Reference: Liu & Zhao 2021, "Asynchronous stochastic gradient descent for extreme-scale recommender systems".
    Differs from the paper: the dense part is pulled at the end of a step and not at the start of the next, so that
    callbacks see it as it is.

    >>> from pytorch_lightning import Trainer
    >>> strategy = AsyncParameterServerStrategy(normalization="linear")
    >>> Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False, enable_checkpointing=False).world_size
    2
    """

    strategy_name = "async_ps"
    asynchronous = True
    wraps_model = False
    dense: ServedDense

    def __init__(
        self,
        *,
        normalization: StalenessNormalization | StalenessRule = "relative",
        min_workers: int = 1,
        max_replacements: int = 0,
        **kwargs: Any,
    ) -> None:
        self.dense = ServedDense(normalization)
        super().__init__(**kwargs)
        require_whole("min_workers", min_workers)
        require_whole("max_replacements", max_replacements, at_least=0, hint="0 replaces none.")
        self.min_workers, self.max_replacements = min_workers, max_replacements
