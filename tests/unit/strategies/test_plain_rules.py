"""Plain embedding modules on servers are trained as their own optimizer would train them, or refused by name."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop, lr_scheduler

from lightning_recsys.optim import RowFTRL, RowSGD, swap
from lightning_recsys.stores import MappedStores
from lightning_recsys.stores.backend import StoreBackend
from lightning_recsys.strategies import HETStrategy, ShadowSyncStrategy
from lightning_recsys.strategies.rows.tables import ServedTables, plan_placement

ROWS = 12


class Towers(nn.Module):
    """Two tables and a dense layer; every batch touches every row."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.users, self.items, self.out = nn.Embedding(ROWS, 4), nn.Embedding(ROWS, 4), nn.Linear(8, 1)

    def loss(self, step):
        ids = torch.arange(2 * ROWS) % ROWS
        labels = torch.randn(2 * ROWS, generator=torch.Generator().manual_seed(step))
        pooled = torch.cat([self.users(ids), self.items(ids.flip(0))], dim=1)
        return nn.functional.mse_loss(self.out(pooled).squeeze(1), labels)


def in_groups(model, optimizer, **other):
    """One group of its own for the users, chosen by its name, and one for the rest."""
    users = [x for name, x in model.named_parameters() if name == "users.weight"]
    rest = [x for name, x in model.named_parameters() if name != "users.weight" and x.requires_grad]
    return optimizer([{"params": rest}, {"params": users, **other}])


def frozen_and_filtered(model):
    model.items.weight.requires_grad = False
    return SGD([x for x in model.parameters() if x.requires_grad], lr=0.5, weight_decay=0.1)


def frozen_and_kept(model):
    model.items.requires_grad_(False)
    return Adagrad(model.parameters(), lr=0.3)


def written(model):
    nn.init.ones_(model.users.weight)
    model.items.weight.data = torch.full((ROWS, 4), 0.5)
    return SGD(model.parameters(), lr=0.5)


def by_size(model):
    large, small = ([x for x in model.parameters() if (x.numel() > ROWS) == each] for each in (True, False))
    return SGD([{"params": large, "lr": 6.0 / model.users.weight.shape[0]}, {"params": small}], lr=0.05)


def by_values(model):
    return SGD(model.parameters(), lr=0.1 * float(model.users.weight.detach().abs().mean()))


OPTIMIZERS = {
    "frozen, filtered": frozen_and_filtered,
    "frozen, kept": frozen_and_kept,
    "written": written,
    "by size": by_size,
    "by values": by_values,
    "sgd": lambda model: SGD(model.parameters(), lr=0.5, weight_decay=0.1),
    "adagrad": lambda model: Adagrad(
        [x for x in model.parameters() if x.dim() == 2],
        lr=0.3,
        weight_decay=0.2,
        eps=1e-3,
        initial_accumulator_value=0.5,
    ),
    "adam": lambda model: Adam(
        [model.users.weight, model.items.weight, *model.out.parameters()],
        lr=0.05,
        betas=(0.7, 0.8),
        eps=1e-3,
        weight_decay=0.1,
    ),
    "a group of its own": lambda model: in_groups(
        model, partial(Adam, lr=0.01, weight_decay=0.1), lr=0.1, weight_decay=0.0, betas=(0.5, 0.9)
    ),
    "swap": lambda model: swap(model.parameters(), inner=partial(Adagrad, lr=0.3), period=2, discount=0.5),
}
SCHEDULES = {
    "none": None,
    # Groups have schedules of their own, one of which begins at zero.
    "warm-up": lambda x: lr_scheduler.LambdaLR(
        x, [lambda step, group=group: step / (3 + 2 * group) for group, _ in enumerate(x.param_groups)]
    ),
    "one cycle": lambda x: lr_scheduler.OneCycleLR(
        x, max_lr=[group["lr"] for group in x.param_groups], total_steps=8, cycle_momentum=False
    ),
}


def serve(model, configure, folder, schedule=None, strategy=None):
    strategy = strategy or ShadowSyncStrategy(num_trainers=1)
    tables = ServedTables(model, min_rows=1)
    with tables.substitution.shown_as_parameters():
        optimizer = configure(model)
        scheduler = None if schedule is None else schedule(optimizer)
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    tables.choose_rules(optimizers, given=strategy.rows.row_optimizer, check=strategy.rows.check_rule)
    plan = plan_placement(tables.collections, 1, method="size")
    servers = [MappedStores(folder)]
    for name, collection in tables.collections.items():
        layout, rule = collection.layout, collection.optimizer
        collection.bind(StoreBackend.create(name, layout, rule, servers=servers, plan=plan))
    tables.attach_to(optimizers)
    return tables, optimizer, scheduler


