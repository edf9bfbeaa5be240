"""Update rules for embedding rows, shared by local tables and stores."""

from lightning_recsys.optim.row_optimizers import RowAdagrad, RowAdam, RowFTRL, RowOptimizer, RowSGD, RowWiseAdagrad
from lightning_recsys.optim.swap import RowSWAP, swap

__all__ = ["RowAdagrad", "RowAdam", "RowFTRL", "RowOptimizer", "RowSGD", "RowSWAP", "RowWiseAdagrad", "swap"]
