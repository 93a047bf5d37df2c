"""`culm run --etcd` and `culm agent` as users start them, over an etcd with TLS, client certificates and a password."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from tests.etcd_servers import etcd_with, patiently
from tests.program_fork_server import fresh_programs

from culm.cli import main
from culm.cluster.store.etcd import EtcdAccess, EtcdStore, parse_etcd_access
from culm.cluster.store.etcd.etcd_gateway import EtcdGateway
from culm.cluster.store.etcd.etcd_messages import EmptyAnswer
from culm.job import load_job
from culm.runtime.clock import RealClock
from culm.testing import reference

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("forked_programs")]
PASSWORD = "the password of the test"
LIMIT_S = 120
CULM = str(Path(sys.executable).with_name("culm"))
JOB = """
import os, pathlib, time, torch
from culm import STOP, Job
from torch import nn

NAP_S = float(os.environ["CULM_TEST_NAP_S"])
END = pathlib.Path(os.environ["CULM_TEST_END"])
DATA = [(torch.randn(4, generator=torch.Generator().manual_seed(i)), torch.zeros(4)) for i in range(32)]

class Nap(nn.Linear):
    def forward(self, x):
        time.sleep(NAP_S)
        return super().forward(x)

def job():
    return Job(
        layers=[lambda: Nap(4, 4)] * 4, loss=nn.functional.mse_loss,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), data=DATA, global_batch=8, micro_batch=2,
        steps=10**6, exact=True, on_step=lambda _: STOP if END.exists() else None,
    )
