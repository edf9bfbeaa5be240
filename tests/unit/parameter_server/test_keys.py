"""Keys of a job: as bytes, as a file that nobody else reads."""

import json
import stat

import pytest
import zmq

from lightning_recsys.parameter_server import JobKeys
from lightning_recsys.parameter_server.keys import TOKEN, Token, load_client_keys


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
