"""Synchronisation rules against numbers computed by hand, and against each other."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest
import torch

from lightning_recsys.sync import (
    BMUF,
    EASGD,
    ModelAveraging,
    SyncAlgorithm,
    Topology,
    algorithm_names,
    make_algorithm,
    register_algorithm,
)
from lightning_recsys.sync import registry as registry_module


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values)


def exchange_with_center(algorithm: SyncAlgorithm, replica: torch.Tensor, center: torch.Tensor) -> None:
    """A round of a centralised rule; the first line is the sync server's."""
    center.lerp_(replica, algorithm.alpha)
    algorithm.fold(replica, center.clone())


def average(algorithms: list[SyncAlgorithm], replicas: list[torch.Tensor]) -> None:
    """A round of a decentralised rule."""
    mean = torch.stack(replicas).mean(0)
    for algorithm, replica in zip(algorithms, replicas, strict=True):
        algorithm.fold(replica, mean.clone())


def test_easgd_when_two_trainers_take_turns_then_equals_the_numbers_by_hand():
    algorithm, center = EASGD(alpha=0.25), vector(0.0, 8.0)
    first, second = vector(4.0, 0.0), vector(-4.0, 8.0)
    exchange_with_center(algorithm, first, center)
    # centre 3/4 * (0, 8) + 1/4 * (4, 0) = (1, 6); replica 3/4 * (4, 0) + 1/4 * (1, 6) = (3.25, 1.5)
    assert center.tolist() == [1.0, 6.0]
    assert first.tolist() == [3.25, 1.5]
    exchange_with_center(algorithm, second, center)
    # centre 3/4 * (1, 6) + 1/4 * (-4, 8) = (-0.25, 6.5); replica 3/4 * (-4, 8) + 1/4 * centre = (-3.0625, 7.625)
    assert center.tolist() == [-0.25, 6.5]
    assert second.tolist() == [-3.0625, 7.625]


def test_easgd_when_compared_with_the_textbook_then_is_not_symmetric():
    center, replica, alpha = vector(0.0), vector(4.0), 0.25
    symmetric = (center + alpha * (replica - center), replica - alpha * (replica - center))
    exchange_with_center(EASGD(alpha=alpha), replica, center)
    assert center == symmetric[0]
    assert (replica.item(), symmetric[1].item()) == (3.25, 3.0)  # the new centre pulls less than the old one


def test_easgd_when_alpha_is_one_then_center_and_replica_are_what_was_sent():
    center, replica = vector(1.0), vector(5.0)
    exchange_with_center(EASGD(alpha=1.0), replica, center)
    assert (center.item(), replica.item()) == (5.0, 5.0)


def test_replica_when_it_moved_while_the_answer_was_on_its_way_then_keeps_its_share():
    replica = vector(4.0)
    answer = vector(2.0)  # of the exchange that saw 4
    replica += 6.0  # a worker's update meanwhile
    EASGD(alpha=0.5).fold(replica, answer)
    assert replica.item() == 6.0  # half of 10, half of 2: the update is not lost


def test_averaging_when_two_rounds_are_done_then_equals_the_numbers_by_hand():
    algorithms, replicas = [ModelAveraging(alpha=0.5) for _ in range(3)], [vector(0.0), vector(3.0), vector(9.0)]
    average(algorithms, replicas)  # the mean is 4
    assert torch.cat(replicas).tolist() == [2.0, 3.5, 6.5]
    average(algorithms, replicas)  # 4 again
    assert torch.cat(replicas).tolist() == [3.0, 3.75, 5.25]


def bmuf_rounds(means: list[float], **options) -> tuple[list[float], BMUF]:
    """Where a replica that follows entirely (alpha=1) stands after each round, from a start at 0."""
    algorithm, replica, seen = BMUF(alpha=1.0, **options), vector(7.0), []
    algorithm.start(vector(0.0))
    for mean in means:
        algorithm.fold(replica, vector(mean))
        seen.append(replica.item())
    return seen, algorithm


def test_bmuf_when_it_has_momentum_then_equals_the_numbers_by_hand():
    # eta 1/2, m 1/2. d = 8 - 0, D = 4, w = 4; d = 8 - 4, D = 2 + 2 = 4, w = 8; d = 0 - 8, D = 2 - 4 = -2, w = 6
    seen, algorithm = bmuf_rounds([8.0, 8.0, 0.0], eta=0.5, block_momentum=0.5)
    assert seen == [4.0, 8.0, 6.0]
    assert {name: x.item() for name, x in algorithm.state_dict().items()} == {"global": 6.0, "momentum": -2.0}


