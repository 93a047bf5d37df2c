"""A token for an etcd of one's own names its certificate, if that is of the CA that the user trusts."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from culm.cluster.store.etcd import EtcdAccess
from culm.errors import UsageError
from culm.machines.head_store import make_certificate
from culm.machines.join_token import access_of, certificate_fingerprint, decode_token, encode_token, etcd_token

SECRET = bytes(range(32))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of a TLS server with the certificate in `tmp_path`/server.pem."""
    certificate, key = make_certificate(["127.0.0.1"])
    (tmp_path / "server.pem").write_bytes(certificate)
    (tmp_path / "pair.pem").write_bytes(certificate + key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "pair.pem")
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            connection, _ = listening.accept()
            if stopped.is_set():
                connection.close()
                return
            try:
                context.wrap_socket(connection, server_side=True).close()
            except OSError:
                connection.close()  # the client does not trust the certificate

    stopped, thread = threading.Event(), threading.Thread(target=serve)
    thread.start()
    address = listening.getsockname()
    yield f"https://127.0.0.1:{address[1]}"
    stopped.set()
    socket.create_connection(address).close()
    thread.join()
    listening.close()


def test_a_token_for_an_etcd_holds_all_that_a_machine_needs(server: str, tmp_path: Path) -> None:
    access = EtcdAccess(
        endpoints=("https://127.0.0.1:9", server), user="root", password="word", ca=str(tmp_path / "server.pem")
    )
    token = decode_token(encode_token(etcd_token(access, SECRET, job="gpt")))
    certificate = (tmp_path / "server.pem").read_text()
    assert (token.secret, token.job, token.fingerprint) == (SECRET, "gpt", certificate_fingerprint(certificate))
    found = access_of(token)
    assert (found.endpoints, found.user, found.password) == (access.endpoints, "root", "word")
    assert certificate_fingerprint(found.trusted_certificate) == token.fingerprint


def test_no_token_is_made_for_a_server_of_another_ca(server: str, tmp_path: Path) -> None:
    (tmp_path / "other.pem").write_bytes(make_certificate(["127.0.0.1"])[0])
    with pytest.raises(UsageError, match="--etcd cannot be reached, or has no certificate of --etcd-ca"):
        etcd_token(EtcdAccess(endpoints=(server,), ca=str(tmp_path / "other.pem")), SECRET)
    assert etcd_token(EtcdAccess(endpoints=(server,)), SECRET).fingerprint == b""
