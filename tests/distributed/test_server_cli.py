"""The console script, as a process of a shell: ready, asked, stopped."""

import json
import re
import signal
import subprocess
import sys
import time
import tomllib
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import pytest
import torch
from served_strategy import Ratings, make_trainer

from lightning_recsys.errors import ServerUnreachableError
from lightning_recsys.launchers.processes import fork_server_context
from lightning_recsys.parameter_server import JobKeys, cli, connect
from lightning_recsys.strategies import ShadowSyncStrategy

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]

READY = r"lightning-recsys-server ready: (tcp://\S+:\d+|ipc:///\S+)\n"
COMMAND = (sys.executable, "-m", cli.__name__)


@contextmanager
def server(*arguments):
    process = subprocess.Popen([*COMMAND, *map(str, arguments)], stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        ready = re.fullmatch(READY, line)
        assert ready, line
        yield process, ready[1]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def serve_in(output, arguments):
    """What the command does, its standard output in a file."""
    with output.open("w") as file, redirect_stdout(file):
        sys.exit(cli.main(arguments))


@contextmanager
def forked_server(output, *arguments):
    """As above, at once: a process of the fork server has imported everything."""
    process = fork_server_context().Process(target=serve_in, args=(output, [str(x) for x in arguments]))
    process.start()
    try:
        while not (output.exists() and (line := output.read_text()).endswith("\n")):
            assert process.exitcode is None
            time.sleep(0.01)
        yield process, re.fullmatch(READY, line)[1]
    finally:
        process.kill()
        process.join()


def train_through(endpoint, keys):
    """Two trainers, for whom no server is started; whether rows and dense part have learned."""
    options = {"servers": [endpoint], "key_file": keys, "transport": "tcp", "min_rows": 60}
    model, fresh = Ratings(), Ratings()
    make_trainer(strategy=ShadowSyncStrategy(num_trainers=2, **options)).fit(model)
    pairs = ((model.items.weight, fresh.items.weight), (model.out.weight, fresh.out.weight))
    return not any(torch.equal(before, after) for after, before in pairs)


def test_console_script_when_installed_then_is_this_one():
    project = tomllib.loads((Path(cli.__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["scripts"]["lightning-recsys-server"] == f"{cli.__name__}:{cli.main.__name__}"


def test_server_when_started_in_a_shell_then_serves_trainers_tells_and_stops_on_sigterm(tmp_path, capsys):
    keys = tmp_path / "job.keys"
    assert cli.main(["--make-keys", str(keys)]) == 0
    with server("--folder", tmp_path / "stores", "--bind", "tcp://0.0.0.0:0", "--keys", keys) as (process, bound):
        endpoint = bound.replace("0.0.0.0", "127.0.0.1")
        stores = connect(endpoint, keys=keys, transport="tcp", timeout=60)
        stores.create_dense_store("center", torch.ones(5))
        capsys.readouterr()
        assert cli.main(["--status", endpoint, "--keys", str(keys), "--timeout", "60", "--json"]) == 0
        status = json.loads(capsys.readouterr().out)
        assert (status["stores"], status["clients"], status["pushes"], status["refused"]) == (1, 1, 1, 0)
        assert (status["bytes"], status["folder"]) == (5 * 4 + 16, str(tmp_path / "stores"))
        assert status["uptime"] > 0
        assert cli.main(["--status", endpoint, "--keys", str(keys), "--timeout", "60"]) == 0
        shown = capsys.readouterr().out
        assert all(re.search(rf"\b{name}\b", shown) for name in status)
        assert cli.main(["--status", endpoint, "--timeout", "0.3"]) == 1
        assert f"{endpoint} did not answer 'status' in 1 attempts" in capsys.readouterr().err
        for _ in range(2):  # the second run replaces what the first one left
            assert train_through(endpoint, keys)
        assert cli.main(["--status", endpoint, "--keys", str(keys), "--timeout", "60", "--json"]) == 0
        trained = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert trained["stores"] == 3  # rows and the trainers' centre beside what was there
        assert trained["pushes"] > 2 * 2 * 4  # runs, trainers, batches
        # What has arrived before the signal is answered.
        store = stores.dense_store("center")
        waiting = [store.begin_elastic_average(torch.zeros(5), alpha=0.5) for _ in range(20)]
        assert waiting[0]().tolist() == [0.5] * 5
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert process.stdout.read() == ""
        stores.connection._gave_up = 1, 0.0, ""  # there is nobody to say goodbye to
        with pytest.raises(ServerUnreachableError, match=r"push(es were| was) never acknowledged"):  # it has not looked
            stores.close()
    again = ("--folder", tmp_path / "stores")
    with forked_server(tmp_path / "second", *again, "--bind", "tcp://127.0.0.1:0") as (process, endpoint):
        token = tmp_path / "stores" / ".token"
        assert cli.main(["--status", endpoint, "--timeout", "0.3"]) == 1
        assert cli.main(["--status", endpoint, "--keys", str(token), "--timeout", "60", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["run"] == "none"
        process.terminate()
        process.join(60)
        assert process.exitcode == 0
    with server(*again) as (process, endpoint):
        assert endpoint == f"ipc://{tmp_path}/stores/.socket"
        center = connect(endpoint, timeout=60).dense_store("center").pull()
        assert center[0] <= 0.5
        process.send_signal(signal.SIGINT)  # which a process of the fork server leaves to who started it
        assert process.wait(60) == 0


def test_clients_when_added_and_removed_in_a_shell_then_a_running_server_takes_note(tmp_path, capsys):
    keys, own = tmp_path / "job.keys", tmp_path / "alice.keys"
    assert cli.main(["--make-keys", str(keys)]) == 0
    asked = ["--keys", str(own), "--json"]
    serving = ("--folder", tmp_path / "stores", "--bind", "tcp://127.0.0.1:0", "--keys", keys)
    with forked_server(tmp_path / "run", *serving) as (process, endpoint):
        assert cli.main(["--add-client", "alice", "--keys", str(keys)]) == 0
        assert f"{own}: keys of alice alone" in capsys.readouterr().out
        assert cli.main(["--status", endpoint, *asked, "--timeout", "60"]) == 0
        assert train_through(endpoint, own)  # two workers, with the same keys
        assert cli.main(["--remove-client", "alice", "--keys", str(keys)]) == 0
        assert "alice is let in no more" in capsys.readouterr().out
        assert cli.main(["--status", endpoint, *asked, "--timeout", "0.3"]) == 1
        process.terminate()
        process.join(60)
    assert cli.main(["--remove-client", "alice", "--keys", str(keys)]) == 1
    assert "has no client 'alice'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["--add-client", "bob"])
    assert "need --keys" in capsys.readouterr().err


def test_help_when_asked_then_explains_itself(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    for needed in ("--folder", "--bind", "--keys", "--make-keys", "--status", "--json", "examples:", "SIGTERM"):
        assert needed in told


def test_server_and_shared_reader_when_imported_then_lightning_is_not():
    """Without what is as large their processes start in less than half of the time and two thirds of the memory."""
    code = (
        "import sys\n"
        "from contextlib import suppress\n"
        "from lightning_recsys.cli import main\n"
        "with suppress(SystemExit):\n"
        "    main(['server', '--help'])\n"
        "assert 'lightning_recsys.parameter_server.server' in sys.modules\n"
        "import lightning_recsys.data.prepared.service\n"
        "large = ('pytorch_lightning', 'lightning_fabric', 'torchmetrics', 'hydra', 'torch._dynamo')\n"
        "print([x for x in large if x in sys.modules])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--folder", "{}/stores", "--bind", "tcp://0.0.0.0:0"],
            "can be reached from other machines, so it needs keys",
        ),
        (["--folder", "{}/stores", "--bind", "nonsense"], "bind must be tcp://host:port"),
        (["--folder", "{}/stores", "--keys", "{}/missing"], "there is no key file"),
        (["--folder", "{}/stores", "--keys", "{}/readable"], "chmod 600"),
        (["--make-keys", "{}/readable"], "File exists"),
        (["--status", "nonsense"], "'nonsense' is no endpoint"),
    ],
)
def test_command_when_wrong_then_says_what_in_one_line(tmp_path, capsys, arguments, sentence):
    readable = tmp_path / "readable"
    readable.write_bytes(JobKeys.generate().to_bytes())
    readable.chmod(0o644)
    assert cli.main([argument.format(tmp_path) for argument in arguments]) == 1
    out, err = capsys.readouterr()
    assert err.startswith("lightning-recsys-server: ")
    assert sentence in err
    assert not (tmp_path / "stores").exists()
    assert err.count("\n") == 1
    assert out == ""


def test_command_when_it_names_no_task_then_says_which_there_are(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == 2
    assert (
        "one of --folder, --status, --make-keys, --add-client and --remove-client is needed" in capsys.readouterr().err
    )
