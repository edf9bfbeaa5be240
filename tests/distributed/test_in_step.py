"""HET in step is ddp: every rule that it has, in one, two and three processes."""

import pytest
import torch
from forked import run_processes
from in_step_runs import CACHEABLE, RULES, UPDATES, train_in_step
from ports import free_port
from server_helpers import running

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What every process held at the end, by their number and its rank."""
    folder = tmp_path_factory.mktemp("in_step")
    stores = [folder / f"server-{number}" for number in range(2)]
    for path in stores:
        path.mkdir()
    with running(stores[0]) as first, running(stores[1]) as second:
        ports = {world: free_port() for world in (1, 2, 3)}
        run_processes(train_in_step, ports, [first.endpoint, second.endpoint], str(folder), nprocs=3)
    return {(w, r): torch.load(folder / f"{w}-{r}.pt", weights_only=True) for w in ports for r in range(w)}


def differing(one, other):
    return [
        f"{name} by {(one[name] - other[name]).abs().max():.1e}"
        for name in one
        if not torch.allclose(one[name], other[name], rtol=1e-6, atol=1e-6)
    ]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("run", "rules"), [("hybrid", tuple(RULES)), ("staleness=0", CACHEABLE)])
def test_workers_when_in_step_then_every_rule_equals_ddp(trained, world, run, rules):
    for rank in range(world):
        seen = trained[world, rank]
        assert seen[f"{run} ran"] == seen["ddp ran"] == (world, UPDATES)
        assert {name.split(".")[1] for name in seen[run] if name.startswith("rows.")} == set(rules)
        expected = {name: value for name, value in seen["ddp"].items() if name in seen[run]}
        assert expected.keys() == seen[run].keys()
        assert differing(seen[run], expected) == []


def test_rows_when_there_are_more_workers_then_all_have_learnt_something_else(trained):
    one, two, three = (
        {name: value for name, value in trained[world, 0]["ddp"].items() if name.endswith("weight")}
        for world in (1, 2, 3)
    )
    for other in (two, three):
        assert len(differing(one, other)) == len(one) == len(RULES) + 2


def test_one_worker_when_no_staleness_is_allowed_then_equals_no_cache_bit_for_bit(trained):
    for name, value in trained[1, 0]["staleness=0"].items():
        assert torch.equal(value, trained[1, 0]["hybrid"][name]), name
