"""Every worker and every server of a real run is scraped while it trains."""

import json
import re
import urllib.request
from pathlib import Path

import promql_parser
import pytest
import pytorch_lightning as pl
import torch
from ports import free_port
from prometheus_client.parser import text_string_to_metric_families
from served_strategy import make_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_recsys.callbacks import NormalizedEntropyMonitor, PrometheusMetrics, TelemetryMonitor, prometheus_metrics
from lightning_recsys.strategies import (
    AsyncParameterServerStrategy,
    ForkserverDDPStrategy,
    FreeRowsDDPStrategy,
    HETStrategy,
    HierarchicalStrategy,
    ShadowSyncStrategy,
)

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]
STEPS = 8
SERVED = {"transport": "tcp", "min_rows": 60}
STRATEGIES = {
    "async_ps": lambda **more: AsyncParameterServerStrategy(**SERVED, **more),
    "shadowsync": lambda **more: ShadowSyncStrategy(num_trainers=2, **SERVED, **more),
    "het": lambda **more: HETStrategy(**SERVED, **more),
    "hierarchical": lambda **more: HierarchicalStrategy(num_groups=2, **SERVED, **more),
    "ddp_free": lambda **more: FreeRowsDDPStrategy(**SERVED, **more),
    "ddp": lambda **more: ForkserverDDPStrategy(),
}


class Clicks(pl.LightningModule):
    """Somebody's own model of clicks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.items, self.out = nn.Embedding(64, 4), nn.Linear(4, 1)

    def forward(self, ids):
        return self.out(self.items(ids)).squeeze(1)

    def training_step(self, batch, batch_idx):
        ids, labels = batch
        logits = self(ids)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        return {"loss": loss, "logits": logits.detach()}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        ids = torch.arange(128) % 64
        return DataLoader(TensorDataset(ids, (ids % 2).float()), batch_size=8)


class Scrape(pl.Callback):
    """Keeps the text of every process that the run's folder names, as rank 0 and the worker itself see it."""

    def __init__(self, run, out):
        self.run, self.out = run, out

    def on_train_start(self, trainer, pl_module):
        prometheus_metrics.REFRESH_SECONDS = 0.0  # in a process that ends with the run
        trainer.strategy.barrier()  # each has its file

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == STEPS - 1:
            for path in (self.run / "monitoring").glob("*.json"):
                name, endpoint = path.stem, json.loads(path.read_text())["endpoint"]
                if name == f"worker-{trainer.global_rank}" or (trainer.is_global_zero and "worker" not in name):
                    with urllib.request.urlopen(f"{endpoint}/metrics", timeout=60) as answer:
                        (self.out / f"{name}.txt").write_bytes(answer.read())


