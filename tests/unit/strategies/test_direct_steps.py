"""Steps that a strategy does not hear of are refused while it trains, and at no other time."""

import pytest
import torch

from lightning_recsys.strategies.common.direct_steps import DirectSteps


def test_step_when_it_goes_past_the_strategy_then_refused_until_the_run_has_ended():
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    steps = DirectSteps([optimizer], consequence="trains nothing")
    with steps.ours():
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"SGD\.step\(\) was called on the optimizer itself, which trains nothing"):
        optimizer.step()

    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), steps.ours():
        optimizer.step(fail)
    with pytest.raises(RuntimeError, match=r"step what self\.optimizers\(\) returns"):
        optimizer.step()
    steps.remove()
    optimizer.step()
