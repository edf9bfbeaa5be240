"""Platt scaling."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from lightning_recsys.metrics.functional._inputs import check_inputs


def platt_scaling(logits: Tensor, target: Tensor) -> tuple[float, float]:
    r"""Two numbers that calibrate a model's logits, by maximum likelihood on rows that it was not trained on.

    .. math:: p_i = \sigma(a z_i + b)

    with the targets of Platt 1999 ("Probabilistic outputs for support vector machines", section 2.2),
    :math:`(N_+ + 1) / (N_+ + 2)` for clicks and :math:`1 / (N_- + 2)` for the others, which keep both numbers finite
    where the logits tell all labels apart.

    Args:
        logits: Logits of the model, ``[N]``, any floating dtype.
        target: Labels, 0 or 1, ``[N]``.

    Returns:
        The scale ``a`` and the shift ``b`` of the logits.

    Raises:
        ValueError: there are no rows, or the shapes differ.

    >>> a, b = platt_scaling(torch.tensor([-4.0, 4.0, -4.0, 4.0] * 50), torch.tensor([0.0, 1.0, 1.0, 0.0] * 50))
    >>> round(abs(a), 6), round(abs(b), 6)  # those logits tell nothing
    (0.0, 0.0)
    """
    check_inputs(logits, target, from_logits=True)
    if not target.numel():
        raise ValueError("Platt scaling needs at least one row, got none.")
    logits, is_click = logits.detach().double(), target > 0.5
    clicks = int(is_click.sum())
    smoothed = torch.where(is_click, (clicks + 1) / (clicks + 2), 1 / (target.numel() - clicks + 2)).double()
    numbers = torch.tensor([1.0, 0.0], dtype=torch.float64, device=logits.device, requires_grad=True)
    search = torch.optim.LBFGS([numbers], max_iter=100, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        search.zero_grad()
        value = binary_cross_entropy_with_logits(numbers[0] * logits + numbers[1], smoothed)
        value.backward()  # type: ignore[no-untyped-call]
        return value

    with torch.enable_grad():
        search.step(loss)  # type: ignore[no-untyped-call]
    a, b = numbers.tolist()
    return a, b
