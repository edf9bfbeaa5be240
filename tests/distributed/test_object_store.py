"""Checkpoints at URLs of an object store: a real S3 server in a process of its own, several ranks, and kills."""

import itertools
import os
import signal
import subprocess
import sys
from functools import partial

import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from test_strategy_checkpoints import StartsFrom, assert_same, make_data, make_task, synchronous, train

from lightning_recsys.checkpoints import (
    FolderCheckpointIO,
    SavedRows,
    has_checkpoint,
    is_folder,
    read_checkpoint,
    save_folder,
    to_file,
)
from lightning_recsys.strategies import DESStrategy, HETStrategy
from lightning_recsys.tasks import load_for_prediction

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(280),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:datetime.datetime.utcnow"),
]
pytest.importorskip("moto.server", reason="moto[server] has the S3 server")
s3fs = pytest.importorskip("s3fs")

SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""
KILLED = 77


@pytest.fixture(scope="module")
def server():
    """The endpoint of an S3 server, which ends with this module."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.stdin.close()


@pytest.fixture
def bucket(server, monkeypatch, request):
    """The URL of an empty bucket; processes that are started meanwhile can read and write there."""
    settings = {
        "ENDPOINT_URL": server,
        "ACCESS_KEY_ID": "any",
        "SECRET_ACCESS_KEY": "any",
        "DEFAULT_REGION": "us-east-1",
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    s3fs.S3FileSystem.clear_instance_cache()
    name = f"bucket-{abs(hash(request.node.name))}"
    s3fs.S3FileSystem().mkdir(name)
    yield f"s3://{name}"
    s3fs.S3FileSystem.clear_instance_cache()


def checkpoint(number):
    return {"state_dict": {"weight": torch.full((64, 2), float(number))}, "global_step": number}


def save_file(url, number):
    FolderCheckpointIO().save_checkpoint(checkpoint(number), url)


def save_as_folder(url, number):
    save_folder(url, checkpoint(number))


KINDS = {"file": save_file, "folder": save_as_folder}


def save_until(step, save, url):
    """Save in a process of its own, which is gone before its change of this number; whether it came so far."""
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # which ends a process that hangs
        steps = itertools.count(1)
        call = s3fs.S3FileSystem._call_s3

        async def look(self, method, *arguments, **options):
            if method.startswith(("put", "delete", "copy", "create", "upload", "complete")) and next(steps) == step:
                os._exit(KILLED)
            return await call(self, method, *arguments, **options)

        s3fs.S3FileSystem._call_s3 = look
        status = 1
        try:
            save(url, 2)
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) in (0, KILLED)
    return os.waitstatus_to_exitcode(status) == KILLED


def number_of(url):
    """The checkpoint that is there, which is whole."""
    found = FolderCheckpointIO().load_checkpoint(url)
    assert torch.equal(found["state_dict"]["weight"], checkpoint(found["global_step"])["state_dict"]["weight"])
    return found["global_step"]


@pytest.mark.parametrize(("before", "after"), [("folder", "folder"), ("file", "folder"), ("folder", "file")])
def test_save_when_killed_at_any_request_then_one_checkpoint_is_whole_and_the_next_save_clears_up(
    before, after, bucket
):
    url = f"{bucket}/run/last.ckpt"
    seen, killed = [], True
    while killed:
        KINDS[before](url, 1)
        killed = save_until(len(seen) + 1, KINDS[after], url)
        seen.append(number_of(url))
        save_as_folder(url, 3)
        assert number_of(url) == 3
        names = {name.split("/")[3] for name in s3fs.S3FileSystem(use_listings_cache=False).find(bucket)}
        assert len(names) == 2, "the pointer and one version"
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (1, 2)
    assert len(seen) > 2


def test_folder_at_a_url_then_reads_like_one_on_this_machine(bucket, tmp_path):
    url, state = f"{bucket}/a.ckpt", {"weight": torch.randn(9, 3), "bias": torch.randn(())}
    assert not has_checkpoint(url)
    for place in (url, tmp_path / "a.ckpt"):
        save_folder(place, {"state_dict": state, "global_step": 7, "note": "both"}, extras={"own": 1})
    assert is_folder(url)
    there, here = read_checkpoint(url), read_checkpoint(tmp_path / "a.ckpt")
    assert there.pop("note") == here.pop("note") == "both"
    torch.testing.assert_close(there, here, rtol=0, atol=0)
    assert torch.equal(SavedRows(url, "weight").take(torch.tensor([8, 0, 8])), state["weight"][[8, 0, 8]])
    to_file(url, tmp_path / "one.ckpt")
    assert torch.equal(torch.load(tmp_path / "one.ckpt")["state_dict"]["weight"], state["weight"])


def test_bucket_that_is_not_there_then_every_rank_is_told_and_nothing_counts(bucket):
    with pytest.raises(OSError, match=r"s3://no-such-bucket/a\.ckpt.*bucket"):
        save_folder("s3://no-such-bucket/a.ckpt", checkpoint(1))


@pytest.mark.parametrize(
    "make_strategy",
    [
        partial(synchronous, num_trainers=2, num_embedding_servers=2),
        partial(HETStrategy, algorithm="hybrid"),
        DESStrategy,
    ],
    ids=["shadowsync", "het", "des"],
)
def test_two_workers_when_they_save_at_a_url_then_a_run_goes_on_from_it(make_strategy, bucket):
    saving = ModelCheckpoint(f"{bucket}/run", save_last=True, save_on_train_epoch_end=True)
    trainer, task = train(make_strategy(), saving, devices=2, max_steps=-1, max_epochs=1)
    assert trainer.world_size == 2
    url = saving.last_model_path
    assert url.startswith("s3://")
    assert is_folder(url)
    starts = [StartsFrom(url)]
    if make_strategy is DESStrategy:  # each of whose processes has a part of the model only
        starts = []
        assert_same(task.state_dict(), read_checkpoint(url)["state_dict"])
    again, _ = train(make_strategy(), *starts, devices=2, ckpt_path=url, max_steps=trainer.global_step + 1)
    assert again.global_step == trainer.global_step + 1
    (data := make_data()).setup("fit")
    (batch,) = data.sample_batches(1)
    whole, served = make_task(seed=5).eval(), make_task(seed=6)
    whole.load_state_dict(read_checkpoint(url)["state_dict"])
    load_for_prediction(served, url)
    with torch.no_grad():
        torch.testing.assert_close(served(batch), whole(batch), rtol=0, atol=0)
