"""FuxiCTR's counterparts of our models.

FuxiCTR's package ships the layers and the training loop; its models live in its repository only. So they are put
together here as that repository does: numeric features get an embedding (a multiple of one vector), everything is
initialised and trained by FuxiCTR's own code. Importing this module imports FuxiCTR.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from fuxictr.features import FeatureMap
from fuxictr.pytorch.layers import (
    CrossNet,
    CrossNetV2,
    FactorizationMachine,
    FeatureEmbedding,
    InnerProductInteraction,
    LogisticRegression,
    MLP_Block,
)
from fuxictr.pytorch.models import BaseModel
from torch import Tensor, nn

Inputs = dict[str, Tensor]
LABEL = "label"


def _not_from_fuxictr(record: logging.LogRecord) -> bool:
    return "fuxictr" not in Path(record.pathname).parts


logging.getLogger().addFilter(_not_from_fuxictr)  # it reports every step on the root logger


def feature_map(
    folder: Path, *, embedding_dim: int, dense: Sequence[str], fields: Mapping[str, int], bags: Mapping[str, int]
) -> FeatureMap:
    """What FuxiCTR knows about the columns.

    Args:
        folder: Where models keep their checkpoints.
        embedding_dim: Width of all embeddings.
        dense: Names of the numeric features.
        fields: Single-hot field -> number of ids.
        bags: Multi-hot field -> number of ids; 0 fills a bag up, so real ids start at 1 and ``fields`` counts one more.
    """
    columns = FeatureMap("rows", str(folder))
    numeric = {name: {"source": "", "type": "numeric"} for name in dense}
    single_hot = {
        name: {"source": "", "type": "categorical", "vocab_size": num_ids}
        for name, num_ids in fields.items()
        if name not in bags
    }
    multi_hot = {
        name: {
            "source": "",
            "type": "sequence",
            "vocab_size": fields[name] + 1,
            "padding_idx": 0,
            "max_len": longest,
            "feature_encoder": "layers.MaskedAveragePooling()",  # what its preprocessing writes by default
        }
        for name, longest in bags.items()
    }
    columns.features = OrderedDict(numeric | single_hot | multi_hot)
    columns.labels = [LABEL]
    columns.num_fields = columns.get_num_fields()
    columns.default_emb_dim = embedding_dim
    columns.set_column_index()
    return columns


class FuxiModel(BaseModel):
    """What the models share: FuxiCTR's loop with its defaults, Adam and gradients clipped at a norm of 10."""

    def __init__(self, columns: FeatureMap, *, learning_rate: float) -> None:
        super().__init__(columns, model_root=columns.data_dir, verbose=0, metrics=["logloss", "AUC"])
        Path(self.model_dir).mkdir(parents=True, exist_ok=True)
        self.learning_rate = learning_rate

    def ready(self) -> None:
        """The last lines of every constructor in FuxiCTR's repository."""
        self.compile("adam", "binary_crossentropy", self.learning_rate)
        self.reset_parameters()
        self.model_to_device()

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        return {"y_pred": self.output_activation(self.logits(self.get_inputs(inputs)))}

    def logits(self, X: Inputs) -> Tensor:
        """``[B, 1]``."""
        raise NotImplementedError


class LR(FuxiModel):
    def __init__(self, columns: FeatureMap, **options: Any) -> None:
        super().__init__(columns, **options)
        self.lr_layer = LogisticRegression(columns, use_bias=True)
        self.ready()

    def logits(self, X: Inputs) -> Tensor:
        return self.lr_layer(X)


class FM(FuxiModel):
    def __init__(self, columns: FeatureMap, *, embedding_dim: int, **options: Any) -> None:
        super().__init__(columns, **options)
        self.embedding_layer = FeatureEmbedding(columns, embedding_dim)
        self.fm = FactorizationMachine(columns)
        self.ready()

    def logits(self, X: Inputs) -> Tensor:
        return self.fm(X, self.embedding_layer(X))


