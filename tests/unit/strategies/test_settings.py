"""Settings that are misspelt, of a wrong type, or mean nothing: refused by name where the strategy is made."""

from __future__ import annotations

import inspect
import re
from datetime import timedelta
from functools import partial

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from lightning_recsys.optim import RowAdagrad, RowSGD
from lightning_recsys.strategies import (
    AsyncParameterServerStrategy,
    DESStrategy,
    ForkserverDDPStrategy,
    HETStrategy,
    HierarchicalStrategy,
    ShadowSyncStrategy,
)
from lightning_recsys.strategies.rows.tables import ServedTables
from lightning_recsys.sync import BMUF

ALL = (
    AsyncParameterServerStrategy,
    DESStrategy,
    ForkserverDDPStrategy,
    HETStrategy,
    HierarchicalStrategy,
    ShadowSyncStrategy,
)


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (HETStrategy, {"cache_frac": 0.5}, r"HETStrategy has no argument cache_frac\. Did you mean cache_fraction\?"),
        (HETStrategy, {"find_unused": True}, r"no argument find_unused\. Did you mean find_unused_parameters\?"),
        (HETStrategy, {"device_ids": [0]}, r"HETStrategy has no argument device_ids"),
        (ShadowSyncStrategy, {"trainers": 2}, r"has no argument trainers\. Did you mean num_trainers\?"),
        (HierarchicalStrategy, {"time_out": None}, r"has no argument time_out\. Did you mean timeout\?"),
        (
            ForkserverDDPStrategy,
            {"xyzzy": 1},
            r"has no argument xyzzy\. It has .*max_restarts, num_threads, server_metrics_port, servers",
        ),
        (AsyncParameterServerStrategy, {"static_graph": True}, r"does not use .* no use for \['static_graph'\]"),
        (AsyncParameterServerStrategy, {"normalization": None}, r"normalization must be a rule's name .*, got None"),
        (ShadowSyncStrategy, {"row_optimizer": "adam"}, r"row_optimizer must be a row optimizer, such as .*'adam'"),
        (ShadowSyncStrategy, {"row_optimizer": RowAdagrad}, r"row_optimizer must be .*RowAdagrad\(lr=.*got <class"),
        (ShadowSyncStrategy, {"row_optimizer": torch.optim.Adam}, r"strategy\.row_optimizer must be"),
        (ShadowSyncStrategy, {"algorithm": BMUF}, r"strategy\.algorithm must be .* or BMUF\(\), got <class"),
        (ShadowSyncStrategy, {"algorithm": "bmuf", "nesterov": "no"}, r"nesterov must be true or false, got 'no'"),
        (HETStrategy, {"embeddings": "model.emb"}, r"embeddings must be a list of .*, such as \['model\.emb'\], got"),
        (
            HETStrategy,
            {"embeddings": [3]},
            r"embeddings must be a list of .*, such as \['model\.embedding'\], got \[3\]",
        ),
        (HETStrategy, {"dynamic_rows": True}, r"strategy\.dynamic_rows must be a DynamicRows\(\.\.\.\), got True"),
        (HETStrategy, {"prefetch": "no"}, r"strategy\.prefetch must be true or false, got 'no'"),
        (DESStrategy, {"whole": "model.emb"}, r"strategy\.whole must be a list of .*, such as \['model\.emb'\], got"),
        (HierarchicalStrategy, {"module": 3}, r"strategy\.module must be a module's path, such as 'model', got 3"),
        *((kind, {"timeout": 5}, r"timeout must be a datetime\.timedelta, such as .*, got 5") for kind in ALL),
        *((kind, {"start_method": "fork"}, r"fork server\. Leave strategy\.start_method out") for kind in ALL),
    ],
)
def test_argument_when_misspelt_or_of_another_type_then_refused_by_name(kind, arguments, message):
    with pytest.raises(TypeError, match=message):
        kind(**arguments)


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (ForkserverDDPStrategy, {"num_threads": "2"}, r"strategy\.num_threads must be a whole number, got '2'"),
        (ForkserverDDPStrategy, {"max_restarts": 1.5}, r"strategy\.max_restarts must be a whole number, got 1\.5"),
        (HETStrategy, {"num_embedding_servers": None}, r"num_embedding_servers must be a whole number, got None"),
        (HETStrategy, {"num_embedding_servers": True}, r"num_embedding_servers must be a whole number, got True"),
        (HETStrategy, {"min_rows": 2.5}, r"strategy\.min_rows must be a whole number, got 2\.5"),
        (DESStrategy, {"num_replicas": 2.5}, r"strategy\.num_replicas must be a whole number, got 2\.5"),
        (DESStrategy, {"num_replicas": 0}, r"num_replicas must be at least 1, got 0\. 1 is one group of all processes"),
    ],
)
def test_number_when_it_is_none_then_refused_by_name(kind, arguments, message):
    with pytest.raises(ValueError, match=message):
        kind(**arguments)


