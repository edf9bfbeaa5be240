"""Several servers of a machine under one command: ranges of ports, exact sums under kills, refusals, endings."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress

import psutil
import pytest
import torch
from ports import free_ports
from served_strategy import Ratings, make_trainer

from lightning_recsys.embeddings import EmbeddingBagConfig
from lightning_recsys.embeddings.kernels import TableLayout
from lightning_recsys.optim import RowSGD
from lightning_recsys.parameter_server import cli, connect
from lightning_recsys.parameter_server.endpoints import all_endpoints, endpoints_of
from lightning_recsys.strategies import ShadowSyncStrategy

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]

COMMAND = (sys.executable, "-m", cli.__name__)
DIM, ROWS, TOUCHED = 8, 40, 16
LAYOUT = TableLayout((EmbeddingBagConfig("t", ROWS, DIM, ("x",), init_std=0.0),))


@contextmanager
def servers(*arguments):
    """The command in a shell: its process, and its lines until it is ready."""
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    lines = []
    try:
        while (line := process.stdout.readline()) and not line.startswith("lightning-recsys-server ready: "):
            lines.append(line)
        assert line, process.stderr.read()
        yield process, line.removeprefix("lightning-recsys-server ready: ").strip(), lines
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def push_ones(endpoint, keys, told, done, number):
    """Add 1 to rows until told to stop; notes how many were acknowledged."""
    stores = connect(endpoint, keys=keys, transport="tcp", timeout=30, retries=10)
    store, pushes = stores.embedding_store("ones"), 0
    generator = torch.Generator().manual_seed(number)
    while not told.is_set():
        rows = torch.randperm(ROWS, generator=generator)[:TOUCHED]
        store.apply_row_gradients(rows, -torch.ones(TOUCHED, DIM), lr=1.0)
        pushes += 1
    store.flush()
    done[number] = pushes
    stores.close()


def test_processes_when_killed_under_load_then_come_back_and_every_push_counts_once(tmp_path, capsys):
    folder, port = tmp_path / "stores", free_ports(3)
    arguments = ("--folder", folder, "--bind", f"tcp://127.0.0.1:{port}", "--processes", 3)
    with servers(*arguments, "--metrics-port", 0) as (process, endpoints, lines):
        assert endpoints == f"tcp://127.0.0.1:{port}-{port + 2}"
        assert len(re.findall(r"metrics: http://127\.0\.0\.1:\d+/metrics", "".join(lines))) == 3
        token, told, done = folder / ".token", threading.Event(), {}
        each = [connect(x, keys=token, transport="tcp", timeout=30, retries=10) for x in endpoints_of(endpoints)]
        stores = [x.create_embedding_store("ones", LAYOUT, RowSGD(), seed=0) for x in each]
        clients = [
            threading.Thread(target=push_ones, args=(x, token, told, done, number))
            for number, x in enumerate(endpoints_of(endpoints) * 2)
        ]
        for client in clients:
            client.start()
        for _ in range(4):
            time.sleep(0.2)
            victims = psutil.Process(process.pid).children()
            os.kill(sorted(victims, key=lambda x: x.create_time())[0].pid, signal.SIGKILL)  # another one each time
            for x in each:
                x.status()  # waits until all answer again
        time.sleep(0.2)
        told.set()
        for client in clients:
            client.join(120)
        assert sorted(done) == list(range(6))
        for number, store in enumerate(stores):
            rows = store.read_rows("weight", slice(0, ROWS))
            assert rows.double().sum().item() == (done[number] + done[number + 3]) * TOUCHED * DIM
        for x in each:
            x.close()
        capsys.readouterr()
        assert cli.main(["--status", endpoints, "--keys", str(token), "--timeout", "60", "--json"]) == 0
        told_each = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [x["folder"] for x in told_each] == [str(folder / name) for name in "012"]
        assert sum(x["restarts"] for x in told_each) == 4
        assert cli.main(["--status", endpoints, "--keys", str(token), "--timeout", "60"]) == 0
        shown = capsys.readouterr().out
        assert re.search(r"servers\W+3\b", shown)
        assert re.search(rf"\brows\W+{3 * ROWS}\b", shown)
        children = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGINT)  # as Ctrl-C, which a terminal sends to all of them
        for child in children:
            child.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert process.stderr.read().count("was ended by SIGKILL. It is started again") == 4
        assert not [child for child in children if child.is_running()]
    with servers(*arguments) as (process, endpoints, _):
        stores = connect(endpoints_of(endpoints)[1], keys=token, transport="tcp", timeout=60)
        rows = stores.embedding_store("ones").read_rows("weight", slice(0, ROWS))
        assert rows.double().sum().item() == (done[1] + done[4]) * TOUCHED * DIM
        stores.close()
        children = psutil.Process(process.pid).children()
        process.kill()
        psutil.wait_procs(children, 60)
        assert not [child for child in children if child.is_running()]
    for wrong, sentence in ((2, "has the stores of 3 processes"), (4, "has the stores of 3 processes")):
        assert cli.main([*map(str, arguments[:-1]), str(wrong)]) == 1
        assert sentence in capsys.readouterr().err


def test_processes_when_they_end_again_and_again_then_the_command_ends_and_says_so(tmp_path):
    port = free_ports(1)
    arguments = ("--folder", tmp_path / "stores", "--bind", f"tcp://127.0.0.1:{port}", "--processes", 1)
    with servers(*arguments) as (process, endpoint, _):
        assert endpoint == f"tcp://127.0.0.1:{port}"
        killed = set()
        while process.poll() is None:
            with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                for child in psutil.Process(process.pid).children():
                    if child.pid not in killed:
                        child.kill()
                        killed.add(child.pid)
            time.sleep(0.02)
        assert process.returncode == 1
        assert len(killed) == 6
        assert "process 0: was ended by SIGKILL, after 5 restarts in a minute." in process.stderr.read()


def test_folder_of_processes_when_served_alone_then_is_refused_and_stays_as_it_was(tmp_path, capsys):
    folder, port = tmp_path / "stores", free_ports(2)
    arguments = ("--folder", folder, "--bind", f"tcp://127.0.0.1:{port}", "--processes", 2)
    with servers(*arguments):
        pass
    before = sorted(folder.iterdir())
    assert cli.main(["--folder", str(folder)]) == 1
    assert "has the stores of several processes: serve it with --processes" in capsys.readouterr().err
    assert sorted(folder.iterdir()) == before
    with servers(*arguments) as (_, endpoints, _):
        assert endpoints == f"tcp://127.0.0.1:{port}-{port + 1}"


def test_trainers_when_given_a_range_of_ports_then_rows_lie_on_all_of_its_servers(tmp_path):
    folder, port, keys = tmp_path / "stores", free_ports(2), tmp_path / "job.keys"
    assert cli.main(["--make-keys", str(keys)]) == 0
    with servers("--folder", folder, "--bind", f"tcp://127.0.0.1:{port}", "--keys", keys, "--processes", 2) as found:
        _, endpoints, _ = found
        model, fresh = Ratings(), Ratings()
        strategy = ShadowSyncStrategy(num_trainers=2, servers=[endpoints], key_file=keys, transport="tcp", min_rows=60)
        assert strategy.servers == (f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}")
        make_trainer(strategy=strategy).fit(model)
        assert not torch.equal(model.items.weight, fresh.items.weight)
        for endpoint in strategy.servers:
            stores = connect(endpoint, keys=keys, transport="tcp", timeout=60)
            status = stores.status()
            assert status["pushes"] > 2 * 4  # trainers, batches
            assert status["rows"] > 0
            stores.close()


def test_processes_when_one_cannot_listen_then_all_end_and_the_sentence_says_which(tmp_path, capsys):
    port = free_ports(2)
    folder, bind = tmp_path / "stores", f"tcp://127.0.0.1:{port}"
    (tmp_path / "stores").mkdir(mode=0o700)
    (tmp_path / "stores" / "1").symlink_to(tmp_path)
    assert cli.main(["--folder", str(folder), "--bind", bind, "--processes", "2"]) == 1
    assert "has the stores of 1 processes" in capsys.readouterr().err
    (tmp_path / "stores" / "0").mkdir(mode=0o700)
    assert cli.main(["--folder", str(folder), "--bind", bind, "--processes", "2"]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"process 1: {folder}/1 is a link" in err


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--processes", "2"], "bind must be tcp://host:port with the first of them"),
        (["--processes", "2", "--bind", "ipc:///tmp/x"], "bind must be tcp://host:port with the first of them"),
        (["--processes", "2", "--bind", "tcp://127.0.0.1:0"], "bind must be tcp://host:port with the first of them"),
        (["--processes", "2", "--bind", "tcp://127.0.0.1:65535"], "bind must be tcp://host:port with the first"),
        (["--processes", "0", "--bind", "tcp://127.0.0.1:5790"], "processes must be 1 to 256, got 0"),
        (["--processes", "2", "--bind", "tcp://0.0.0.0:5790"], "can be reached from other machines, so it needs keys"),
    ],
)
def test_command_when_processes_make_no_sense_then_says_so_in_one_line(tmp_path, capsys, more, sentence):
    assert cli.main(["--folder", str(tmp_path / "stores"), *more]) == 1
    out, err = capsys.readouterr()
    assert sentence in err
    assert (out, err.count("\n")) == ("", 1)
    assert not (tmp_path / "stores").exists()


def test_ranges_when_they_are_none_then_say_what_is_wrong():
    with pytest.raises(ValueError, match="is no range of ports"):
        endpoints_of("tcp://a:9-5")
    with pytest.raises(ValueError, match="is no range of ports"):
        endpoints_of("tcp://a:9-70000")
    with pytest.raises(ValueError, match=r"tcp://a:6 is named twice"):
        all_endpoints(["tcp://a:5-6", "tcp://a:6"])
    with pytest.raises(ValueError, match="names 2 servers, each with stores of its own"):
        connect("tcp://127.0.0.1:5-6")
    with pytest.raises(ValueError, match=r"or ranges of ports such as"):
        ShadowSyncStrategy(num_trainers=1, servers=["tcp://a"])
