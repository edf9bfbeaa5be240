"""The metrics of a run in one file of CSV, though several processes write it, one after the other."""

from __future__ import annotations

import csv

from pytorch_lightning.loggers.csv_logs import ExperimentWriter


class ContinuingWriter(ExperimentWriter):
    """A writer of CSV that goes on with a file that is there; Lightning's own removes it.

    Args:
        log_dir: Folder of the run's ``metrics.csv``.
    """

    def _check_log_dir_exists(self) -> None:
        if self._fs.isfile(self.metrics_file_path):
            with self._fs.open(self.metrics_file_path, "r", newline="") as file:
                self.metrics_keys = next(csv.reader(file), [])
