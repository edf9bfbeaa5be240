"""``python -m lightning_recsys``, as for ``torchrun -m``: the command ``lightning-recsys``."""

import sys

from lightning_recsys.cli import main

if __name__ == "__main__":
    sys.exit(main())