def train(model, optimizer, scheduler, steps=6):
    for step in range(steps):
        model.loss(step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_when_every_batch_touches_them_then_train_as_by_the_users_own_optimizer(name, schedule, tmp_path):
    plain, served = Towers(), Towers()
    expected = OPTIMIZERS[name](plain)
    train(plain, expected, SCHEDULES[schedule] and SCHEDULES[schedule](expected))
    tables, optimizer, scheduler = serve(served, OPTIMIZERS[name], tmp_path, SCHEDULES[schedule])
    train(served, optimizer, scheduler)
    tables.release(copy_rows=True)
    for key, trained in plain.state_dict().items():
        torch.testing.assert_close(served.state_dict()[key], trained, rtol=1e-5, atol=1e-6)
    assert [x.requires_grad for x in served.parameters()] == [x.requires_grad for x in plain.parameters()]
    assert not torch.allclose(plain.users.weight, Towers().users.weight, atol=1e-2)


REFUSED = {
    "momentum": (partial(SGD, lr=0.1, momentum=0.9), r"SGD\(lr=0.1, momentum=0.9\).*row_optimizer=RowSGD\(lr=0.1\)"),
    "nesterov": (
        partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.5),
        r"row_optimizer=RowSGD\(lr=0.1, weight_decay=0.5\)",
    ),
    "adamw": (partial(AdamW, lr=0.01), r"AdamW\(lr=0.01, decoupled_weight_decay=True\).*=RowAdam\(lr=0.01\)"),
    "amsgrad": (partial(Adam, lr=0.01, amsgrad=True), r"amsgrad=True.*row_optimizer=RowAdam\(lr=0.01\)"),
    "maximize": (partial(SGD, lr=0.1, maximize=True), r"maximize=True.*row_optimizer=RowSGD"),
    "lr_decay": (partial(Adagrad, lr=0.1, lr_decay=0.1), r"lr_decay=0.1.*=RowAdagrad\(lr=0.1, eps=1e-10\)"),
    "another class": (partial(RMSprop, lr=0.1), r"by RMSprop\(lr=0.1\).*=RowWiseAdagrad\(lr=0.1\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rows_when_no_rule_is_such_as_their_optimizer_then_refused_with_what_to_write(name, tmp_path):
    make, match = REFUSED[name]
    with pytest.raises(TypeError, match=rf"users is on servers.*{match}"):
        serve(Towers(), lambda model: make(model.parameters()), tmp_path)
    # A rule that is given wins over whatever the optimizer is, and frozen rows need none.
    given = ShadowSyncStrategy(num_trainers=1, row_optimizer=RowFTRL(0.1))
    (folder := tmp_path / "given").mkdir()
    tables, *_ = serve(Towers(), lambda model: make(model.parameters()), folder, strategy=given)
    assert {x.optimizer for x in tables.collections.values()} == {RowFTRL(0.1)}
    tables.release(copy_rows=False)
    frozen = Towers()
    frozen.users.requires_grad_(False), frozen.items.requires_grad_(False)
    (folder := tmp_path / "frozen").mkdir()
    tables, *_ = serve(frozen, lambda model: make(model.parameters()), folder)
    with pytest.raises(ValueError, match=rf"users was frozen when training began.*{match}"):
        frozen.users.requires_grad_(True)
    tables.release(copy_rows=False)


def test_rows_when_the_strategy_cannot_train_them_by_their_optimizers_rule_then_refused(tmp_path):
    def adam(model):
        return Adam(model.parameters(), lr=0.01)

    with pytest.raises(TypeError, match=r"users .*Adam\(lr=0.01\): RowAdam cannot train cached.*=RowAdagrad\(lr=0.01"):
        serve(Towers(), adam, tmp_path, strategy=HETStrategy())
    tables, *_ = serve(Towers(), adam, tmp_path, strategy=HETStrategy(algorithm="hybrid"))
    assert tables.rules() == "users, items: RowAdam(lr=0.01)"
    tables.release(copy_rows=False)


def replaced(model):
    model.users.weight = nn.Parameter(torch.ones(ROWS, 4))


def resized(model):
    model.users.weight.data = torch.ones(ROWS, 5)


def hooked(model):
    model.users.weight.register_hook(lambda gradient: 2 * gradient)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (replaced, r"users is served .*configure_optimizers puts another parameter in the place of its weight\."),
        (resized, r"users is served .*makes its weight \[12, 5\] torch.float32, which was \[12, 4\] torch.float32\."),
        (hooked, r"users is served .*puts hooks on its weight.*higher min_rows"),
    ],
)
def test_weight_when_an_optimizer_is_made_and_rows_cannot_take_what_is_done_to_it_then_refused(change, match, tmp_path):
    def make(model):
        change(model)
        return SGD(model.parameters(), lr=0.1)

    model = Towers()
    with pytest.raises(ValueError, match=match):
        serve(model, make, tmp_path)
    assert [len(x) for x in model.users.parameters()] == [0], "hidden again"


