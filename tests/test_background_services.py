"""`culm.head` and `culm.dash`: stores and pages that are served while the program goes on."""

from __future__ import annotations

import threading
import urllib.request
from pathlib import Path

import pytest
from tests import tiny_jobs
from tests.cli.cli_process import JOBS

import culm
from culm.job import load_job
from culm.machines.join_token import decode_token
from culm.providers.private_etcd import free_port
from culm.testing import reference, simulate


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


def test_a_page_is_served_until_it_is_closed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    simulate(tiny_jobs.job(), pipelines=1, stages=2, strategy="none", out=str(tmp_path))
    with culm.dash(tmp_path) as page:
        assert "<html" in read(page.url)
        assert "culm_step" in read(f"{page.url}metrics")
    with pytest.raises(OSError, match="refused"):
        read(page.url)
    assert capfd.readouterr() == ("", "")


def test_a_wrong_request_is_an_error_of_the_caller(tmp_path: Path) -> None:
    with pytest.raises(culm.CulmError, match="--port is 70000"):
        culm.dash(tmp_path, port=70000)
    with pytest.raises(culm.CulmError, match="one of the two"):
        culm.dash()
    with pytest.raises(culm.CulmError, match="it is not a folder of culm head"):
        culm.head_token(data=tmp_path / "none", address="127.0.0.1")
    with pytest.raises(culm.CulmError, match="valid_s is 0"):
        culm.head(data=tmp_path / "head", address="127.0.0.1", valid_s=0)


@pytest.mark.real
def test_a_run_over_a_head_of_this_program(tmp_path: Path) -> None:
    port = free_port()
    with culm.head(data=tmp_path / "head", address="127.0.0.1", port=port) as head:
        assert head.url == f"https://127.0.0.1:{port}"
        with pytest.raises(culm.CulmError, match="a culm head is running there"):
            culm.head(data=tmp_path / "head", address="127.0.0.1", port=free_port())
        own = culm.head_token(data=tmp_path / "head", address="127.0.0.1", port=port, job_name="brief", valid_s=3600)
        assert (decode_token(own).secret, decode_token(own).job) == (decode_token(head.token).secret, "brief")
        reference_job = f"{JOBS}:brief"
        nodes = [
            threading.Thread(target=culm.join, kwargs={"join": head.token, "job_name": "brief", "address": "127.0.0.1"})
            for _ in range(2)
        ]
        for node in nodes:
            node.start()
        summary = culm.train(reference_job, join=own, job_name="brief", stages=2, address="127.0.0.1", progress=False)
        for node in nodes:
            node.join()
    assert summary.weights_sha256 == reference(load_job(reference_job)).weights_sha256
