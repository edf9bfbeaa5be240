"""What all models have in common: shapes, options, seeds, precision, copies, configs."""

import copy
import pickle
from inspect import signature
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn

from lightning_recsys import models
from lightning_recsys.embeddings import EmbeddingBagCollection, PoolingType, SparseFeatures
from lightning_recsys.models import DCN, DLRM, DCNv2, DeepFM, FactorizationMachine, LogisticRegression, WideDeep
from lightning_recsys.optim import RowFTRL, RowSGD

MODELS = [LogisticRegression, FactorizationMachine, WideDeep, DeepFM, DCN, DCNv2, DLRM]
FIELDS = {"user": 30, "movie": 50, "genre": 20}
LEAVES = sorted((Path(__file__).parents[3] / "conf" / "model").glob("*.yaml"))
CONFIGS = [path for path in LEAVES if "defaults" not in OmegaConf.load(path)]  # a variant of another leaf has them
OTHERS = {"GraphSAGE"}  # what is no model of click-through rates; tests/distributed/test_graphsage_strategies.py


def batch(size=6, num_dense=3):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 20, (size, len(FIELDS)), generator=generator)
    return torch.randn(size, num_dense, generator=generator), SparseFeatures.from_ids(tuple(FIELDS), ids)


def collections_of(model):
    return [module for module in model.modules() if isinstance(module, EmbeddingBagCollection)]


def make(model_class, num_dense=3, **arguments):
    torch.manual_seed(0)
    return model_class(num_dense, FIELDS, kernel="torch", **arguments)


def test_models_are_all_exported():
    assert {model.__name__ for model in MODELS} | OTHERS == set(models.__all__)


@pytest.mark.parametrize("num_dense", [0, 1, 3])
@pytest.mark.parametrize("size", [1, 6])
@pytest.mark.parametrize("model_class", MODELS)
def test_forward_on_any_batch_size_gives_one_finite_logit_per_example(model_class, size, num_dense):
    logits = make(model_class, num_dense)(*batch(size, num_dense))
    assert logits.shape == (size,)
    assert logits.dtype == torch.float32
    assert logits.isfinite().all()


@pytest.mark.parametrize("model_class", MODELS)
def test_features_in_the_batch_in_another_order_change_nothing(model_class):
    model, (dense, sparse) = make(model_class).eval(), batch()
    shuffled = sparse.select(("genre", "user", "movie"))
    torch.testing.assert_close(model(dense, shuffled), model(dense, sparse), rtol=0, atol=0)


