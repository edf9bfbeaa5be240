"""Direct sockets: messages arrive whole however they are cut on their way, and what are no messages is refused."""

import select
import socket
import struct
from contextlib import closing, contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_recsys.parameter_server.direct import MAX_FRAMES, DirectDoor, DirectSocket

NONCE = bytes(range(16))
messages = st.lists(st.lists(st.binary(max_size=300), min_size=1, max_size=MAX_FRAMES), min_size=1, max_size=5)


@contextmanager
def connected():
    """A direct socket, and a plain one at its other end."""
    with (
        closing(DirectDoor("127.0.0.1", nonce=NONCE, max_bytes=1 << 20)) as door,
        socket.create_connection(("127.0.0.1", door.port), timeout=5) as plain,
        closing(door.let_in()) as direct,
    ):
        assert plain.recv(16, socket.MSG_WAITALL) == NONCE
        yield direct, plain


@pytest.fixture
def pair():
    with connected() as pair:
        yield pair


def prefix(count, *sizes):
    return struct.pack(f"<{1 + MAX_FRAMES}Q", count, *sizes, *[0] * (MAX_FRAMES - len(sizes)))


def as_bytes(message):
    return prefix(len(message), *map(len, message)) + b"".join(message)


def receive(direct, count):
    """So many messages, as soon as they are there."""
    received = []
    while len(received) < count and select.select([direct], [], [], 5)[0]:
        while (message := direct.receive()) is not None:
            received.append([bytes(frame) for frame in message])
    return received


@settings(max_examples=50, deadline=None)
@given(messages, st.lists(st.integers(1, 400), max_size=10))
def test_messages_when_cut_anywhere_then_arrive_whole_and_in_order(sent, cuts):
    with connected() as (direct, plain):
        data, received = b"".join(map(as_bytes, sent)), []
        for cut in cuts:
            plain.sendall(data[:cut])
            data = data[cut:]
            while (message := direct.receive()) is not None:
                received.append([bytes(frame) for frame in message])
        plain.sendall(data)
        assert received + receive(direct, len(sent) - len(received)) == sent


@settings(max_examples=50, deadline=None)
@given(messages)
def test_messages_when_sent_then_are_what_the_other_side_receives(sent):
    with connected() as (direct, plain):
        assert all(direct.send(message) for message in sent)
        other = DirectSocket(plain.dup(), max_bytes=1 << 20)
        assert receive(other, len(sent)) == sent
        other.close()


def test_message_when_larger_than_the_system_takes_then_waits_and_goes_on(pair):
    direct, plain = pair
    message = [bytes(1000), bytes(range(256)) * (1 << 17)]  # 32 MiB
    assert not direct.send(message)
    assert direct.waits
    assert not direct.send([b"behind it"])
    received = bytearray()
    expected = as_bytes(message) + as_bytes([b"behind it"])
    while len(received) < len(expected):
        received += plain.recv(1 << 20)
        direct.send_rest()
    assert not direct.waits
    assert received == expected


@pytest.mark.parametrize("way", ["send", "receive"])
def test_socket_when_interrupted_while_bytes_move_then_is_closed_for_nobody_knows_how_many_have(pair, monkeypatch, way):
    direct, plain = pair

    def interrupted(buffers, num_bytes):
        raise KeyboardInterrupt

    monkeypatch.setattr("lightning_recsys.parameter_server.direct._without", interrupted)
    plain.sendall(as_bytes([b"a message"]))
    select.select([direct], [], [], 5)
    with pytest.raises(KeyboardInterrupt):
        direct.send([b"another"]) if way == "send" else direct.receive()
    monkeypatch.undo()
    with pytest.raises(OSError, match="Bad file descriptor"):
        direct.send([b"another"])
    with pytest.raises(OSError, match="Bad file descriptor"):
        direct.receive()


@pytest.mark.parametrize(
    "wrong",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".ljust(200),
        bytes(200),
        b"\xff" * 200,
        prefix(MAX_FRAMES + 1),
        prefix(1, 1 << 62),
        prefix(2, 1 << 19, (1 << 19) + 1),
        prefix(1, 8, 8),
    ],
    ids=["http", "zeros", "ones", "too many frames", "too large", "together too large", "more sizes than frames"],
)
def test_bytes_when_they_are_no_message_then_are_refused_before_there_is_room_for_them(pair, wrong):
    direct, plain = pair
    plain.sendall(wrong)
    select.select([direct], [], [], 5)
    with pytest.raises(ConnectionAbortedError, match="what arrived were no messages"):
        direct.receive()


def test_socket_when_the_other_side_closes_then_says_so(pair):
    direct, plain = pair
    plain.sendall(as_bytes([b"whole"]) + as_bytes([b"in part"])[:-3])
    assert receive(direct, 1) == [[b"whole"]]
    plain.close()
    select.select([direct], [], [], 5)
    with pytest.raises(ConnectionResetError, match="the connection was lost"):
        direct.receive()


def test_door_when_nobody_is_there_then_lets_nobody_in():
    with closing(DirectDoor("127.0.0.1", nonce=b"", max_bytes=1)) as door:
        assert door.let_in() is None
