"""The traffic of a training step: parameter servers, mesh, all-reduce and distributed equivalent substitution (DES)."""

# Symbols: N processes, B examples of the batch, u distinct features in it, D embedding dim, F fields, H outputs.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FLOAT_BYTES = 4
KEY_BYTES = 8
NUMBER_BYTES = 4  # of a row, and of its clock, in messages to our own stores


@dataclass(frozen=True)
class Network:
    """A link between two processes.

    Args:
        bandwidth: Bytes per second, in each direction; infinite where only the latency counts.
        latency: Seconds from one process to another for a message without content.

    Raises:
        ValueError: a bandwidth that is not positive, or a latency that is negative or not finite.
    """

    bandwidth: float = math.inf
    latency: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.bandwidth, bool) or not self.bandwidth > 0:
            raise ValueError(f"bandwidth must be above 0 bytes per second, got {self.bandwidth}.")
        if isinstance(self.latency, bool) or not 0 <= self.latency < math.inf:
            raise ValueError(f"latency must be a finite number of seconds of at least 0, got {self.latency}.")


@dataclass(frozen=True)
class CommunicationCost:
    """The bytes of one process in a step, and how often it must wait for a message before it can send the next.

    Args:
        sent_bytes: Bytes sent by a process; as many arrive, so that a full-duplex link carries both at once.
        messages: Messages that wait for each other.
    """

    sent_bytes: float
    messages: int

    def __add__(self, other: CommunicationCost) -> CommunicationCost:
        return CommunicationCost(self.sent_bytes + other.sent_bytes, self.messages + other.messages)

    def seconds(self, network: Network) -> float:
        """How long it takes: every message's latency, and all bytes at full speed."""
        return self.messages * network.latency + self.sent_bytes / network.bandwidth


NO_COST = CommunicationCost(0.0, 0)


@dataclass(frozen=True)
class RichLayer:
    """A weights-rich layer, as the network sees it.

    Args:
        row_floats: Floats of a row that each distinct feature of the batch brings along.
        block_floats: Floats of weights that are cut by field but used by every batch.
        partial_floats: Floats of the partial results of one example, one number for each all-reduce.

    Raises:
        ValueError: a negative number.
    """

    row_floats: int
    block_floats: int
    partial_floats: tuple[int, ...]

    def __post_init__(self) -> None:
        if min(self.row_floats, self.block_floats, *self.partial_floats) < 0:
            raise ValueError(f"a layer's sizes must be at least 0, got {self}.")


def first_order() -> RichLayer:
    """One weight for each feature, as in logistic regression: a partial result of one number."""
    return RichLayer(1, 0, (1,))


def second_order(embedding_dim: int) -> RichLayer:
    """A factorization machine's pairs: the sum of the vectors and the sum of their squares, ``D + 1`` numbers."""
    return RichLayer(embedding_dim, 0, (embedding_dim + 1,))


def deep(num_fields: int, embedding_dim: int, out_features: int) -> RichLayer:
    """Embeddings and the first fully connected layer above them: ``H`` numbers."""
    return RichLayer(embedding_dim, num_fields * embedding_dim * out_features, (out_features,))


def mesh(layers: Sequence[RichLayer], *, num_processes: int, num_distinct: int) -> CommunicationCost:
    r"""Weights lie with the workers, a share with each; a worker fetches those that its batch needs and it lacks.

    .. math:: \tfrac{N-1}{N} \big(u\,(8 + 4 D) + 4 F D H\big)

    One direction: the gradients take the same way back (:func:`round_trip`).

    Reference: Rong et al. 2019, "Distributed equivalent substitution training for large-scale recommender systems",
    section 4.
    """
    _check(num_processes=num_processes, num_distinct=num_distinct)
    share = (num_processes - 1) / num_processes
    whole = parameter_servers(layers, num_distinct=num_distinct)
    return CommunicationCost(share * whole.sent_bytes, whole.messages if num_processes > 1 else 0)


def parameter_servers(layers: Sequence[RichLayer], *, num_distinct: int) -> CommunicationCost:
    """The cost of :func:`mesh` with all weights on servers of their own, so that every weight travels."""
    _check(num_distinct=num_distinct)
    floats = sum(num_distinct * layer.row_floats + layer.block_floats for layer in layers)
    keys = num_distinct * len(layers)
    return CommunicationCost(FLOAT_BYTES * floats + KEY_BYTES * keys, 1 if floats else 0)


