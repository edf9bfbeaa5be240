"""Turns raw click logs into prepared rows that :class:`lightning_recsys.data.PreparedDataModule` reads."""

from lightning_recsys.data.preparation.job import Preparation
from lightning_recsys.data.preparation.preprocessing import Preprocessing
from lightning_recsys.data.preparation.schema_rules import SchemaRules
from lightning_recsys.data.preparation.schema_split import BySchema
from lightning_recsys.data.preparation.source import Progress
from lightning_recsys.data.preparation.splits import ByFile, ByShare, ByTime, SplitRule, split_rule

__all__ = [
    "ByFile",
    "BySchema",
    "ByShare",
    "ByTime",
    "Preparation",
    "Preprocessing",
    "Progress",
    "SchemaRules",
    "SplitRule",
    "split_rule",
]
