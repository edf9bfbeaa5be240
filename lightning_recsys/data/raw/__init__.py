"""Formats of raw click logs: from lines of text to columns."""

from lightning_recsys.data.raw.avazu import AvazuFormat
from lightning_recsys.data.raw.columns import BadLine, Bags, RawColumns, RawFormat
from lightning_recsys.data.raw.criteo import CriteoFormat
from lightning_recsys.data.raw.libfm import LibfmFormat
from lightning_recsys.data.raw.tabular import TabularFormat
from lightning_recsys.data.raw.text import Block, Position, TextBlock, text_blocks

__all__ = [
    "AvazuFormat",
    "BadLine",
    "Bags",
    "Block",
    "CriteoFormat",
    "LibfmFormat",
    "Position",
    "RawColumns",
    "RawFormat",
    "TabularFormat",
    "TextBlock",
    "text_blocks",
]
