"""Plain embedding modules of somebody's own model, served from stores: results, gradients, keys and refusals."""

import copy
from contextlib import nullcontext

import pytest
import torch
from pytorch_lightning import LightningModule, Trainer
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader

from lightning_recsys.embeddings.substitution import substitute_embeddings
from lightning_recsys.optim import RowAdagrad, RowAdam, RowFTRL, RowSGD, RowWiseAdagrad
from lightning_recsys.placement import PlacementPlan, TablePart
from lightning_recsys.stores import MappedStores
from lightning_recsys.stores.backend import StoreBackend
from lightning_recsys.strategies.common.run.changes import RunChanges


class Bound:
    """A module whose embeddings are served from two stores, each table cut in two."""

    def __init__(self, module, folder, optimizer=None, *, copy_rows=True, **choice):
        for server in range(2):
            (folder / str(server)).mkdir(exist_ok=True)
        self.servers = [MappedStores(folder / str(server)) for server in range(2)]
        self.substitution = substitute_embeddings(
            module, optimizer=optimizer or RowSGD(0.1), **(choice or {"min_rows": 1})
        )
        for path, collection in self.substitution.collections.items():
            rows = collection.tables[0].num_embeddings
            sizes = len(range(0, rows, 2)), len(range(1, rows, 2))
            parts = [TablePart(path, "rows", size, i, stripe=i, num_stripes=2) for i, size in enumerate(sizes)]
            plan = PlacementPlan("size", 2, tuple(parts))
            backend = StoreBackend.create(
                path, collection.layout, collection.optimizer, servers=self.servers, plan=plan
            )
            collection.bind(backend, copy_rows=copy_rows)

    def release(self):
        for collection in self.substitution.collections.values():
            collection.unbind()
        self.substitution.restore()
        for server in self.servers:
            server.close()


