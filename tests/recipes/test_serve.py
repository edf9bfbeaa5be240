"""What ``recipes/serve.py`` leaves of a server's processes, and ``recipes/export.py`` beside a version that is held."""

import multiprocessing
import socket
import time
from types import SimpleNamespace

import litserve
import pytest
import torch
from recipe_tools.jobs import exporting
from recipe_tools.jobs.serving import serve

from lightning_recsys.models import LogisticRegression
from lightning_recsys.serving import ModelReader, dense, export, roll_back
from lightning_recsys.serving.server import _Server


class Interrupted:
    """A server that has started a process when something ends it, and does not know of that process yet.

    LitServe returns without an error where Ctrl-C comes while it starts the processes that answer.
    """

    def __init__(self, error=None):
        self.error = error

    def run(self, **_):
        multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,)).start()
        if self.error is not None:
            raise self.error


@pytest.mark.timeout(60)
def test_server_when_ended_while_it_starts_then_no_process_is_left():
    for interrupted in (Interrupted(), Interrupted(KeyboardInterrupt())):
        serve(interrupted, host="127.0.0.1", port=8000)
        assert multiprocessing.active_children() == []
    with pytest.raises(SystemExit, match="was killed"):
        serve(Interrupted(RuntimeError("a process was killed")), host="127.0.0.1", port=8000)
    assert multiprocessing.active_children() == []


@pytest.mark.timeout(60)
def test_server_when_it_says_that_it_answers_then_a_connection_is_not_refused(monkeypatch):
    said = []

    def connect():
        socket.create_connection(bound.getsockname(), timeout=10).close()
        said.append(len(started))

    started = []
    monkeypatch.setattr(litserve.LitServer, "_start_server", lambda *_: started.append(1) or {0: "process"})
    server = object.__new__(_Server)
    server.on_ready = connect
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert server._start_server(0, 1, "warning", [bound], "process") == {0: "process"}
    assert said == [1]


def test_export_when_another_version_is_held_then_onnx_is_of_the_published_one_and_a_warning_says_what_counts(
    tmp_path, monkeypatch, caplog
):
    task, written = SimpleNamespace(model=LogisticRegression(2, {"a": 5})), {}
    task.modules, task.load_state_dict = task.model.modules, task.model.load_state_dict
    made = {
        "check_onnx": lambda file: None,
        "check_file": lambda path: None,
        "load_checkpoint": lambda *_: {"state_dict": task.model.state_dict(), "epoch": 1, "global_step": 9},
        "build_datamodule": lambda *_, **__: SimpleNamespace(num_dense=2),
        "build_task": lambda *_: task,
        "export_onnx": lambda model, file: written.update({file: model}),
    }
    for name, function in made.items():
        monkeypatch.setattr(exporting, name, function)
    monkeypatch.setattr(export, "export_apart", dense._export)
    out = str(tmp_path / "published")
    config = {"checkpoint": str(tmp_path / "a.ckpt"), "out": out, "rows": "float32", "layout": "versions"}
    config |= {"keep_runs": None, "onnx": None}
    assert exporting.export(config) == f"published version 1 in {out}"
    roll_back(out, 1)
    with torch.no_grad():
        task.model.first_order.bias.fill_(3.0)
    assert exporting.export(config | {"onnx": "dense.onnx"}).startswith(f"published version 2 in {out}; its dense part")
    assert written["dense.onnx"].version == 2
    assert written["dense.onnx"].weights["first_order.bias"].item() == 3.0
    assert ModelReader(out).version == 1
    assert f"Version 1 of {out} counts, and not version 2" in caplog.text
