"""The messages between client and server: a msgpack header of plain types, then raw arrays. Nothing is unpickled.

A message is the frames ``[header, array, array, ...]``. Headers are lists, so that every field has its place:

* request: ``[VERSION, operation, id, client, sequence, store, arguments, arrays]``
* reply: ``[VERSION, id, status, value, arrays]``

``arrays`` describes the frames that follow, one ``[dtype, shape]`` each, so the size of a header bounds their number.
Arrays are little-endian and contiguous.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgpack
import torch
import zmq
from torch import Tensor

from lightning_recsys.compression.dtypes import CODES, DTYPES
from lightning_recsys.stores.folders.mapped_arrays import check_name

VERSION = 11  # raised with every change of a message
CLIENT_ID_BYTES = 16
MAX_SEQUENCE = 2**62
MAX_WINDOW = 64  # pushes that a client may have on their way: of so many a server knows which it has refused
_DESCRIPTION_BYTES = 5  # of a header, at least, for each array: two lists, a dtype of a letter or more, and a size
_ALIGNMENT = 8
_MORE, _NOBLOCK = int(zmq.SNDMORE), int(zmq.NOBLOCK)

Frame: TypeAlias = "zmq.Frame | bytes | bytearray | memoryview"

assert sys.byteorder == "little"


class Status:
    """How a request ended."""

    OK = "ok"
    REFUSED = "refused"  # wrong in itself; nothing was changed
    MISSING = "missing"  # names a store that is not there
    GAP = "gap"  # earlier pushes of this client have not arrived; the value says up to which they have
    FAILED = "failed"  # the server could not do it
    ALL = frozenset({OK, REFUSED, MISSING, GAP, FAILED})


class MessageError(ValueError):
    """A message that is not as it should be.

    Args:
        reason: What is wrong with the message, in words.
        request_id: The id of its reply; 0 where none could be read.
        push: Whose push it is and which, without what was to be done; ``None`` where that could not be read, or it
            is none. It was refused and is done with: the client's next one follows it.
    """

    def __init__(self, reason: str, request_id: int = 0, push: Request | None = None) -> None:
        super().__init__(reason)
        self.request_id = request_id
        self.push = push


@dataclass(frozen=True)
class Limits:
    """The limits of a message: how much of the receiver it may take.

    Args:
        header_bytes: Size of the header, which describes every array.
        message_bytes: Size of all arrays, of a request as of its reply.
        rows: Rows or ids in one request.
    """

    header_bytes: int = 1 << 20
    message_bytes: int = 512 << 20
    rows: int = 1 << 24


@dataclass(slots=True)
class Request:
    """A request, decoded; its fields have the right types and its arrays the right sizes, nothing more is known.

    Args:
        operation: Name of the operation that is asked for.
        id: Chosen by the client; the reply carries it.
        client: Id of the client, 16 bytes.
        sequence: Number of this push among the client's, from 1; 0 for what changes nothing.
        store: The store's name; empty where none is meant.
        arguments: Plain values by name.
        arrays: The arrays, which share memory with the frames.
    """

    operation: str
    id: int
    client: bytes
    sequence: int = 0
    store: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    arrays: list[Tensor] = field(default_factory=list)


@dataclass(slots=True)
class Reply:
    """A reply: the request's id, how it ended, a plain value and arrays."""

    id: int
    status: str
    value: Any = None
    arrays: list[Tensor] = field(default_factory=list)


def encode_request(request: Request) -> list[bytes | memoryview]:
    """Frames to send. The arrays must be contiguous and stay as they are until the frames are sent."""
    header = [
        VERSION,
        request.operation,
        request.id,
        request.client,
        request.sequence,
        request.store,
        request.arguments,
        _describe(request.arrays),
    ]
    return [msgpack.packb(header), *map(_as_bytes, request.arrays)]


def encode_reply(reply: Reply) -> list[bytes | memoryview]:
    """Frames to send; as :func:`encode_request`."""
    header = [VERSION, reply.id, reply.status, reply.value, _describe(reply.arrays)]
    return [msgpack.packb(header), *map(_as_bytes, reply.arrays)]


