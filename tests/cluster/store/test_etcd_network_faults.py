"""The store between processes and hosts: stopped, silent and healed later, slow. Fenced clients write nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tests import network_namespaces
from tests.etcd_servers import etcd_with
from tests.network_namespaces import Lab, NoLab

from culm.providers.private_etcd import etcd_binary

pytestmark = [pytest.mark.real, pytest.mark.waits(3), pytest.mark.usefixtures("forked_programs")]
hosts = pytest.mark.skipif(not network_namespaces.possible(), reason="needs root and network namespaces")
PATIENCE_S = 60
CLIENT = [sys.executable, "-m", "tests.cluster.store.etcd_client_process"]


class Client:
    """A process with its own store client, on a host."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def hear(self, line: str) -> list[str]:
        """Read until this line; returns the lines before it."""
        assert self._process.stdout is not None
        before: list[str] = []
        for said in self._process.stdout:
            if said.strip() == line:
                return before
            before.append(said.strip())
        raise AssertionError(f"it never said {line!r} but {before}")

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def ask(self, line: str) -> None:
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)


@contextmanager
def running(command: list[str]) -> Iterator[Client]:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    bound = threading.Timer(PATIENCE_S, process.kill)  # so that a missing line does not hang the test
    bound.start()
    try:
        yield Client(process)
    finally:
        bound.cancel()
        process.kill()
        process.communicate()


@contextmanager
def cluster(folder: Path, *nodes: str) -> Iterator[tuple[Lab, dict[str, Client]]]:
    """etcd on its own host, and nodes on theirs or beside it, all up."""
    with network_namespaces.lab("etcd", *(node for node in nodes if node != "etcd")) as lab, ExitStack() as stack:
        url, peers = f"http://{lab.address('etcd')}:2379", "http://127.0.0.1:2380"
        etcd = [etcd_binary(), f"--data-dir={folder}", f"--listen-client-urls={url}", f"--advertise-client-urls={url}"]
        alone = [f"--listen-peer-urls={peers}", "--heartbeat-interval=10", "--election-timeout=100"]
        stack.enter_context(running(lab.command("etcd", *etcd, *alone, "--log-level=panic")))
        clients = {}
        for node in nodes:
            clients[node] = stack.enter_context(running(lab.command(node, *CLIENT, url, node)))
            clients[node].hear("up")
        yield lab, clients


@hosts
def test_a_node_that_was_cut_off_for_longer_than_its_lease_comes_back_fenced(tmp_path: Path) -> None:
    with cluster(tmp_path, "a", "b") as (lab, clients):
        clients["a"].ask("put epoch 1")
        clients["a"].hear("epoch is 1")
        lab.silence("a")
        clients["b"].hear("nodes/a gone")
        clients["b"].ask("put epoch 2")
        clients["b"].hear("epoch is 2")
        clients["a"].ask("put epoch 1b")
        lab.heal("a")
        clients["a"].hear("refused")
        clients["b"].ask("get epoch")
        clients["b"].hear("epoch is 2")


@hosts
def test_a_node_that_lost_its_session_is_notified_without_a_call(tmp_path: Path) -> None:
    with cluster(tmp_path, "a", "b") as (lab, clients):
        clients["a"].hear("nodes/a there")
        lab.unplug("a")
        clients["b"].hear("nodes/a gone")
        lab.plug("a")
        clients["a"].hear("lost")


@hosts
def test_clients_are_fenced_after_etcd_was_cut_off_for_longer_than_the_leases(
    tmp_path: Path,
) -> None:
    with cluster(tmp_path, "a", "b", "etcd") as (lab, clients):
        lab.silence("etcd")
        gone = clients["etcd"].hear("nodes/a gone")  # this client is on etcd's own host
        if "nodes/b gone" not in gone:
            clients["etcd"].hear("nodes/b gone")
        lab.heal("etcd")
        for node in ("a", "b"):
            clients[node].hear("lost")
        clients["etcd"].ask("get nodes/etcd")
        clients["etcd"].hear("nodes/etcd is here")


@hosts
def test_a_slow_link_costs_no_client_its_session(tmp_path: Path) -> None:
    with cluster(tmp_path, "a", "b") as (lab, clients):
        try:
            lab.slow("a", 200)
        except NoLab as reason:
            pytest.skip(str(reason))
        for i in range(10):
            clients["a"].ask(f"put x {i}")
            clients["a"].hear(f"x is {i}")
        clients["b"].ask("get nodes/a")
        assert "nodes/a gone" not in clients["b"].hear("nodes/a is here")


def test_a_process_that_was_stopped_for_longer_than_its_lease_wakes_up_fenced(tmp_path: Path) -> None:
    with etcd_with(tmp_path) as url, ExitStack() as stack:
        a, b = (stack.enter_context(running([*CLIENT, url, name])) for name in "ab")
        a.hear("up")
        b.hear("up")
        a.send(signal.SIGSTOP)
        a.ask("put epoch stale")
        b.hear("nodes/a gone")
        b.ask("put epoch new")
        b.hear("epoch is new")
        a.send(signal.SIGCONT)
        a.hear("refused")
        b.ask("get epoch")
        b.hear("epoch is new")
