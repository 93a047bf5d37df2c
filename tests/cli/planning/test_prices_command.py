"""`culm prices`: a table, one object for scripts, and a user's catalogue from a file of SkyPilot."""

from __future__ import annotations

import functools
import json
import os
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.cli.cli_process import one_sentence

from culm.cli import main

HEADER = "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,AvailabilityZone"
ROWS = f"""{HEADER}
p5e.48xlarge,H200,8.0,192.0,2048.0,,60.0,25.0,us-west-2,usw2-az1
p5e.48xlarge,H200,8.0,192.0,2048.0,,60.0,27.0,us-west-2,usw2-az2
x9.large,K80,1.0,4.0,16.0,,1.0,0.5,us-west-2,usw2-az1
"""
SHARED = Path(__file__).parents[4] / "shared" / "traces" / "cloud-prices" / "catalogue-us-2026-08.csv"


def invoke(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(list(options))
    found = capsys.readouterr()
    assert isinstance(end.value.code, int)
    return end.value.code, found.out, found.err


def as_json(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    code, out, _ = invoke(capsys, *options, "--json")
    assert code == 0
    found = json.loads(out)
    assert isinstance(found, dict)
    return found


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves files without logging."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def catalogue(tmp_path: Path) -> Path:
    path = tmp_path / "aws" / "vms.csv"
    path.parent.mkdir()
    path.write_text(ROWS)
    os.utime(path, (1_790_000_000, 1_790_000_000))  # 2026-09-21
    return path


def test_the_table_names_prices_marks_and_sources(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = invoke(capsys, "prices", "--accelerator", "H100")
    assert code == 0
    lines = {line.split()[0]: line for line in out.splitlines() if line.split()}
    assert "2.579" in lines["p5.48xlarge"]
    assert "63%" in lines["p5.48xlarge"]
    assert "spot = on demand" in lines["Standard_ND96isr_H100_v5"]
    assert lines["a3-megagpu-8g+8xH100"].rstrip().endswith("no price")
    assert "1  SkyPilot catalogue" in out


def test_the_json_has_figures_date_and_source_of_every_price(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "prices", "--cloud", "aws", "--instance", "p6")
    by_name = {row["instance"]: row for row in found["prices"]}
    assert set(by_name) == {"p6-b200.48xlarge", "p6-b300.48xlarge", "p6e-gb200.36xlarge"}
    b300 = by_name["p6-b300.48xlarge"]
    assert (b300["on_demand_usd_h"], b300["spot_usd_h"], b300["on_demand_usd_per_gpu_h"]) == (142.416, None, 17.802)
    assert (b300["nvlink_gb_s"], b300["network_gbit_s"], b300["tensor_tflops"]) == (1800, 6400, 2250)
    assert b300["date"] == "2026-08-26"
    assert b300["source"]
    assert by_name["p6e-gb200.36xlarge"]["marks"] == ["no price"]


def test_update_writes_a_catalogue_that_is_used_only_if_named(
    capsys: pytest.CaptureFixture[str], catalogue: Path, tmp_path: Path
) -> None:
    out = tmp_path / "mine.csv"
    found = as_json(capsys, "prices", "update", str(catalogue), "--out", str(out))
    assert (found["cloud"], found["instances"], found["rows"], found["date"]) == ("aws", 1, 2, "2026-09-21")
    assert "line 4, has the accelerator 'K80'" in found["problems"][0]
    (own,) = as_json(capsys, "prices", "--instance", "p5e.", "--prices", str(out))["prices"]
    assert (own["spot_usd_h"], own["zone_spread"], own["date"]) == (26.0, 27 / 25, "2026-09-21")
    (builtin,) = as_json(capsys, "prices", "--instance", "p5e.")["prices"]
    assert builtin["marks"] == ["no price"]


def test_update_writes_to_the_folder_of_the_user_and_keeps_other_instances(
    capsys: pytest.CaptureFixture[str], catalogue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    target = tmp_path / "config" / "culm" / "prices.csv"
    target.parent.mkdir(parents=True)
    target.write_text("instance,on_demand_usd_h,spot_usd_h,date\ng5.xlarge,1,0.2,2026-11-01\n")
    code, out, err = invoke(capsys, "prices", "update", str(catalogue), "--date", "2026-11-02")
    assert code == 0
    assert f"2 prices of 1 aws instances, as of 2026-11-02, are in {target}" in out
    assert "K80" in err
    names = {row["instance"]: row for row in as_json(capsys, "prices", "--prices", str(target))["prices"]}
    assert names["g5.xlarge"]["spot_usd_h"] == 0.2
    assert names["p5e.48xlarge"]["date"] == "2026-11-02"


def test_update_reads_a_url(capsys: pytest.CaptureFixture[str], catalogue: Path, tmp_path: Path) -> None:
    handler = functools.partial(QuietHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        found = as_json(capsys, "prices", "update", f"{address}/aws/vms.csv", "--out", str(tmp_path / "mine.csv"))
        code, _, err = invoke(capsys, "prices", "update", f"{address}/none/vms.csv")
        server.shutdown()
    assert (found["cloud"], found["rows"]) == ("aws", 2)
    assert code == 2
    assert "/none/vms.csv could not be read: " in one_sentence(err)


@pytest.mark.skipif(not SHARED.is_file(), reason="the price catalogue is not available")
def test_the_development_catalogue_is_a_price_file(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "prices", "--prices", str(SHARED), "--instance", "p5.48xlarge")
    assert found["prices"][0]["spot_usd_h"] == 20.6328


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("prices", "--cloud", "moon"), "--cloud is 'moon': use one of aws, gcp, azure"),
        (("prices", "--accelerator", "TPU"), "no instance matches --accelerator TPU"),
        (("prices", "--on", "soon"), "the date is 'soon'"),
        (("prices", "update", "none.csv"), "the prices 'none.csv' could not be read: No such file"),
        (("prices", "update", "ftp://host/aws/vms.csv"), "use https:// or a file"),
    ],
)
def test_mistakes_are_one_sentence(capsys: pytest.CaptureFixture[str], options: tuple[str, ...], sentence: str) -> None:
    code, _, err = invoke(capsys, *options)
    assert code == 2
    assert sentence in one_sentence(err)


def test_a_catalogue_without_a_known_accelerator_is_refused(
    capsys: pytest.CaptureFixture[str], catalogue: Path, tmp_path: Path
) -> None:
    code, _, err = invoke(
        capsys, "prices", "update", str(catalogue), "--region", "eu-*", "--out", str(tmp_path / "o.csv")
    )
    assert code == 2
    assert "has no price of an instance with a known accelerator in these regions" in one_sentence(err)
    assert not (tmp_path / "o.csv").exists()
