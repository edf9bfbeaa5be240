"""A worker's metrics while it trains, in this process."""

import itertools
import threading
import time
import urllib.error
import urllib.request

import pytest
from click_module import ClickModule, make_loader, make_trainer
from prometheus_client.parser import text_string_to_metric_families
from pytorch_lightning.callbacks import Callback

from lightning_recsys.callbacks import NormalizedEntropyMonitor, PrometheusMetrics, TelemetryMonitor, prometheus_metrics
from lightning_recsys.monitoring import monitored_in

pytestmark = pytest.mark.timeout(100)


@pytest.fixture(autouse=True)
def _looks_at_every_step(monkeypatch):
    monkeypatch.setattr(prometheus_metrics, "REFRESH_SECONDS", 0.0)


def samples(url):
    with urllib.request.urlopen(f"{url}/metrics", timeout=20) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {
        (x.name, *(value for _, value in sorted(x.labels.items()))): x.value
        for family in families
        for x in family.samples
    }


class Scrape(Callback):
    """Keeps what was told after each step, and what the trainer knew then."""

    def __init__(self, metrics, folder=None, fails=False):
        self.metrics, self.folder, self.fails = metrics, folder, fails
        self.told, self.known, self.processes = [], [], []

    def on_train_batch_end(self, trainer, *_):
        self.told.append(samples(self.metrics.url))
        self.known.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        if self.folder is not None:
            self.processes.append(monitored_in(self.folder))
        if self.fails:
            raise ZeroDivisionError("after the step")

    def on_validation_epoch_end(self, *_):
        time.sleep(0.5)


def run(tmp_path, metrics, scrape, **options):
    callbacks = [NormalizedEntropyMonitor(), TelemetryMonitor(), metrics, scrape]
    trainer = make_trainer(tmp_path, callbacks=callbacks, **options)
    trainer.fit(ClickModule(), make_loader(64, 32, 32), make_loader(64))


def test_worker_when_it_trains_then_tells_steps_examples_and_entropy(tmp_path):
    metrics = PrometheusMetrics(folder=tmp_path / "run")
    scrape = Scrape(metrics, tmp_path / "run")
    run(tmp_path, metrics, scrape, max_epochs=2)
    assert [told["lightning_recsys_worker_steps_total", "0"] for told in scrape.told] == [1, 2, 3, 4, 5, 6]
    examples = [told["lightning_recsys_worker_examples_total", "0"] for told in scrape.told]
    assert examples == [64, 96, 128, 192, 224, 256]
    for told, known in zip(scrape.told, scrape.known, strict=True):
        assert told["lightning_recsys_worker_normalized_entropy", "run", "0"] == known["train/ne"]
        assert told["lightning_recsys_worker_normalized_entropy", "window", "0"] == known["train/window_ne"]
    assert ("lightning_recsys_worker_examples_per_second", "0") not in scrape.told[0]
    assert scrape.told[1]["lightning_recsys_worker_examples_per_second", "0"] > 0
    assert all([x.name for x in processes] == ["worker-0"] for processes in scrape.processes)
    assert len({processes[0].endpoint for processes in scrape.processes}) == 1
    assert metrics.url is None
    assert not (tmp_path / "run" / "monitoring").exists()
    assert not [thread for thread in threading.enumerate() if thread.name == "monitoring-endpoint"]
    with pytest.raises(urllib.error.URLError):
        samples(scrape.processes[0][0].endpoint)


class SlowLoader:
    """Takes a while for each batch."""

    def __init__(self, loader):
        self.loader = loader

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        for batch in self.loader:
            time.sleep(0.2)
            yield batch


def test_worker_when_its_data_is_slow_then_tells_the_wait_and_not_that_of_validation(tmp_path):
    metrics = PrometheusMetrics()
    scrape = Scrape(metrics)
    trainer = make_trainer(tmp_path, callbacks=[metrics, scrape], max_epochs=2)
    trainer.fit(ClickModule(), SlowLoader(make_loader(8, 8, 8, 8)), make_loader(8))
    waited = [told["lightning_recsys_worker_waiting_seconds_total", "0", "data"] for told in scrape.told]
    between = [after - before for before, after in itertools.pairwise(waited)]
    # Lightning fetches a batch ahead, so the last step of an epoch waits for nothing.
    assert sum(x >= 0.2 for x in between) >= 3
    assert between[3] == 0, "from the end of one epoch to the first step of the next"


@pytest.mark.parametrize("fails", [False, True])
def test_run_when_it_fails_then_leaves_no_port_and_no_file(tmp_path, fails):
    metrics = PrometheusMetrics(folder=tmp_path)
    scrape = Scrape(metrics, tmp_path, fails=fails)
    if fails:
        with pytest.raises(ZeroDivisionError):
            run(tmp_path, metrics, scrape)
    else:
        run(tmp_path, metrics, scrape, limit_val_batches=0)
    assert scrape.processes[0][0].name == "worker-0"
    assert metrics.url is None
    assert not (tmp_path / "monitoring").exists()


@pytest.mark.parametrize("port", [-1, 65536])
def test_port_when_out_of_range_then_refused(port):
    with pytest.raises(ValueError, match="port must be from 0"):
        PrometheusMetrics(port)
