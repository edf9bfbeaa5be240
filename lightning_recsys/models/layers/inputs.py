"""The requirements that every model has of a batch."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, fx


def check_dense(dense: Tensor, num_dense: int) -> None:
    """Refuse numeric features that a model was not made for; torch's own error would name two matrices.

    Args:
        dense: Numeric features of a batch.
        num_dense: Numeric features that the model was made for.

    Raises:
        ValueError: the shape is not ``[B, num_dense]``.
    """
    _refuse_other_shapes(dense, num_dense)


def check_features(num_dense: int, fields: Mapping[str, int]) -> None:
    """Refuse to make a model that sees nothing of an example.

    Args:
        num_dense: Number of numeric features.
        fields: Field name -> number of ids.

    Raises:
        ValueError: there is neither a numeric feature nor a field.
    """
    if not num_dense and not fields:
        raise ValueError("a model needs at least one numeric feature or one categorical field, got neither.")


@fx.wrap  # one call of a traced model, which makes the check at every batch, too
def _refuse_other_shapes(dense: Tensor, num_dense: int) -> None:
    if dense.dim() != 2 or dense.shape[1] != num_dense:
        raise ValueError(
            f"the model was made with num_dense={num_dense} and takes numeric features [B, {num_dense}],"
            f" got shape {list(dense.shape)}. Make it with the num_dense of the data module that it trains on."
        )
