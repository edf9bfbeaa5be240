"""Parts of models that a server computes for nets: forward passes with a token, and one backward pass for each token.

A pool of threads computes, so that the server's loop goes on with other requests.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from lightning_recsys.compression import Compression, Receiver, Sender
from lightning_recsys.parameter_server.connections import Peer
from lightning_recsys.parameter_server.messages.wire import Limits, Request
from lightning_recsys.parameter_server.parts.operator_wire import pack, unpack
from lightning_recsys.parameter_server.parts.trained_part import Graph, Settings, TrainedPart
from lightning_recsys.parameter_server.requests.checks import take_arguments
from lightning_recsys.parameter_server.requests.operations import Answer, Operations
from lightning_recsys.runtime import configure_worker

MAX_TOKENS = 64  # of one net: more are of batches that nobody will finish, and the oldest goes
MAX_AGE_SECONDS = 3600.0  # of a token
GRACE_SECONDS = 30.0  # that the tokens of a net stay when its connection is lost: it may make a new one
MAX_WAITING = 1024  # requests that wait for a thread
MAX_SETTINGS = 64  # numbers for one group of an optimizer
PROBE = "probe"  # a part that every server has and that does nothing, by which nets measure what a request costs


@dataclass(eq=False)
class _Net:
    """Who has passes computed.

    Args:
        peer: The connection that it was last heard over.
        lost: When that was first seen to be lost.
        senders: Of the gradients that go back to it, by part: what a codec has kept back belongs to one net and part.
    """

    peer: Peer | None = None
    lost: float | None = None
    senders: dict[str, Sender] = field(default_factory=dict)


@dataclass(eq=False)
class _Token:
    """A forward pass whose backward pass may come.

    Args:
        part: Name of the part that was computed.
        client: Id of the client whose net asked for the pass.
        since: When it was made, in seconds of the clock.
        graph: What the backward pass needs; the backward pass takes it away.
        answer: Future of the backward pass's answer, once that pass was asked for: it may be asked again, where an
            answer is lost.
    """

    part: str
    client: bytes
    since: float
    graph: Graph | None = None
    answer: Future[object] | None = None

    @property
    def num_bytes(self) -> int:
        return 0 if self.graph is None else self.graph.num_bytes


@dataclass
class OperatorCounts:
    """The passes that a server of parts has computed.

    Args:
        forwards: Number of forward passes.
        backwards: Backward passes, which are updates where the part has parameters.
        expired: Tokens that went without a backward pass.
        staleness_sum: The sum of the staleness of all backward passes.
        staleness_max: The largest staleness of all updates.
    """

    forwards: int = 0
    backwards: int = 0
    expired: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def count_backward(self, staleness: int) -> None:
        """Take note of one; from any thread."""
        with self.lock:
            self.backwards += 1
            self.staleness_sum += staleness
            self.staleness_max = max(self.staleness_max, staleness)


class _Probe(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x.clone(),)


class OperatorRequests:
    """The operations of a server of parts.

    A token is its net's alone: another one cannot use it. It goes after its backward pass, when its net forgets it (a
    net has :data:`MAX_TOKENS`), with its net's connection, and with age.

    Args:
        limits: What a request, and its reply, may take.
        peer: Tells over which connection the present request came.
        num_threads: Passes that are computed at the same time.
        max_kept_bytes: Inputs and outputs of forward passes that are kept for backward passes; more are refused.
        clock: Returns the present time in seconds, and never goes back.

    Attributes:
        parts: The parts that can be computed, by name.
        compression: How nets send, and are sent, activations and gradients.
        counts: Counts of passes and updates so far.
        operations: The operations that a client may ask for, by name.
    """

    def __init__(
        self,
        limits: Limits,
        peer: Callable[[], Peer | None] = lambda: None,
        *,
        num_threads: int = 1,
        max_kept_bytes: int = 4 << 30,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.parts: dict[str, TrainedPart] = {}
        self._probe = TrainedPart(_Probe(), None)
        self.compression = Compression.from_option("none")
        self.counts = OperatorCounts()
        self.operations = Operations(reads={"forward": self._forward, "backward": self._backward})
        self._limits, self._peer, self._clock = limits, peer, clock
        self._max_kept_bytes = max_kept_bytes
        self._nets: dict[bytes, _Net] = {}  # by client, as long as it is connected, and a moment longer
        self._tokens: dict[int, _Token] = {}  # oldest first; only the server's loop adds, looks and removes
        self._working: dict[Future[object], int] = {}  # requests under way, with the bytes that they brought
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="operators", initializer=configure_worker)

    def status(self) -> dict[str, Any]:
        """Numbers for the server's status."""
        self._expire()
        counts = self.counts
        return {
            "parts": len(self.parts),
            "forwards": counts.forwards,
            "backwards": counts.backwards,
            "tokens": sum(token.graph is not None for token in self._tokens.values()),
            "expired": counts.expired,
            "staleness_mean": round(counts.staleness_sum / max(counts.backwards, 1), 3),
            "staleness_max": counts.staleness_max,
            "processor_seconds": time.process_time(),
        }

    def submit(self, work: Callable[..., object], *arguments: object, num_bytes: int = 0) -> Future[object]:
        """Have a thread of the pool do something.

        Args:
            work: The function to call.
            arguments: Positional arguments of the function.
            num_bytes: What is kept in memory until then.

        Raises:
            ValueError: too much is waiting.
        """
        self._working = {future: size for future, size in self._working.items() if not future.done()}
        waiting = sum(self._working.values())
        if len(self._working) >= MAX_WAITING or waiting + num_bytes > 2 * self._limits.message_bytes:
            raise ValueError(f"{len(self._working)} requests with {waiting:,} bytes are waiting already: ask later")
        future = self._pool.submit(work, *arguments)
        self._working[future] = num_bytes
        return future

    def close(self) -> None:
        """Compute no more."""
        self._pool.shutdown(cancel_futures=True)
        self._tokens.clear()

    # --- Requests ----------------------------------------------------------------------------------------------------

    def _forward(self, request: Request) -> object:
        name, keep, wanted, described = take_arguments(request, part=str, keep=bool, wanted=list, tensors=list)
        part = self._part(name)
        inputs = unpack(Receiver(self.compression.activations), described, request.arrays)
        if any(x is None for x in inputs) or len(wanted) != len(inputs) or not all(type(x) is bool for x in wanted):
            raise ValueError(f"{name} takes tensors, and for each whether its gradient is wanted, got {wanted!r:.100}")
        self._expire()
        self._meet(request.client)
        if not keep:
            return self._submit_forward(part, inputs, wanted, None)
        kept = sum(token.num_bytes for token in self._tokens.values())
        if kept > self._max_kept_bytes:
            raise ValueError(f"{kept:,} bytes of forward passes wait for their backward passes already: ask later")
        self._forget_old(request.client, name)
        number = secrets.randbits(62)  # never one of before a restart
        token = self._tokens[number] = _Token(name, request.client, self._clock())
        return self._submit_forward(part, inputs, wanted, (number, token))

    def _submit_forward(
        self, part: TrainedPart, inputs: Sequence[Any], wanted: Sequence[bool], kept: tuple[int, _Token] | None
    ) -> Future[object]:
        def compute() -> Answer:
            graph = part.forward(inputs, wanted=wanted, keep=kept is not None)
            described, arrays = pack(Sender(self.compression.activations), graph.outputs)
            self._check_reply(arrays)
            if kept is not None:
                kept[1].graph = graph
            return Answer({"token": kept[0] if kept else 0, "tensors": described}, arrays)

        self.counts.forwards += part is not self._probe
        return self.submit(compute, num_bytes=sum(x.nbytes for x in inputs))

    def _backward(self, request: Request) -> object:
        number, settings, described = take_arguments(request, token=int, settings=list, tensors=list)
        token = self._tokens.get(number)
        if token is None or token.client != request.client:
            raise KeyError(
                f"there is no token {number}: its backward pass was made, or its net's connection was lost, or the"
                " server has started anew since its forward pass"
            )
        if token.answer is not None:
            return token.answer
        if token.graph is None:
            raise ValueError("the forward pass of this token has failed, or is not done")
        grads = unpack(Receiver(self.compression.gradients), described, request.arrays)
        _check_plain(settings)
        part, size = self._part(token.part), sum(array.nbytes for array in request.arrays)
        senders = self._meet(request.client).senders
        sender = senders.setdefault(token.part, Sender(self.compression.gradients))
        token.answer = self.submit(self._compute_backward, part, token.graph, grads, settings, sender, num_bytes=size)
        token.graph = None  # it is used, whatever comes of it: asked again, the answer is the same
        return token.answer

    def _compute_backward(
        self,
        part: TrainedPart,
        graph: Graph,
        grads: Sequence[Tensor | None],
        settings: Sequence[Settings],
        sender: Sender,
    ) -> Answer:
        found, staleness = part.backward(graph, grads, settings)
        if part is not self._probe:
            self.counts.count_backward(staleness)
        described, arrays = pack(sender, found)
        return Answer({"staleness": staleness, "tensors": described}, arrays)

    def _part(self, name: str) -> TrainedPart:
        if name == PROBE:
            return self._probe
        if name not in self.parts:
            raise KeyError(f"there is no part {name!r:.100}; there are {sorted(self.parts)!s:.500}")
        return self.parts[name]

    def _check_reply(self, arrays: Sequence[Tensor]) -> None:
        size, most = sum(array.nbytes for array in arrays), self._limits.message_bytes
        if size > most:
            raise ValueError(f"the reply would have {size:,} bytes, and may have {most:,}: use smaller batches")

    # --- Tokens ------------------------------------------------------------------------------------------------------

    def _meet(self, client: bytes) -> _Net:
        """The net of a client, which is at the other end of the present connection."""
        net = self._nets.setdefault(client, _Net())
        net.peer, net.lost = self._peer(), None
        return net

    def _expire(self) -> None:
        """Let go of tokens that are old, or whose net has gone, and of nets that have."""
        now = self._clock()
        for net in self._nets.values():
            if net.peer is not None and not net.peer.is_alive and net.lost is None:
                net.lost = now
        gone = [x for x, net in self._nets.items() if net.lost is not None and now - net.lost > GRACE_SECONDS]
        for client in gone:
            del self._nets[client]
        old = (x for x, token in self._tokens.items() if token.client in gone or now - token.since > MAX_AGE_SECONDS)
        self._drop(list(old))

    def _forget_old(self, client: bytes, part: str) -> None:
        """A net that goes on has taken the answers of before for this part, and forgotten the oldest of many."""
        own = [(number, token) for number, token in self._tokens.items() if token.client == client]
        answered = [number for number, token in own if token.part == part and token.answer is not None]
        self._drop(answered)
        waiting = [number for number, token in own if token.answer is None]
        self._drop(waiting[: max(0, len(waiting) - MAX_TOKENS + 1)])

    def _drop(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            token = self._tokens.pop(number)
            self.counts.expired += token.answer is None


def _check_plain(settings: Sequence[object]) -> None:
    """Refuse what is no number of an optimizer's group."""
    for group in settings:
        if not isinstance(group, Mapping) or len(group) > MAX_SETTINGS or not all(map(_is_setting, group.values())):
            raise ValueError(f"settings must be numbers by name for each group, got {group!r:.200}")
        for name, value in group.items():
            if isinstance(value, list):
                group[name] = tuple(value)  # type: ignore[index]  # as optimizers keep betas


def _is_setting(value: object) -> bool:
    if isinstance(value, list):
        return len(value) <= 4 and all(type(x) in (int, float) for x in value)
    return value is None or type(value) in (bool, int, float)
