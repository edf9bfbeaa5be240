"""Graphs: nodes, edges, features, and neighbourhoods that are sampled from them."""

from lightning_recsys.data.graph.batch import NODE_FIELD, GraphBatch
from lightning_recsys.data.graph.csr import CSRGraph
from lightning_recsys.data.graph.interactions import InteractionDataModule, Interactions
from lightning_recsys.data.graph.module import NodeDataModule
from lightning_recsys.data.graph.nodes import Bags, NodeData
from lightning_recsys.data.graph.pyg import from_pyg, interactions_from_pyg, to_pyg
from lightning_recsys.data.graph.readers import read_nodes
from lightning_recsys.data.graph.sampling import Neighborhood, NeighborSampler

__all__ = [
    "NODE_FIELD",
    "Bags",
    "CSRGraph",
    "GraphBatch",
    "InteractionDataModule",
    "Interactions",
    "NeighborSampler",
    "Neighborhood",
    "NodeData",
    "NodeDataModule",
    "from_pyg",
    "interactions_from_pyg",
    "read_nodes",
    "to_pyg",
]
