"""Models: plain modules. Those for click-through rates are ``forward(dense, sparse) -> logits [B]``."""

from lightning_recsys.models.dcn import DCN
from lightning_recsys.models.dcn_v2 import DCNv2
from lightning_recsys.models.deepfm import DeepFM
from lightning_recsys.models.dlrm import DLRM
from lightning_recsys.models.factorization_machine import FactorizationMachine
from lightning_recsys.models.graphsage import GraphSAGE
from lightning_recsys.models.logistic_regression import LogisticRegression
from lightning_recsys.models.wide_deep import WideDeep

__all__ = ["DCN", "DLRM", "DCNv2", "DeepFM", "FactorizationMachine", "GraphSAGE", "LogisticRegression", "WideDeep"]
