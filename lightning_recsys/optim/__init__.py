"""Update rules for embedding rows, shared by local tables and stores."""

from lightning_recsys.optim.row_optimizers import FTRL, SGD, Adagrad, Adam, RowOptimizer, RowwiseAdagrad

__all__ = ["FTRL", "SGD", "Adagrad", "Adam", "RowOptimizer", "RowwiseAdagrad"]
