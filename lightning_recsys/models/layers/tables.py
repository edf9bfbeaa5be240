"""From a model's fields to its embedding tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Unpack

from lightning_recsys.embeddings import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingOptions, PoolingType
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
    return _collection(fields, embedding_dim, 0.01, options.get("row_optimizer"), options)


def first_order_weights(fields: Mapping[str, int], **options: Unpack[EmbeddingOptions]) -> EmbeddingBagCollection:
    """One table of scalar weights for each field, all 0 at the start: an id that was never seen adds nothing.

    Args:
        fields: Field name -> number of ids.
        options: As in :class:`~lightning_recsys.embeddings.EmbeddingOptions`.

    Raises:
        ValueError: there is no field.
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
) -> EmbeddingBagCollection:
    # At run time ** takes any name: without this a misspelt argument of a model would be ignored.
    unknown = sorted(set(options) - EmbeddingOptions.__optional_keys__)
    if unknown:
        raise TypeError(
            f"unexpected model argument {unknown[0]!r}. Besides the arguments of its architecture a model takes "
            f"{sorted(EmbeddingOptions.__optional_keys__)}."
        )
    if not fields:
        raise ValueError(
            "a model needs at least one categorical field, got none. Turn some numeric features into categories "
            "(quantile buckets, say), or use torch.nn.Linear for numeric features alone."
        )
    pooling = options.get("pooling", PoolingType.SUM)
    kernel = options.get("kernel", "auto")
    if kernel == "fbgemm" and embedding_dim == 1:
        kernel = "auto"  # whoever names FBGEMM means the embeddings; it has no rows of width 1
    tables = [
        EmbeddingBagConfig(name, num_embeddings, embedding_dim, (name,), pooling=pooling, init_std=init_std)
        for name, num_embeddings in fields.items()
    ]
    return EmbeddingBagCollection(
        tables,
        optimizer=optimizer,
        kernel=kernel,
        check_ids=options.get("check_ids", True),
        device=options.get("device"),
    )
