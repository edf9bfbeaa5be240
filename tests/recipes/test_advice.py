"""What a run is told to try."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from recipe_tools.advice import advice, first_run


def told(*, steps: int = 500, test_ne: float = 0.8, train_ne: float = 0.8, unknown: float = 0.1) -> list[str]:
    details = {"steps": steps, "unknown_ids": {"validation": {"user": 1.0}, "test": {"user": unknown}}}
    record = SimpleNamespace(metrics={"test/ne": test_ne, "train/ne": train_ne}, details=details)
    return list(advice(record, training_rows=800))


@pytest.mark.parametrize(
    ("run", "sentences"),
    [
        ({}, []),
        ({"steps": 50, "test_ne": 1.0, "unknown": 0.89}, []),
        ({"steps": 1}, ["The run made 1 step,.*Try data.batch_size=32 trainer.max_epochs=auto."]),
        (
            {"test_ne": 1.2, "train_ne": 0.7},
            ["The NE is 1.2000: above 1.*On the training rows it is 0.7000.*fewer epochs"],
        ),
        ({"test_ne": 1.2, "train_ne": 1.1}, ["The NE is 1.2000: above 1.*lower learning rates"]),
        ({"unknown": 0.9}, ["user: 90% of the test rows' ids are unknown to training.*without it"]),
        ({"steps": 49, "test_ne": 1.01, "unknown": 1.0}, ["made 49 steps", "More steps come first", "user: 100%"]),
    ],
)
def test_advice_when_something_keeps_the_run_from_being_good_then_says_what_to_try(run, sentences):
    found = told(**run)
    assert len(found) == len(sentences)
    for sentence, pattern in zip(found, sentences, strict=True):
        assert re.search(pattern, sentence)


@pytest.mark.parametrize("rows", [1, 100, 800, 5600, 26_000, 409_599, 409_600, 10**9])
def test_first_run_then_has_the_largest_batch_of_two_hundred_steps_and_as_many_epochs_as_are_good(rows):
    values = dict(override.split("=") for override in first_run(rows))
    batch_size = int(values.get("data.batch_size", 2048))
    assert batch_size == 32 or rows / batch_size >= 200
    assert batch_size == 2048 or 2 * batch_size * 200 > rows
    assert values.get("trainer.max_epochs") == (None if batch_size == 2048 else "auto")