@pytest.mark.parametrize("model_class", MODELS)
def test_same_seed_gives_the_same_parameters_and_another_seed_others(model_class):
    states = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        states.append(model_class(3, FIELDS, kernel="torch").state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    if model_class is not LogisticRegression:  # which starts at 0 whatever the seed
        assert any(not torch.equal(states[0][key], states[2][key]) for key in states[0])


@pytest.mark.parametrize("model_class", MODELS)
def test_tables_start_small_and_first_order_weights_at_zero(model_class):
    collections = collections_of(
        make(model_class, embedding_dim=8) if model_class is not LogisticRegression else make(model_class)
    )
    for collection in collections:
        rows = torch.cat([v for k, v in collection.state_dict().items() if k.endswith("weight")])
        if collection.embedding_dim == 1:
            assert rows.abs().max() == 0
        else:
            assert rows.std().item() == pytest.approx(0.01, rel=0.15)  # 800 draws: 2.5 % off, one sigma


@pytest.mark.parametrize("model_class", MODELS)
def test_options_reach_the_collections(model_class):
    options = {"row_optimizer": RowSGD(0.5), "first_order_optimizer": RowFTRL(0.25), "check_ids": False}
    for collection in collections_of(make(model_class, pooling=PoolingType.MEAN, **options)):
        assert collection.optimizer == (RowFTRL(0.25) if collection.embedding_dim == 1 else RowSGD(0.5))
        assert collection.check_ids is False
        assert all(table.pooling is PoolingType.MEAN for table in collection.tables)
        assert collection.embedding_bags.kernel_name == "torch"


@pytest.mark.parametrize("model_class", MODELS)
def test_first_order_optimizer_when_absent_is_the_row_optimizer(model_class):
    assert {c.optimizer for c in collections_of(make(model_class, row_optimizer=RowSGD(0.5)))} == {RowSGD(0.5)}


@pytest.mark.parametrize("model_class", MODELS)
def test_unknown_argument_is_an_error_that_names_it(model_class):
    with pytest.raises(TypeError, match=r"unexpected model argument 'hiden'.*'row_optimizer'"):
        make(model_class, hiden=[3])


@pytest.mark.parametrize("model_class", MODELS)
def test_model_without_any_feature_is_an_error(model_class):
    with pytest.raises(ValueError, match="at least one numeric feature or one categorical field, got neither"):
        model_class(0, {})


@pytest.mark.parametrize("model_class", [model for model in MODELS if model is not DLRM])
def test_model_of_numeric_features_alone_learns_a_line(model_class):
    torch.manual_seed(0)
    arguments = {"hidden": [16]} if "hidden" in signature(model_class).parameters else {}
    model, dense = model_class(3, {}, **arguments), torch.randn(400, 3)
    labels = (dense @ torch.tensor([2.0, -1.0, 0.0]) > 0).float()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    no_ids = SparseFeatures((), torch.empty(0, dtype=torch.int64))
    for _ in range(200):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(dense, no_ids), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert collections_of(model) == []
    assert ((model(dense, no_ids) > 0) == labels.bool()).float().mean() > 0.95


@pytest.mark.parametrize("model_class", [WideDeep, DeepFM, DCN, DCNv2])
def test_model_of_numeric_features_alone_takes_all_options(model_class):
    model = model_class(3, {}, embedding_dropout=0.5, dropout=0.1, hidden=[4])
    assert model(torch.randn(5, 3), SparseFeatures((), torch.empty(0, dtype=torch.int64))).shape == (5,)


def test_dlrm_of_numeric_features_alone_names_models_that_work():
    with pytest.raises(ValueError, match=r"model=dlrm takes dot products.*model=lr, fm, wide_deep.*concatenation"):
        DLRM(3, {})
    model = DLRM(3, {}, interaction="concatenation")
    assert model(torch.randn(5, 3), SparseFeatures((), torch.empty(0, dtype=torch.int64))).shape == (5,)


@pytest.mark.parametrize(("made_with", "given"), [(3, 2), (3, 0), (0, 3)])
@pytest.mark.parametrize("model_class", MODELS)
def test_wrong_number_of_numeric_features_is_an_error_that_names_both(model_class, made_with, given):
    model, (dense, sparse) = make(model_class, made_with), batch(6, given)
    with pytest.raises(ValueError, match=rf"made with num_dense={made_with} and .* got shape \[6, {given}\]"):
        model(dense, sparse)


def test_dlrm_with_one_vector_is_an_error_that_says_what_to_add():
    with pytest.raises(ValueError, match="at least two vectors, got 1: give the model a second categorical field"):
        DLRM(0, {"user": 3})


def test_dlrm_with_one_vector_and_concatenation_then_is_made():
    assert DLRM(0, {"user": 3}, interaction="concatenation").top[0].in_features == 16


def test_dlrm_unknown_interaction_is_an_error_that_lists_the_known():
    with pytest.raises(ValueError, match=r"model.interaction must be one of \['dot', 'concatenation'\], got 'cat'"):
        DLRM(0, {"user": 3}, interaction="cat")


@pytest.mark.parametrize("model_class", [WideDeep, DeepFM, DCN, DCNv2, DLRM])
def test_embedding_dropout_then_drops_in_training_only_and_is_refused_out_of_range(model_class):
    model, inputs = make(model_class, embedding_dropout=0.5), batch()
    for table in model.embeddings.tables:
        model.embeddings.embedding_bags.read(table.name, "weight").fill_(1.0)
    seen = []
    model.drop.register_forward_hook(lambda module, args, output: seen.append(output))
    model(*inputs)
    assert set(seen[0].unique().tolist()) == {0.0, 2.0}
    model.eval()(*inputs)
    assert set(seen[1].unique().tolist()) == {1.0}
    with pytest.raises(ValueError, match=r"model.embedding_dropout must be in \[0, 1\), got 1"):
        make(model_class, embedding_dropout=1)
    assert make(model_class).drop is None


def test_dcn_v2_unknown_structure_is_an_error_that_lists_the_known():
    with pytest.raises(ValueError, match=r"model.structure must be one of \['parallel', 'stacked'\], got 'series'"):
        DCNv2(0, {"user": 3}, structure="series")


# F fields, D width, N numeric features, K = F D + N: the formulas of docs/models.md with F=3, D=4, N=2, hidden 8 and 5.
@pytest.mark.parametrize(
    ("model_class", "arguments", "dense_parameters"),
    [
        (LogisticRegression, {}, 2 + 1),
        (FactorizationMachine, {"embedding_dim": 4}, 2 + 1 + 2 * 4),
        (WideDeep, {"embedding_dim": 4, "hidden": [8, 5]}, 2 + (14 * 8 + 8) + (8 * 5 + 5) + (5 + 1)),
        (DeepFM, {"embedding_dim": 4, "hidden": [8, 5]}, 2 + 2 * 4 + (14 * 8 + 8) + (8 * 5 + 5) + (5 + 1)),
        (
            DCN,
            {"embedding_dim": 4, "hidden": [8, 5], "num_cross_layers": 3},
            3 * 2 * 14 + 14 + (14 * 8 + 8) + (8 * 5 + 5) + (5 + 1),
        ),
        (
            DCNv2,
            {"embedding_dim": 4, "hidden": [8, 5], "num_cross_layers": 3},
            3 * (14 * 14 + 14) + 14 + (14 * 8 + 8) + (8 * 5 + 5) + (5 + 1),
        ),
        (
            DCNv2,
            {"embedding_dim": 4, "hidden": [8, 5], "num_cross_layers": 3, "rank": 2, "structure": "stacked"},
            3 * (2 * 14 * 2 + 14) + (14 * 8 + 8) + (8 * 5 + 5) + (5 + 1),
        ),
        (
            DLRM,
            {"embedding_dim": 4, "bottom_hidden": [6], "top_hidden": [5]},
            (2 * 6 + 6) + (6 * 4 + 4) + ((4 + 4 * 3 // 2) * 5 + 5) + (5 + 1),
        ),
        (
            DLRM,
            {"embedding_dim": 4, "bottom_hidden": [6], "top_hidden": [5], "interaction": "concatenation"},
            (2 * 6 + 6) + (6 * 4 + 4) + (4 * 4 * 5 + 5) + (5 + 1),
        ),
    ],
)
def test_number_of_dense_parameters_is_the_documented_one(model_class, arguments, dense_parameters):
    model = make(model_class, num_dense=2, **arguments)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == dense_parameters


@pytest.mark.parametrize("num_dense", [0, 3])
@pytest.mark.parametrize("model_class", MODELS)
def test_bfloat16_autocast_trains_and_stays_close_to_float32(model_class, num_dense):
    model, (dense, sparse) = make(model_class, num_dense, row_optimizer=RowSGD(1.0)), batch(64, num_dense)
    exact = model(dense, sparse)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(dense, sparse)
        nn.functional.binary_cross_entropy_with_logits(logits.float(), torch.ones(64)).backward()
    # 8 bits of mantissa through a handful of layers
    torch.testing.assert_close(logits.float(), exact, rtol=0.05, atol=0.02)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
    moved = [
        key
        for key, value in model.state_dict().items()
        if ".embedding_bags." in key and "step" not in key and not torch.equal(value, before[key])
    ]
    assert len(moved) == len(FIELDS) * len(collections_of(model))


@pytest.mark.parametrize("model_class", MODELS)
def test_copies_by_deepcopy_pickle_and_state_dict_give_the_same_logits(model_class):
    model, inputs = make(model_class).eval(), batch()
    torch.manual_seed(1)
    loaded = model_class(3, FIELDS, kernel="torch").eval()
    loaded.load_state_dict(model.state_dict())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        torch.testing.assert_close(twin(*inputs), model(*inputs), rtol=0, atol=0)


@pytest.mark.parametrize("model_class", MODELS)
def test_gradients_do_not_fall_into_denormals_at_the_start(model_class):
    # The reason for small embeddings: activations and gradients keep an ordinary size.
    model, (dense, sparse) = make(model_class), batch(64)
    nn.functional.binary_cross_entropy_with_logits(model(dense, sparse), torch.ones(64)).backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad.abs().max() > 1e-20, name


def test_configs_cover_every_model_once():
    targets = [OmegaConf.load(path)["_target_"] for path in CONFIGS]
    assert sorted(targets) == sorted(f"lightning_recsys.models.{name}" for name in models.__all__)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_builds_its_model_with_the_defaults_of_the_constructor(path):
    config = OmegaConf.load(path)
    defaults = signature(getattr(models, config["_target_"].rsplit(".", 1)[1])).parameters
    given = {name: value for name, value in OmegaConf.to_container(config).items() if name != "_target_"}
    assert {name: list(x) if isinstance(x := defaults[name].default, tuple) else x for name in given} == given


@pytest.mark.parametrize("path", [path for path in CONFIGS if path.stem != "graphsage"], ids=lambda path: path.stem)
def test_config_builds_its_model_as_the_constructor_does(path):
    config = OmegaConf.load(path)
    built = instantiate(config, _convert_="all", _partial_=True)(num_dense=3, fields=FIELDS, kernel="torch")
    default = getattr(models, config["_target_"].rsplit(".", 1)[1])(3, FIELDS, kernel="torch")
    assert repr(built) == repr(default)
    assert built(*batch()).shape == (6,)
