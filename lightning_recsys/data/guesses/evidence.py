"""The evidence of rows about a column: how well it tells the labels of rows that were held out."""

# Shape suffixes: N rows, K folds, V values of a column, B bins of them, C columns.

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

_FOLDS = 5
_FEWEST = 20  # rows of either label, below which rows say nothing
_SMOOTHING = (1, 4, 16, 64, 256, 1024)  # rows that the rate around a value counts for; the best is taken
_BINS = (4, 8, 16, 32, 64)  # of equally many rows each; the best is taken
_BIN_SMOOTHING = 10  # the same for a bin
_GROUPS = 1024  # of values of one column, where it has more and single ones are no ids
_CLEAR = 2  # standard errors of a difference that is no chance
_WORTH = 1e-3  # share of the loss without any column, below which a difference is not worth a word
_ITERATIONS = 12  # of Newton's method
_SUSPECT = 0.9  # AUC from which on a column is compared with all others together
_FAR_ABOVE = 3  # times as many pairs of rows that all others together put in the wrong order
_JOINT_ROWS = 50_000  # rows that are enough to fit a number for each column


@dataclass(frozen=True)
class HeldOut:
    """The rows of a sample whose labels are known, dealt to folds, each of which is held out once.

    Folds are drawn, the same ones each time, and have equal shares of either label.

    Args:
        places_N: Which rows of the sample they are.
        labels_N: The label of each of them, 0 or 1.
        folds_N: The fold of each row, from 0 on.
    """

    places_N: NDArray[np.int64]
    labels_N: Numbers
    folds_N: NDArray[np.int64]

    @classmethod
    def deal(cls, labels: NDArray[np.float32]) -> HeldOut | None:
        """Deal the rows of a sample to folds.

        Args:
            labels: 0 or 1 for each row of the sample, NaN where it has none.

        Returns:
            ``None`` where fewer than 20 rows have either label: so few say nothing about a column.
        """
        places_N = np.flatnonzero(~np.isnan(labels))
        labels_N = labels[places_N].astype(np.float64)
        if min(labels_N.sum(), len(labels_N) - labels_N.sum()) < _FEWEST:
            return None
        order = np.random.default_rng(0).permutation(len(labels_N))
        order = order[np.argsort(labels_N[order], kind="stable")]
        folds_N = np.empty(len(order), dtype=np.int64)
        folds_N[order] = np.arange(len(order)) % _FOLDS
        return cls(places_N, labels_N, folds_N)


