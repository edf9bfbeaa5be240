"""Formats of raw click logs: from lines of text to columns."""

from lightning_recsys.data.raw.avazu import AvazuFormat
from lightning_recsys.data.raw.columns import LineFormat, RawColumns, RawFormat
from lightning_recsys.data.raw.criteo import CriteoFormat
from lightning_recsys.data.raw.libfm import LibfmFormat
from lightning_recsys.data.raw.tabular import TabularFormat
from lightning_recsys.data.raw.text import Block, Position

__all__ = [
    "AvazuFormat",
    "Block",
    "CriteoFormat",
    "LibfmFormat",
    "LineFormat",
    "Position",
    "RawColumns",
    "RawFormat",
    "TabularFormat",
]