def test_bmuf_when_it_looks_ahead_then_equals_the_numbers_by_hand():
    # d = 8 - 0, D = 4, w = 4, b = w + m D = 6; d = 8 - 6, D = 2 + 1 = 3, w = 7, b = 8.5;
    # d = 0 - 8.5, D = 1.5 - 4.25 = -2.75, w = 4.25, b = 2.875
    seen, algorithm = bmuf_rounds([8.0, 8.0, 0.0], eta=0.5, block_momentum=0.5, nesterov=True)
    assert seen == [6.0, 8.5, 2.875]
    state = {name: x.item() for name, x in algorithm.state_dict().items()}
    assert state == {"global": 4.25, "momentum": -2.75, "base": 2.875}


@pytest.mark.parametrize(("nesterov", "error"), [(True, 1e-6), (False, 1e-3)])
def test_bmuf_when_its_replicas_train_between_rounds_then_they_come_to_the_optimum(nesterov, error):
    """What a round hands to the rule follows from the round before, as in training, which invented means do not.

    The error of what the replicas are drawn towards obeys a linear recurrence of order 2, whose roots have size
    sqrt(3 / 8) with the look-ahead and sqrt(3) / 2 without: 60 rounds leave about 1e-13 and 1e-4 of it.
    """
    optimum, start = torch.linspace(-1.0, 1.0, 8, dtype=torch.float64), torch.zeros(8, dtype=torch.float64)
    replicas = [start.clone() for _ in range(4)]
    algorithms = [BMUF(alpha=1.0, eta=1.0, block_momentum=0.75, nesterov=nesterov) for _ in replicas]
    for algorithm in algorithms:
        algorithm.start(start)
    for _ in range(60):
        for replica in replicas:
            replica.lerp_(optimum, 0.5)  # local steps on a quadratic, which halve the error
        average(algorithms, replicas)
    for replica in replicas:
        assert (replica - optimum).abs().max() < error


def test_bmuf_when_alpha_is_below_one_then_the_replica_keeps_a_part():
    algorithm, replica = BMUF(alpha=0.25, eta=0.5), vector(4.0)
    algorithm.start(vector(0.0))
    algorithm.fold(replica, vector(8.0))  # global model 0 + 1/2 * 8 = 4, where the replica is
    assert replica.item() == 4.0
    algorithm.fold(replica, vector(12.0))  # global model 4 + 1/2 * 8 = 8; replica 3/4 * 4 + 1/4 * 8
    assert replica.item() == 5.0


def test_bmuf_when_it_steps_all_the_way_without_momentum_then_equals_averaging():
    start = torch.randn(1000)
    replicas = [start + torch.randn(1000) for _ in range(4)]
    others = [replica.clone() for replica in replicas]
    bmuf = [BMUF(alpha=0.3, eta=1.0, block_momentum=0.0) for _ in replicas]
    for algorithm in bmuf:
        algorithm.start(start)
    for _ in range(5):
        average(bmuf, replicas)
        average([ModelAveraging(alpha=0.3) for _ in others], others)
        for replica, other in zip(replicas, others, strict=True):
            noise = torch.randn(1000)  # training goes on between rounds
            replica += noise
            other += noise
    # w_g + (w_c - w_g) is not w_c to the last bit
    torch.testing.assert_close(torch.stack(replicas), torch.stack(others), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("nesterov", "then"), [(False, 6.0), (True, 2.875)])  # the third numbers by hand
def test_bmuf_when_restored_then_goes_on_as_if_uninterrupted(nesterov, then):
    options = {"eta": 0.5, "block_momentum": 0.5, "nesterov": nesterov}
    _, algorithm = bmuf_rounds([8.0, 8.0], **options)
    resumed, replica = BMUF(alpha=1.0, **options), vector(8.0)
    resumed.start(replica)
    resumed.load_state_dict(pickle.loads(pickle.dumps(algorithm.state_dict())))
    resumed.fold(replica, vector(0.0))
    assert replica.item() == then


def test_bmuf_when_the_saved_run_did_not_look_ahead_then_refused():
    _, saved = bmuf_rounds([8.0], block_momentum=0.5)
    _, resumed = bmuf_rounds([], block_momentum=0.5, nesterov=True)
    with pytest.raises(ValueError, match=r"base \[1\], but the checkpoint holds global .* other settings of it"):
        resumed.load_state_dict(saved.state_dict())