class ColumnEvidence:
    """How often each value of a column comes with each label, in each fold of the rows.

    A prediction has one probability for each value in each fold, learned from the other folds. A missing value is a
    value like others, without a place among numbers.

    Args:
        held_out: The rows with known labels, and the fold of each.
        codes: Which value each row of the sample has, from 0 on; -1 where it is missing.
        numbers: The values as numbers in increasing order, or ``None`` where they are words.
        single: Whether single numbers may be ids. Otherwise neighbours are put together where they are many.
    """

    def __init__(
        self, held_out: HeldOut, codes: NDArray[np.int64], numbers: Numbers | None, *, single: bool = True
    ) -> None:
        self.held_out = held_out
        codes_N = codes[held_out.places_N]
        used_V, codes_N = _used(codes_N)
        numbers = None if numbers is None else numbers[used_V]
        if numbers is not None and not single and len(numbers) > _GROUPS:
            codes_N, numbers = _grouped(codes_N, numbers)
        num_values = int(codes_N.max(initial=-1)) + 1
        self.codes_N = np.where(codes_N < 0, num_values, codes_N)  # the last is that of missing ones
        self.numbers = numbers
        cells_N, shape = held_out.folds_N * (num_values + 1) + self.codes_N, (_FOLDS, num_values + 1)
        size = shape[0] * shape[1]
        self.rows_KV = np.bincount(cells_N, minlength=size).reshape(shape).astype(np.float64)
        self.positives_KV: Numbers = np.bincount(cells_N, held_out.labels_N, size).reshape(shape).astype(np.float64)
        self.prior_KV = np.broadcast_to(
            self._rates(self.rows_KV.sum(1, keepdims=True), self.positives_KV.sum(1, keepdims=True)), shape
        )

    def median(self, x_V: Numbers) -> float:
        """The median over the rows of a number for each value."""
        order = np.argsort(x_V)
        rows_V = np.cumsum(self.rows_KV[:, :-1].sum(0)[order])
        return float(x_V[order][np.searchsorted(rows_V, rows_V[-1] / 2)])

    @property
    def num_missing(self) -> int:
        """Number of rows without a value."""
        return int(self.rows_KV[:, -1].sum())

    def as_ids(self, around_KV: Numbers | None = None) -> Numbers:
        """Each value has a rate of its own, drawn towards another prediction the more, the fewer rows it has.

        Args:
            around_KV: That other prediction; the share of positives if absent.
        """
        around_KV = self.prior_KV if around_KV is None else around_KV
        return self._best(self._rates(self.rows_KV, self.positives_KV, rows, around_KV) for rows in _SMOOTHING)

    def as_number(self, bins: Sequence[int] = _BINS) -> Numbers:
        """Quantile bins have a rate each, and log odds go in a straight line from one to the next.

        Args:
            bins: How many bins there may be; the best number is taken, of those that are at most half as many as the
                values, or else the first.
        """
        assert self.numbers is not None
        most = max(bins[0], len(self.numbers) // 2)
        return self._best(self._binned(num_bins) for num_bins in bins if num_bins <= most)

    def as_bins(self, num_bins: int) -> tuple[Numbers, Numbers]:
        """Quantile bins have a rate each.

        Returns:
            The prediction, and the least number of each bin but the first.
        """
        assert self.numbers is not None
        starts_B, bin_V = self._bins(num_bins)
        return self._with_missing(self._rates_of_bins(starts_B)[:, bin_V]), self.numbers[starts_B[1:]]

    def as_line(self, x_V: Numbers) -> Numbers:
        """The log odds are a straight line of a number for each value, by logistic regression."""
        rows_KV, positives_KV = (self._others(counts[:, :-1]) for counts in (self.rows_KV, self.positives_KV))
        weights_V = self.rows_KV[:, :-1].sum(0)
        x_V = x_V - np.average(x_V, weights=weights_V)
        x_V = x_V / max(np.sqrt(np.average(x_V**2, weights=weights_V)), 1e-30)
        prior_K1 = self.prior_KV[:, :1]
        constant_K, slope_K = _logit(prior_K1)[:, 0].copy(), np.zeros(_FOLDS)
        for _ in range(_ITERATIONS):
            p_KV = sigmoid(constant_K[:, None] + slope_K[:, None] * x_V)
            error_KV, curve_KV = positives_KV - rows_KV * p_KV, rows_KV * p_KV * (1 - p_KV)
            g0, g1 = error_KV.sum(1), error_KV @ x_V - slope_K
            h00, h01, h11 = curve_KV.sum(1) + 1e-6, curve_KV @ x_V, curve_KV @ x_V**2 + 1
            determinant = h00 * h11 - h01**2
            constant_K += np.clip((h11 * g0 - h01 * g1) / determinant, -1, 1)
            slope_K += np.clip((h00 * g1 - h01 * g0) / determinant, -1, 1)
        return self._with_missing(sigmoid(constant_K[:, None] + slope_K[:, None] * x_V))

    def if_missing(self) -> Numbers:
        """All that is known of a row is whether it has a value."""
        shape = (_FOLDS, self.rows_KV.shape[1] - 1)
        rows, positives = (counts[:, :-1].sum(1, keepdims=True) for counts in (self.rows_KV, self.positives_KV))
        p_K1 = self._rates(rows, positives, _BIN_SMOOTHING, self.prior_KV[:, :1])
        return self._with_missing(np.broadcast_to(p_K1, shape))

    def loss(self, p_KV: Numbers) -> float:
        """Mean log loss of the rows, in nats."""
        return float(self._sum(-np.log(p_KV), -np.log1p(-p_KV)) / self._num_rows)

    def is_better(self, p_KV: Numbers, q_KV: Numbers) -> bool:
        """Whether a prediction has a smaller loss than another, by so much that it is neither chance nor nothing."""
        if_1, if_0 = np.log(p_KV / q_KV), np.log1p(-p_KV) - np.log1p(-q_KV)
        gain, squares = (self._sum(if_1**power, if_0**power) / self._num_rows for power in (1, 2))
        chance = np.sqrt(max(squares - gain**2, 0) / self._num_rows)
        return bool(gain > max(_CLEAR * chance, _WORTH * self.loss(self.prior_KV)))

    def auc(self, p_KV: Numbers) -> float:
        """Share of the pairs of a positive and a negative row that a prediction orders, the mean of the folds."""
        areas = []
        for rows_V, positives_V, p_V in zip(self.rows_KV, self.positives_KV, p_KV, strict=True):
            _, place_V = np.unique(p_V, return_inverse=True)
            positives = np.bincount(place_V, positives_V)
            negatives = np.bincount(place_V, rows_V - positives_V)
            below = np.cumsum(negatives) - negatives / 2
            areas.append(float(positives @ below / (positives.sum() * negatives.sum())))
        return float(np.mean(areas))

    def log_odds(self, p_KV: Numbers) -> Numbers:
        """For each row how much a prediction adds to the log odds of the share of positives."""
        odds_N: Numbers = (_logit(p_KV) - _logit(self.prior_KV))[self.held_out.folds_N, self.codes_N]
        return odds_N

    @property
    def _num_rows(self) -> int:
        return len(self.held_out.labels_N)

    def _sum(self, if_1_KV: Numbers, if_0_KV: Numbers) -> float:
        """The sum over all rows of what stands there for each value, if the label is 1 and if it is 0."""
        return float((self.positives_KV * if_1_KV + (self.rows_KV - self.positives_KV) * if_0_KV).sum())

    def _best(self, predictions: Iterable[Numbers]) -> Numbers:
        return min(predictions, key=self.loss)

    def _with_missing(self, p_KV: Numbers) -> Numbers:
        """A prediction of the values that are there, and behind it the rate of those that are missing."""
        rows, positives = self.rows_KV[:, -1:], self.positives_KV[:, -1:]
        return np.hstack([p_KV, self._rates(rows, positives, _BIN_SMOOTHING, self.prior_KV[:, :1])])

    def _binned(self, num_bins: int) -> Numbers:
        starts_B, _ = self._bins(num_bins)
        rows_V, middle_V = self.rows_KV[:, :-1].sum(0), self._middle()
        middle_B = np.add.reduceat(middle_V * rows_V, starts_B) / np.add.reduceat(rows_V, starts_B)
        odds = [np.interp(middle_V, middle_B, odds_B) for odds_B in _logit(self._rates_of_bins(starts_B))]
        return self._with_missing(sigmoid(np.array(odds)))

    def _middle(self) -> Numbers:
        """For each value the share of the rows below it, and half of its own."""
        rows_V = self.rows_KV[:, :-1].sum(0)
        middle_V: Numbers = (np.cumsum(rows_V) - rows_V / 2) / rows_V.sum()
        return middle_V

    def _bins(self, num_bins: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The first value of each quantile bin that has one, and the bin of each value."""
        begins_V = np.diff(np.floor(self._middle() * num_bins), prepend=-1) > 0
        return np.flatnonzero(begins_V), np.cumsum(begins_V) - 1

    def _rates_of_bins(self, starts_B: NDArray[np.int64]) -> Numbers:
        rows_KB, positives_KB = (
            np.add.reduceat(x[:, :-1], starts_B, axis=1) for x in (self.rows_KV, self.positives_KV)
        )
        return self._rates(rows_KB, positives_KB, _BIN_SMOOTHING, self.prior_KV[:, :1])

    @staticmethod
    def _others(counts_KX: Numbers) -> Numbers:
        """For each fold what the others have counted."""
        others_KX: Numbers = counts_KX.sum(0) - counts_KX
        return others_KX

    def _rates(
        self, rows_KX: Numbers, positives_KX: Numbers, smoothing: int = 0, around: Numbers | float = 0.0
    ) -> Numbers:
        """For each fold the share of positives among the others' rows and so many more, which have the rate around."""
        rates_KX: Numbers = (self._others(positives_KX) + smoothing * around) / (self._others(rows_KX) + smoothing)
        return rates_KX


def far_above_the_others(columns: Mapping[str, tuple[ColumnEvidence, Numbers]]) -> dict[str, tuple[float, float]]:
    """The columns that by themselves tell far more than all others together.

    Args:
        columns: For each column the evidence and its best prediction. All are of the same rows.

    Returns:
        For each of those columns its AUC, and that of all others together, by a logistic regression of their log odds.
    """
    aucs = {name: evidence.auc(p_KV) for name, (evidence, p_KV) in columns.items()}
    suspects = [name for name, auc in aucs.items() if auc > _SUSPECT]
    if not suspects or len(columns) < 2:
        return {}
    held_out = columns[suspects[0]][0].held_out
    some = slice(None, None, -(-len(held_out.labels_N) // _JOINT_ROWS))
    odds_NC = np.stack([evidence.log_odds(p_KV)[some] for evidence, p_KV in columns.values()], axis=1)
    found = {}
    for name in suspects:
        others = _joint_auc(odds_NC[:, [other != name for other in columns]], held_out.labels_N[some])
        if 1 - others > _FAR_ABOVE * (1 - aucs[name]):
            found[name] = (aucs[name], others)
    return found


def auc_together(columns: Sequence[tuple[ColumnEvidence, Numbers]]) -> float:
    """AUC of a logistic regression of the log odds of columns.

    Args:
        columns: For each column the evidence and its best prediction, one at least. All are of the same rows.
    """
    labels_N = columns[0][0].held_out.labels_N
    some = slice(None, None, -(-len(labels_N) // _JOINT_ROWS))
    return _joint_auc(np.stack([evidence.log_odds(p_KV)[some] for evidence, p_KV in columns], axis=1), labels_N[some])


def fit_together(x_NC: Numbers, y_N: Numbers) -> Numbers:
    """Log odds by a logistic regression, by Newton's method. A number a column is too few to fit the rows by chance.

    Args:
        x_NC: Numbers of each row.
        y_N: Labels, 0 or 1.
    """
    x_NC = np.hstack([np.ones((len(x_NC), 1)), x_NC])
    weights_C = np.zeros(x_NC.shape[1])
    weights_C[0] = _logit(float(y_N.mean()))
    for _ in range(_ITERATIONS):
        p_N = sigmoid(x_NC @ weights_C)
        curve_CC = (x_NC * (p_N * (1 - p_N))[:, None]).T @ x_NC + np.eye(len(weights_C))
        step_C = np.linalg.solve(curve_CC, x_NC.T @ (y_N - p_N) - weights_C)
        weights_C = weights_C + step_C / max(1.0, float(np.abs(step_C).max()))
    odds_N: Numbers = x_NC @ weights_C
    return odds_N


def _joint_auc(x_NC: Numbers, y_N: Numbers) -> float:
    """AUC of a logistic regression."""
    _, place_N = np.unique(fit_together(x_NC, y_N), return_inverse=True)
    positives, negatives = np.bincount(place_N, y_N), np.bincount(place_N, 1 - y_N)
    return float(positives @ (np.cumsum(negatives) - negatives / 2) / (positives.sum() * negatives.sum()))


def _used(codes_N: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Which codes are there, and the rows with these counted anew."""
    there_V = np.bincount(codes_N + 1)[1:] > 0
    return np.flatnonzero(there_V), np.append(np.cumsum(there_V) - 1, -1)[codes_N]


def _grouped(codes_N: NDArray[np.int64], numbers: Numbers) -> tuple[NDArray[np.int64], Numbers]:
    """Neighbours among many numbers put together, about as many rows to each group; the numbers are their means."""
    known_N = codes_N >= 0
    rows_V = np.bincount(codes_N[known_N], minlength=len(numbers)).astype(np.float64)
    share_V = (np.cumsum(rows_V) - rows_V / 2) / max(rows_V.sum(), 1)
    _, group_V = np.unique(np.floor(share_V * _GROUPS), return_inverse=True)
    means = np.bincount(group_V, rows_V * numbers) / np.maximum(np.bincount(group_V, rows_V), 1)
    return np.where(known_N, group_V[codes_N], -1), means


def _logit(p: Numbers | float) -> Numbers:
    odds: Numbers = np.log(p) - np.log1p(-p)
    return odds


def sigmoid(x: Numbers) -> Numbers:
    """The probability of log odds."""
    p: Numbers = 1 / (1 + np.exp(-np.clip(x, -30, 30)))
    return p
