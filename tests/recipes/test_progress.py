"""What a run writes to a terminal: its log above its bar, and the table that closes it."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path

import pytest
from recipe_helpers import ROOT  # noqa: F401  # the recipes can be imported from here on
from recipe_tools.progress import log_above_bars
from recipe_tools.report import from_here


@pytest.fixture
def handlers(monkeypatch):
    """Handlers of the root and of Lightning's logger, on the process's own streams, as Hydra's and Lightning's are."""
    loggers = {"stdout": logging.root, "stderr": logging.getLogger("pytorch_lightning")}
    for name, logger in loggers.items():
        handler = logging.StreamHandler(getattr(sys, name))
        handler.setFormatter(logging.Formatter(f"{name}: %(message)s"))
        monkeypatch.setattr(logger, "handlers", [handler, logging.NullHandler()])
    return loggers


def test_log_when_a_bar_has_taken_the_streams_then_goes_through_it(handlers, monkeypatch):
    log_above_bars()
    for name, logger in handlers.items():
        monkeypatch.setattr(sys, name, bar := io.StringIO())
        logger.warning("a version was published")
        assert bar.getvalue() == f"{name}: a version was published\n"
        assert type(logger.handlers[1]) is logging.NullHandler


def test_log_when_its_handler_writes_elsewhere_then_stays_there(monkeypatch):
    handler = logging.StreamHandler(io.StringIO())
    monkeypatch.setattr(logging.root, "handlers", [handler])
    log_above_bars()
    assert logging.root.handlers == [handler]


def test_folder_when_it_lies_in_the_current_one_then_is_shown_from_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert from_here(tmp_path / "logs" / "train") == "logs/train"
    assert from_here(Path("/elsewhere/train")) == "/elsewhere/train"
