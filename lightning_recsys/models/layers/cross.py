"""Cross layers of Deep & Cross networks, versions 1 and 2, and the output over what they cross."""

# Shape suffixes: B batch, F fields, D embedding dim, K inputs, L layers, R rank.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx, nn
from torch.distributed import ProcessGroup

from lightning_recsys.models.layers.linear import affine
from lightning_recsys.partition.field_layer import FieldLayer
from lightning_recsys.partition.pieces import Sends


def flatten_inputs(dense: Tensor, embeddings_BFD: Tensor) -> Tensor:
    """Embeddings ``[B, F, D]`` and numeric features ``[B, N]`` side by side: ``[B, F D + N]``."""
    return _beside(embeddings_BFD.flatten(1), dense)


@fx.wrap  # one call of a traced model: which branch it takes is for the batch to say
def _beside(flat: Tensor, dense: Tensor) -> Tensor:
    return torch.cat([flat, dense], 1) if dense.shape[1] else flat


class InputLayer(FieldLayer):
    """A layer over ``[embeddings, numeric features]``, of which each process can have some columns.

    Numeric features, and what belongs to them, are on the process that has field 0.

    Args:
        in_features: Inputs ``K``.
        embedding_dim: Columns of a field.
        num_dense: Columns behind the fields'.
    """

    def __init__(self, in_features: int, *, embedding_dim: int = 1, num_dense: int = 0) -> None:
        super().__init__()
        self.in_features = in_features
        self._embedding_dim, self._num_dense = embedding_dim, num_dense

    def columns_of(self, fields: Sequence[int]) -> Tensor:
        """Positions of some fields' columns, and of the numeric ones where field 0 is among them.

        >>> InputLayer(7, embedding_dim=2, num_dense=1).columns_of((0, 2)).tolist()
        [0, 1, 4, 5, 6]
        """
        embedded = self.in_features - self._num_dense
        columns = torch.arange(embedded).view(-1, self._embedding_dim)[list(fields)].flatten()
        return torch.cat([columns, torch.arange(embedded, self.in_features)]) if 0 in fields else columns


class InputWeights(InputLayer):
    """One output without bias, ``x w``: the last layer over crossed inputs.

    Cut point: the product of some columns is additive over disjoint sets of columns.

    Args:
        in_features: Inputs ``K``.
        embedding_dim: Columns of a field.
        num_dense: Columns behind the fields'.

    Shape:
        - input: ``[B, K]``; output: ``[B]``; weight: ``[1, K]``.

    Weights start from N(0, 2 / (K + 1)) (Glorot).
    """

    def __init__(self, in_features: int, *, embedding_dim: int = 1, num_dense: int = 0) -> None:
        super().__init__(in_features, embedding_dim=embedding_dim, num_dense=num_dense)
        self.weight = nn.Parameter(torch.empty(1, in_features))
        nn.init.xavier_normal_(self.weight)

    def own_parts(self, fields: Sequence[int]) -> dict[str, tuple[int, Tensor]]:  # noqa: D102 - inherited
        return {"weight": (1, self.columns_of(fields))}

    @property
    def sends(self) -> Sends:  # noqa: D102 - inherited
        return Sends("all-reduce", 1)

    def forward(self, x_BK: Tensor) -> Tensor:
        """The product; see the class for shapes."""
        (product_B,) = self.sum_partials(x_BK @ self.weight[0])
        return product_B