def receive_frames(socket: zmq.Socket[bytes], *, before: int = 0) -> list[zmq.Frame]:
    """A message that has arrived; ``recv_multipart`` would ask the socket after each frame.

    Frames behind more than the header can describe are let go of: millions of empty ones would fill the memory. What is
    returned is still one too many, so that the message is refused.

    Args:
        socket: The socket to receive from.
        before: Frames that come before the header, such as who sent it.

    Raises:
        zmq.Again: no message has arrived.
    """
    frames = [socket.recv(_NOBLOCK, copy=False)]
    while frames[-1].more and len(frames) <= before:
        frames.append(socket.recv(_NOBLOCK, copy=False))
    more, most = frames[-1].more, before + 2 + len(frames[-1]) // _DESCRIPTION_BYTES
    while more:
        frame = socket.recv(_NOBLOCK, copy=False)
        more = frame.more
        if len(frames) < most:
            frames.append(frame)
    return frames


def send_frames(socket: zmq.Socket[bytes], frames: Sequence[Frame]) -> None:
    """Send a message without copying its arrays; ``send_multipart`` would work out an enumeration for each frame."""
    for frame in frames[:-1]:
        socket.send(frame, _MORE, copy=False)
    socket.send(frames[-1], copy=False)


def decode_request(frames: Sequence[Frame], limits: Limits) -> Request:
    """Check a message and take it apart, without copying arrays.

    Raises:
        MessageError: the message is not a request, or is over a limit.
    """
    header = _unpack_header(frames, limits)
    request_id = header[2] if len(header) > 2 and _is_count(header[2]) else 0
    sender: Request | None = None
    try:
        sender = _sender(header)
        return _request(header, sender, frames[1:], limits)
    except MessageError as error:
        raise MessageError(str(error), request_id, sender if sender and sender.sequence else None) from None


def _sender(header: list[Any]) -> Request:
    """The checked part of a header that says whose request it is and which; the rest is to be filled in."""
    _check_version(header, "client")
    if len(header) != 8:
        raise MessageError(f"a request has 8 fields, got {len(header)}")
    _, _, request_id, client, sequence, *_ = header
    if not _is_count(request_id) or request_id == 0:
        raise MessageError(f"a request's id must be a positive integer, got {request_id!r:.100}")
    if type(client) is not bytes or len(client) != CLIENT_ID_BYTES or not any(client):
        raise MessageError(f"a client id must be {CLIENT_ID_BYTES} bytes, not all 0, got {client!r:.100}")
    if not _is_count(sequence):
        raise MessageError(f"a sequence number must be an integer from 0 to 2**62, got {sequence!r:.100}")
    return Request("", request_id, client, sequence)


def _request(header: list[Any], sender: Request, frames: Sequence[Frame], limits: Limits) -> Request:
    _, operation, _, _, _, store, arguments, arrays = header
    if type(operation) is not str or len(operation) > 64:
        raise MessageError(f"an operation must be a short string, got {operation!r:.100}")
    if type(store) is not str:
        raise MessageError(f"a store's name must be a string, got {store!r:.100}")
    if store:
        try:
            check_name(store)
        except ValueError as error:
            raise MessageError(f"{error!s:.300}") from None
    if type(arguments) is not dict or not all(type(name) is str for name in arguments):
        raise MessageError(f"arguments must be a map with strings as keys, got {arguments!r:.100}")
    tensors = _arrays(arrays, frames, limits)
    return Request(operation, sender.id, sender.client, sender.sequence, store, arguments, tensors)


def decode_reply(frames: Sequence[Frame], limits: Limits) -> Reply:
    """The client's side of :func:`decode_request`."""
    header = _unpack_header(frames, limits)
    _check_version(header, "server")
    if len(header) != 5 or not _is_count(header[1]) or header[2] not in Status.ALL:
        raise MessageError(f"this is no reply of a server: {header!r:.200}")
    _, request_id, status, value, arrays = header
    return Reply(request_id, status, value, _arrays(arrays, frames[1:], limits))