class Holder(nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.emb = embedding

    def forward(self, *args, **kwargs):
        return self.emb(*args, **kwargs)


IDS = torch.tensor([[1, 3, 3], [0, 9, 1]])
FLAT, OFFSETS = torch.tensor([1, 3, 3, 0, 9, 1]), torch.tensor([0, 2, 2])  # bags of 2, 0 and 4
WEIGHTS = torch.tensor([0.5, 1.0, 2.0, -1.0, 0.25, 3.0])

CASES = {
    "embedding": (lambda: nn.Embedding(10, 4), (IDS,), {}),
    "embedding_int32": (lambda: nn.Embedding(10, 4), (IDS.int(),), {}),
    "embedding_scalar": (lambda: nn.Embedding(10, 4), (torch.tensor(3),), {}),
    "embedding_no_ids": (lambda: nn.Embedding(10, 4), (IDS[:0],), {}),
    "embedding_sparse": (lambda: nn.Embedding(10, 4, sparse=True), (IDS,), {}),
    "embedding_padding": (lambda: nn.Embedding(10, 4, padding_idx=3), (IDS,), {}),
    "embedding_padding_from_the_end": (lambda: nn.Embedding(10, 4, padding_idx=-1), (IDS,), {}),
    "sum_rows": (lambda: nn.EmbeddingBag(10, 4, mode="sum"), (IDS,), {}),
    "mean_rows": (lambda: nn.EmbeddingBag(10, 4, mode="mean"), (IDS,), {}),
    "sum_offsets": (lambda: nn.EmbeddingBag(10, 4, mode="sum"), (FLAT, OFFSETS), {}),
    "mean_offsets": (lambda: nn.EmbeddingBag(10, 4), (FLAT,), {"offsets": OFFSETS}),
    "mean_padding": (lambda: nn.EmbeddingBag(10, 4, padding_idx=3), (FLAT, OFFSETS), {}),
    "mean_rows_padding": (lambda: nn.EmbeddingBag(10, 4, padding_idx=3), (IDS,), {}),
    "weighted": (lambda: nn.EmbeddingBag(10, 4, mode="sum"), (FLAT, OFFSETS), {"per_sample_weights": WEIGHTS}),
    "weighted_rows": (lambda: nn.EmbeddingBag(10, 4, mode="sum"), (IDS, None, WEIGHTS.view(2, 3)), {}),
    "weighted_padding": (
        lambda: nn.EmbeddingBag(10, 4, mode="sum", padding_idx=1),
        (FLAT, OFFSETS),
        {"per_sample_weights": WEIGHTS},
    ),
    "last_offset": (
        lambda: nn.EmbeddingBag(10, 4, mode="sum", include_last_offset=True),
        (FLAT, torch.tensor([0, 2, 2, 6])),
        {},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_module_when_served_from_stores_then_output_and_training_equal_torch(case, tmp_path):
    make, args, kwargs = CASES[case]
    plain = Holder(make())
    with torch.no_grad():
        plain.emb.weight.normal_()  # the padding row too: torch looks it up and does not train it
    served = copy.deepcopy(plain)
    bound = Bound(served, tmp_path)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        expected, output = plain(*args, **kwargs), served(*args, **kwargs)
        assert output.shape == expected.shape
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
        for result in (expected, output):
            (result - 1).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert list(served.state_dict()) == list(plain.state_dict())
    bound.release()
    assert type(served.emb) is type(plain.emb)
    torch.testing.assert_close(served.emb.weight, plain.emb.weight, rtol=1e-5, atol=1e-6)


def test_checkpoint_when_saved_while_bound_then_a_plain_module_loads_it_and_back(tmp_path):
    served, plain = Holder(nn.Embedding(10, 4, padding_idx=2)), Holder(nn.Embedding(10, 4, padding_idx=2))
    bound = Bound(served, tmp_path, RowFTRL(0.1))
    served(IDS).sum().backward()
    torch.save(served.state_dict(), tmp_path / "saved.pt")
    plain.load_state_dict(torch.load(tmp_path / "saved.pt"))
    torch.testing.assert_close(plain(IDS), served(IDS))
    with torch.no_grad():
        plain.emb.weight.normal_()
    served.load_state_dict(plain.state_dict())
    assert torch.equal(served(torch.arange(10)), plain(torch.arange(10)))
    # The row optimizer's state goes with the rows: FTRL's would undo the load at the next update.
    before = served(IDS).detach().clone()
    (served(IDS) * 0).sum().backward()
    torch.testing.assert_close(served(IDS), before)
    with pytest.raises(RuntimeError, match=r"(?s)Missing.*emb.weight"):
        served.load_state_dict({})
    with pytest.raises(RuntimeError, match=r"size mismatch for emb.weight: the checkpoint has \[2, 4\]"):
        served.load_state_dict({"emb.weight": torch.zeros(2, 4)})
    bound.release()


def take_steps(served):
    for _ in range(3):
        (served(IDS) - 1).square().sum().backward()


@pytest.mark.parametrize(
    "rule", [RowAdam(0.1), RowAdagrad(0.5), RowWiseAdagrad(0.5), RowSGD(0.1)], ids=lambda x: type(x).__name__
)
def test_row_state_when_saved_and_loaded_then_training_goes_on_as_if_it_had_never_stopped(rule, tmp_path):
    served = Holder(nn.Embedding(10, 4))
    bound = Bound(served, tmp_path, rule)
    take_steps(served)
    torch.save((served.state_dict(), bound.substitution.row_state()), tmp_path / "saved.pt")
    take_steps(served)
    bound.release()
    weights, state = torch.load(tmp_path / "saved.pt")
    assert state["emb"]["step"] == 3
    resumed = Holder(nn.Embedding(10, 4))
    (tmp_path / "second").mkdir()
    bound = Bound(resumed, tmp_path / "second", rule)
    resumed.load_state_dict(weights)
    assert bound.substitution.load_row_state(state) == []
    take_steps(resumed)
    bound.release()
    torch.testing.assert_close(resumed.emb.weight, served.emb.weight, rtol=0, atol=0)


def test_row_state_when_it_is_another_rules_or_lacks_then_the_module_is_named_and_begins_afresh(tmp_path):
    served = Holder(nn.Embedding(10, 4))
    bound = Bound(served, tmp_path, RowAdagrad(0.5))
    take_steps(served)
    before = bound.substitution.row_state()["emb"]
    rowwise = {"sum": torch.ones(10), "step": 5}
    for saved in ({}, {"other": before}, {"emb": rowwise}, {"emb": {"sum": torch.ones(9, 4), "step": 5}}):
        assert bound.substitution.load_row_state(saved) == ["emb"]
    after = bound.substitution.row_state()["emb"]
    assert after["step"] == before["step"] == 3
    assert torch.equal(after["sum"], before["sum"])
    bound.release()


def test_second_worker_when_bound_without_copying_then_it_sees_the_first_ones_rows(tmp_path):
    first, second = Holder(nn.Embedding(10, 4)), Holder(nn.Embedding(10, 4))
    a, b = Bound(first, tmp_path), Bound(second, tmp_path, copy_rows=False)
    assert torch.equal(first(IDS), second(IDS))
    second(IDS).sum().backward()
    assert torch.equal(first(IDS), second(IDS))
    a.release()
    b.release()


def test_frozen_embedding_when_served_then_it_does_not_train(tmp_path):
    served = Holder(nn.Embedding.from_pretrained(torch.randn(10, 4)))
    bound = Bound(served, tmp_path)
    assert not served(IDS).requires_grad
    served.emb.requires_grad_(True)
    assert served(IDS).requires_grad
    bound.release()


def test_mode_when_the_model_is_evaluated_then_the_backend_is_asked_for_rows_that_are_not_kept(tmp_path, monkeypatch):
    plain = nn.Embedding(10, 4).eval()
    served = Holder(plain)
    bound, asked = Bound(served, tmp_path), []
    fresh = StoreBackend.lookup_fresh
    monkeypatch.setattr(StoreBackend, "lookup_fresh", lambda *args: asked.append(True) or fresh(*args))
    with torch.no_grad():
        served(IDS)
        assert len(asked) == 1, "as the module was"
        served.train()(IDS)
        assert len(asked) == 1
        served.eval()(IDS)
    assert len(asked) == 2
    bound.release()
    assert not plain.training


class Rating(LightningModule):
    """A user's own matrix factorisation: nothing but embeddings, listed with ``self.parameters()``."""

    def __init__(self):
        super().__init__()
        self.users, self.movies = nn.Embedding(50, 4), nn.Embedding(8, 4)
        self.towers = nn.ModuleDict({"movies": self.movies})

    def training_step(self, batch):
        users, movies, label = batch.unbind(1)
        return ((self.users(users) * self.towers["movies"](movies)).sum(1) - label).square().sum()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), "interval": "step"}]


