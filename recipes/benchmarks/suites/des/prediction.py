"""What suite ``des`` expects to be sent: the cost model on the suite's own data, models and baselines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from benchmarks.suites.des.rows import Rows, distinct, join
from benchmarks.suites.des.training import make_model

from lightning_recsys.data import Batch
from lightning_recsys.placement.communication import (
    FLOAT_BYTES,
    KEY_BYTES,
    NO_COST,
    CommunicationCost,
    RichLayer,
    all_gather,
    all_reduce,
    deep,
    first_order,
    mesh,
    round_trip,
    row_exchange,
    second_order,
    substitution,
)

DES, PS, ALL_REDUCE = "DES", "PS", "all-reduce"
VARIANTS = (DES, PS, ALL_REDUCE)

# gloo sends a message in two parts at least, each announced, accepted and preceded by a header of 48 bytes.
GLOO_BYTES = 2 * 3 * 48
# Before each batch Lightning broadcasts whether rank 0 got a SIGTERM: (2 * 48 + 4 by rank 0, 48 by rank 1) / 2.
LIGHTNING_BYTES = 74


@dataclass(frozen=True)
class Prediction:
    """Of one model on one kind of rows.

    Args:
        traffic: Variant -> what a process sends in a step.
        paper: The same of DES and of the paper's mesh, where weights travel once, without state, and gradients back.
        distinct: Distinct features of a global batch, and of a process's part of it.
    """

    traffic: Mapping[str, CommunicationCost]
    paper: Mapping[str, CommunicationCost]
    distinct: tuple[float, float]


def predict(model: str, rows: Rows, pieces: Sequence[Batch], *, num_processes: int) -> Prediction:
    """Expect what a step sends, as a mean over batches.

    Args:
        model: One of ``des_training.MODELS``.
        rows: What the batches are made of.
        pieces: Parts of global batches, as many for each as there are processes.
        num_processes: ``N``.
    """
    starts = range(0, len(pieces), num_processes)
    wholes = [join(pieces[start : start + num_processes]) for start in starts]
    batch_size = len(wholes[0])
    all_distinct, own_distinct = (mean(distinct(x) for x in batches) for batches in (wholes, pieces))
    layers = layers_of(model, rows)
    cluster = {"num_processes": num_processes}
    dense = all_reduce(dense_floats(model, rows), **cluster)
    gathered = NO_COST
    for layer in layers:
        if layer.row_floats:
            num_ids = mean(max(piece.sparse.values.numel() for piece in pieces[i : i + num_processes]) for i in starts)
            bags = batch_size // num_processes * len(rows.fields)
            lengths = 0 if pieces[0].sparse.is_single_hot else KEY_BYTES * bags
            gathered += all_gather(KEY_BYTES * num_ids + FLOAT_BYTES * layer.row_floats * bags + lengths, **cluster)
    des = substitution(layers, batch_size=batch_size, **cluster)
    rows_alone = [layer for layer in layers if layer.row_floats]
    return Prediction(
        {
            DES: _with_headers(des),
            PS: _with_headers(dense)
            + row_exchange(
                layers,
                num_distinct=round(own_distinct),
                num_distinct_of_all=round(all_distinct),
                state_floats=1,
                **cluster,
            ),
            ALL_REDUCE: _with_headers(dense + gathered),
        },
        {DES: des, PS: round_trip(mesh(rows_alone, num_distinct=round(own_distinct), **cluster))},
        (all_distinct, own_distinct),
    )


def layers_of(model: str, rows: Rows) -> list[RichLayer]:
    """The weights-rich layers of a model; one that shares its rows with another brings none."""
    layers = [first_order()]
    if model != "LR":
        layers.append(deep(len(rows.fields), rows.dim, rows.hidden[0]))
    if model == "DeepFM":
        layers.append(replace(second_order(rows.dim), row_floats=0))
    return layers


def dense_floats(model: str, rows: Rows) -> int:
    """Weights that data parallel training averages."""
    return sum(x.numel() for x in make_model(model, rows, device="meta").parameters() if x.requires_grad)


def _with_headers(traffic: CommunicationCost) -> CommunicationCost:
    return replace(traffic, sent_bytes=traffic.sent_bytes + GLOO_BYTES * traffic.messages + LIGHTNING_BYTES)