"""


class Guarded:
    """An etcd that speaks TLS, asks for a client certificate, and then for a password; and the files for it."""

    def __init__(self, folder: Path) -> None:
        authority, stranger = trustme.CA(), trustme.CA()
        made = authority.issue_cert("127.0.0.1")
        self.ca, self.other_ca = folder / "ca.pem", folder / "other.pem"
        self.cert, self.key, self.broken = folder / "cert.pem", folder / "key.pem", folder / "broken.pem"
        authority.cert_pem.write_to_path(str(self.ca))
        stranger.cert_pem.write_to_path(str(self.other_ca))
        made.cert_chain_pems[0].write_to_path(str(self.cert))
        made.private_key_pem.write_to_path(str(self.key))
        self.broken.write_text("no certificate")
        self.url = ""

    @property
    def server(self) -> list[str]:
        files = [f"--cert-file={self.cert}", f"--key-file={self.key}", f"--trusted-ca-file={self.ca}"]
        return [*files, "--client-cert-auth", "--bcrypt-cost=4"]

    def access(self, user: str = "") -> EtcdAccess:
        return parse_etcd_access(self.url, user=user, ca=str(self.ca), cert=str(self.cert), key=str(self.key))

    def options(self, **changes: str | None) -> list[str]:
        """Of a command; None leaves one away."""
        given = {"etcd": self.url, "etcd-ca": str(self.ca), "etcd-cert": str(self.cert), "etcd-key": str(self.key)}
        merged = {**given, "etcd-user": "root", "job": "guarded"} | {k.replace("_", "-"): v for k, v in changes.items()}
        return [word for name, value in merged.items() if value is not None for word in (f"--{name}", value)]


async def _lock(guarded: Guarded) -> None:
    """Wait until it answers; from then on only who knows the password gets in."""
    async with await EtcdStore.open(guarded.access(), "nobody", timeout_s=30):
        pass
    gateway = EtcdGateway(guarded.access(), RealClock(), attempt_timeout_s=5, log=print)
    for path, body in [
        ("/v3/auth/user/add", {"name": "root", "password": PASSWORD}),
        ("/v3/auth/user/grant", {"user": "root", "role": "root"}),
        ("/v3/auth/enable", {}),
    ]:
        await gateway.call(path, body, EmptyAnswer)
    await gateway.close()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    made = Guarded(tmp_path_factory.mktemp("certificates"))
    with etcd_with(tmp_path_factory.mktemp("etcd"), *made.server, scheme="https") as made.url:
        patiently(_lock(made))
        yield made


@pytest.fixture(autouse=True)
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, list[str]]:
    """What is typed, but for the options of etcd: the job trains at leisure until it is told to end."""
    monkeypatch.setenv("CULM_SECRET", "a secret of the test")
    monkeypatch.setenv("CULM_ETCD_PASSWORD", PASSWORD)
    monkeypatch.setenv("CULM_TEST_END", str(tmp_path / "end"))
    monkeypatch.setenv("CULM_TEST_NAP_S", "0.02")
    file = tmp_path / "guarded.py"
    file.write_text(JOB)
    return {"run": ["run", str(file), "--pipelines", "2", "--stages", "1"], "agent": ["agent"]}


def refused(capsys: pytest.CaptureFixture[str], command: list[str], options: list[str]) -> str:
    """The one sentence of a command that must end with 2."""
    with pytest.raises(SystemExit) as ended:
        main([*command, *options])
    said = capsys.readouterr().err
    assert ended.value.code == 2, said
    assert said.startswith("culm: ")
    assert said.count("\n") == 1, said
    return said


@pytest.mark.parametrize("word", ["run", "agent"])
def test_a_wrong_password_or_certificate_is_refused_in_a_sentence(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    guarded: Guarded,
    commands: dict[str, list[str]],
    word: str,
) -> None:
    command = commands[word]
    told = {
        "does not know this user with this password": guarded.options(etcd_user="root:wrong"),
        "asks for a user and a password": guarded.options(etcd_user=None),
        "cannot be used": guarded.options(etcd_ca=str(guarded.broken)),
        "is not to be trusted": guarded.options(etcd_ca=str(guarded.other_ca)),
        "check --etcd-cert and --etcd-key": guarded.options(etcd_cert=None, etcd_key=None),
        "--etcd-key is missing": guarded.options(etcd_key=None),
    }
    for part, options in told.items():
        assert part in refused(capsys, command, options)
    monkeypatch.delenv("CULM_ETCD_PASSWORD")
    assert "without a password" in refused(capsys, command, guarded.options())


class Started:
    """A command of this test, on what counts as a machine of its own."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen([CULM, *arguments], stdout=-1, stderr=-1, text=True)

    def line(self, start: str) -> str:
        """The next line on stderr that begins so; empty: the command has ended."""
        assert self.process.stderr is not None
        return next((line for line in self.process.stderr if line.startswith(start)), "")

    def ended(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, out, err


@pytest.fixture
def start() -> Iterator[type[Started]]:
    """Starts commands; none is left afterwards."""
    made: list[Started] = []

    class Kept(Started):
        def __init__(self, *arguments: str) -> None:
            super().__init__(*arguments)
            made.append(self)

    yield Kept
    for each in made:
        each.process.kill()
        each.process.communicate()


def test_a_run_on_other_machines_completes_despite_connections_of_strangers(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    start: type[Started],
    guarded: Guarded,
    commands: dict[str, list[str]],
    tmp_path: Path,
) -> None:
    run = start(*commands["run"], "--local", "0", *guarded.options(), "--json", "--strategy", "reroute")
    agents = [start("agent", "--zone", "a", *guarded.options())]
    with fresh_programs():
        agents.append(start("agent", "--zone", "b", *guarded.options()))
    assert run.line("steps "), run.ended()
    for command in commands.values():
        said = refused(capsys, command, guarded.options(etcd_user="root:wrong"))
        assert "does not know this user with this password" in said
        assert "is not to be trusted" in refused(capsys, command, guarded.options(etcd_ca=str(guarded.other_ca)))
    assert "is in use by another culm run" in refused(capsys, commands["run"], guarded.options())
    (tmp_path / "end").touch()
    code, out, err = run.ended()
    assert code == 0, err
    summary = json.loads(out)
    assert (summary["preemptions"], summary["samples_lost"], summary["samples_duplicated"]) == (0, 0, 0)
    monkeypatch.setenv("CULM_TEST_NAP_S", "0")
    expected = reference(load_job(commands["run"][1], {"steps": str(summary["steps"])}))
    assert summary["state_sha256"] == expected.state_sha256
    for agent in agents:
        code, said, err = agent.ended()
        assert code == 0, err
        assert "joining job guarded as node" in said
    assert asyncio.run(_keys(guarded)) == []


async def _keys(guarded: Guarded) -> list[str]:
    async with await EtcdStore.open(guarded.access(f"root:{PASSWORD}"), "guarded") as store:
        return await store.list_keys("")