class Served(Rating):
    """The same, served from stores as a strategy would do it."""

    def __init__(self, folder, **choice):
        super().__init__()
        self.folder, self.choice = folder, choice

    def setup(self, stage):
        self.bound = Bound(self, self.folder, **self.choice)

    def on_train_start(self):
        self.bound.substitution.attach_to(self.trainer.optimizers)

    def teardown(self, stage):
        self.bound.release()
        del self.bound


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("choice", "served_paths"), [({"min_rows": 10}, ["users"]), ({"min_rows": 1}, ["users", "movies"])]
)
def test_lightning_module_when_fit_then_it_trains_as_with_its_own_optimizer(tmp_path, accumulate, choice, served_paths):
    plain, served = Rating(), Served(tmp_path, **choice)
    served.load_state_dict(plain.state_dict())
    rows = torch.stack([torch.randint(0, 50, (48,)), torch.randint(0, 8, (48,)), torch.randint(0, 2, (48,))], 1)
    for module in (plain, served):
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=1,
            accumulate_grad_batches=accumulate,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(rows, batch_size=8))
        assert trainer.global_step == 6 // accumulate
    assert type(served.users) is nn.Embedding
    assert served.movies is served.towers["movies"]
    assert sorted(path.name for path in (tmp_path / "0").iterdir()) == sorted(served_paths)
    expected = plain.state_dict()
    assert list(served.state_dict()) == list(expected)
    for key, tensor in served.state_dict().items():
        torch.testing.assert_close(tensor, expected[key], rtol=1e-5, atol=1e-6)


