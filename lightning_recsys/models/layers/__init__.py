"""Layers that the models share; those with many weights are modules of their own, ready to be cut by field."""

from lightning_recsys.models.layers.cross import (
    CrossLayer,
    CrossNetwork,
    CrossNetworkV2,
    InputWeights,
    LowRankCrossLayer,
    flatten_inputs,
)
from lightning_recsys.models.layers.dropout import EmbeddingDropout
from lightning_recsys.models.layers.factorization import FMSecondOrder
from lightning_recsys.models.layers.fieldwise import FieldwiseLinear
from lightning_recsys.models.layers.first_order import FirstOrder
from lightning_recsys.models.layers.inputs import check_dense, check_features
from lightning_recsys.models.layers.interaction import DotInteraction
from lightning_recsys.models.layers.mlp import MLP, DeepTower, begin
from lightning_recsys.models.layers.normalization import LocalNormalization, Normalization
from lightning_recsys.models.layers.tables import field_embeddings, optional_embeddings, pooled_embeddings
from lightning_recsys.partition.field_layer import FieldGather, FieldLayer, partition_parts
from lightning_recsys.partition.pieces import Cut, Sends, Share

__all__ = [
    "MLP",
    "CrossLayer",
    "CrossNetwork",
    "CrossNetworkV2",
    "Cut",
    "DeepTower",
    "DotInteraction",
    "EmbeddingDropout",
    "FMSecondOrder",
    "FieldGather",
    "FieldLayer",
    "FieldwiseLinear",
    "FirstOrder",
    "InputWeights",
    "LocalNormalization",
    "LowRankCrossLayer",
    "Normalization",
    "Sends",
    "Share",
    "begin",
    "check_dense",
    "check_features",
    "field_embeddings",
    "flatten_inputs",
    "optional_embeddings",
    "partition_parts",
    "pooled_embeddings",
]
