"""Servers run in threads of a test's own process, beside the clients that talk to them."""

import pytest
from zmq.utils import garbage


@pytest.fixture(autouse=True)
def _collector_stops():
    """The thread ends with which pyzmq frees what was sent without a copy; it starts again when it is needed."""
    yield
    garbage.gc.stop()