class Adversaries(LightningModule):
    """Two optimizers, the second of which has the embedding and its own schedule; the first trains what judges it."""

    automatic_optimization = False

    def __init__(self, folder=None, *, toggles):
        super().__init__()
        self.folder, self.toggles = folder, toggles
        self.vectors, self.makes, self.judges = nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def setup(self, stage):
        self.bound = None if self.folder is None else Bound(self, self.folder)

    def on_train_start(self):
        if self.bound is not None:
            self.bound.substitution.attach_to(self.trainer.optimizers)
            self.changes = RunChanges(self.trainer)
            self.changes.follow_toggling(tuple(self.bound.substitution.collections.values()))

    def configure_optimizers(self):
        judging = torch.optim.SGD(self.judges.parameters(), lr=0.1)
        making = torch.optim.SGD([*self.makes.parameters(), *self.vectors.parameters()], lr=0.1)
        schedules = [torch.optim.lr_scheduler.ExponentialLR(x, y) for x, y in ((judging, 0.9), (making, 0.5))]
        return [judging, making], schedules

    def training_step(self, ids, batch_idx):
        for sign, optimizer in zip((1, -1), self.optimizers(), strict=True):
            with self.toggled_optimizer(optimizer) if self.toggles else nullcontext():
                made = self.makes(self.vectors(ids))
                self.manual_backward(sign * self.judges(made).square().sum())
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def teardown(self, stage):
        if self.bound is not None:
            self.changes.undo()
            self.bound.release()
            del self.bound


@pytest.mark.parametrize("toggles", [False, True])
def test_second_optimizer_when_it_has_the_embedding_then_rows_follow_its_steps_schedule_and_toggling(tmp_path, toggles):
    plain, served = Adversaries(toggles=toggles), Adversaries(tmp_path, toggles=toggles)
    served.load_state_dict(plain.state_dict())
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    for module in (plain, served):
        trainer = Trainer(accelerator="cpu", max_epochs=1, enable_model_summary=False, **options)
        trainer.fit(module, DataLoader(torch.arange(8).repeat(3), batch_size=4))
    for key, tensor in plain.state_dict().items():
        torch.testing.assert_close(served.state_dict()[key], tensor, rtol=1e-5, atol=1e-6)


def test_shared_module_when_in_two_places_then_both_get_the_same_substitute(tmp_path):
    model = Rating()
    bound = Bound(model, tmp_path, names=["towers.movies"])
    assert model.movies is model.towers["movies"]
    assert list(bound.substitution.collections) == ["movies"]
    assert type(model.users) is nn.Embedding
    assert len(list(model.parameters())) == 2, "as many as before, so that an optimizer's state fits"
    bound.release()
    assert type(model.movies) is nn.Embedding


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: nn.EmbeddingBag(10, 4, mode="max"), r"emb cannot be served.*mode='max' is not a sum"),
        (lambda: nn.Embedding(10, 4, max_norm=1.0), r"emb cannot be served.*max_norm=1.0.*names="),
        (lambda: nn.Embedding(10, 4, scale_grad_by_freq=True), r"emb cannot .*scale_grad_by_freq=True"),
        (lambda: nn.EmbeddingBag(10, 4, max_norm=2.0), r"max_norm=2.0"),
        (lambda: nn.Embedding(10, 4, dtype=torch.float64), r"its weight is torch.float64"),
        (lambda: parametrizations.weight_norm(nn.Embedding(10, 4)), r"\['emb'\] are no nn.Embedding"),
    ],
)
def test_module_when_a_store_cannot_do_what_it_does_then_it_is_refused_by_path(make, match):
    model = Holder(make())
    before = model.emb
    with pytest.raises((ValueError, KeyError), match=match):
        substitute_embeddings(model, optimizer=RowSGD(), names=["emb"])
    assert model.emb is before


