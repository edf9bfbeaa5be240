"""Keys of a job: as bytes, as a file that nobody else reads."""

import json
import stat

import pytest
import zmq

from lightning_recsys.parameter_server import JobKeys
from lightning_recsys.parameter_server.access.keys import TOKEN, Token, add_client, load_client_keys, remove_client


def test_keys_when_generated_then_each_half_has_its_pair_and_knows_the_other():
    keys = JobKeys.generate()
    assert zmq.curve_public(keys.server.secret) == keys.server.public == keys.client.server
    assert zmq.curve_public(keys.client.secret) == keys.client.public
    assert keys.server.clients == (keys.client.public,)
    assert JobKeys.generate() != keys


def test_keys_when_shown_then_hide_their_secrets():
    keys = JobKeys.generate()
    shown = repr(keys)
    assert keys.server.public.decode() in shown
    assert keys.server.secret.decode() not in shown
    assert keys.client.secret.decode() not in shown


def test_keys_when_saved_then_only_their_owner_reads_them(tmp_path):
    keys, path = JobKeys.generate(), tmp_path / "job.keys"
    keys.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert JobKeys.load(path) == keys
    with pytest.raises(FileExistsError):
        JobKeys.generate().save(path)
    assert JobKeys.load(path) == keys


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_key_file_when_others_reach_it_then_is_refused_with_what_to_do(tmp_path, mode):
    path = tmp_path / "job.keys"
    JobKeys.generate().save(path)
    path.chmod(mode)
    with pytest.raises(
        ValueError, match=rf"can be read or written by others \(mode {mode:04o}\): chmod 600 .*job.keys"
    ):
        JobKeys.load(path)


def test_key_file_when_it_is_not_there_then_the_error_says_how_to_make_one(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"no key file .*job\.keys\. `lightning-recsys-server --make-keys .*job"
    ):
        JobKeys.load(tmp_path / "job.keys")


def changed(**parts):
    return json.dumps(json.loads(JobKeys.generate().to_bytes()) | parts).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b"null",
        b"\xff\xfe",
        changed(server_public="short"),
        changed(client_secret=None),
        changed(server_public=JobKeys.generate().server.public.decode()),  # of another secret
    ],
)
def test_keys_when_the_bytes_are_none_then_says_how_to_make_some(data):
    with pytest.raises(ValueError, match="no keys of a job: `lightning-recsys-server --make-keys FILE` makes some"):
        JobKeys.from_bytes(data)


# --- Tokens -------------------------------------------------------------------------------------------------------


def test_token_when_a_folder_has_none_then_is_made_for_its_owner_alone_and_stays(tmp_path):
    token, path = Token.of_folder(tmp_path), tmp_path / TOKEN
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Token.of_folder(tmp_path) == Token.load(path) == load_client_keys(path) == token
    assert token.is_equal(token.secret.encode())
    assert not token.is_equal(b"")
    assert token.secret not in repr(token)
    assert [x.name for x in tmp_path.iterdir()] == [TOKEN]


def test_token_when_others_can_read_it_then_is_refused(tmp_path):
    Token.of_folder(tmp_path)
    (tmp_path / TOKEN).chmod(0o644)
    with pytest.raises(ValueError, match="can be read or written by others"):
        Token.of_folder(tmp_path)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"token": 7}', b'{"token": "short"}', b"\xff\xfe"])
def test_token_when_its_file_is_damaged_then_says_what_to_do(tmp_path, content):
    path = tmp_path / TOKEN
    path.touch(0o600)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"no token of a server\. Remove it, and start the server again"):
        Token.load(path)


def test_client_keys_when_the_file_has_a_jobs_then_are_the_clients_half(tmp_path):
    keys, path = JobKeys.generate(), tmp_path / "job.keys"
    keys.save(path)
    assert load_client_keys(path) == keys.client


def test_client_keys_when_the_file_is_no_text_then_says_which(tmp_path):
    path = tmp_path / "job.keys"
    path.touch(0o600)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"key file .*job\.keys: these are no keys of a job"):
        load_client_keys(path)


def test_client_when_added_then_its_file_has_its_keys_alone_and_the_server_knows_it(tmp_path):
    path = tmp_path / "job.keys"
    JobKeys.generate().save(path)
    before = JobKeys.load(path)
    own = add_client(path, "alice")
    assert own == tmp_path / "alice.keys"
    assert stat.S_IMODE(own.stat().st_mode) == stat.S_IMODE(path.stat().st_mode) == 0o600
    keys, after = load_client_keys(own), JobKeys.load(path)
    assert (keys.server, keys.public) == (before.server.public, after.named["alice"])
    assert after.server.clients == (before.client.public, keys.public)
    assert after.client == before.client
    assert before.client.secret not in own.read_bytes()
    assert before.server.secret not in own.read_bytes()
    remove_client(path, "alice")
    assert JobKeys.load(path) == before
    assert sorted(x.name for x in tmp_path.iterdir()) == ["alice.keys", "job.keys"]


@pytest.mark.parametrize("name", ["", "a/b", "..\n", "x" * 65, "\u00e4"])
def test_client_when_its_name_is_none_then_refused_and_nothing_is_written(tmp_path, name):
    path = tmp_path / "job.keys"
    JobKeys.generate().save(path)
    content = path.read_bytes()
    with pytest.raises(ValueError, match="a client's name is 1 to 64"):
        add_client(path, name)
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_client_when_it_is_there_or_is_not_then_added_or_removed_with_a_reason(tmp_path):
    path = tmp_path / "job.keys"
    JobKeys.generate().save(path)
    with pytest.raises(ValueError, match=r"has no client 'alice'; it has \[\]"):
        remove_client(path, "alice")
    add_client(path, "alice")
    with pytest.raises(ValueError, match="has a client 'alice' already: remove it first"):
        add_client(path, "alice")
    remove_client(path, "alice")
    with pytest.raises(FileExistsError):  # the keys of before, which open nothing any more
        add_client(path, "alice")
    assert not JobKeys.load(path).named


@pytest.mark.parametrize("change", [{"client_secret": "0" * 40}, {"server_public": 1}, {"client_public": None}])
def test_client_file_when_it_holds_no_keys_then_refused_with_its_name(tmp_path, change):
    path = tmp_path / "job.keys"
    JobKeys.generate().save(path)
    own = add_client(path, "alice")
    own.write_text(json.dumps(json.loads(own.read_text()) | change))
    with pytest.raises(ValueError, match=r"alice\.keys: these are no keys of a client"):
        load_client_keys(own)


@pytest.mark.parametrize("clients", [{"a": "short"}, {"a": 1}, ["a"], {"a": "~" * 40}])
def test_key_file_when_its_clients_are_no_keys_then_refused(tmp_path, clients):
    content = json.loads(JobKeys.generate().to_bytes()) | {"clients": clients}
    with pytest.raises(ValueError, match="no keys of a job"):
        JobKeys.from_bytes(json.dumps(content).encode())
