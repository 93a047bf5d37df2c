"""Access to etcd: every wrong setting is refused in one sentence, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiohttp import web
from tests.etcd_servers import etcd_with, patiently
from tests.fake_metadata_service import metadata

from culm.cluster.store.etcd import EtcdAccess, EtcdStore, parse_etcd_access
from culm.cluster.store.etcd.etcd_access import check_password_is_encrypted
from culm.cluster.store.etcd.etcd_gateway import EtcdGateway
from culm.cluster.store.etcd.etcd_messages import EmptyAnswer
from culm.cluster.timeouts import derive_timeouts
from culm.errors import RunError, UsageError
from culm.providers.private_etcd import PrivateEtcd
from culm.runtime.clock import RealClock


@pytest.mark.parametrize(
    ("urls", "endpoints"),
    [
        ("http://10.0.0.5:2379", ("http://10.0.0.5:2379",)),
        ("https://a:1, https://b:2/", ("https://a:1", "https://b:2")),
        ("etcd.example", ("http://etcd.example:2379",)),
        ("http://[::1]:2379", ("http://[::1]:2379",)),
    ],
)
def test_endpoints_are_read_in_every_usual_form(urls: str, endpoints: tuple[str, ...]) -> None:
    assert parse_etcd_access(urls).endpoints == endpoints


@pytest.mark.parametrize(
    ("urls", "user", "refused"),
    [
        ("http://10.0.0.5:2379", "root:word", True),
        ("https://a:1,http://b:2", "root:word", True),
        ("https://a:1", "root:word", False),
        ("http://127.0.0.1:2379", "root:word", False),
        ("http://10.0.0.5:2379", "", False),
    ],
)
def test_a_password_is_not_sent_unencrypted_to_another_machine(urls: str, user: str, refused: bool) -> None:
    refusal = pytest.raises(UsageError, match="use https://, or --etcd-insecure")
    with refusal if refused else contextlib.nullcontext():
        check_password_is_encrypted(parse_etcd_access(urls, user=user))


@pytest.mark.parametrize(
    ("urls", "options", "sentence"),
    [
        ("", {}, "--etcd is '': name at least one endpoint"),
        (" , ", {}, "--etcd is ' , ': name at least one endpoint"),
        ("ftp://a:1", {}, "--etcd has the endpoint 'ftp://a:1': write it as https://host:2379"),
        ("http://a:port", {}, "--etcd has the endpoint 'http://a:port'"),
        ("http://a:99999", {}, "--etcd has the endpoint 'http://a:99999'"),
        ("http://:1", {}, "--etcd has the endpoint 'http://:1'"),
        ("http://a:1/v3", {}, "--etcd has the endpoint 'http://a:1/v3'"),
        ("http://me:secret@a:1", {}, "--etcd has the endpoint"),
        ("http://a:1", {"user": "me"}, "--etcd-user is 'me' without a password: write name:password"),
        ("https://a:1", {"cert": "c.pem"}, "--etcd-key is missing: a client certificate and its key come together"),
        ("https://a:1", {"key": "k.pem"}, "--etcd-cert is missing"),
        ("http://a:1", {"ca": "ca.pem"}, "certificates are given: write https:// instead of http://"),
    ],
)
def test_invalid_access_options_are_refused(urls: str, options: dict[str, str], sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_etcd_access(urls, **options)
    assert sentence in str(refused.value)


def test_a_password_is_given_with_the_user_or_separately() -> None:
    assert parse_etcd_access("a", user="me:se:cret").password == "se:cret"
    assert parse_etcd_access("a", user="me", password="secret").password == "secret"


def test_a_password_is_not_shown() -> None:
    assert "secret" not in repr(parse_etcd_access("a", user="me:secret"))


@pytest.mark.parametrize("job", ["", "a/b", "../x", "a b", "é", "x" * 65])
def test_a_job_whose_name_makes_no_key_is_refused(job: str) -> None:
    with pytest.raises(UsageError, match=r"--job is .*: use up to 64 letters"):
        asyncio.run(EtcdStore.open(EtcdAccess(endpoints=("http://127.0.0.1:9",)), job))


async def opened(access: EtcdAccess, **options: Any) -> None:
    async with await EtcdStore.open(access, "job", **options) as store:
        await store.put("x", b"1")
        assert await store.get("x") == b"1"
        assert await anext(aiter(store.watch("x"))) is not None


def refusal(access: EtcdAccess, timeout_s: float = 10.0) -> str:
    """The message with which a client is refused."""
    with pytest.raises(UsageError) as refused:
        patiently(opened(access, timeout_s=timeout_s))
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_an_unreachable_etcd_is_refused_with_each_address() -> None:
    said = refusal(parse_etcd_access("http://127.0.0.1:9,http://nowhere.invalid"), timeout_s=0.1)
    assert "--etcd cannot be reached: cannot connect to http://127.0.0.1:9 (Connect call failed" in said
    assert "http://nowhere.invalid:2379 has an unknown host name" in said
    assert said.endswith("start etcd or correct the address")


def test_a_server_that_is_not_etcd_is_refused() -> None:
    async def main(status: int, text: str) -> str:
        async def answer(request: web.Request) -> web.StreamResponse:
            return web.Response(status=status, text=text)

        async with metadata(answer) as fake:
            with pytest.raises(UsageError) as refused:
                await EtcdStore.open(EtcdAccess(endpoints=(fake.url,)), "job", timeout_s=30)
            return str(refused.value)

    assert "answers, but not as etcd does" in asyncio.run(main(200, "<html>welcome</html>"))
    assert "status 404 and not as etcd does: is it etcd 3.4 or newer" in asyncio.run(main(404, "not here"))
    assert "status 302" in asyncio.run(main(302, ""))


@pytest.fixture(scope="module")
def etcd() -> Iterator[PrivateEtcd]:
    with contextlib.closing(PrivateEtcd()) as private:
        asyncio.run(private.start())
        yield private


@pytest.mark.real
def test_a_wrong_password_is_refused(etcd: PrivateEtcd) -> None:
    url = etcd.access.endpoints[0]
    sentence = f"--etcd-user is 'root': etcd at {url} does not know this user with this password"
    assert refusal(parse_etcd_access(url, user="root:wrong")) == sentence
    assert "--etcd-user is 'me'" in refusal(parse_etcd_access(url, user="me:wrong"))


@pytest.mark.real
def test_a_missing_password_is_refused(etcd: PrivateEtcd) -> None:
    url = etcd.access.endpoints[0]
    assert refusal(parse_etcd_access(url)) == f"--etcd-user is missing: etcd at {url} asks for a user and a password"


@pytest.mark.real
def test_a_user_without_rights_is_refused(etcd: PrivateEtcd) -> None:
    async def add_user() -> None:
        gateway = EtcdGateway(etcd.access, RealClock(), attempt_timeout_s=2, log=print)
        await gateway.call("/v3/auth/user/add", {"name": "guest", "password": "guest"}, EmptyAnswer)
        await gateway.close()

    asyncio.run(add_user())
    said = refusal(parse_etcd_access(etcd.access.endpoints[0], user="guest:guest"))
    assert said.startswith("--etcd-user is 'guest': etcd at ")
    assert said.endswith("does not let it use keys under culm/ (readwrite)")


@pytest.mark.real
def test_https_where_there_is_no_tls_is_refused(etcd: PrivateEtcd) -> None:
    url = etcd.access.endpoints[0].replace("http:", "https:")
    assert f"{url} closed the connection (if it should be http://, write that)" in refusal(
        parse_etcd_access(url), timeout_s=0.1
    )


@pytest.mark.real
def test_a_password_for_an_etcd_that_asks_for_none_is_refused(tmp_path: Path) -> None:
    with etcd_with(tmp_path) as url:
        assert "etcd at " + url + " has authentication disabled" in refusal(parse_etcd_access(url, user="me:secret"))


@pytest.mark.real
def test_an_expired_token_is_replaced_silently(tmp_path: Path) -> None:
    async def main(url: str) -> None:
        plain = EtcdGateway(EtcdAccess(endpoints=(url,)), RealClock(), attempt_timeout_s=2, log=print)
        for path, body in [
            ("/v3/auth/user/add", {"name": "root", "password": "secret"}),
            ("/v3/auth/user/grant", {"user": "root", "role": "root"}),
            ("/v3/auth/enable", {}),
        ]:
            await plain.call(path, body, EmptyAnswer)
        await plain.close()
        notes: list[str] = []
        async with await EtcdStore.open(parse_etcd_access(url, user="root:secret"), "job", log=notes.append) as store:
            for i in range(3):
                used = store._gateway._token
                await store.put("x", str(i).encode())
                store._gateway._token = "gone.1"
                assert await store.get("x") == str(i).encode()
                assert store._gateway._token not in ("gone.1", used)
        assert not notes

    with etcd_with(tmp_path, "--bcrypt-cost=4") as url:
        patiently(main(url))


class Certificates:
    """A certificate authority, and certificates signed by it, as files."""

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        folder.mkdir(exist_ok=True)
        authority, self._folder = trustme.CA(), folder
        self.ca = self._write("ca.pem", authority.cert_pem)
        made = authority.issue_cert(host)
        self.cert, self.key = self._write("c.pem", *made.cert_chain_pems), self._write("k.pem", made.private_key_pem)

    def _write(self, name: str, *blobs: trustme.Blob) -> str:
        for blob in blobs:
            blob.write_to_path(str(self._folder / name), append=True)
        return str(self._folder / name)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def tls_url(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An etcd with TLS that requires a client certificate."""
    ours = certificates
    options = [f"--cert-file={ours.cert}", f"--key-file={ours.key}", f"--trusted-ca-file={ours.ca}"]
    with etcd_with(tmp_path_factory.mktemp("tls"), *options, "--client-cert-auth", scheme="https") as url:
        patiently(opened(parse_etcd_access(url, ca=ours.ca, cert=ours.cert, key=ours.key), timeout_s=20))
        yield url


