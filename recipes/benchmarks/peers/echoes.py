"""Servers that answer every request with so many bytes: what is left of a server without its work, by transport.

``python -m benchmarks.peers.echoes <transport> [<folder of credentials>]``. With credentials both ends encrypt, and
prove who they are: ZeroMQ by CURVE, as our servers do, a plain socket and Arrow Flight by TLS with certificates.
"""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import zmq
from benchmarks.peers.bare_link import receive

from lightning_recsys.parameter_server.access.keys import JobKeys

Ask = Callable[[Sequence[memoryview], int], None]
"""Sends some arrays, and waits for an answer of so many bytes."""

_SIZES = struct.Struct("<QQ")  # of a request over a socket: how long it is, and its answer
_KEYS, _CERTIFICATE, _PRIVATE = "keys", "certificate.pem", "private.pem"
_BYTES = pa.schema([("bytes", pa.uint8())])


def make_credentials(folder: Path) -> None:
    """Write keys, and a certificate that signs itself, which both ends have."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    folder.mkdir()
    JobKeys.generate().save(folder / _KEYS)
    private, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, private.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(here, critical=True)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(private, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / _CERTIFICATE).write_bytes(certificate.public_bytes(pem))
    plain = serialization.NoEncryption()
    (folder / _PRIVATE).write_bytes(private.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))


def _ready(endpoint: str) -> None:
    sys.stdout.write(f"ready: {endpoint}\n")
    sys.stdout.flush()


# --- ZeroMQ -----------------------------------------------------------------------------------------------------------


def _serve_zeromq(folder: Path | None) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        if folder is not None:
            router.curve_server, router.curve_secretkey = True, JobKeys.load(folder / _KEYS).server.secret
        router.bind("tcp://127.0.0.1:0")
        _ready(router.getsockopt_string(zmq.LAST_ENDPOINT))
        answers: dict[int, bytes] = {}
        while True:
            sender, header, *_ = router.recv_multipart(copy=False)
            size = int.from_bytes(header.bytes, "little")
            answer = answers.setdefault(size, bytes(size))
            router.send(sender, zmq.SNDMORE, copy=False)
            router.send(answer, copy=False)


@contextmanager
def _ask_zeromq(endpoint: str, folder: Path | None) -> Iterator[Ask]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        if folder is not None:
            keys = JobKeys.load(folder / _KEYS).client
            dealer.curve_serverkey, dealer.curve_publickey, dealer.curve_secretkey = (
                keys.server,
                keys.public,
                keys.secret,
            )
        dealer.linger = 0
        dealer.connect(endpoint)

        def ask(arrays: Sequence[memoryview], answer: int) -> None:
            dealer.send(answer.to_bytes(8, "little"), zmq.SNDMORE)
            for number, array in enumerate(arrays, 1):
                dealer.send(array, zmq.SNDMORE if number < len(arrays) else 0, copy=False)
            dealer.recv_multipart(copy=False)

        yield ask


# --- A plain socket ---------------------------------------------------------------------------------------------------


def _tls(folder: Path, *, server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.load_cert_chain(folder / _CERTIFICATE, folder / _PRIVATE)
    context.load_verify_locations(folder / _CERTIFICATE)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def _serve_socket(folder: Path | None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        _ready(f"tcp://127.0.0.1:{door.getsockname()[1]}")
        client, _ = door.accept()
    with ExitStack() as opened, suppress(EOFError, ConnectionError):
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if folder is not None:
            client = _tls(folder, server=True).wrap_socket(client, server_side=True)
        opened.enter_context(client)
        head, memory = memoryview(bytearray(_SIZES.size)), memoryview(bytearray())
        answers: dict[int, bytes] = {}
        while True:
            receive(client, head)
            length, size = _SIZES.unpack(head)
            if len(memory) < length:
                memory = memoryview(bytearray(length))
            receive(client, memory[:length])
            client.sendall(answers.setdefault(size, bytes(size)))


@contextmanager
def _ask_socket(endpoint: str, folder: Path | None) -> Iterator[Ask]:
    port = int(endpoint.rpartition(":")[2])
    with ExitStack() as opened:
        server = socket.create_connection(("127.0.0.1", port))
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if folder is not None:
            server = _tls(folder, server=False).wrap_socket(server, server_hostname="127.0.0.1")
        opened.enter_context(server)

        def ask(arrays: Sequence[memoryview], answer: int) -> None:
            server.sendall(_SIZES.pack(sum(map(len, arrays)), answer))
            for array in arrays:
                server.sendall(array)
            receive(server, memoryview(bytearray(answer)))

        yield ask


# --- Arrow Flight -----------------------------------------------------------------------------------------------------


def _batch(data: memoryview | bytes) -> pa.RecordBatch:
    return pa.record_batch([pa.array(np.frombuffer(data, dtype=np.uint8))], schema=_BYTES)


class _FlightServer(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no types
    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        writer.begin(_BYTES)
        answers: dict[int, pa.RecordBatch] = {}
        for chunk in reader:
            size = int.from_bytes(chunk.app_metadata.to_pybytes(), "little")
            if size not in answers:
                answers[size] = _batch(bytes(size))
            writer.write_batch(answers[size])


def _serve_flight(folder: Path | None) -> None:
    options: dict[str, Any] = {}
    if folder is not None:
        certificate, private = (folder / _CERTIFICATE).read_bytes(), (folder / _PRIVATE).read_bytes()
        options = {
            "tls_certificates": [(certificate, private)],
            "verify_client": True,
            "root_certificates": certificate,
        }
    scheme = "grpc+tcp" if folder is None else "grpc+tls"
    server = _FlightServer(f"{scheme}://127.0.0.1:0", **options)
    _ready(f"{scheme}://127.0.0.1:{server.port}")
    server.serve()


@contextmanager
def _ask_flight(endpoint: str, folder: Path | None) -> Iterator[Ask]:
    options: dict[str, Any] = {}
    if folder is not None:
        certificate, private = (folder / _CERTIFICATE).read_bytes(), (folder / _PRIVATE).read_bytes()
        options = {"tls_root_certs": certificate, "cert_chain": certificate, "private_key": private}
    with flight.connect(endpoint, **options) as client:
        writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(b"echo"))
        writer.begin(_BYTES)

        def ask(arrays: Sequence[memoryview], answer: int) -> None:
            for array in arrays[:-1]:
                writer.write_with_metadata(_batch(array), (0).to_bytes(8, "little"))
            writer.write_with_metadata(_batch(arrays[-1]), answer.to_bytes(8, "little"))
            for _ in arrays:
                reader.read_chunk()

        yield ask
        writer.done_writing()
        writer.close()


_SERVE = {"ZeroMQ": _serve_zeromq, "socket": _serve_socket, "Flight": _serve_flight}
_ASK = {"ZeroMQ": _ask_zeromq, "socket": _ask_socket, "Flight": _ask_flight}
TRANSPORTS = tuple(_SERVE)


@contextmanager
def asking(transport: str, endpoint: str, folder: Path | None) -> Iterator[Ask]:
    """A client of an echo; the function that it gives asks and waits."""
    with _ASK[transport](endpoint, folder) as ask:
        yield ask


if __name__ == "__main__":
    _SERVE[sys.argv[1]](Path(sys.argv[2]) if len(sys.argv) > 2 else None)