def test_arguments_when_right_then_taken():
    het = HETStrategy(
        timeout=timedelta(seconds=5),
        bucket_cap_mb=1,
        process_group_backend="gloo",
        embeddings=("a", "b.c"),
        row_optimizer=RowAdagrad(lr=0.1),
    )
    assert (het.rows.row_optimizer.lr, het._timeout, het._ddp_kwargs["bucket_cap_mb"]) == (0.1, timedelta(seconds=5), 1)
    hybrid = HETStrategy(algorithm="hybrid", staleness=0, lookahead_batches=0, prefetch=False)  # which is what it does
    assert (hybrid.rows.algorithm, hybrid.rows.prefetch) == ("hybrid", False)
    assert ShadowSyncStrategy(rounds="foreground", gap=10, timeout=None).dense.gap == 10
    assert ShadowSyncStrategy(algorithm=BMUF(alpha=0.5), interval=1).dense.algorithm.alpha == 0.5
    cut = HierarchicalStrategy(num_groups=2, num_sync_servers=2, compression={"gradients": "topk"}, top_k_fraction=0.2)
    assert (cut.dense.num_groups, cut.dense.num_sync_servers) == (2, 2)


@pytest.mark.parametrize("kind", ALL)
def test_arguments_when_at_the_defaults_of_lightning_and_torch_then_count_as_not_given(kind):
    """LightningCLI hands over all that a class and its bases have."""
    parameters = {
        name: x.default
        for base in (DistributedDataParallel, DDPStrategy, *reversed(kind.__mro__[: kind.__mro__.index(DDPStrategy)]))
        for name, x in inspect.signature(base).parameters.items()
        if x.default is not inspect.Parameter.empty and name not in ("device_ids", "start_method")
    }
    strategy = kind(**parameters)
    assert strategy._ddp_kwargs == {}
    assert strategy._timeout == (timedelta(days=7) if kind.asynchronous else timedelta(minutes=30))


def test_min_workers_when_there_are_fewer_from_the_start_then_refused():
    with pytest.raises(ValueError, match=r"strategy\.min_workers=5, and the run has 2 workers .* Choose at most 2"):
        pl.Trainer(accelerator="cpu", devices=2, strategy=AsyncParameterServerStrategy(min_workers=5), barebones=True)


@pytest.mark.parametrize(
    ("rows", "net", "schedule", "says"),
    [
        ({"lr": 0.5}, {"lr": 0.1}, None, ["emb lr=0.5 in a group .*RowSGD with lr=0.2"]),
        ({"lr": 0.5}, {"lr": 0.1}, partial(LambdaLR, lr_lambda=lambda _: 0.01), ["emb lr=0.5"]),
        ({"lr": 0.1, "weight_decay": 0.3}, {"lr": 0.1}, None, ["emb weight_decay=0.3 .* weight_decay=0. "]),
        ({"lr": 0.2}, {"lr": 0.1}, None, []),  # as the row optimizer has it
        ({"lr": 0.1}, {"lr": 0.1, "weight_decay": 0.3}, None, []),  # rows have no decay in either
        ({"lr": 0.1}, {"lr": 0.1}, None, []),  # nothing that is the rows' own
    ],
)
def test_parameter_group_when_it_speaks_of_rows_on_servers_then_what_nobody_takes_is_named(rows, net, schedule, says):
    model = torch.nn.ModuleDict({"emb": torch.nn.Embedding(9, 2), "net": torch.nn.Linear(2, 1)})
    tables = ServedTables(model, names=("emb",))
    empty = {"params": [], "lr": 7.0}  # as a collection adds it for its own rows
    groups = [{"params": model["net"].parameters(), **net}, {"params": model["emb"].parameters(), **rows}, empty]
    optimizer = torch.optim.SGD(groups)
    if schedule is not None:
        schedule(optimizer)
    tables.choose_rules([optimizer], given=RowSGD(0.2), check=lambda _: None)
    told = tables.ignored_groups([optimizer])
    assert len(told) == len(says)
    assert all(re.search(pattern, sentence) for pattern, sentence in zip(says, told, strict=True))
    tables.release(copy_rows=False)
