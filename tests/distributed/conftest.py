"""Servers run in threads of a test's own process, beside clients, or in processes of their own."""

import ports
import pytest
from zmq.utils import garbage


@pytest.fixture(autouse=True)
def _collector_stops():
    """The thread ends with which pyzmq frees what was sent without a copy; it starts again when it is needed."""
    yield
    garbage.gc.stop()


@pytest.fixture(autouse=True)
def _ports_are_let_go():
    """Those that were held for processes of the test."""
    yield
    ports.let_go()
