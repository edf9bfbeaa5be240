"""Strategies that have no name of their own, for the table in test_strategies.py."""

from lightning_recsys.strategies import RecsysStrategy


class FreeStrategy(RecsysStrategy):
    """The base with nothing on top: replicas that never meet. One worker of it is as good as any."""

    asynchronous = True
    wraps_model = False


def free_workers() -> FreeStrategy:
    return FreeStrategy()
