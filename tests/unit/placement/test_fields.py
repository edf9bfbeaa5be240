"""Fields dealt out to processes."""

import pytest

from lightning_recsys.placement import FieldCost, place_fields

# Like Criteo's: a few fields have almost all rows.
ROWS = [1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652]
COSTS = [FieldCost((f"c{i}",), 64 * rows, 16.0) for i, rows in enumerate(ROWS)]


def test_fields_when_dealt_by_mod_then_the_paper_says_where():
    assert place_fields(COSTS, 4).owners == {f"c{i}": i % 4 for i in range(len(COSTS))}


@pytest.mark.parametrize("processes", [2, 3, 4])
def test_fields_when_balanced_then_bytes_and_lookups_are_nearly_even(processes):
    dealt, packed = (place_fields(COSTS, processes, method=method).imbalance for method in ("mod", "balanced"))
    largest = max(ROWS) * processes / sum(ROWS)  # one field is never cut
    assert packed[0] <= 1.01 * max(largest, 1.1)
    assert max(packed) < max(dealt)


def test_fields_when_balanced_then_multi_hot_ones_count_for_their_lookups():
    costs = [FieldCost(("long",), 64, 1600.0), *(FieldCost((f"f{i}",), 64, 16.0) for i in range(9))]
    plan = place_fields(costs, 2, method="balanced")
    assert [len(fields) for fields in plan.processes] == [1, 9]


def test_processes_when_more_than_fields_then_some_have_none():
    plan = place_fields(COSTS[:2], 3, method="balanced")
    assert sorted(len(fields) for fields in plan.processes) == [0, 1, 1]
    assert "0.0%" in str(plan)


def test_fields_when_they_share_a_table_then_stay_together():
    plan = place_fields([FieldCost(("user", "friend"), 10, 2.0), FieldCost(("movie",), 10, 1.0)], 2)
    assert plan.owners == {"user": 0, "friend": 0, "movie": 1}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: place_fields(COSTS, 2, method="profiled"),
            r"strategy.field_placement must be one of \['mod', 'balanced'\]",
        ),
        (lambda: place_fields(COSTS[:1] * 2, 2), "each field once"),
        (lambda: place_fields(COSTS, 0), "needs a process"),
        (lambda: FieldCost((), 1, 1.0), "fields need a name"),
        (lambda: FieldCost(("a",), 1, float("inf")), "finite costs"),
    ],
)
def test_placement_when_asked_for_nonsense_then_says_what_is_allowed(call, message):
    with pytest.raises(ValueError, match=message):
        call()
