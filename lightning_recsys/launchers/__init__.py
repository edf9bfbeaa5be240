"""How the processes of a run come to life, and how what they learnt comes back."""

from lightning_recsys.launchers.forkserver import ForkserverLauncher

__all__ = ["ForkserverLauncher"]
