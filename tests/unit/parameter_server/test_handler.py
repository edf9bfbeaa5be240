"""A server's handler in this process: what it keeps of stores, and whose place it knows to be taken."""

from pathlib import Path

import msgpack
import pytest
import torch

from lightning_recsys.parameter_server.connections import Peer
from lightning_recsys.parameter_server.handler import RequestHandler
from lightning_recsys.parameter_server.messages.wire import Request, encode_request

CLIENT, OTHER = b"c" * 16, b"o" * 16


@pytest.fixture
def handler(tmp_path):
    handler = RequestHandler(tmp_path)
    yield handler
    handler.close()


def ask(handler, operation, *arrays, peer=None, client=CLIENT, sequence=0, store="", **arguments):
    request = Request(operation, 1, client, sequence, store, arguments, list(arrays))
    reply = handler.handle([bytearray(frame) for frame in encode_request(request)], peer)
    return msgpack.unpackb(bytes(reply[0]))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not list mappings")
def test_stores_when_made_and_removed_by_clients_then_nothing_of_them_stays_mapped(handler, tmp_path):
    ask(handler, "hello")
    for first in (1, 3):
        ask(handler, "create_dense_store", torch.zeros(3), sequence=first, store="center", optimizer=None)
        assert (tmp_path / "center").exists()
        ask(handler, "remove", sequence=first + 1, store="center")
    assert handler.counts.pushes == 4
    assert not handler.stores.mapped._opened
    assert not [line for line in Path("/proc/self/maps").read_text().splitlines() if "center" in line]


def test_client_when_cut_off_and_it_only_reads_then_it_keeps_its_place(handler):
    first, second, third = (Peer(number, number) for number in (100, 101, 102))
    ask(handler, "hello", peer=first)
    handler.clients.lose(first)
    assert not handler.clients._peers
    ask(handler, "status", peer=third, client=OTHER)
    assert not handler.clients._peers, "who has no place gets none by reading"
    ask(handler, "status", peer=second)
    assert handler.clients._peers == {handler.journal.slot(CLIENT): second}
    handler.clients.lose(second)
    assert not handler.clients._peers
