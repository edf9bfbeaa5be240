"""Fully connected layers."""

# Shape suffixes: B batch, F fields, N numeric features, D embedding dim.

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_recsys.models.layers.fieldwise import FieldwiseLinear
from lightning_recsys.models.layers.linear import Linear
from lightning_recsys.models.layers.normalization import Normalization, make_normalization

# In place only where the backward pass needs the output and not the input.
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": partial(nn.ReLU, inplace=True),
    "gelu": nn.GELU,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
}


class MLP(nn.Sequential):
    r"""Hidden layers, each linear, (normalisation,) activation, (dropout); then a linear output where asked for.

    .. math:: h_{i+1} = \sigma(W_i h_i + b_i)

    Weights start from N(0, 2 / (in + out)) (Glorot, as in the reference code of DLRM), biases at 0.

    Args:
        in_features: Width of the input.
        hidden: Width of each hidden layer; may be empty.
        out_features: Outputs of a last layer without activation; ``None`` for no such layer.
        activation: One of ``relu``, ``gelu``, ``sigmoid``, ``silu``, ``tanh``.
        dropout: Probability that an activation is zeroed in training, in ``[0, 1)``.
        normalization: How the inputs of each activation are normalised: ``none``, ``batch``, or ``local``
            (:class:`~lightning_recsys.models.layers.LocalNormalization`).

    Shape:
        - input: ``[B, in_features]``.
        - output: ``[B, out_features]``, or ``[B, hidden[-1]]``.

    Raises:
        ValueError: a width is below 1, the activation or normalisation is unknown, or ``dropout`` is out of range.
    """

    def __init__(
        self,
        in_features: int,
        hidden: Sequence[int],
        *,
        out_features: int | None = None,
        activation: str = "relu",
        dropout: float = 0.0,
        normalization: Normalization = "none",
    ) -> None:
        modules: list[nn.Module] = []
        for fan_in, fan_out in pairwise((in_features, *hidden)):
            after = after_linear(fan_out, activation, dropout=dropout, normalization=normalization)
            modules += [Linear(fan_in, fan_out), *after]
        if out_features is not None:
            modules.append(Linear((in_features, *hidden)[-1], out_features))
        super().__init__(*modules)


class DeepTower(nn.Module):
    r"""The deep part of a model: an :class:`MLP` whose first layer is a :class:`FieldwiseLinear`, ending in one logit.

    .. math::
        h_1 = \sigma(\text{FieldwiseLinear}(x, e)), \qquad h_{l+1} = \sigma(W_l h_l + b_l), \qquad y = w^\top h_L + b

    Args:
        num_dense: Numeric features ``N``; 0 is fine.
        num_fields: Fields ``F``.
        embedding_dim: Width ``D``.
        hidden: Width of each hidden layer, at least one.
        activation: Activation of every layer; see :class:`MLP`.
        dropout: Probability that an activation is zeroed in training; see :class:`MLP`.
        normalization: How the inputs of each activation are normalised; see :class:`MLP`.

    Shape:
        - dense: ``[B, N]``; embeddings: ``[B, F, D]``.
        - output: ``[B]``.

    Raises:
        ValueError: there is no hidden layer, or as in :class:`MLP`.
    """

    def __init__(
        self,
        num_dense: int,
        *,
        num_fields: int,
        embedding_dim: int,
        hidden: Sequence[int],
        activation: str = "relu",
        dropout: float = 0.0,
        normalization: Normalization = "none",
    ) -> None:
        super().__init__()
        if not hidden:
            raise ValueError("model.hidden must name the width of at least one layer, got none. Try [400, 400].")
        after = after_linear(hidden[0], activation, dropout=dropout, normalization=normalization)
        self.first = FieldwiseLinear(
            num_dense, num_fields=num_fields, embedding_dim=embedding_dim, out_features=hidden[0]
        )
        self.rest = nn.Sequential(
            *after,
            *MLP(
                hidden[0],
                hidden[1:],
                out_features=1,
                activation=activation,
                dropout=dropout,
                normalization=normalization,
            ),
        )

    def partition(self, fields: Sequence[int], group: ProcessGroup, *, cut_dense: bool = False) -> None:
        """Cut the first layer by fields; as :meth:`FieldwiseLinear.partition`."""
        self.first.partition(fields, group, cut_dense=cut_dense)

    def forward(self, dense: Tensor, embeddings_BFD: Tensor) -> Tensor:
        """The tower's logit; see the class for shapes."""
        logits: Tensor = self.rest(self.first(dense, embeddings_BFD))
        return logits.squeeze(1)


def begin(tower: nn.Module, dense: Tensor, embeddings_BFD: Tensor) -> Callable[[], Tensor]:
    """Begin with a :class:`DeepTower`, so that other parts of a model are computed while partial results travel.

    Returns:
        A function for the tower's logit. Of a tower that is not cut, or compiled, all is computed when it is called.
    """
    if not isinstance(tower, DeepTower) or tower.first.share is None:
        return partial(tower, dense, embeddings_BFD)
    first = tower.first.start(dense, embeddings_BFD)

    def finish() -> Tensor:
        logits: Tensor = tower.rest(first())
        return logits.squeeze(1)

    return finish


def after_linear(width: int, activation: str, *, dropout: float, normalization: Normalization) -> list[nn.Module]:
    """The modules behind the linear part of a hidden layer of the given width.

    Raises:
        ValueError: ``width`` is below 1, the activation or normalisation is unknown, or ``dropout`` is out of range.
    """
    if width < 1:
        raise ValueError(f"the width of a hidden layer must be at least 1, got {width}.")
    if activation not in ACTIVATIONS:
        raise ValueError(f"model.activation must be one of {sorted(ACTIVATIONS)}, got {activation!r}.")
    if not 0 <= dropout < 1:
        raise ValueError(f"model.dropout must be in [0, 1), got {dropout}. 0 switches it off.")
    drop = [nn.Dropout(dropout)] if dropout else []
    return [*make_normalization(normalization, width), ACTIVATIONS[activation](), *drop]
