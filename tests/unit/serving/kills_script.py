"""Kills a publisher at every step of a publication; for a process of its own, in which nothing else happens."""

import os
import signal
import sys

import torch
from published import TABLES, Trained

from lightning_recsys.serving import ModelReader, reader, release, roll_back
from lightning_recsys.serving.program import load_program

STEPS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.truncate")


def rows(trained):
    return [trained.rows(table.name, torch.arange(table.num_embeddings)) for table in TABLES]


def published(opened):
    return [opened.model.rows_of("embeddings", x.name, torch.arange(x.num_embeddings)) for x in TABLES]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def kill_at(step, folder):
    """Kill this process where it is about to change the folder for the ``step``-th time."""
    seen = 0

    def watch(event, arguments):
        nonlocal seen
        if event not in STEPS or not str(arguments[0]).startswith(folder):
            return
        if event == "open" and not (arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
            return
        seen += 1
        if seen == step:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def kill_everywhere(folder, program, told):
    """Tell through a pipe how many steps there were."""
    torch.set_num_threads(1)
    os.fsync = lambda descriptor: None  # a kill loses nothing that the system has
    url, loaded = folder / "model", load_program(program)
    reader.load_program = lambda path: loaded  # which takes longer than all else
    options = {"keep": 1, "compact_share": 1e9, "max_increments": 2}
    trained = Trained(program, folder / "stores", url, **options)
    step, outcomes, status = 0, set(), signal.SIGKILL
    while not os.WIFEXITED(status):
        step += 1
        trained.restart()
        for number in range(2):
            trained.train([10 + number])
            manifest = trained.publish()  # a base, then an increment
        assert sorted(int(x.name) for x in (url / "versions").iterdir()) == [manifest.version - 1, manifest.version]
        before = rows(trained)
        if (child := os.fork()) == 0:
            trained.train([20])
            kill_at(step, str(url))
            trained.publish()  # an increment, and a compaction
            os._exit(0)
        _, status = os.waitpid(child, 0)
        opened = ModelReader(url)
        outcomes.add(opened.version - manifest.version)
        assert same(published(opened), before if opened.version == manifest.version else rows(trained))
    assert os.WEXITSTATUS(status) == 0
    assert outcomes == {0, 1, 2}, outcomes
    kill_going_back(trained)
    trained.close()
    told.send(step)


def kill_going_back(trained):
    """Kill whoever holds or releases a version at every step; a run publishes before and after."""
    trained.restart(keep=100)
    url, first = trained.folder.url, trained.publish().version
    trained.publish()
    for change, back in (
        (lambda: roll_back(url, first), release),
        (lambda: release(url), lambda _: roll_back(url, first)),
    ):
        step, status = 0, signal.SIGKILL
        while not os.WIFEXITED(status):
            step += 1
            trained.restart()
            back(url)
            counted = ModelReader(url).version
            if (child := os.fork()) == 0:
                kill_at(step, url)
                change()
                os._exit(0)
            _, status = os.waitpid(child, 0)
            is_changed = ModelReader(url).version != counted  # a reader opens what counted before, or what is to count
            latest, held = trained.publish().version, trained.folder.held()
            assert ModelReader(url).version == (latest if held is None else first)
        assert os.WEXITSTATUS(status) == 0
        assert is_changed
        assert step > 2
    trained.restart()
    assert not [name for name in os.listdir(url) if name.startswith(".held.json")]