def train(folder: Path, strategy) -> dict[str, str]:
    """Two workers; the texts by the names of the processes."""
    out, run = folder / "texts", folder / "run"
    out.mkdir()
    callbacks = [
        NormalizedEntropyMonitor(labels_fn=lambda batch: batch[1]),
        TelemetryMonitor(),
        PrometheusMetrics(folder=run),
        Scrape(run, out),
    ]
    trainer = make_trainer(strategy=strategy, callbacks=callbacks, log_every_n_steps=1)
    trainer.fit(Clicks())
    assert trainer.world_size == 2
    assert not (run / "monitoring").exists()
    return {path.stem: path.read_text() for path in out.iterdir()}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Trains by a strategy, once; the texts of its processes."""
    known = {}

    def trained(name):
        if name not in known:
            known[name] = train(tmp_path_factory.mktemp(name), STRATEGIES[name](server_metrics_port=free_port()))
        return known[name]

    return trained


def samples(text):
    families = text_string_to_metric_families(text)
    return {
        (x.name, *(value for _, value in sorted(x.labels.items()))): x.value
        for family in families
        for x in family.samples
    }


@pytest.mark.parametrize("name", STRATEGIES)
def test_run_when_scraped_then_every_worker_and_server_tells_what_it_did(texts, name):
    texts = texts(name)
    servers = sorted(x for x in texts if not x.startswith("worker"))
    assert sorted(texts.keys() - set(servers)) == ["worker-0", "worker-1"]
    assert servers == {"ddp": [], "shadowsync": ["embedding-0", "sync-0"]}.get(name, servers)
    for rank in "01":
        told = samples(texts[f"worker-{rank}"])
        assert told["lightning_recsys_worker_steps_total", rank] == STEPS
        assert told["lightning_recsys_worker_examples_total", rank] == STEPS * 8
        assert told["lightning_recsys_worker_examples_per_second", rank] > 0
        assert told["lightning_recsys_worker_normalized_entropy", "run", rank] > 0
        assert told["lightning_recsys_worker_waiting_seconds_total", rank, "data"] > 0
        if servers:
            assert told["lightning_recsys_worker_waiting_seconds_total", rank, "servers"] > 0
            assert told["lightning_recsys_worker_telemetry", "comm/sent_bytes", rank, "value"] > 0
    if name == "async_ps":
        assert told["lightning_recsys_worker_telemetry", "staleness", "1", "mean"] >= 1
    if servers:
        (served,) = (samples(texts[x]) for x in servers if x.startswith("embedding"))
        assert served["lightning_recsys_server_pushes_total",] > 0
        assert served["lightning_recsys_server_rows",] == 64
        assert sum(value for key, value in served.items() if "received_bytes_total" in key[0]) > 0


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"server_metrics_port": 0}, "9100 is a usual choice"),
        ({"server_metrics_port": 9100, "servers": ["tcp://10.0.0.7:5790"]}, "start them with --metrics-port"),
    ],
)
def test_port_of_servers_when_wrong_then_refused(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        ShadowSyncStrategy(**settings)


DASHBOARD = json.loads((Path(__file__).parents[2] / "examples/grafana/lightning_recsys.json").read_text())
OF_PROMETHEUS = {"instance", "job"}  # labels that every scraped sample gets


def selectors(node):
    """Every selector of series in a query, with the labels that are kept around it."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node, set()
    elif isinstance(node, promql_parser.MatrixSelector):
        yield node.vector_selector, set()
    elif isinstance(node, promql_parser.AggregateExpr):
        kept = set() if node.modifier is None else set(node.modifier.labels)
        yield from ((found, kept | labels) for found, labels in selectors(node.expr))
    elif isinstance(node, promql_parser.Call):
        for argument in node.args:
            yield from selectors(argument)
    elif isinstance(node, promql_parser.BinaryExpr):
        yield from selectors(node.lhs)
        yield from selectors(node.rhs)
    else:
        assert isinstance(node, promql_parser.NumberLiteral | promql_parser.StringLiteral), node


def is_matched(matcher, labels):
    value, operator = labels.get(matcher.name, ""), str(matcher.op)
    assert operator in ("MatchOp.Equal", "MatchOp.Re"), operator
    return value == matcher.value if operator == "MatchOp.Equal" else re.fullmatch(matcher.value, value) is not None


QUERIES = [
    pytest.param(target["expr"], target["legendFormat"], id=f"{panel['title']} {target['refId']}")
    for panel in DASHBOARD["panels"]
    for target in panel["targets"]
]


@pytest.mark.parametrize(("query", "legend"), QUERIES)
def test_dashboard_then_metrics_and_labels_of_its_queries_are_told_by_servers_and_workers(texts, query, legend):
    told = [
        sample
        for name in ("async_ps", "shadowsync")
        for text in texts(name).values()
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]
    filled = query.replace("$__rate_interval", "1m").replace("$__range", "1h").replace("$instance", ".*")
    found = list(selectors(promql_parser.parse(filled)))
    assert found
    shown = set(re.findall(r"{{(\w+)}}", legend))
    for selector, kept in found:
        matching = [
            x
            for x in told
            if x.name == selector.name and all(is_matched(matcher, x.labels) for matcher in selector.matchers.matchers)
        ]
        assert matching, f"nobody tells {selector.prettify()}"
        assert (kept | shown) - OF_PROMETHEUS <= set(matching[0].labels)


def test_dashboard_then_its_panels_do_not_overlap_and_choose_their_data_source():
    places = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        own = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not own & places
        places |= own
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert {x["name"] for x in DASHBOARD["templating"]["list"]} == {"datasource", "instance"}