class CrossNetwork(InputLayer):
    r"""All cross layers of DCN version 1, in one matrix product.

    .. math:: x_{l+1} = x_0\, (x_l^\top w_l) + b_l + x_l, \qquad l = 0, \dots, L-1

    By induction :math:`x_l = \alpha_l x_0 + \beta_l` with one scalar :math:`\alpha_l` for each example and
    :math:`\beta_l = \sum_{k<l} b_k`, the same for all examples. So the layers need ``x_0`` only through
    :math:`p_l = x_0^\top w_l`:

    .. math:: \alpha_0 = 1, \qquad \alpha_{l+1} = \alpha_l (1 + p_l) + c_l, \qquad c_l = \beta_l^\top w_l

    which is 2.4 times faster than layer by layer at 2048 x 429 with 3 layers, forward and backward.

    Cut point: :meth:`partial`, ``p`` and ``c`` of all layers, is additive over disjoint sets of inputs, with the
    columns ``weight[:, those]`` and ``bias[:, those]``; :meth:`combine` gives each process its own columns of ``x_L``.
    Where only a product :math:`x_L^\top w` is wanted, :meth:`project` gives it from one more scalar.

    Args:
        in_features: Inputs ``K``.
        num_layers: Layers ``L``, at least 1.
        embedding_dim: Columns of a field, to cut by.
        num_dense: Columns behind the fields'.

    Shape:
        - input: ``[B, K]``; output: ``[B, K]``.
        - weight and bias: ``[L, K]``.

    Weights start from N(0, 2 / (K + 1)) (Glorot for one output), biases at 0.

    Raises:
        ValueError: ``num_layers`` is below 1.

    Reference: Wang et al. 2017, Deep & Cross Network for Ad Click Predictions (cross network).
    Differs from the paper: the order of the additions, so results agree to rounding.
    """

    def __init__(self, in_features: int, num_layers: int, *, embedding_dim: int = 1, num_dense: int = 0) -> None:
        super().__init__(in_features, embedding_dim=embedding_dim, num_dense=num_dense)
        _check_num_layers(num_layers)
        self.weight = nn.Parameter(torch.empty(num_layers, in_features).normal_(0.0, (2 / (in_features + 1)) ** 0.5))
        self.bias = nn.Parameter(torch.zeros(num_layers, in_features))

    def own_parts(self, fields: Sequence[int]) -> dict[str, tuple[int, Tensor]]:  # noqa: D102 - inherited
        return dict.fromkeys(("weight", "bias"), (1, self.columns_of(fields)))

    @property
    def sends(self) -> Sends:
        """The exchange of :meth:`project`, its last number for the weights; :meth:`forward` sends gradients, too."""
        return Sends("all-reduce", len(self.weight), len(self.weight) + 1)

    def partial(self, x0_BK: Tensor) -> tuple[Tensor, Tensor]:
        """These inputs' shares of ``p``, ``[B, L]``, and of ``c``, ``[L]``."""
        beta_LK = self.bias.cumsum(0) - self.bias
        return x0_BK @ self.weight.t(), (beta_LK * self.weight).sum(1)

    def combine(self, x0_BK: Tensor, p_BL: Tensor, c_L: Tensor) -> Tensor:
        """The last layer's output at these inputs, ``[B, K]``, from the sums over all inputs."""
        alpha_B = _alpha(p_BL.to(x0_BK.dtype), c_L)
        return torch.addcmul(self.bias.sum(0), x0_BK, alpha_B.unsqueeze(1))

    def forward(self, x0_BK: Tensor) -> Tensor:
        """All layers; see the class for shapes. Of a layer that is cut, own columns in and out."""
        return self.combine(x0_BK, *self.sum_partials(*self.partial(x0_BK), cut_after=True))

    def project(self, x0_BK: Tensor, weights: InputWeights) -> Tensor:
        r"""The product of the last layer's output with a vector, ``[B]``, without that output.

        .. math:: x_L^\top w = \alpha_L\, (x_0^\top w) + \beta_L^\top w

        Args:
            x0_BK: As for :meth:`forward`.
            weights: Cut as this layer is.
        """
        weight_MK = torch.cat([self.weight, weights.weight])
        beta_MK = torch.cat([torch.zeros_like(weights.weight), self.bias.cumsum(0)])
        p_BM, c_M = self.sum_partials(x0_BK @ weight_MK.t(), (beta_MK * weight_MK).sum(1))
        p_BM = p_BM.to(x0_BK.dtype)
        return torch.addcmul(c_M[-1], _alpha(p_BM[:, :-1], c_M[:-1]), p_BM[:, -1])


@fx.wrap  # one call of a traced model, which could not loop over the layers
def _alpha(p_BL: Tensor, c_L: Tensor) -> Tensor:
    """Float32 in mixed precision, too: bfloat16 would lose ``p`` in ``1 + p``."""
    alpha_B = torch.ones_like(p_BL[:, 0])
    for p_B, c in zip(p_BL.unbind(1), c_L.unbind(), strict=True):
        alpha_B = torch.addcmul(alpha_B + c, alpha_B, p_B)
    return alpha_B


class CrossLayer(nn.Module):
    r"""One cross layer of DCN version 2 with a full matrix.

    .. math:: x_{l+1} = x_0 \odot (x_l W_l + b_l) + x_l

    Not cut by fields: though :meth:`partial` is additive over disjoint sets of inputs, with the rows ``weight[those]``,
    it is as wide as all inputs, in each layer forward and backward. Embeddings of all fields, gathered once, are less.

    Args:
        in_features: Inputs ``K``.

    Shape:
        - x0 and x: ``[B, K]``; output: ``[B, K]``.
        - weight: ``[K, K]``, input by output; bias: ``[K]``.

    Weights start from N(0, 1 / K) (Glorot), the bias at 0.

    Reference: Wang et al. 2021, DCN V2 (cross network).
    """

    def __init__(self, in_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, in_features))
        self.bias = nn.Parameter(torch.zeros(in_features))
        nn.init.xavier_normal_(self.weight)

    def partial(self, x_BK: Tensor) -> Tensor:
        """These inputs' share of ``x W``, ``[B, K]``."""
        return affine(x_BK, self.weight)

    def combine(self, x0_BK: Tensor, x_BK: Tensor, partial_BK: Tensor) -> Tensor:
        """The layer's output, ``[B, K]``, from the sum over all inputs."""
        return torch.addcmul(x_BK, x0_BK, partial_BK + self.bias)

    def forward(self, x0_BK: Tensor, x_BK: Tensor) -> Tensor:
        """The whole layer, one addition cheaper than :meth:`combine` of :meth:`partial`."""
        return torch.addcmul(x_BK, x0_BK, affine(x_BK, self.weight, self.bias))


