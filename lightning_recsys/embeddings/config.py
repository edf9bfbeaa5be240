"""The description of an embedding table, in TorchRec's words."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from lightning_recsys.embeddings.int64_ids import NUM_IDS


class PoolingType(StrEnum):
    """The sum or the mean of a bag's rows; an empty bag gives zeros in both."""

    SUM = "sum"
    MEAN = "mean"


class RowDtype(StrEnum):
    """The numbers in which rows are kept: float32, or bfloat16 in half the bytes. Both are computed with in float32."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@dataclass(frozen=True)
class EmbeddingBagConfig:
    """One embedding table and the features that look it up.

    Args:
        name: Table name, unique in its collection; part of the state-dict key.
        num_embeddings: Rows; valid ids are ``0 .. num_embeddings - 1``. Tables of dynamic rows may have up to
            ``2**64 - 1``: then every int64 is an id, negative ones too (as unsigned numbers they are those from
            ``2**63`` on), but -1.
        embedding_dim: Row width. Any positive number: widths that FBGEMM does not take use our own kernel.
        feature_names: Features that share this table.
        pooling: ``sum`` or ``mean``. The mean divides by the number of ids in the bag, also where they are weighted.
        init_std: Rows start normally distributed around 0 with this deviation. Small on purpose: rows drawn from
            N(0, 1), the default of ``torch.nn.Embedding``, drive DeepFM's backward pass into denormal numbers.
        dtype: ``float32`` or ``bfloat16``, in which the rows are kept; an update of the latter is rounded
            stochastically (:mod:`lightning_recsys.compiled.bfloat16`). The state of their optimizer is float32.

    Raises:
        ValueError: a number is not positive, there are more ids than int64 has, no feature, or the pooling or the
            dtype is unknown.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    feature_names: tuple[str, ...]
    pooling: PoolingType = PoolingType.SUM
    init_std: float = 0.01
    dtype: RowDtype = RowDtype.FLOAT32

    def __post_init__(self) -> None:
        object.__setattr__(self, "feature_names", tuple(self.feature_names))
        for name, kind in (("pooling", PoolingType), ("dtype", RowDtype)):
            if (value := getattr(self, name)) not in list(kind):
                allowed = " or ".join(repr(str(one)) for one in kind)
                raise ValueError(f"table {self.name!r}: {name} must be {allowed}, got {value!r}.")
            object.__setattr__(self, name, kind(value))
        if self.num_embeddings < 1 or self.embedding_dim < 1:
            raise ValueError(
                f"table {self.name!r}: num_embeddings and embedding_dim must be at least 1, "
                f"got {self.num_embeddings} and {self.embedding_dim}."
            )
        if self.num_embeddings > NUM_IDS:
            raise ValueError(
                f"table {self.name!r}: num_embeddings must be at most 2**64 - 1 (ids are int64, and -1 is none), got "
                f"{self.num_embeddings}."
            )
        if not self.name or "." in self.name:
            raise ValueError(f"a table name must not be empty or hold a dot (it is part of keys), got {self.name!r}.")
        if not self.feature_names:
            raise ValueError(f"table {self.name!r}: feature_names must name at least one feature.")