def test_optimizer_when_made_before_the_run_then_the_error_says_so(tmp_path):
    model = Towers()
    made = SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        ValueError, match=r"users is on servers.* SGD, which .* was made of its weight before .*in __init__"
    ):
        serve(model, lambda _: made, tmp_path)


def test_placeholders_when_adagrad_makes_their_state_at_once_then_take_no_memory_for_it():
    model = Towers()
    tables = ServedTables(model, min_rows=1)
    with tables.substitution.shown_as_parameters():
        optimizer = Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)
        state = optimizer.state[model.users.weight]["sum"]
        assert (state.shape, state.untyped_storage().nbytes()) == ((ROWS, 4), 4)
        assert model.users.weight.data_ptr() == model.users.plain.weight.data_ptr()
    tables.choose_rules([optimizer], given=None, check=lambda rule: None)
    shapes = {len(x["sum"]) for x in optimizer.state_dict()["state"].values()}
    assert shapes == {0, *(len(x) for x in model.out.parameters())}, "nor do checkpoints have it"
    tables.release(copy_rows=False)


@pytest.mark.parametrize("owners", [0, 2])
def test_rows_when_not_one_optimizer_has_them_then_refused(owners, tmp_path):
    def make(model):
        theirs = model.parameters if owners else model.out.parameters
        return [SGD(theirs(), lr=0.1) for _ in range(max(owners, 1))]

    with pytest.raises(ValueError, match=rf"users is on servers.* has it in {owners} parameter groups.*freeze it"):
        serve(Towers(), make, tmp_path)


def test_rows_when_a_schedule_moves_more_than_the_learning_rate_then_the_run_ends(tmp_path):
    model = Towers()
    tables, optimizer, scheduler = serve(
        model,
        lambda model: Adam(model.parameters(), lr=0.01),
        tmp_path,
        lambda x: lr_scheduler.OneCycleLR(x, max_lr=0.01, total_steps=8),
    )
    with pytest.raises(ValueError, match=r"users is on servers.*RowAdam\(.*cycle_momentum=False"):
        train(model, optimizer, scheduler)
    tables.release(copy_rows=False)


def test_given_rule_when_groups_have_schedules_of_their_own_then_rows_are_scaled_as_their_group(tmp_path):
    given = ShadowSyncStrategy(num_trainers=1, row_optimizer=RowSGD(2.0))

    def schedule(optimizer):
        return lr_scheduler.LambdaLR(optimizer, [lambda step: 1.0, lambda step: 0.5**step])

    model = Towers()
    tables, optimizer, scheduler = serve(
        model, lambda model: in_groups(model, partial(SGD, lr=0.1), lr=0.3), tmp_path, schedule, given
    )
    train(model, optimizer, scheduler, steps=1)
    rates = {path: collection.lr for path, collection in tables.collections.items()}
    assert rates == pytest.approx({"users": 1.0, "items": 2.0})
    tables.release(copy_rows=False)


def test_placeholders_when_an_optimizer_is_made_then_stand_for_the_weights_and_later_ask_for_no_gradient():
    model = Towers()
    model.items.requires_grad_(False)
    names = [(name, x.requires_grad, x.dim()) for name, x in model.named_parameters()]
    tables = ServedTables(model, min_rows=1)
    with tables.substitution.shown_as_parameters():
        assert [(name, x.requires_grad, x.dim()) for name, x in model.named_parameters()] == names
    assert [x.requires_grad for x in (*model.users.parameters(), *model.items.parameters())] == [False, False]
    with pytest.raises(AttributeError, match=r"users\.weight is in stores"):
        _ = model.users.weight
    tables.release(copy_rows=False)
