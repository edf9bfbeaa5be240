"""From a model's fields to its embedding tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from torch import Tensor

from lightning_recsys.embeddings import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingOptions,
    PoolingType,
    RowDtype,
    SparseFeatures,
)
from lightning_recsys.optim import RowOptimizer


def field_embeddings(
    fields: Mapping[str, int], embedding_dim: int, **options: Unpack[EmbeddingOptions]
) -> EmbeddingBagCollection:
    """One table of vectors for each field, drawn from N(0, 0.01): small, as ``EmbeddingBagConfig.init_std`` explains.

    Args:
        fields: Field name -> number of ids, in the order in which the model sees the fields.
        embedding_dim: Width ``D`` of the vectors.
        options: As in :class:`~lightning_recsys.embeddings.EmbeddingOptions`.

    Raises:
        ValueError: there is no field.
        TypeError: an option is unknown.
    """
    embeddings = optional_embeddings(fields, embedding_dim, **options)
    if embeddings is None:
        raise ValueError(
            "this model needs at least one categorical field, got none. For numeric features alone use model=lr, fm, "
            "wide_deep, deepfm, dcn or dcn_v2, or in a model of your own optional_embeddings and pooled_embeddings."
        )
    return embeddings


def optional_embeddings(
    fields: Mapping[str, int], embedding_dim: int, **options: Unpack[EmbeddingOptions]
) -> EmbeddingBagCollection | None:
    """The result of :func:`field_embeddings`, or ``None`` without any field: such a model has numeric features alone.

    Args:
        fields: Field name -> number of ids; may be empty.
        embedding_dim: Width ``D`` of the vectors.
        options: As in :class:`~lightning_recsys.embeddings.EmbeddingOptions`.

    Raises:
        TypeError: an option is unknown.
    """
    return _collection(fields, embedding_dim, 0.01, options.get("row_optimizer"), options)


def pooled_embeddings(
    embeddings: EmbeddingBagCollection | None, dense: Tensor, sparse: SparseFeatures, embedding_dim: int
) -> Tensor:
    """The pooled vectors of all fields, ``[B, F, D]``; ``[B, 0, D]`` for a model of numeric features alone.

    Args:
        embeddings: The model's tables, as :func:`field_embeddings` makes them.
        dense: Numeric features ``[B, N]``, which have the batch size where there are no fields.
        sparse: ``B`` examples of the fields.
        embedding_dim: Width ``D`` of the vectors.
    """
    if embeddings is None:
        return dense.new_empty(dense.shape[0], 0, embedding_dim)
    pooled: Tensor = embeddings(sparse)
    return pooled


def first_order_weights(
    fields: Mapping[str, int], **options: Unpack[EmbeddingOptions]
) -> EmbeddingBagCollection | None:
    """One table of scalar weights for each field, all 0 at the start: an id that was never seen adds nothing.

    Args:
        fields: Field name -> number of ids.
        options: As in :class:`~lightning_recsys.embeddings.EmbeddingOptions`.

    Returns:
        The tables, or ``None`` where there is no field: the model then has numeric features alone.

    Raises:
        TypeError: an option is unknown.
    """
    optimizer = options.get("first_order_optimizer", options.get("row_optimizer"))
    return _collection(fields, 1, 0.0, optimizer, options)


def _collection(
    fields: Mapping[str, int],
    embedding_dim: int,
    init_std: float,
    optimizer: RowOptimizer | None,
    options: EmbeddingOptions,
) -> EmbeddingBagCollection | None:
    # At run time ** takes any name: without this a misspelt argument of a model would be ignored.
    unknown = sorted(set(options) - EmbeddingOptions.__optional_keys__)
    if unknown:
        raise TypeError(
            f"unexpected model argument {unknown[0]!r}. Besides the arguments of its architecture a model takes "
            f"{sorted(EmbeddingOptions.__optional_keys__)}."
        )
    if not fields:
        return None
    pooling = options.get("pooling", PoolingType.SUM)
    kernel = options.get("kernel", "auto")
    if kernel == "fbgemm" and embedding_dim == 1:
        kernel = "auto"  # whoever names FBGEMM means the embeddings; it has no rows of width 1
    kept: dict[str, Any] = {"init_std": init_std, "dtype": options.get("dtype", RowDtype.FLOAT32)}
    tables = [
        EmbeddingBagConfig(name, num_embeddings, embedding_dim, (name,), pooling=pooling, **kept)
        for name, num_embeddings in fields.items()
    ]
    return EmbeddingBagCollection(
        tables,
        optimizer=optimizer,
        kernel=kernel,
        check_ids=options.get("check_ids", True),
        device=options.get("device"),
    )
