"""LightningModules: what is optimised, and what is logged."""

from lightning_recsys.tasks.base import Task
from lightning_recsys.tasks.ctr import CTRTask
from lightning_recsys.tasks.graph import LinkPredictionTask, NodeClassificationTask
from lightning_recsys.tasks.graph_predictions import embed_users_and_items, predict_nodes, recommend
from lightning_recsys.tasks.precision import PrecisionTimes, time_precisions
from lightning_recsys.tasks.saved import load_for_prediction

__all__ = [
    "CTRTask",
    "LinkPredictionTask",
    "NodeClassificationTask",
    "PrecisionTimes",
    "Task",
    "embed_users_and_items",
    "load_for_prediction",
    "predict_nodes",
    "recommend",
    "time_precisions",
]
