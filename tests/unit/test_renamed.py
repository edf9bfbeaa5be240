"""Old names are refused by an error that names the new one."""

import importlib
import inspect

import pytest

from lightning_recsys.optim import RowAdagrad, RowAdam, RowFTRL, RowSGD, RowWiseAdagrad
from lightning_recsys.parameter_server import connect
from lightning_recsys.strategies import DESStrategy, HETStrategy, ShadowSyncStrategy


@pytest.mark.parametrize(
    ("call", "old", "new"),
    [
        *((rule, "learning_rate", "lr") for rule in (RowSGD, RowAdagrad, RowWiseAdagrad, RowAdam, RowFTRL)),
        (HETStrategy, "num_servers", "num_embedding_servers"),
        (HETStrategy, "mode", "algorithm"),
        (HETStrategy, "placement", "table_placement"),
        (ShadowSyncStrategy, "mode", "rounds"),
        (ShadowSyncStrategy, "placement", "table_placement"),
        (DESStrategy, "placement", "field_placement"),
        (DESStrategy, "replicas", "num_replicas"),
    ],
)
def test_argument_when_it_has_its_old_name_then_the_error_names_the_new_one(call, old, new):
    with pytest.raises(TypeError, match=f"{old} is called {new} now"):
        call(**{old: 1})


def test_connect_when_given_shared_memory_then_the_error_names_transport():
    with pytest.raises(TypeError, match="connect: shared_memory is called transport now"):
        connect("shm:///nowhere", shared_memory="never")


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("optim", "SGD", "RowSGD"),
        ("optim", "Adagrad", "RowAdagrad"),
        ("optim", "RowwiseAdagrad", "RowWiseAdagrad"),
        ("optim", "Adam", "RowAdam"),
        ("optim", "FTRL", "RowFTRL"),
        ("callbacks", "StalenessMonitor", "TelemetryMonitor"),
        ("sync", "Exchange", "Topology"),
    ],
)
def test_class_when_imported_by_its_old_name_then_the_error_names_the_new_one(module, old, new):
    package = importlib.import_module(f"lightning_recsys.{module}")
    with pytest.raises(ImportError, match=f"lightning_recsys.{module}.{old} is called {new} now"):
        exec(f"from lightning_recsys.{module} import {old}")
    assert hasattr(package, new)
    assert not hasattr(package, "NeverThere")


def test_constructor_when_it_refuses_old_names_then_its_signature_is_still_there():
    assert "staleness" in inspect.signature(HETStrategy).parameters
    assert list(inspect.signature(RowAdam).parameters) == [
        "lr",
        "beta1",
        "beta2",
        "eps",
        "weight_decay",
        "decay_all_rows",
    ]