def test_weight_when_tied_or_hooked_then_it_is_refused_by_path():
    model = nn.ModuleDict({"emb": nn.Embedding(10, 4), "out": nn.Linear(4, 10)})
    model["out"].weight = model["emb"].weight
    with pytest.raises(ValueError, match=r"emb cannot be served from stores: its weight is tied to out.weight"):
        substitute_embeddings(model, optimizer=RowSGD(), min_rows=1)
    hooked = Holder(nn.Embedding(10, 4))
    hooked.emb.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="emb cannot be served from stores: it has hooks"):
        substitute_embeddings(hooked, optimizer=RowSGD(), min_rows=1)
    hooked = Holder(nn.Embedding(10, 4))
    hooked.emb.weight.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(ValueError, match="emb cannot be served from stores: its weight has hooks"):
        substitute_embeddings(hooked, optimizer=RowSGD(), min_rows=1)


def test_names_when_wrong_then_the_error_lists_what_there_is():
    with pytest.raises(KeyError, match=r"\['user'\] are no .*\['users', 'movies', 'towers.movies'\]"):
        substitute_embeddings(Rating(), optimizer=RowSGD(), names=["user"])


def test_served_module_when_used_in_other_ways_then_errors_name_it(tmp_path):
    model = Rating()
    model.aside = [model.users]  # a reference that no module tree shows
    bound = Bound(model, tmp_path, RowAdagrad(0.1))
    with pytest.raises(IndexError, match=r"users: .*id 50 is outside \[0, 50\)"):
        model.users(torch.tensor([50]))
    with pytest.raises(AttributeError, match=r"users.weight is in stores during this run.*configure_optimizers"):
        _ = model.users.weight
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = model.users.nothing
    with pytest.raises(RuntimeError, match=r"users is served from stores.*called through a reference"):
        model.aside[0](torch.tensor([1]))
    for collection in bound.substitution.collections.values():
        collection.unbind()
    with pytest.raises(RuntimeError, match=r"movies was prepared for stores and none is bound"):
        model.movies(torch.tensor([1]))
    bound.release()
    assert model.aside[0](torch.tensor([1])).shape == (1, 4)


@pytest.mark.parametrize(
    ("mode", "args", "match"),
    [
        ("mean", (FLAT, OFFSETS, WEIGHTS), r"emb: per_sample_weights need mode='sum', and it is 'mean'"),
        ("sum", (FLAT, OFFSETS, WEIGHTS[:2]), r"emb: per_sample_weights must have the input's shape \[6\].*got \[2\]"),
        ("sum", (FLAT, OFFSETS, WEIGHTS.clone().requires_grad_()), r"ask for no gradient.*requires_grad=True"),
        ("sum", (FLAT,), r"emb: input must be \[B, L\] without offsets.*got \[6\] and None"),
        ("sum", (IDS, OFFSETS), r"emb: input must be .*got \[2, 3\] and \[3\]"),
        ("sum", (FLAT, torch.tensor([1, 2])), r"emb: the bags of \['ids'\] do not cover their 6 ids"),
    ],
)
def test_bag_when_called_with_what_does_not_fit_then_errors_name_it(tmp_path, mode, args, match):
    model = Holder(nn.EmbeddingBag(10, 4, mode=mode))
    bound = Bound(model, tmp_path)
    with pytest.raises(ValueError, match=match):
        model(*args)
    bound.release()


def test_padding_row_when_written_while_the_weight_is_shown_then_is_what_is_looked_up(tmp_path):
    model = Holder(nn.Embedding(10, 4, padding_idx=2))
    substitution = substitute_embeddings(model, optimizer=RowSGD(), names=["emb"])
    with substitution.shown_as_parameters():
        nn.init.constant_(model.emb.weight, 3.0)
    assert torch.equal(model.emb._padding_row, torch.full((4,), 3.0))
    substitution.restore()
    assert torch.equal(model(IDS), torch.full((*IDS.shape, 4), 3.0))
