"""Catalogues of SkyPilot are read with their real columns, and what is not understood is reported with its line."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from culm.errors import UsageError
from culm.market import load_catalogue
from culm.market.skypilot_prices import SkyPilotPrices, format_prices, guess_cloud, read_skypilot, rows_to_keep
from culm.plan.model.accelerators import ACCELERATORS, GIB

GIB_OF = {device.name: device.memory / GIB for device in ACCELERATORS.values()}
DAY = date(2026, 11, 1)

GPU_INFO = "\"{'Gpus': [{'Name': 'V100', 'Count': 8, 'MemoryInfo': {'SizeInMiB': 32768}}]}\""
COLUMNS = "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region"
AWS = f"""{COLUMNS},AvailabilityZone,Arch
a1.2xlarge,,,8.0,16.0,,0.204,0.2032,us-east-1,use1-az2,arm64
c5n.2xlarge,,,8.0,21.0,,0.432,0.2,us-east-1,use1-az1,x86_64
p3dn.24xlarge,V100-32GB,8.0,96.0,768.0,{GPU_INFO},31.212,8.3576,us-east-1,use1-az1,x86_64
p3dn.24xlarge,V100-32GB,8.0,96.0,768.0,{GPU_INFO},31.212,,us-east-1,use1-az2,x86_64
p3dn.24xlarge,V100-32GB,8.0,96.0,768.0,{GPU_INFO},42.783,16.2,ap-northeast-1,apne1-az4,x86_64
p5e.48xlarge,H200,8.0,192.0,2048.0,,60.0,25.0,us-west-2,usw2-az1,x86_64
g4ad.xlarge,Radeon MI25,1.0,4.0,16.0,,0.37,0.1,us-east-1,use1-az1,x86_64
g5.xlarge,A10G,1.0,4.0,16.0,,cheap,0.1,us-east-1,use1-az1,x86_64
"""
AZURE = f"""{COLUMNS},Generation
Standard_ND96isr_H100_v5,H100,12,96.0,1900,H100,98.32,98.32,eastus,V2
Standard_ND96isr_H100_v5,H100,12,96.0,1900,H100,98.32,98.32,eastus2,V2
Standard_NC8as_T4_v3,T4,1,8.0,56,T4,0.752,0.08272,australiaeast,"V1,V2"
Standard_NC8as_T4_v3,T4,1,8.0,56,T4,0.752,0.08272,westus3,"V1,V2"
"""
GCP = """InstanceType,vCPUs,MemoryGiB,AcceleratorName,AcceleratorCount,GpuInfo,Region,AvailabilityZone,Price,SpotPrice
a3-megagpu-8g,208.0,1872.0,,,,us-central1,us-central1-a,10.0,2.0
a3-highgpu-8g,208.0,1872.0,,,,us-central1,us-central1-a,9.46,2.1
,,,H100-MEGA,8.0,H100-MEGA,us-central1,us-central1-a,80.0,40.0
,,,H100,8.0,H100,us-central1,us-central1-a,78.0,41.0
,,,tpu-v4-8,1,tpu-v4-8,us-central1,us-central1-a,12.88,3.864
"""


def read(text: str, cloud: str, *regions: str) -> SkyPilotPrices:
    return read_skypilot(
        text, "vms.csv", cloud=cloud, catalogue=load_catalogue(), accelerator_gib=GIB_OF, regions=regions
    )


def test_rows_of_aws_are_read_by_zone() -> None:
    found = read(AWS, "aws")
    assert found.instances == ("c5n.2xlarge", "p3dn.24xlarge", "p5e.48xlarge")
    first, second = found.prices[1:3]
    assert (first.zone, first.on_demand, first.spot) == ("use1-az1", 31.212, 8.3576)
    assert (second.zone, second.spot) == ("use1-az2", None)
    assert (first.hardware.gpu, first.hardware.gpu_count, first.hardware.gpu_mem_gib) == ("V100-32GB", 8, 32.0)
    assert found.skipped == 2


def test_rows_that_are_not_understood_are_reported_with_their_line() -> None:
    accelerator, price = read(AWS, "aws").problems
    assert accelerator.startswith("vms.csv, line 8, has the accelerator 'Radeon MI25', for which culm has no figures")
    assert price.startswith("vms.csv, line 9, has price 'cheap': use a number")


def test_many_rows_with_problems_are_counted() -> None:
    row = AWS.splitlines()[-1]
    problems = read(AWS + f"{row}\n" * 10, "aws").problems
    assert len(problems) == 6
    assert problems[-1] == "7 more rows are left out for such reasons"


def test_unknown_columns_are_reported() -> None:
    text = AWS.replace(",Arch", ",Colour")
    assert read(text, "aws").problems[0] == "vms.csv, line 1, has the unknown column 'colour': it is ignored"


def test_a_missing_column_is_refused() -> None:
    with pytest.raises(UsageError, match="has no column 'spotprice'"):
        read(AWS.replace("SpotPrice", "Cost"), "aws")


def test_azure_has_regions_for_zones_and_a_wrong_number_of_gpus_is_corrected() -> None:
    found = read(AZURE, "azure")
    assert [price.zone for price in found.prices] == ["eastus", "eastus2", "westus3"]
    assert found.prices[0].hardware.gpu_count == 8
    (problem,) = found.problems
    assert "line 2, has 12 accelerators for Standard_ND96isr_H100_v5: 8 are used" in problem


def test_machines_and_accelerators_of_google_cloud_are_added_up() -> None:
    prices = {price.instance: price for price in read(GCP, "gcp").prices}
    assert set(prices) == {"a3-megagpu-8g+8xH100", "a3-highgpu-8g+8xH100"}
    mega, high = prices["a3-megagpu-8g+8xH100"], prices["a3-highgpu-8g+8xH100"]
    assert (mega.on_demand, mega.spot) == (90.0, 42.0)
    assert (high.on_demand, high.spot) == (87.46, 43.1)


def test_other_regions_are_read_if_requested() -> None:
    assert {price.zone for price in read(AWS, "aws", "ap-*").prices} == {"apne1-az4"}


@pytest.mark.parametrize(
    ("text", "source", "cloud"),
    [
        ("", "https://host/catalogs/v8/gcp/vms.csv", "gcp"),
        (AWS, "vms.csv", "aws"),
        (AZURE, "vms.csv", "azure"),
        (GCP, "vms.csv", "gcp"),
    ],
)
def test_the_cloud_is_recognised_by_address_or_names(text: str, source: str, cloud: str) -> None:
    assert guess_cloud(text, source) == cloud


def test_an_unknown_cloud_has_to_be_given() -> None:
    with pytest.raises(UsageError, match="give it with --cloud"):
        guess_cloud("InstanceType\nmystery\n", "vms.csv")


def test_what_is_written_is_a_catalogue_for_prices_and_keeps_other_instances(tmp_path: Path) -> None:
    path = tmp_path / "prices.csv"
    path.write_text("instance,on_demand_usd_h,spot_usd_h\ng5.xlarge,1,0.2\np5e.48xlarge,1,1\n")
    found = read(AWS, "aws")
    kept = rows_to_keep(path.read_text(), path.name, found.instances)
    path.write_text(format_prices(found, on=DAY, source="SkyPilot catalogue: vms.csv", kept=kept))
    own = load_catalogue(path)
    assert own.find("g5.xlarge").spot_usd_h == 0.2
    machine = own.find("p3dn.24xlarge")
    assert (machine.cloud, machine.spot_usd_h, machine.on_demand_usd_h) == ("aws", 8.3576, 31.212)
    assert (machine.as_of, machine.source, machine.notice_s) == (DAY, "SkyPilot catalogue: vms.csv", 120)
    assert own.find("p5e.48xlarge").price() == 25.0
