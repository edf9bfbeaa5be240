"""Turns raw click logs into prepared rows that :class:`lightning_recsys.data.prepared.PreparedDataModule` reads."""

from lightning_recsys.data.preparation.job import Preparation, Progress
from lightning_recsys.data.preparation.preprocessing import Preprocessing
from lightning_recsys.data.preparation.splits import ByFile, ByShare, ByTime, SplitRule, split_rule

__all__ = ["ByFile", "ByShare", "ByTime", "Preparation", "Preprocessing", "Progress", "SplitRule", "split_rule"]
