"""Update rules for embedding rows, shared by local tables and stores."""

from typing import TYPE_CHECKING

from lightning_recsys.optim.row_optimizers import RowAdagrad, RowAdam, RowFTRL, RowOptimizer, RowSGD, RowWiseAdagrad
from lightning_recsys.optim.swap import RowSWAP, swap
from lightning_recsys.renamed import renamed_names

__all__ = ["RowAdagrad", "RowAdam", "RowFTRL", "RowOptimizer", "RowSGD", "RowSWAP", "RowWiseAdagrad", "swap"]

if not TYPE_CHECKING:  # which would make a type checker believe in every name
    __getattr__ = renamed_names(
        __name__, SGD="RowSGD", Adagrad="RowAdagrad", RowwiseAdagrad="RowWiseAdagrad", Adam="RowAdam", FTRL="RowFTRL"
    )
