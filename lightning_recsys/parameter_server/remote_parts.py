"""The net's side of parts that a server computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_recsys.parameter_server.client import Connection
from lightning_recsys.parameter_server.operator_wire import flatten, restore


class TokenLostError(RuntimeError):
    """The server has forgotten a forward pass, so its backward pass cannot be made.

    Args:
        endpoint: The server.
        part: What was computed.
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
        connection: To the server, of this net alone: tokens belong to connections.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def forward(
        self, part: str, inputs: Sequence[Tensor], *, wanted: Sequence[bool], keep: bool
    ) -> tuple[int, list[Tensor]]:
        """Compute a part.

        Args:
            part: Its name.
            inputs: What it takes.
            wanted: Which of them are to get a gradient.
            keep: A backward pass may follow.

        Returns:
            The token for the backward pass, and the outputs.

        Raises:
            TypeError: an input's dtype does not travel.
            RequestRefusedError: the server could not compute it.
            ServerUnreachableError: it does not answer.
        """
        shapes, arrays = flatten(inputs)
        arguments = {"part": part, "keep": keep, "wanted": list(wanted), "shapes": shapes}
        reply = self.connection.request("forward", arguments=arguments, arrays=arrays)
        outputs = restore(reply.value["shapes"], reply.arrays, limits=self.connection.limits)
        return int(reply.value["token"]), [x for x in outputs if x is not None]

    def backward(
        self, part: str, token: int, grads: Sequence[Tensor | None], *, settings: Sequence[dict[str, Any]]
    ) -> tuple[list[Tensor | None], int]:
        """Have a part updated.

        Args:
            part: Its name.
            token: Of the forward pass.
            grads: Of the outputs; ``None`` where the loss does not depend on one.
            settings: Of each of the optimizer's groups, what its numbers are now.

        Returns:
            The gradients of the inputs, where wanted, and the update's staleness.

        Raises:
            TokenLostError: the server has forgotten the forward pass. The update may have been made.
        """
        shapes, arrays = flatten(grads)
        arguments = {"token": token, "settings": list(settings), "shapes": shapes}
        try:
            reply = self.connection.request("backward", arguments=arguments, arrays=arrays)
        except KeyError:
            raise TokenLostError(self.connection.endpoint, part) from None
        grads = restore(reply.value["shapes"], reply.arrays, limits=self.connection.limits)
        return grads, int(reply.value["staleness"])
