"""Stores in folders of a test's own."""

import pytest
from mapped_servers import mapped_servers

from lightning_recsys.stores import MappedStores


@pytest.fixture
def stores(tmp_path):
    opened = MappedStores(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def servers(tmp_path):
    """Three of them."""
    with mapped_servers(tmp_path, 3) as opened:
        yield opened