class LowRankCrossLayer(InputLayer):
    r"""One cross layer of DCN version 2 whose matrix is a product of two thin ones.

    .. math:: x_{l+1} = x_0 \odot (x_l V_l U_l + b_l) + x_l

    Cut point: :meth:`partial`, the ``R`` numbers between the two, is additive over disjoint sets of inputs, with the
    rows ``down[those]``; :meth:`combine` gives each process its own columns, with ``up[:, those]``. As each process
    goes on with its own columns, the gradient of those ``R`` numbers is summed over the processes, too.

    Args:
        in_features: Inputs ``K``.
        rank: ``R``; worth it below ``K / 2``.
        embedding_dim: Columns of a field, to cut by.
        num_dense: Columns behind the fields'.

    Shape:
        - x0 and x: ``[B, K]``; output: ``[B, K]``.
        - down (V): ``[K, R]``; up (U): ``[R, K]``; bias: ``[K]``.

    Weights start from N(0, 2 / (K + R)) (Glorot), the bias at 0.

    Raises:
        ValueError: ``rank`` is below 1.

    Reference: Wang et al. 2021, DCN V2 (low-rank form, without the mixture of experts).
    """

    def __init__(self, in_features: int, rank: int, *, embedding_dim: int = 1, num_dense: int = 0) -> None:
        super().__init__(in_features, embedding_dim=embedding_dim, num_dense=num_dense)
        if rank < 1:
            raise ValueError(f"model.rank must be at least 1, or null for the full matrix, got {rank}.")
        self.down = nn.Parameter(torch.empty(in_features, rank))
        self.up = nn.Parameter(torch.empty(rank, in_features))
        self.bias = nn.Parameter(torch.zeros(in_features))
        nn.init.xavier_normal_(self.down)
        nn.init.xavier_normal_(self.up)

    def own_parts(self, fields: Sequence[int]) -> dict[str, tuple[int, Tensor]]:  # noqa: D102 - inherited
        columns = self.columns_of(fields)
        return {"down": (0, columns), "up": (1, columns), "bias": (0, columns)}

    @property
    def sends(self) -> Sends:  # noqa: D102 - inherited
        return Sends("all-reduce", self.down.shape[1], gradients=True)

    def partial(self, x_BK: Tensor) -> Tensor:
        """These inputs' share of ``x V``, ``[B, R]``."""
        return affine(x_BK, self.down)

    def combine(self, x0_BK: Tensor, x_BK: Tensor, partial_BR: Tensor) -> Tensor:
        """The layer's output, ``[B, K]``, from the sum over all inputs."""
        return torch.addcmul(x_BK, x0_BK, affine(partial_BR, self.up, self.bias))

    def forward(self, x0_BK: Tensor, x_BK: Tensor) -> Tensor:
        """The whole layer; see the class for shapes. Of a layer that is cut, own columns in and out."""
        return self.combine(x0_BK, x_BK, *self.sum_partials(self.partial(x_BK), cut_after=True))


class CrossNetworkV2(nn.Module):
    """The cross layers of DCN version 2, one behind the other.

    Args:
        in_features: Inputs ``K``.
        num_layers: Layers, at least 1.
        rank: ``R`` of :class:`LowRankCrossLayer`; ``None`` for full matrices (:class:`CrossLayer`), not to be cut.
        embedding_dim: Columns of a field, to cut by.
        num_dense: Columns behind the fields'.

    Shape:
        - input: ``[B, K]``; output: ``[B, K]``.

    Raises:
        ValueError: ``num_layers`` or ``rank`` is below 1.
    """

    def __init__(
        self,
        in_features: int,
        num_layers: int,
        *,
        rank: int | None = None,
        embedding_dim: int = 1,
        num_dense: int = 0,
    ) -> None:
        super().__init__()
        _check_num_layers(num_layers)
        self.layers = nn.ModuleList(
            CrossLayer(in_features)
            if rank is None
            else LowRankCrossLayer(in_features, rank, embedding_dim=embedding_dim, num_dense=num_dense)
            for _ in range(num_layers)
        )

    def partition(self, fields: Sequence[int], group: ProcessGroup) -> None:
        """Keep the columns of some fields only, of all layers; see :meth:`FieldLayer.partition`.

        Raises:
            TypeError: the layers have full matrices.
        """
        for layer in self.layers:
            if not isinstance(layer, LowRankCrossLayer):
                raise TypeError("cross layers with full matrices cannot be cut by field: set model.rank.")
            layer.partition(fields, group)

    def forward(self, x0_BK: Tensor) -> Tensor:
        """All layers; see the class for shapes."""
        x_BK = x0_BK
        for layer in self.layers:
            x_BK = layer(x0_BK, x_BK)
        return x_BK


def _check_num_layers(num_layers: int) -> None:
    if num_layers < 1:
        raise ValueError(f"model.num_cross_layers must be at least 1, got {num_layers}. 3 is the usual choice.")
