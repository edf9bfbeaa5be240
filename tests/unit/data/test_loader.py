"""Batches, their order, their shares over ranks, and resuming inside an epoch."""

from __future__ import annotations

from functools import partial
from itertools import chain

import pytest
import torch
from torch.utils.data import SequentialSampler

from lightning_recsys.data import BatchLoader
from lightning_recsys.sync.leases import Lease


class Numbers:
    """Rows that are their own numbers."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def __len__(self) -> int:
        return self.num_rows

    def take(self, rows: torch.Tensor) -> list[int]:
        assert rows.dtype == torch.int64
        return rows.tolist()


def steps_of(num_rows: int, *, world_size: int = 1, epochs: int = 1, **options) -> list[list[list[int]]]:
    """For each step, the rows of each rank."""
    loaders = [
        BatchLoader(Numbers(num_rows), rank=rank, world_size=world_size, **options) for rank in range(world_size)
    ]
    steps = []
    for _ in range(epochs):
        steps += [list(step) for step in zip(*loaders, strict=True)]  # strict: ranks have equally many batches
    assert len(steps) == epochs * len(loaders[0])
    return steps


def test_batches_when_rows_do_not_divide_then_the_last_is_smaller():
    assert steps_of(10, batch_size=4) == [[[0, 1, 2, 3]], [[4, 5, 6, 7]], [[8, 9]]]
    assert steps_of(10, batch_size=4, drop_last=True) == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    assert steps_of(3, batch_size=4) == [[[0, 1, 2]]]


@pytest.mark.parametrize("shuffle", [None, "rows", "batches"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [1, 2, 5, 100])
def test_shares_when_ranks_divide_any_number_of_rows_then_each_row_comes_once_and_counts_agree(
    shuffle, world_size, batch_size
):
    for num_rows in range(world_size, 60):
        steps = steps_of(num_rows, world_size=world_size, batch_size=batch_size, shuffle=shuffle)
        batches = list(chain.from_iterable(steps))
        assert sorted(chain.from_iterable(batches)) == list(range(num_rows))
        assert min(map(len, batches)) >= 1
        assert max(map(len, batches)) <= batch_size + 1
        assert all(max(map(len, step)) - min(map(len, step)) <= 1 for step in steps)


@pytest.mark.parametrize("shuffle", ["rows", "batches"])
def test_shares_when_two_ranks_take_a_step_then_they_see_what_one_sees_with_twice_the_batch(shuffle):
    two = [
        list(chain.from_iterable(step)) for step in steps_of(43, world_size=2, batch_size=5, shuffle=shuffle, epochs=3)
    ]
    one = [list(chain.from_iterable(step)) for step in steps_of(43, batch_size=10, shuffle=shuffle, epochs=3)]
    assert two == one


def test_drop_last_when_rows_do_not_divide_then_every_batch_is_full_and_other_rows_are_left_out_each_epoch():
    steps = steps_of(23, world_size=2, batch_size=5, shuffle="rows", drop_last=True, epochs=2)
    assert [len(batch) for step in steps for batch in step] == [5] * 8
    seen = [set(chain.from_iterable(chain.from_iterable(epoch))) for epoch in (steps[:2], steps[2:])]
    assert len(seen[0]) == len(seen[1]) == 20
    assert seen[0] != seen[1]


@pytest.mark.parametrize("shuffle", ["rows", "batches"])
def test_order_when_shuffled_then_epochs_differ_and_seeds_decide(shuffle):
    def epochs(seed: int) -> list[list[int]]:
        loader = BatchLoader(Numbers(64), batch_size=4, shuffle=shuffle, seed=seed)
        return [list(chain.from_iterable(loader)) for _ in range(3)]

    first, again, other = epochs(0), epochs(0), epochs(1)
    assert first == again
    assert len({tuple(order) for order in first + other + [list(range(64))]}) == 7


def test_order_when_batches_are_shuffled_then_batches_keep_their_rows():
    steps = steps_of(23, batch_size=4, shuffle="batches")
    assert sorted(step[0][0] for step in steps) == [0, 4, 8, 12, 16, 20]
    assert all(batch == list(range(batch[0], batch[0] + len(batch))) for (batch,) in steps)
    assert steps[-1] == [[20, 21, 22]]


def test_order_when_not_shuffled_then_every_epoch_is_the_same():
    steps = steps_of(10, batch_size=5, epochs=2)
    assert steps[:2] == steps[2:]


def test_set_epoch_when_called_then_that_epoch_comes_next_and_the_following_after_it():
    free = BatchLoader(Numbers(30), batch_size=7, shuffle="rows")
    epochs = [list(free) for _ in range(4)]
    told = BatchLoader(Numbers(30), batch_size=7, shuffle="rows")
    told.set_epoch(2)
    assert [list(told), list(told)] == epochs[2:]


@pytest.mark.parametrize("shuffle", [None, "rows", "batches"])
def test_resume_when_saved_after_any_batch_then_continues_with_the_next(shuffle):
    def make() -> BatchLoader:
        return BatchLoader(Numbers(23), batch_size=4, shuffle=shuffle, seed=3)

    whole = make()
    expected = [batch for _ in range(4) for batch in whole]
    for stop in range(13):
        saved = make()
        served = []
        while len(served) < stop:
            for batch in saved:
                served.append(batch)
                if len(served) == stop:
                    break
        state = saved.state_dict()
        resumed = make()
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        sequence = served + list(resumed) + list(resumed)
        assert len(sequence) >= stop + 6
        assert sequence == expected[: len(sequence)]


def test_resume_when_the_trainer_asks_for_the_next_epoch_then_the_rest_of_the_old_one_is_dropped():
    saved = BatchLoader(Numbers(20), batch_size=4, shuffle="rows")  # as under Trainer(limit_train_batches=2)
    iterator = iter(saved)
    next(iterator), next(iterator)
    resumed = BatchLoader(Numbers(20), batch_size=4, shuffle="rows")
    resumed.load_state_dict(saved.state_dict())
    resumed.set_epoch(1)
    assert list(resumed) == list(saved)


def test_resume_when_it_is_inside_an_epoch_of_other_rows_then_raises():
    saved = BatchLoader(Numbers(20), batch_size=4)
    next(iter(saved))
    other = BatchLoader(Numbers(21), batch_size=4)
    other.load_state_dict(saved.state_dict())
    with pytest.raises(ValueError, match=r"stopped inside epoch 0, after row 4 .*'num_rows': 20.*'num_rows': 21.*same"):
        next(iter(other))


@pytest.mark.parametrize(
    ("ranks", "setting"), [(2, r"data\.batch_size=2,"), (3, r"workers and data\.batch_size whose product is 4,")]
)
def test_resume_when_steps_are_shuffled_and_have_other_sizes_then_says_which_setting_to_give(ranks, setting):
    saved = BatchLoader(Numbers(20), batch_size=4, shuffle="batches")
    next(iter(saved))
    other = BatchLoader(Numbers(20), batch_size=5, shuffle="batches", rank=0, world_size=ranks)
    other.load_state_dict(saved.state_dict())
    with pytest.raises(ValueError, match=rf"'rows_per_step': 4.* Resume with {setting} or from a checkpoint saved at"):
        next(iter(other))


def test_resume_when_it_is_behind_the_last_of_fewer_rows_then_raises_the_same():
    saved = BatchLoader(Numbers(20), batch_size=8)
    batches = iter(saved)
    next(batches), next(batches)
    other = BatchLoader(Numbers(3), batch_size=8)
    other.load_state_dict(saved.state_dict())
    assert len(other) == 2
    with pytest.raises(ValueError, match=r"stopped inside epoch 0, after row 16 .*'num_rows': 20.*'num_rows': 3"):
        next(iter(other))


def test_resume_when_it_is_at_the_end_of_an_epoch_of_other_rows_then_starts_the_next():
    saved = BatchLoader(Numbers(20), batch_size=4)
    assert len(list(saved)) == 5
    other = BatchLoader(Numbers(21), batch_size=3, shuffle="rows")
    other.load_state_dict(saved.state_dict())
    expected = BatchLoader(Numbers(21), batch_size=3, shuffle="rows")
    expected.set_epoch(1)
    assert list(other) == list(expected)


def test_iterating_when_an_evaluation_was_cut_short_then_starts_over():
    loader = BatchLoader(Numbers(10), batch_size=4)
    next(iter(loader))  # a sanity check of one batch
    assert list(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_sampler_when_lightning_asks_then_tells_whether_the_order_is_fixed():
    assert isinstance(BatchLoader(Numbers(4), batch_size=2).sampler, SequentialSampler)
    shuffled = BatchLoader(Numbers(4), batch_size=2, shuffle="rows")
    assert shuffled.sampler is shuffled


def test_loader_when_there_are_fewer_rows_than_ranks_then_raises():
    with pytest.raises(ValueError, match="3 rows are too few for 4 ranks: at least 4 are needed"):
        BatchLoader(Numbers(3), batch_size=2, world_size=4)
    with pytest.raises(
        ValueError, match=r"7 rows are too few for 2 ranks with data.batch_size=4 and drop_last: at least 8"
    ):
        BatchLoader(Numbers(7), batch_size=4, world_size=2, drop_last=True)


def test_loader_when_the_batch_size_is_not_positive_then_raises():
    with pytest.raises(ValueError, match=r"data.batch_size must be at least 1, got 0"):
        BatchLoader(Numbers(3), batch_size=0)


class Deals:
    """Deals out what it was told to, and hears what is trained."""

    def __init__(self, *leases, in_flight=2) -> None:
        self.in_flight = in_flight
        self.leases, self.finished, self.asked = [Lease(n + 1, *x) for n, x in enumerate(leases)], [], []

    def __call__(self, num_batches):
        self.asked.append(num_batches)
        yield from self.leases

    def finish(self, lease):
        self.finished.append(lease.number)


@pytest.mark.parametrize("shuffle", [None, "rows", "batches"])
def test_batches_when_shares_are_dealt_then_a_lease_has_what_its_owner_would_have_served(shuffle):
    make = partial(BatchLoader, Numbers(85), batch_size=4, world_size=2, shuffle=shuffle, seed=3)
    shares = [list(make(rank=rank)) for rank in (0, 1)]
    loader = make(rank=1, world_size=3)  # made when others lived than those that the run began with
    dealer = Deals((0, 0, 5), (1, 8, 11), (1, 4, 8), (0, 5, 6), (0, 6, 11))
    loader.deal(dealer, rank=0, num_shares=2)
    with pytest.raises(TypeError, match="not known before"):
        len(loader)
    served = list(loader)
    assert served == [*shares[0][:5], *shares[1][8:11], *shares[1][4:8], *shares[0][5:11]]
    assert dealer.asked == [11]
    assert dealer.finished == [1, 2, 4]  # a lease of one batch says nothing; the last one is finished with the epoch
    assert loader.state_dict()["finished"]
    again = make(rank=1)
    again.load_state_dict(loader.state_dict())
    assert list(again) != shares[1] or shuffle is None  # the next epoch


def test_lease_when_gradients_are_accumulated_then_is_finished_once_they_are_pushed():
    """Of a lease's last batches the gradients may wait for three more batches, and then for the batch under way."""
    loader = BatchLoader(Numbers(40), batch_size=2, world_size=2)
    dealer = Deals((0, 0, 5), (0, 5, 10), in_flight=4)
    loader.deal(dealer, rank=0, num_shares=2)
    finished = [list(dealer.finished) for _ in loader]
    assert finished == [[]] * 9 + [[1]]


def test_position_when_shares_are_dealt_then_it_is_that_of_the_batch_that_is_trained():
    loader = BatchLoader(Numbers(40), batch_size=2, world_size=2)
    loader.deal(Deals((0, 0, 4), (1, 9, 10)), rank=0, num_shares=2)
    batches = iter(loader)
    next(batches)
    assert next(batches) == [4, 5]  # the one fetched ahead
    assert loader.state_dict()["row"] == 4
    assert not loader.state_dict()["finished"]
    again = BatchLoader(Numbers(40), batch_size=2, world_size=2)
    again.load_state_dict(loader.state_dict())
    assert again.is_within_epoch
    assert next(iter(again)) == [4, 5]