@pytest.mark.real
def test_with_certificates_that_belong_together_everything_works(tls_url: str, certificates: Certificates) -> None:
    ours = certificates
    patiently(opened(parse_etcd_access(tls_url, ca=ours.ca, cert=ours.cert, key=ours.key)))


@pytest.mark.real
def test_an_etcd_whose_certificate_is_not_known_is_not_trusted(tls_url: str, certificates: Certificates) -> None:
    ours = certificates
    for ca in ("", Certificates(Path(ours.ca).parent / "theirs").ca):
        said = refusal(parse_etcd_access(tls_url, ca=ca, cert=ours.cert, key=ours.key))
        assert f"the certificate of {tls_url} is not to be trusted" in said
        assert said.endswith("check --etcd-ca")


@pytest.mark.real
def test_an_etcd_under_another_name_than_its_certificate_says_is_not_trusted(tmp_path: Path) -> None:
    other = Certificates(tmp_path / "c", host="etcd.example")
    with etcd_with(tmp_path / "d", f"--cert-file={other.cert}", f"--key-file={other.key}", scheme="https") as url:
        said = refusal(parse_etcd_access(url, ca=other.ca))
    assert "IP address mismatch, certificate is not valid for '127.0.0.1'" in said


@pytest.mark.real
def test_a_client_certificate_that_etcd_does_not_know_is_refused(tls_url: str, certificates: Certificates) -> None:
    theirs = Certificates(Path(certificates.ca).parent / "strangers")
    for cert, key in [("", ""), (theirs.cert, theirs.key)]:
        said = refusal(parse_etcd_access(tls_url, ca=certificates.ca, cert=cert, key=key))
        assert said.endswith("does not accept the client certificate: check --etcd-cert and --etcd-key")


