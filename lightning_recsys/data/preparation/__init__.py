"""Turns raw click logs into prepared rows that :class:`lightning_recsys.data.prepared.PreparedDataModule` reads."""

from lightning_recsys.data.preparation.job import Preparation, Progress
from lightning_recsys.data.preparation.preprocessing import ColumnRules, Preprocessing
from lightning_recsys.data.preparation.schema_rules import SchemaRules
from lightning_recsys.data.preparation.schema_split import BySchema, split_by_schema
from lightning_recsys.data.preparation.splits import ByFile, ByShare, ByTime, SplitRule, split_rule

__all__ = [
    "ByFile",
    "BySchema",
    "ByShare",
    "ByTime",
    "ColumnRules",
    "Preparation",
    "Preprocessing",
    "Progress",
    "SchemaRules",
    "SplitRule",
    "split_by_schema",
    "split_rule",
]
