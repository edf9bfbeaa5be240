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
    # The closing table of a short run has the AUC of a model that scores nearly alike; less than .01 off is not worth a
    # warning at each of its validations. More is one.
    (UserWarning, r"AUC may be off by up to 0\.00"),
    # A resumed run writes into a folder of its own.
    (UserWarning, r"The dirpath has changed from"),
)


# Loggers of notes on hardware, processes and progress. (Lightning's profilers have others and are heard.)
NOTES = (
    "pytorch_lightning.utilities.rank_zero",
    "lightning_fabric.utilities.rank_zero",
    "lightning_fabric.utilities.distributed",
    "matplotlib.font_manager",  # it has looked for fonts
)


def be_quiet() -> None:
    """Silence the messages above in this process and in the workers that it launches."""
    for category, message in WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category)
    for name in NOTES:
        logging.getLogger(name).setLevel(logging.WARNING)