def _check_version(header: list[Any], sender: str) -> None:
    if not header or type(header[0]) is not int or header[0] != VERSION:
        raise MessageError(
            f"this version of lightning-recsys has messages that start with {VERSION}, and the {sender}'s start with"
            f" {header[:1]!r:.100}: install the same version on both sides"
        )


def check_size(frames: Sequence[Frame], limits: Limits) -> None:
    """Refuse a message that its receiver would.

    Raises:
        MessageError: the message is over a limit.
    """
    if not frames:
        raise MessageError("a message has at least one frame")
    if len(frames[0]) > limits.header_bytes:
        raise MessageError(f"a header has at most {limits.header_bytes} bytes, got {len(frames[0])}")
    _check_arrays(frames[1:], limits)


def _check_arrays(frames: Sequence[Frame], limits: Limits) -> None:
    total = sum(map(len, frames))
    if total > limits.message_bytes:
        raise MessageError(f"the arrays of a message have at most {limits.message_bytes} bytes, got {total}: cut it")


def _unpack_header(frames: Sequence[Frame], limits: Limits) -> list[Any]:
    check_size(frames[:1], limits)
    data = _buffer(frames[0])
    try:
        header = msgpack.unpackb(data, use_list=True, raw=False, strict_map_key=True)
    except Exception as error:  # ValueError, UnicodeDecodeError and msgpack's own: bytes of a stranger
        raise MessageError(f"the header is not msgpack: {type(error).__name__}") from None
    if type(header) is not list:
        raise MessageError(f"a header must be a list, got {type(header).__name__}")
    return header


def _arrays(described: object, frames: Sequence[Frame], limits: Limits) -> list[Tensor]:
    _check_arrays(frames, limits)
    if type(described) is not list or len(described) != len(frames):
        raise MessageError(f"{len(frames)} arrays follow the header, which describes {described!r:.100}")
    return [_array(description, _buffer(frame)) for description, frame in zip(described, frames, strict=True)]


def _array(description: object, data: memoryview) -> Tensor:
    if type(description) is not list or len(description) != 2:
        raise MessageError(f"an array is described by [dtype, shape], got {description!r:.100}")
    code, shape = description
    dtype = DTYPES.get(code) if type(code) is str else None
    if dtype is None:
        raise MessageError(f"an array's dtype must be one of {list(DTYPES)}, got {code!r:.100}")
    if type(shape) is not list or not 1 <= len(shape) <= 3 or not all(_is_count(size) for size in shape):
        raise MessageError(f"an array's shape must be a list of 1 to 3 sizes, got {shape!r:.100}")
    if math.prod(shape) * dtype.itemsize != data.nbytes:
        raise MessageError(f"an array of dtype {code} and shape {shape} does not have {data.nbytes} bytes")
    if not data.nbytes:
        return torch.empty(shape, dtype=dtype)
    if dtype == torch.bool:  # any other byte than 0 and 1 would be no truth value
        flat = torch.frombuffer(data, dtype=torch.uint8) != 0
    else:
        flat = torch.frombuffer(data, dtype=dtype)
    if flat.data_ptr() % _ALIGNMENT:  # a small frame, somewhere in a block that ZeroMQ has read
        flat = flat.clone()
    return flat if len(shape) == 1 else flat.view(shape)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_SEQUENCE


def _buffer(frame: Frame) -> memoryview:
    return frame.buffer if isinstance(frame, zmq.Frame) else memoryview(frame)


def _describe(arrays: Sequence[Tensor]) -> list[tuple[str, list[int]]]:
    return [(CODES[array.dtype], list(array.shape)) for array in arrays]


def _as_bytes(array: Tensor) -> memoryview:
    if array.dtype == torch.bfloat16 or array.dtype.is_complex:  # which a buffer cannot describe
        array = array.view(torch.uint8)
    return array.numpy().data.cast("B") if array.numel() else memoryview(b"")