def test_state_when_another_algorithm_saved_it_then_refused():
    with pytest.raises(ValueError, match=r"EASGD keeps nothing, but the checkpoint holds global \[1\], momentum \[1\]"):
        EASGD().load_state_dict({"global": vector(0.0), "momentum": vector(0.0)})


def test_state_when_the_model_is_another_then_refused():
    algorithm = BMUF()
    algorithm.start(vector(0.0, 0.0))
    with pytest.raises(ValueError, match=r"keeps global \[2\].* the checkpoint holds global \[1\]"):
        algorithm.load_state_dict({"global": vector(0.0), "momentum": vector(0.0)})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("easgd", {"alpha": 0.0}, r"strategy.alpha must be in \(0, 1\], got 0.0"),
        ("ma", {"alpha": 1.5}, r"strategy.alpha must be in \(0, 1\], got 1.5"),
        ("bmuf", {"eta": 0.0}, "strategy.eta must be a finite number above 0, got 0.0"),
        ("bmuf", {"eta": float("nan")}, "strategy.eta must be a finite number above 0, got nan"),
        ("bmuf", {"block_momentum": 1.0}, r"strategy.block_momentum must be in \[0, 1\), got 1.0"),
        ("bmuf", {"nesterov": True}, "strategy.nesterov=true looks ahead along strategy.block_momentum, which is 0"),
        ("easgd", {"alpha": 0.5, "eta": 0.5}, "strategy.eta means nothing to strategy.algorithm=easgd, which takes"),
        ("sgd", {}, "strategy.algorithm must be one of (.+, )?bmuf, easgd, ma.*, got 'sgd'"),
    ],
)
def test_option_when_wrong_then_refused_by_its_place_in_the_config(name, options, message):
    with pytest.raises(ValueError, match=message):
        make_algorithm(name, options)


def test_options_when_left_out_then_are_the_algorithms_own():
    algorithm = make_algorithm("bmuf", {"alpha": 0.25, "eta": None, "block_momentum": None, "nesterov": None})
    assert isinstance(algorithm, BMUF)
    assert (algorithm.alpha, algorithm.eta, algorithm.block_momentum, algorithm.nesterov) == (0.25, 1.0, 0.0, False)


def test_algorithm_when_registered_then_is_made_by_its_name(monkeypatch):
    class Median(SyncAlgorithm):
        topology = Topology.ALL_REDUCE

        def __init__(self, *, alpha: float = 0.5, trim: int = 1) -> None:
            super().__init__(alpha=alpha)
            self.trim = trim

        def fold(self, replica: torch.Tensor, answer: torch.Tensor) -> None:
            replica.copy_(answer)

    monkeypatch.setattr(registry_module, "_ALGORITHMS", dict(registry_module._ALGORITHMS))
    register_algorithm("median", Median)
    assert "median" in algorithm_names()
    assert make_algorithm("median", {"alpha": 0.25, "eta": None}).trim == 1
    with pytest.raises(ValueError, match=r"strategy\.eta means nothing to strategy\.algorithm=median"):
        make_algorithm("median", {"eta": 1.0})


@pytest.mark.parametrize("wrong", [int, EASGD()])
def test_registration_when_it_is_no_algorithm_then_refused(wrong):
    with pytest.raises(TypeError, match="'mine': a synchronisation algorithm is a subclass of SyncAlgorithm"):
        register_algorithm("mine", wrong)


def test_algorithm_in_the_docs_when_run_then_does_what_they_say(monkeypatch):
    monkeypatch.setattr(registry_module, "_ALGORITHMS", dict(registry_module._ALGORITHMS))
    page = (Path(__file__).parents[2] / "docs/own_algorithm.md").read_text()
    (block,) = re.findall(r"```python\n(.*?class SlowMomentum.*?)```", page, re.DOTALL)
    exec(compile(block, "docs/own_algorithm.md", "exec"), {})
    algorithm, replica = make_algorithm("slow_momentum", {"alpha": 1.0}), vector(7.0)
    algorithm.start(vector(0.0))
    algorithm.fold(replica, vector(10.0))  # momentum 10, model 10
    algorithm.fold(replica, vector(10.0))  # momentum 7 + 0, model 17
    assert replica.item() == 17.0
    copy = make_algorithm("slow_momentum", {})
    copy.start(vector(0.0))
    copy.load_state_dict(algorithm.state_dict())
    assert {name: x.item() for name, x in copy.state_dict().items()} == {"model": 17.0, "momentum": 7.0}