@pytest.mark.real
def test_http_where_tls_is_required_is_refused(tls_url: str) -> None:
    url = tls_url.replace("https:", "http:")
    assert f"{url} closed the connection (if it should be https://, write that)" in refusal(
        parse_etcd_access(url), timeout_s=0.1
    )


def test_files_that_are_not_there_or_are_no_certificates_are_refused(
    tmp_path: Path, certificates: Certificates
) -> None:
    url, broken, ours = "https://127.0.0.1:9", tmp_path / "broken.pem", certificates
    broken.write_text("no certificate")
    other = Certificates(tmp_path / "other")
    assert (
        refusal(EtcdAccess(endpoints=(url,), ca="nowhere.pem")) == "--etcd-ca is 'nowhere.pem': there is no such file"
    )
    assert "--etcd-ca" in refusal(EtcdAccess(endpoints=(url,), ca=str(broken)))
    assert "--etcd-cert and --etcd-key" in refusal(EtcdAccess(endpoints=(url,), cert=str(broken), key=ours.key))
    assert "belong together" in refusal(EtcdAccess(endpoints=(url,), cert=ours.cert, key=other.key))
    assert (
        refusal(EtcdAccess(endpoints=(url,), cert=ours.cert, key="no")) == "--etcd-key is 'no': there is no such file"
    )


@pytest.mark.real
def test_a_changed_password_ends_calls(tmp_path: Path) -> None:
    async def main() -> None:
        async with PrivateEtcd(tmp_path) as private:
            store = await EtcdStore.open(private.access, "job", timeouts=derive_timeouts(0.5))
            admin = EtcdGateway(private.access, RealClock(), attempt_timeout_s=2, log=print)
            await admin.call("/v3/auth/user/changepw", {"name": "root", "password": "other"}, EmptyAnswer)
            for call in (store.put("x", b""), anext(aiter(store.watch("x")))):
                with pytest.raises(RunError, match="does not know this user with this password"):
                    await call
            await admin.close()
            await store.close()

    patiently(main())
