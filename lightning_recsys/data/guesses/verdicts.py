"""Guesses held against the rows: what the labels of held-out rows say about each column, and what follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from lightning_recsys.data.guesses.column_guesses import Guess, Sample, guess_dense
from lightning_recsys.data.guesses.crosses import Cross, find_crosses
from lightning_recsys.data.guesses.evidence import ColumnEvidence, HeldOut, Numbers, auc_together, far_above_the_others
from lightning_recsys.data.tables.features import Categorical, Dense

GIVES_AWAY = "gives the label away"
"""How the reason starts for which such a column is ignored."""
_LEAK = 0.99  # AUC above which a column by itself gives the label away
_SKEWED = 10  # largest number over the typical one, from which on its logarithm may be the better feature
_NUM_BINS = 16  # of a number that a straight line does not fit
_SLOW = (4, 8)  # bins that follow a drift and not the hours of a day


@dataclass(frozen=True)
class _Witness:
    """The verdict of the rows on a column.

    Args:
        evidence: How often each value comes with each label.
        best: The prediction with the least loss.
        auc: The largest AUC of any prediction by this column alone.
        auc_if_missing: The AUC of knowing only whether a row has a value.
    """

    evidence: ColumnEvidence
    best: Numbers
    auc: float
    auc_if_missing: float


@dataclass(frozen=True)
class Bins:
    """Bins of a number whose labels do not follow a straight line of it.

    Args:
        column: The column of the number, as the table calls it.
        edges: The least number of each bin but the first.
        in_bins: Held-out log loss of a rate for each bin, in nats.
        on_a_line: The same of a straight line through the number as it is transformed.
    """

    column: str
    edges: tuple[float, ...]
    in_bins: float
    on_a_line: float


@dataclass(frozen=True)
class Verdict:
    """The judgement of the rows on the columns of a table.

    Args:
        guesses: What the columns are, with what the rows say among the reasons.
        drifts: A remark for each time whose labels drift.
        crosses: Pairs of categorical columns that tell more together than apart, the best first.
        bins: Numbers that tell more in bins than on a straight line, the best first.
    """

    guesses: Mapping[str, Guess]
    drifts: Mapping[str, str] = field(default_factory=dict)
    crosses: Sequence[Cross] = ()
    bins: Sequence[Bins] = ()


def judge(samples: Mapping[str, Sample], guesses: Mapping[str, Guess], labels: NDArray[np.float32]) -> Verdict:
    """Correct guesses by the rows.

    Whole numbers become ids, numbers or both, by the log loss of each on held-out rows; where these hardly differ, the
    guess stays. So it is with the logarithm of skewed numbers. A column that by itself has an AUC above .99 is ignored.
    It stays, with a remark, where the columns below that reach .99 together: then the label is easy to tell.

    Args:
        samples: All columns but the label.
        guesses: What they were taken for by their names and values.
        labels: 0 or 1 for each row of the sample, NaN where it has none.

    Returns:
        The guesses as they were given, and nothing else, where fewer than 20 rows have either label.
    """
    held_out = HeldOut.deal(labels)
    if held_out is None:
        return Verdict(guesses)
    judged, drifts, features = dict(guesses), {}, {}
    leaks: dict[str, _Witness] = {}
    for name, sample in samples.items():
        witness = _hear(sample, held_out)
        if witness is None:
            continue
        if witness.auc > _LEAK:
            leaks[name] = witness
            judged[name] = Guess("ignore", None, _gives_away(witness))
        elif guesses[name].key == "time":
            if (drift := _drift(witness.evidence)) is not None:
                drifts[name] = drift
        elif guesses[name].key != "ignore":
            judged[name] = _correct(sample, guesses[name], witness.evidence)
            features[name] = witness
    judged |= _easily_told(samples, guesses, leaks, features)
    heard = {name: (witness.evidence, witness.best) for name, witness in features.items()}
    told = far_above_the_others(heard)
    for name, (auc, others) in told.items():
        remark = (
            f"by itself it has an AUC of {auc:.3f}, all others together {others:.3f}: is it known before the label?"
        )
        judged[name] = replace(judged[name], reason=remark)
    categories = [name for name in features if judged[name].key == "categorical" or judged[name].ids is not None]
    numbers = [name for name in features if judged[name].key == "dense" and judged[name].ids is None]
    bins = [_bins(name, judged[name].options, features[name].evidence) for name in numbers]
    found = sorted(filter(None, bins), key=lambda x: x.in_bins - x.on_a_line)
    return Verdict(judged, drifts, find_crosses(heard, categories), found)


def _easily_told(
    samples: Mapping[str, Sample],
    guesses: Mapping[str, Guess],
    leaks: Mapping[str, _Witness],
    features: Mapping[str, _Witness],
) -> dict[str, Guess]:
    """The columns above .99 that stay, because those below reach .99 together: none where these do not."""
    if not leaks or not features:
        return {}
    together = auc_together([(witness.evidence, witness.best) for witness in features.values()])
    if together <= _LEAK:
        return {}
    return {
        name: replace(
            _correct(samples[name], guesses[name], witness.evidence),
            reason=f"an easy label: by itself it has an AUC of {witness.auc:.4f}, columns below .99 together have "
            f"{together:.4f}",
        )
        for name, witness in leaks.items()
        if witness.auc_if_missing <= _LEAK and guesses[name].key not in ("ignore", "time")
    }


def _hear(sample: Sample, held_out: HeldOut) -> _Witness | None:
    """The evidence of rows about a column; none where it is the same in all that have a label."""
    codes, numbers = sample.codes
    if len(np.unique(codes[held_out.places_N])) < 2:
        return None
    evidence = ColumnEvidence(held_out, codes, numbers, single=sample.may_be_ids)
    predictions = [evidence.prior_KV]
    if numbers is not None:
        predictions.append(evidence.as_number())
    if sample.may_be_ids or (numbers is None and not sample.never_repeats):
        predictions.append(evidence.as_ids())
    if_missing = evidence.auc(evidence.if_missing()) if evidence.num_missing else 0.5
    return _Witness(
        evidence, min(predictions, key=evidence.loss), max(if_missing, *map(evidence.auc, predictions)), if_missing
    )


def _gives_away(witness: _Witness) -> str:
    if witness.auc_if_missing > _LEAK:
        return f"{GIVES_AWAY}: whether a row has it has an AUC of {witness.auc_if_missing:.4f} on held-out rows"
    return f"{GIVES_AWAY}: by itself it has an AUC of {witness.auc:.4f} on held-out rows"


def _correct(sample: Sample, guess: Guess, evidence: ColumnEvidence) -> Guess:
    """A guess after what the rows say of ids, numbers and logarithms."""
    if sample.may_be_ids and guess.key in ("dense", "categorical"):
        guess = _ids_or_number(sample, guess, evidence)
    return _with_logarithm(guess, evidence) if guess.key == "dense" else guess


def _ids_or_number(sample: Sample, guess: Guess, evidence: ColumnEvidence) -> Guess:
    number, ids = evidence.as_number(), evidence.as_ids()
    both = evidence.as_ids(around_KV=number)
    losses = (
        f"held-out log loss as ids {short_loss(evidence.loss(ids))}, as a number {short_loss(evidence.loss(number))}"
    )
    if evidence.is_better(both, ids) and evidence.is_better(both, number):
        dense = guess_dense(sample)
        why = f"{dense.reason}; {losses}, as both {short_loss(evidence.loss(both))}: both"
        return replace(dense, ids=Categorical(), reason=why)
    if evidence.is_better(ids, number) and evidence.is_better(ids, evidence.prior_KV):
        return Guess("categorical", Categorical(), f"{len(sample.counts)} different values; {losses}: categorical")
    if evidence.is_better(number, ids) and evidence.is_better(number, evidence.prior_KV):
        dense = guess_dense(sample)
        return replace(dense, reason=f"{dense.reason}; {losses}: dense")
    return replace(guess, reason=f"{guess.reason}; {losses}: no clear difference")


def _with_logarithm(guess: Guess, evidence: ColumnEvidence) -> Guess:
    """A numeric feature, by its logarithm where a straight line of that tells more, or else by the number itself."""
    x_V = evidence.numbers
    assert x_V is not None
    size_V = np.abs(x_V)
    if size_V.max() <= _SKEWED * (1 + evidence.median(size_V)):
        return guess
    plain, logarithm = evidence.as_line(x_V), evidence.as_line(np.sign(x_V) * np.log1p(size_V))
    better, worse = (plain, logarithm) if guess.options.transform == "log" else (logarithm, plain)
    if not evidence.is_better(better, worse):
        return guess
    losses = f"log loss of a straight line {short_loss(evidence.loss(plain))}, of its logarithm"
    why = f"{guess.reason}; {losses} {short_loss(evidence.loss(logarithm))}"
    return replace(guess, options=Dense(transform="log" if better is logarithm else "none"), reason=why)


def _bins(name: str, options: Dense, evidence: ColumnEvidence) -> Bins | None:
    """The bins of a number, if they tell more than a straight line."""
    x_V = evidence.numbers
    if x_V is None or len(x_V) < 2:
        return None
    line = evidence.as_line(np.sign(x_V) * np.log1p(np.abs(x_V)) if options.transform == "log" else x_V)
    bins, edges = evidence.as_bins(_NUM_BINS)
    if not evidence.is_better(bins, line):
        return None
    rounded = tuple(dict.fromkeys(float(f"{edge:.6g}") for edge in edges))
    return Bins(name, rounded, evidence.loss(bins), evidence.loss(line))


def _drift(evidence: ColumnEvidence) -> str | None:
    """How the labels drift with time, if they do."""
    if not evidence.is_better(evidence.as_number(_SLOW), evidence.prior_KV):
        return None
    labels_N = evidence.held_out.labels_N[np.argsort(evidence.codes_N, kind="stable")]
    tenth = max(len(labels_N) // 10, 1)
    first, last = labels_N[:tenth].mean(), labels_N[-tenth:].mean()
    return f"the label drifts: {first:.1%} positive in the earliest tenth of the sample, {last:.1%} in the latest"


def short_loss(loss: float) -> str:
    """A loss with four digits.

    >>> short_loss(0.41234), short_loss(0.0123456), short_loss(1.5)
    ('.4123', '.01235', '1.500')
    """
    return f"{loss:#.4g}".removeprefix("0")
