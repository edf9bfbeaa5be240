"""What a normal run need not hear from the libraries below it: each message by name, with the reason."""

from __future__ import annotations

import logging
import warnings

# (category, start of the message as a regular expression)
WARNINGS: tuple[tuple[type[Warning], str], ...] = (
    # Lightning 2.6 calls what torch 2.13 has renamed; nothing a user could change.
    (FutureWarning, r"`isinstance\(treespec, LeafSpec\)` is deprecated"),
    # A test or evaluation needs the weights, not the state of the callbacks that watched the training.
    (UserWarning, r"Be aware that when using `ckpt_path`, callbacks used to create the checkpoint"),
    # A short run is short on purpose, and its metrics are logged at the end of the epoch all the same.
    (UserWarning, r"The number of training batches \(\d+\) is smaller than the logging interval"),
    # A resumed run writes into a folder of its own.
    (UserWarning, r"The dirpath has changed from"),
)


def be_quiet() -> None:
    """Silence the messages above, and Lightning's notes on hardware and progress."""
    for category, message in WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category)
    for library in ("pytorch_lightning", "lightning_fabric"):
        logging.getLogger(library).setLevel(logging.WARNING)
