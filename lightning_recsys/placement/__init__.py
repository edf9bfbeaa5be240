"""What goes where: ranks to trainers and nodes, tables to embedding servers, chunks of a vector to sync servers."""

from lightning_recsys.placement.bin_packing import (
    PlacementMethod,
    PlacementPlan,
    TableCost,
    TablePart,
    chunk_evenly,
    place_tables,
)
from lightning_recsys.placement.cluster_layout import ClusterLayout

__all__ = [
    "ClusterLayout",
    "PlacementMethod",
    "PlacementPlan",
    "TableCost",
    "TablePart",
    "chunk_evenly",
    "place_tables",
]
