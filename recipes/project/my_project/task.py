"""The LightningModule: what is minimised. Metrics, optimizers and predictions are those of CTRTask."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from lightning_recsys.data import Batch
from lightning_recsys.tasks import CTRTask


class MyTask(CTRTask):
    """Cross entropy in which clicks count more or less than other examples.

    Args:
        model: The model.
        positive_weight: What a click counts.
        arguments: As for CTRTask: optimizers and the configuration, which the recipes fill in.
    """

    def __init__(self, model: torch.nn.Module, *, positive_weight: float = 1.0, **arguments: Any) -> None:
        super().__init__(model, **arguments)
        self.positive_weight = positive_weight

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the loss, and the logits, which callbacks make metrics of."""
        logits = self(batch)
        weight = torch.where(batch.labels > 0, self.positive_weight, 1.0)
        loss = binary_cross_entropy_with_logits(logits, batch.labels, weight=weight)
        return {"loss": loss, "logits": logits.detach()}
