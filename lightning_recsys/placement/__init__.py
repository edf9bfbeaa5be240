"""The choice of what goes where: ranks to trainers and nodes, tables and chunks of vectors to servers."""

from lightning_recsys.placement.bin_packing import (
    PlacementMethod,
    PlacementPlan,
    Room,
    TableCost,
    TablePart,
    chunk_evenly,
    place_tables,
    rows_in_stripe,
)
from lightning_recsys.placement.cluster_layout import ClusterLayout
from lightning_recsys.placement.communication import Network
from lightning_recsys.placement.fields import FieldCost, FieldMethod, FieldPlan, place_fields

__all__ = [
    "ClusterLayout",
    "FieldCost",
    "FieldMethod",
    "FieldPlan",
    "Network",
    "PlacementMethod",
    "PlacementPlan",
    "Room",
    "TableCost",
    "TablePart",
    "chunk_evenly",
    "place_fields",
    "place_tables",
    "rows_in_stripe",
]