class WideDeep(FuxiModel):
    def __init__(self, columns: FeatureMap, *, embedding_dim: int, hidden: list[int], **options: Any) -> None:
        super().__init__(columns, **options)
        self.embedding_layer = FeatureEmbedding(columns, embedding_dim)
        self.lr_layer = LogisticRegression(columns, use_bias=False)
        self.dnn = MLP_Block(columns.sum_emb_out_dim(), hidden_units=hidden, output_dim=1)
        self.ready()

    def logits(self, X: Inputs) -> Tensor:
        return self.lr_layer(X) + self.dnn(self.embedding_layer(X).flatten(start_dim=1))


class DeepFM(FuxiModel):
    def __init__(self, columns: FeatureMap, *, embedding_dim: int, hidden: list[int], **options: Any) -> None:
        super().__init__(columns, **options)
        self.embedding_layer = FeatureEmbedding(columns, embedding_dim)
        self.fm = FactorizationMachine(columns)
        self.mlp = MLP_Block(columns.sum_emb_out_dim(), hidden_units=hidden, output_dim=1)
        self.ready()

    def logits(self, X: Inputs) -> Tensor:
        embedded = self.embedding_layer(X)
        return self.fm(X, embedded) + self.mlp(embedded.flatten(start_dim=1))


class DCN(FuxiModel):
    cross_network: type[nn.Module] = CrossNet

    def __init__(
        self, columns: FeatureMap, *, embedding_dim: int, num_cross_layers: int, hidden: list[int], **options: Any
    ) -> None:
        super().__init__(columns, **options)
        self.embedding_layer = FeatureEmbedding(columns, embedding_dim)
        width = columns.sum_emb_out_dim()
        self.crossnet = self.cross_network(width, num_cross_layers)
        self.dnn = MLP_Block(width, hidden_units=hidden)
        self.fc = nn.Linear(width + hidden[-1], 1)
        self.ready()

    def logits(self, X: Inputs) -> Tensor:
        first = self.embedding_layer(X, flatten_emb=True)
        return self.fc(torch.cat([self.crossnet(first), self.dnn(first)], dim=-1))


class DCNv2(DCN):
    cross_network = CrossNetV2


class DLRM(FuxiModel):
    def __init__(
        self,
        columns: FeatureMap,
        *,
        embedding_dim: int,
        bottom_hidden: list[int],
        top_hidden: list[int],
        **options: Any,
    ) -> None:
        super().__init__(columns, **options)
        self.dense = [name for name, spec in columns.features.items() if spec["type"] == "numeric"]
        self.embedding_layer = FeatureEmbedding(columns, embedding_dim, not_required_feature_columns=self.dense)
        vectors = columns.num_fields - len(self.dense) + bool(self.dense)
        self.interact = InnerProductInteraction(vectors, output="inner_product")
        width = vectors * (vectors - 1) // 2
        if self.dense:
            self.bottom_mlp = MLP_Block(
                len(self.dense), hidden_units=bottom_hidden, output_dim=embedding_dim, output_activation="ReLU"
            )
            width += embedding_dim
        self.top_mlp = MLP_Block(width, hidden_units=top_hidden, output_dim=1)
        self.ready()

    def logits(self, X: Inputs) -> Tensor:
        vectors = self.embedding_layer(X)
        if not self.dense:
            return self.top_mlp(self.interact(vectors))
        bottom = self.bottom_mlp(torch.stack([X[name].float() for name in self.dense], dim=-1))
        dots = self.interact(torch.cat([vectors, bottom.unsqueeze(1)], dim=1))
        return self.top_mlp(torch.cat([dots, bottom], dim=-1))


MODELS: dict[str, type[FuxiModel]] = {
    "lr": LR,
    "fm": FM,
    "wide_deep": WideDeep,
    "deepfm": DeepFM,
    "dcn": DCN,
    "dcn_v2": DCNv2,
    "dlrm": DLRM,
}
