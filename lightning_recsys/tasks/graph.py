"""Training on graphs as LightningModules: classes of nodes, and which items users take."""

# Shape suffixes: S seeds, P pairs, B positive pairs, H width of vectors, K classes.

from __future__ import annotations

from typing import Any, Literal, get_args

import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from torchmetrics.retrieval import RetrievalMRR, RetrievalNormalizedDCG, RetrievalRecall

from lightning_recsys.data.graph import GraphBatch
from lightning_recsys.tasks.base import Task
from lightning_recsys.tasks.ctr import StepOutput

LinkLoss = Literal["bpr", "logistic"]


class GraphTask(Task):
    """The base class of tasks on :class:`GraphBatch`: scores of a batch, a loss, and metrics.

    Args:
        model: ``forward(dense, nodes, sparse, blocks)``, as :class:`~lightning_recsys.models.GraphSAGE`.
        **options: Further arguments of :class:`Task`.
    """

    joins_examples = True

    def loss(self, scores: Tensor, batch: GraphBatch) -> Tensor:
        """The loss that training makes small."""
        raise NotImplementedError

    def vectors(self, batch: GraphBatch) -> Tensor:
        """The model's result for the seeds, ``[S, K]`` or ``[S, H]``, float32 under mixed precision too."""
        vectors: Tensor = self.model(batch.dense, batch.nodes, batch.sparse, batch.neighborhood.blocks)
        return vectors.float()

    def forward(self, batch: GraphBatch) -> Tensor:
        """See :meth:`vectors`."""
        return self.vectors(batch)

    def training_step(self, batch: GraphBatch, batch_idx: int) -> StepOutput:  # noqa: D102 - inherited
        scores: Tensor = self(batch)
        return {"loss": self.loss(scores, batch), "logits": scores.detach()}


class NodeClassificationTask(GraphTask):
    """Learns the classes of nodes by cross entropy.

    Logs ``val/accuracy`` (share of nodes) and ``val/macro_f1`` (mean over classes), and the same under ``test/``.

    Args:
        model: As for :class:`GraphTask`, with an attribute ``num_classes``.
        **options: Further arguments of :class:`Task`.

    Raises:
        ValueError: the model scores no classes.
    """

    shown_metric = "accuracy"

    def __init__(self, model: nn.Module, **options: Any) -> None:
        if getattr(model, "num_classes", None) is None:
            raise ValueError("NodeClassificationTask needs a model with num_classes, one score for each class.")
        self._num_classes = int(model.num_classes)  # type: ignore[arg-type]
        super().__init__(model, **options)

    def make_metrics(self) -> dict[str, Metric]:  # noqa: D102 - inherited
        count = self._num_classes
        return {
            "accuracy": MulticlassAccuracy(count, average="micro"),
            "macro_f1": MulticlassF1Score(count, average="macro"),
        }

    def loss(self, scores: Tensor, batch: GraphBatch) -> Tensor:
        """Cross entropy."""
        return F.cross_entropy(scores, batch.labels)

    def evaluate(self, batch: GraphBatch, metrics: MetricCollection) -> None:  # noqa: D102 - inherited
        metrics.update(self(batch), batch.labels)

    def vectors_and_scores(self, batch: GraphBatch) -> tuple[Tensor, Tensor]:
        """The seeds' vectors before the last layer, ``[S, H]``, and the scores of their classes, ``[S, K]``; float32.

        The model's ``embed`` makes both.
        """
        hidden, scores = self.model.embed(batch.dense, batch.nodes, batch.sparse, batch.neighborhood.blocks)  # type: ignore[operator]
        return hidden.float(), scores.float()

    def predict_step(self, batch: GraphBatch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Probabilities of the classes, float32 ``[S, K]``."""
        scores: Tensor = self(batch)
        return scores.softmax(1)


class LinkPredictionTask(GraphTask):
    r"""Learns which items users take: a pair's score is the dot product of its vectors.

    .. math:: L_\text{bpr} = -\log \sigma(s_{ui} - s_{uj}), \qquad
        L_\text{logistic} = -\log \sigma(s_{ui}) - \log \sigma(-s_{uj})

    as a mean over pairs, for an item :math:`i` that user :math:`u` took and one :math:`j` that the user did not.

    Logs ``val/recall`` and ``val/ndcg``, of the first ``top_k`` items for each user, and ``val/mrr``, the mean over
    users of one through the rank of the first item that the user took, among all candidates; and the same under
    ``test/``.

    Args:
        model: As for :class:`GraphTask`; its output is the vectors.
        link_loss: ``bpr`` or ``logistic``.
        top_k: ``k`` of recall@k and NDCG@k.
        **options: Further arguments of :class:`Task`.

    Raises:
        ValueError: the loss is unknown, or ``top_k`` is not positive.

    Reference: Rendle et al. 2009, BPR: Bayesian Personalized Ranking from Implicit Feedback.
    """

    shown_metric = "ndcg"

    def __init__(self, model: nn.Module, *, link_loss: LinkLoss = "bpr", top_k: int = 20, **options: Any) -> None:
        if link_loss not in get_args(LinkLoss) or top_k < 1:
            raise ValueError(
                f"task.link_loss must be bpr or logistic and task.top_k at least 1, got {link_loss!r} and {top_k}."
            )
        self._link_loss, self._top_k = link_loss, top_k
        super().__init__(model, **options)

    def make_metrics(self) -> dict[str, Metric]:  # noqa: D102 - inherited
        return {
            "recall": RetrievalRecall(top_k=self._top_k),
            "ndcg": RetrievalNormalizedDCG(top_k=self._top_k),
            "mrr": RetrievalMRR(),
        }

    def forward(self, batch: GraphBatch) -> Tensor:
        """Scores of the pairs, ``[P]``."""
        assert batch.pairs is not None
        users_PH, items_PH = self.vectors(batch)[batch.pairs]
        scores_P: Tensor = (users_PH * items_PH).sum(1)
        return scores_P

    def loss(self, scores: Tensor, batch: GraphBatch) -> Tensor:
        """The chosen loss; pairs of negatives stand behind the positive ones, once around for each draw."""
        if self._link_loss == "logistic":
            return F.binary_cross_entropy_with_logits(scores, batch.labels)
        positive_B, negative = scores[: batch.size], scores[batch.size :].view(-1, batch.size)
        return F.softplus(negative - positive_B).mean()

    def evaluate(self, batch: GraphBatch, metrics: MetricCollection) -> None:  # noqa: D102 - inherited
        metrics.update(self(batch), batch.labels.long(), indexes=batch.groups)

    def predict_step(self, batch: GraphBatch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Scores of the pairs, float32 ``[P]``."""
        scores: Tensor = self(batch)
        return scores
