"""Pairs of columns that tell more together than apart, by the labels of held-out rows."""

# Shape suffixes: N rows, F folds, C columns, V values of a column, or pairs of values of two.

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from lightning_recsys.data.guesses.evidence import ColumnEvidence, Numbers, fit_together, sigmoid

_ROWS = 30_000  # that are enough to see an effect which is worth a feature
_COLUMNS = 8  # that tell most by themselves, of which every two are tried
_CLEAR = 4  # standard errors of a gain that is no chance, where so many pairs are tried
_WORTH = 1e-3  # share of the loss without any column that a cross has to gain
_SMOOTHING = (4, 32, 256)  # rows that an effect of nothing counts for; the best is taken
_SWEEPS = 3  # over the effects that are fitted together


@dataclass(frozen=True)
class Cross:
    """A pair of columns whose values together tell what neither tells alone.

    Args:
        columns: The two categorical columns, as the table calls them.
        together: Held-out log loss of all columns and the pair, in nats.
        apart: The same without the pair.
    """

    columns: tuple[str, str]
    together: float
    apart: float


def find_crosses(columns: Mapping[str, tuple[ColumnEvidence, Numbers]], categories: Sequence[str]) -> list[Cross]:
    """The pairs of categorical columns that are worth a cross, the best first.

    The log odds of all columns, each by itself, are added up by a logistic regression. To them come effects of the
    values of both columns, and then effects of pairs of values, each fitted to the rows of all folds but one and judged
    by that one. A cross gains more than four standard errors, and more than a thousandth of the loss without any
    column. A pair most of whose values are there once is not tried.

    Args:
        columns: For each column the evidence and its best prediction. All are of the same rows.
        categories: The columns to make pairs of; the eight that tell most by themselves are.
    """
    if len(categories) < 2:
        return []
    evidences = [evidence for evidence, _ in columns.values()]
    held_out = evidences[0].held_out
    some = slice(None, None, -(-len(held_out.labels_N) // _ROWS))
    rows = _Rows(held_out.labels_N[some], held_out.folds_N[some])
    odds_NC = np.stack([evidence.log_odds(p_KV)[some] for evidence, p_KV in columns.values()], axis=1)
    told_N = fit_together(odds_NC, rows.labels_N)
    best = sorted(categories, key=lambda name: -columns[name][0].auc(columns[name][1]))[:_COLUMNS]
    codes = {name: columns[name][0].codes_N[some] for name in best}
    found = []
    for pair in combinations([name for name in categories if name in best], 2):
        first_N, second_N = (np.unique(codes[name], return_inverse=True)[1] for name in pair)
        cells, together_N = np.unique(first_N * (second_N.max() + 1) + second_N, return_inverse=True)
        if 2 * len(cells) > len(rows.labels_N):
            continue
        apart_FN = rows.best(told_N, [first_N, second_N])
        together_FN = rows.best(apart_FN, [together_N])
        apart_N, both_N = rows.losses(apart_FN), rows.losses(together_FN)
        gain_N = apart_N - both_N
        if gain_N.mean() > max(_CLEAR * gain_N.std() / np.sqrt(len(gain_N)), _WORTH * rows.loss_of_all):
            found.append(Cross(pair, float(both_N.mean()), float(apart_N.mean())))
    return sorted(found, key=lambda cross: cross.together - cross.apart)


@dataclass(frozen=True)
class _Rows:
    """Rows dealt to folds F, each of which has log odds that the other folds have taught."""

    labels_N: Numbers
    folds_N: NDArray[np.int64]

    @property
    def loss_of_all(self) -> float:
        """Mean log loss of the share of positives."""
        share = float(self.labels_N.mean())
        return float(-share * np.log(share) - (1 - share) * np.log1p(-share))

    def losses(self, odds_FN: Numbers) -> Numbers:
        """Log loss of each row by the odds of its own fold, which has not seen it."""
        odds_N = odds_FN[self.folds_N, np.arange(len(self.labels_N))]
        losses_N: Numbers = np.logaddexp(0, odds_N) - self.labels_N * odds_N
        return losses_N

    def best(self, odds: Numbers, codes: Sequence[NDArray[np.int64]]) -> Numbers:
        """Log odds with effects of values added, drawn towards nothing as much as held-out rows like best.

        Args:
            odds: Log odds of each row, or of each row in each fold.
            codes: For each column the value that each row has.
        """
        num_folds = int(self.folds_N.max()) + 1
        odds_FN = np.broadcast_to(odds, (num_folds, len(self.labels_N)))
        fitted: Iterable[Numbers] = (self._fitted(odds_FN, codes, smoothing) for smoothing in _SMOOTHING)
        return min(fitted, key=lambda x_FN: float(self.losses(x_FN).mean()))

    def _fitted(self, odds_FN: Numbers, codes: Sequence[NDArray[np.int64]], smoothing: int) -> Numbers:
        share = float(self.labels_N.mean())
        ridge = smoothing * share * (1 - share)
        fitted_FN = odds_FN.copy()
        for fold, odds_N in enumerate(fitted_FN):
            others_N = self.folds_N != fold
            labels_N, taught_N = self.labels_N[others_N], odds_N[others_N]
            effects = [np.zeros(int(codes_N.max()) + 1) for codes_N in codes]
            for _ in range(_SWEEPS):
                for codes_N, effect_V in zip(codes, effects, strict=True):
                    of_N = codes_N[others_N]
                    p_N = sigmoid(taught_N)
                    error_V = np.bincount(of_N, labels_N - p_N, len(effect_V)) - ridge * effect_V
                    step_V = error_V / (np.bincount(of_N, p_N * (1 - p_N), len(effect_V)) + ridge)
                    step_V = np.clip(step_V, -1, 1)
                    effect_V += step_V
                    taught_N = taught_N + step_V[of_N]
            for codes_N, effect_V in zip(codes, effects, strict=True):
                odds_N += effect_V[codes_N]
        return fitted_FN