def round_trip(traffic: CommunicationCost) -> CommunicationCost:
    """There and back: weights and then their gradients."""
    return CommunicationCost(2 * traffic.sent_bytes, 2 * traffic.messages)


def all_reduce(num_floats: float, *, num_processes: int) -> CommunicationCost:
    r"""A ring all-reduce of so many float32: :math:`2 \tfrac{N-1}{N} \cdot 4 M` bytes in :math:`2 (N - 1)` messages."""
    _check(num_processes=num_processes, num_floats=num_floats)
    if num_processes == 1 or not num_floats:
        return NO_COST
    return CommunicationCost(
        2 * (num_processes - 1) / num_processes * FLOAT_BYTES * num_floats, 2 * (num_processes - 1)
    )


def all_gather(num_bytes: float, *, num_processes: int) -> CommunicationCost:
    """A ring all-gather of so many bytes from each process, such as sparse gradients with their ids."""
    _check(num_processes=num_processes, num_bytes=num_bytes)
    if num_processes == 1 or not num_bytes:
        return NO_COST
    return CommunicationCost((num_processes - 1) * num_bytes, num_processes - 1)


def row_exchange(
    layers: Sequence[RichLayer],
    *,
    num_processes: int,
    num_distinct: int,
    num_distinct_of_all: int,
    state_floats: int = 0,
) -> CommunicationCost:
    r"""The cost of our own stores where a mesh needs ``u`` rows once: processes in step fetch and train rows each step.

    .. math::
        \tfrac{N-1}{N} \big(u + \tfrac{v}{N}\big) \big(8 + 4 (D + S)\big)
        + \big(u - \tfrac{v}{N}\big)\, 4 D + (N-1)\, 4 u

    for each layer. Each row of a process's batch is fetched, and each of the ``v`` rows of all batches pushed by one of
    the processes: a number and a clock of 4 bytes, the row and its state. That one gets the others' gradients of the
    row; which it is follows from the rows' numbers, which all send to all. A process and the server beside it send this
    together; the layers' blocks are not in it (:func:`all_reduce`).

    Args:
        layers: The layers with their tables; those without rows send nothing.
        num_processes: ``N``, each with a server of as many rows beside it.
        num_distinct: Number ``u`` of distinct rows in the batch of one process.
        num_distinct_of_all: Number ``v`` of distinct rows in the batches of all processes together.
        state_floats: ``S``, floats of optimizer state of a row.
    """
    _check(num_processes=num_processes, num_distinct=num_distinct, state_floats=state_floats)
    if num_processes == 1:
        return NO_COST
    share, owned = (num_processes - 1) / num_processes, num_distinct_of_all / num_processes
    widths = [layer.row_floats for layer in layers if layer.row_floats]
    stored = [2 * NUMBER_BYTES + FLOAT_BYTES * (width + state_floats) for width in widths]
    between = [(num_distinct - owned) * FLOAT_BYTES * width for width in widths]
    numbers = all_gather(NUMBER_BYTES * num_distinct * len(widths), num_processes=num_processes)
    sent_bytes = share * (num_distinct + owned) * sum(stored) + sum(between) + numbers.sent_bytes
    return CommunicationCost(sent_bytes, 4 * len(widths) + (3 * numbers.messages if widths else 0))


def substitution(layers: Sequence[RichLayer], *, num_processes: int, batch_size: int) -> CommunicationCost:
    """Distributed equivalent substitution: one :func:`all_reduce` of ``batch_size`` partial results each, forward only.

    Reference: Rong et al. 2019, section 4.
    """
    _check(batch_size=batch_size)
    traffic = NO_COST
    for layer in layers:
        for floats in layer.partial_floats:
            traffic += all_reduce(batch_size * floats, num_processes=num_processes)
    return traffic


def saving(traffic: CommunicationCost, baseline: CommunicationCost) -> float:
    """The share of a baseline's bytes that is not sent: 1 is all of them, below 0 it is the baseline that sends less.

    >>> layers = [first_order()]
    >>> des = substitution(layers, num_processes=4, batch_size=512)
    >>> round(saving(des, mesh(layers, num_processes=4, num_distinct=147_664)), 5)
    0.99769
    """
    if not baseline.sent_bytes:
        return -math.inf if traffic.sent_bytes else 0.0
    return 1.0 - traffic.sent_bytes / baseline.sent_bytes


def _check(**numbers: float) -> None:
    for name, number in numbers.items():
        if number < (1 if name == "num_processes" else 0):
            raise ValueError(f"{name} must be at least {1 if name == 'num_processes' else 0}, got {number}.")
