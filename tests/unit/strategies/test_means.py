"""The mean over workers: of those who bring something, type by type."""

import pytest
import torch
import torch.distributed as dist

from lightning_recsys.strategies.common.means import meet_buffers, take_mean


@pytest.fixture
def others(monkeypatch):
    """What the other ranks bring to each all-reduce in turn; the types of those that were made."""
    brought, types = [], []

    def all_reduce(total):
        types.append(total.dtype)
        total += torch.tensor(brought.pop(0), dtype=total.dtype)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "broadcast", lambda tensor, src: tensor.fill_(7))
    return brought, types


def test_mean_when_some_ranks_count_then_it_is_theirs_in_one_message_of_each_type(others):
    brought, types = others
    brought += [[3.0, 5.0, 7.0, 1.0], [8.0, 3.0]]  # from one other rank, and from three
    tensors = torch.tensor([[1.0], [1.0]]), torch.tensor(4.0, dtype=torch.float64), torch.tensor([9.0])
    assert take_mean(tensors)
    assert [x.tolist() for x in tensors] == [[[2.0], [3.0]], 3.0, [8.0]]
    assert types == [torch.float32, torch.float64]


def test_mean_when_this_rank_does_not_count_then_it_gets_the_others_or_keeps_its_own(others):
    brought, _ = others
    brought += [[3.0, 1.0], [0.0, 0.0]]
    tensor = torch.full((1,), torch.inf)
    assert take_mean([tensor], counts=False)
    assert tensor.tolist() == [3.0]
    assert not take_mean([tensor], counts=False)
    assert tensor.tolist() == [3.0]


def test_buffers_when_they_meet_then_constants_keep_their_bits_and_counts_are_the_first_ranks(others):
    brought, types = others
    module = torch.nn.BatchNorm1d(1)
    module.running_mean.fill_(0.1)
    value = module.running_mean.double().item()
    brought += [[2 * value, 2.0 * 4.0, 2.0]]  # two others
    meet_buffers(module)
    assert torch.equal(module.running_mean, torch.tensor([0.1]))
    assert module.running_var.item() == 3.0
    assert module.num_batches_tracked == 7
    assert types == [torch.float64]
