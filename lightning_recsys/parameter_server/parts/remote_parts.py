"""The net's side of parts that a server computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lightning_recsys.compression import CodecTraffic, Compression, Receiver, Sender
from lightning_recsys.parameter_server.client import Connection
from lightning_recsys.parameter_server.parts.operator_wire import pack, unpack


class TokenLostError(RuntimeError):
    """The server has forgotten a forward pass, so its backward pass cannot be made.

    Args:
        endpoint: Endpoint of the server.
        part: Name of the part whose forward pass was forgotten.
    """

    def __init__(self, endpoint: str, part: str) -> None:
        super().__init__(
            f"{endpoint} has forgotten a forward pass of part {part}: it was started anew, or cut off from this net."
        )
        self.endpoint, self.part = endpoint, part

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.endpoint, self.part)


class RemoteParts:
    """Parts of a model behind a connection.

    Args:
        connection: The connection to the server, of this net alone: tokens belong to connections.
        compression: How activations and gradients travel; the server's is the same.
    """

    def __init__(self, connection: Connection, compression: Compression | None = None) -> None:
        compression = compression or Compression.from_option("none")
        self.connection = connection
        self._activations, self._gradients = Sender(compression.activations), compression.gradients
        self._outputs, self._input_gradients = Receiver(compression.activations), Receiver(compression.gradients)
        # What a codec has kept back of the gradients belongs to the part that they go to.
        self._output_gradients: dict[str, Sender] = {}

    @property
    def traffic(self) -> CodecTraffic:
        """The bytes that this end has encoded and decoded."""
        total = CodecTraffic()
        senders: list[Sender] = [self._activations, *self._output_gradients.values()]
        for traffic in (*(x.traffic for x in senders), self._outputs.traffic, self._input_gradients.traffic):
            total.add(traffic)
        return total

    def forward(
        self, part: str, inputs: Sequence[Tensor], *, wanted: Sequence[bool], keep: bool
    ) -> Callable[[], tuple[int, list[Tensor]]]:
        """Have a part computed, without waiting for it.

        Args:
            part: Name of the part, as the plan of the model has it.
            inputs: Tensors that the part takes, in order.
            wanted: Which of them are to get a gradient.
            keep: Whether a backward pass may follow, for which the server keeps what it needs.

        Returns:
            Waits for the answer, and returns the token for the backward pass and the outputs. It raises
            ``RequestRefusedError`` where the server could not compute the part, and ``ServerUnreachableError`` where
            it does not answer.

        Raises:
            TypeError: an input's dtype does not travel.
        """
        described, arrays = pack(self._activations, inputs)
        arguments = {"part": part, "keep": keep, "wanted": list(wanted), "tensors": described}
        pending = self.connection.begin("forward", arguments=arguments, arrays=arrays)

        def answer() -> tuple[int, list[Tensor]]:
            reply = self.connection.wait(pending)
            outputs = unpack(self._outputs, reply.value["tensors"], reply.arrays)
            return int(reply.value["token"]), [x for x in outputs if x is not None]

        return answer

    def backward(
        self, part: str, token: int, grads: Sequence[Tensor | None], *, settings: Sequence[dict[str, Any]]
    ) -> Callable[[], tuple[list[Tensor | None], int]]:
        """Have a part updated, without waiting for it.

        Args:
            part: Name of the part, as the plan of the model has it.
            token: The token that :meth:`forward` returned.
            grads: Gradients of the outputs; ``None`` where the loss does not depend on one.
            settings: Hyperparameters of each of the optimizer's groups, as they are now.

        Returns:
            Waits for the answer, and returns the gradients of the inputs, where wanted, and the update's staleness. It
            raises :class:`TokenLostError` where the server has forgotten the forward pass; the update may have been
            made.
        """
        described, arrays = pack(self._output_gradients.setdefault(part, Sender(self._gradients)), grads)
        arguments = {"token": token, "settings": list(settings), "tensors": described}
        pending = self.connection.begin("backward", arguments=arguments, arrays=arrays)

        def answer() -> tuple[list[Tensor | None], int]:
            try:
                reply = self.connection.wait(pending)
            except KeyError:
                raise TokenLostError(self.connection.endpoint, part) from None
            return unpack(self._input_gradients, reply.value["tensors"], reply.arrays), int(reply.value["staleness"])

        return answer
