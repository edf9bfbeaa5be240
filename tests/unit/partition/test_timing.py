"""Measured times of operators."""

from functools import partial
from itertools import count

import pytest
import torch
from traced_models import MODELS, make

from lightning_recsys.partition import timing
from lightning_recsys.partition.timing import time_operators
from lightning_recsys.partition.tracing import trace
from lightning_recsys.placement.machines import Processor

SGD = partial(torch.optim.SGD, lr=1.0)


@pytest.mark.parametrize("name", MODELS)
def test_time_operators_then_what_computes_has_times_and_the_model_is_unchanged(name):
    model, arguments = make(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    traced = trace(model, arguments)
    timed = time_operators(traced, arguments, make_optimizer=SGD, repeats=1)
    for operator, counted in zip(timed.operators, traced.operators.operators, strict=True):
        assert operator.name == counted.name
        if counted.forward_flops:
            assert Processor().forward_seconds(operator) == operator.forward_seconds > 0
            assert (operator.backward_seconds > 0) == (counted.backward_flops > 0)
        else:
            assert operator == counted
    assert all(parameter.grad is None for parameter in model.parameters())
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0, msg=key)


def test_times_when_each_operator_costs_something_of_its_own_then_are_together_what_all_take_at_once(monkeypatch):
    """By a clock that goes on by one at each look: every pass takes one, the whole model's as well as an operator's."""
    model, arguments = make("dlrm")
    ticks = count()
    monkeypatch.setattr(timing.time, "thread_time", lambda: float(next(ticks)))
    timed = time_operators(trace(model, arguments), arguments, make_optimizer=SGD, repeats=1)
    timed_operators = [x for x in timed.operators if x.forward_flops]
    assert len(timed_operators) > 3
    assert sum(x.forward_seconds for x in timed_operators) == pytest.approx(1.0)
    assert sum(x.backward_seconds for x in timed_operators) == pytest.approx(1.0)


def test_time_operators_when_it_is_not_to_run_then_says_so():
    model, arguments = make(next(iter(MODELS)))
    with pytest.raises(ValueError, match="repeats"):
        time_operators(trace(model, arguments), arguments, make_optimizer=SGD, repeats=0)
