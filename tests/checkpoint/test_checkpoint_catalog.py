from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.checkpoint.sample_states import (
    check_newest_checkpoint,
    files,
    same_bits,
    same_tensors,
    save_checkpoint,
    state_tensors,
)

import culm
from culm.checkpoint import CheckpointCatalog, ShardReceipt, Storage
from culm.checkpoint import storage as storage_module
from culm.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from pathlib import Path


def shard_files(catalog: CheckpointCatalog, step: int) -> list[str]:
    return [name for name in catalog.storage.list(f"step-{step:08d}") if name.endswith(".safetensors")]


def damage(storage: Storage, name: str, place: int = -1, mask: int = 1) -> None:
    data = bytearray(storage.read(name))
    data[place] ^= mask
    storage.write(name, bytes(data))


def test_a_committed_state_comes_back_bit_for_bit(catalog: CheckpointCatalog) -> None:
    save_checkpoint(catalog, 7, workers=3)
    found = catalog.newest()
    assert found.rejected == ()
    with catalog.open(found.manifest) as reader:
        assert same_tensors(reader.load(), state_tensors(7))


def test_the_manifest_read_is_the_one_that_was_committed(catalog: CheckpointCatalog) -> None:
    committed = save_checkpoint(catalog, 7, facts={"tied": (("0.weight", "3.weight"),), "exact": True})
    assert catalog.newest().manifest == committed
    assert (committed.step, committed.created, committed.culm) == (7, 1.5, culm.__version__)
    assert committed.torch == torch.__version__


def test_a_receipt_travels_as_json() -> None:
    receipt = ShardReceipt(name="a", sha256="b", bytes=3, tensors=("0.weight",))
    assert msgspec.json.decode(msgspec.json.encode(receipt), type=ShardReceipt) == receipt


def test_shards_without_a_commit_are_no_checkpoint(catalog: CheckpointCatalog) -> None:
    catalog.write_shard(3, catalog.shard_name(3, 0), state_tensors(3))
    assert catalog.steps() == []
    with pytest.raises(CheckpointError, match="there is no committed checkpoint in"):
        catalog.newest()


def test_steps_are_in_order_of_their_number(catalog: CheckpointCatalog) -> None:
    for step in (100_000_000, 9, 20):
        save_checkpoint(catalog, step)
    assert catalog.steps() == [9, 20, 100_000_000]


def test_other_files_below_the_root_are_ignored(catalog: CheckpointCatalog) -> None:
    save_checkpoint(catalog, 2)
    catalog.storage.write("notes/step-00000009/manifest.json", b"{}")
    catalog.storage.write("step-x/manifest.json", b"{}")
    assert catalog.steps() == [2]
    catalog.prune(1)
    assert catalog.storage.list() == ["notes", "step-00000002", "step-x"]


def test_a_worker_with_a_name_that_is_no_file_name_is_refused(catalog: CheckpointCatalog) -> None:
    with pytest.raises(CheckpointError, match=r"worker '\.\./x' cannot name a file"):
        catalog.shard_name(1, "../x")


def test_before_selects_an_older_checkpoint(catalog: CheckpointCatalog) -> None:
    for step in (1, 2, 3):
        save_checkpoint(catalog, step)
    assert catalog.newest(before=3).manifest.step == 2
    with pytest.raises(CheckpointError, match="before step 1"):
        catalog.newest(before=1)


def test_a_tensor_in_two_shards_is_refused(catalog: CheckpointCatalog) -> None:
    receipts = [catalog.write_shard(1, catalog.shard_name(1, worker), {"0.weight": torch.ones(1)}) for worker in "ab"]
    with pytest.raises(CheckpointError, match=r"0.weight is in two shards of step 1"):
        catalog.commit(1, receipts, {}, {}, 0.0)
    assert catalog.steps() == []


def test_a_name_that_is_tensor_and_scalar_is_refused(catalog: CheckpointCatalog) -> None:
    receipt = catalog.write_shard(1, catalog.shard_name(1, 0), {"optimizer.0.weight.step": torch.tensor(1.0)})
    with pytest.raises(CheckpointError, match=r"optimizer.0.weight.step is a scalar and also a tensor"):
        catalog.commit(1, [receipt], {"optimizer.0.weight.step": 1}, {}, 0.0)


def test_a_commit_needs_a_shard(catalog: CheckpointCatalog) -> None:
    with pytest.raises(CheckpointError, match="step 1 cannot be committed without a shard"):
        catalog.commit(1, [], {}, {}, 0.0)


def test_a_commit_needs_its_shards_on_storage(catalog: CheckpointCatalog) -> None:
    receipt = catalog.write_shard(1, catalog.shard_name(1, 0), state_tensors(1))
    catalog.storage.delete(f"step-00000001/{receipt.name}")
    with pytest.raises(CheckpointError, match="is missing"):
        catalog.commit(1, [receipt], {}, {}, 0.0)
    assert catalog.steps() == []


def test_shards_of_an_abandoned_attempt_do_not_stay_in_the_checkpoint(catalog: CheckpointCatalog) -> None:
    catalog.write_shard(5, catalog.shard_name(5, 9), state_tensors(5))
    committed = save_checkpoint(catalog, 5)
    assert shard_files(catalog, 5) == sorted(committed.files)


def test_writing_a_committed_step_again_touches_nothing_until_its_commit(catalog: CheckpointCatalog) -> None:
    save_checkpoint(catalog, 5, workers=2)
    for worker in range(2):
        catalog.write_shard(5, catalog.shard_name(5, worker), {"other": torch.full((worker + 1,), math.nan)})
    found = catalog.newest()
    with catalog.open(found.manifest, verify=True) as reader:
        assert same_tensors(reader.load(), state_tensors(5))


@pytest.mark.parametrize("verify", ["full", "sizes"])
def test_a_missing_shard_rejects_the_checkpoint_with_a_reason(catalog: CheckpointCatalog, verify: str) -> None:
    save_checkpoint(catalog, 1)
    save_checkpoint(catalog, 2)
    lost = shard_files(catalog, 2)[0]
    catalog.storage.delete(f"step-00000002/{lost}")
    found = catalog.newest(verify="full" if verify == "full" else "sizes")
    assert found.manifest.step == 1
    [(step, reason)] = found.rejected
    assert step == 2
    assert reason.endswith(f"step-00000002/{lost} is missing")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_changed_byte_in_any_file_is_found(root: str, data: st.DataObject) -> None:
    catalog = CheckpointCatalog(Storage(root))
    save_checkpoint(catalog, 1)
    save_checkpoint(catalog, 2)
    name = f"step-00000002/{data.draw(st.sampled_from(catalog.storage.list('step-00000002')))}"
    size = catalog.storage.size(name)
    assert size
    damage(catalog.storage, name, data.draw(st.integers(0, size - 1)), data.draw(st.integers(1, 255)))
    found = catalog.newest()
    assert found.manifest.step == 1
    [(step, reason)] = found.rejected
    assert step == 2
    assert name in reason


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_cut_in_any_file_is_found_by_sizes_alone(root: str, data: st.DataObject) -> None:
    catalog = CheckpointCatalog(Storage(root))
    save_checkpoint(catalog, 1)
    save_checkpoint(catalog, 2)
    name = f"step-00000002/{data.draw(st.sampled_from(catalog.storage.list('step-00000002')))}"
    content = catalog.storage.read(name)
    catalog.storage.write(name, content[: data.draw(st.integers(0, len(content) - 1))])
    assert catalog.newest(verify="sizes").manifest.step == 1


def test_when_none_is_intact_the_error_says_why_for_each(catalog: CheckpointCatalog) -> None:
    save_checkpoint(catalog, 1)
    save_checkpoint(catalog, 2)
    damage(catalog.storage, "step-00000001/manifest.json")
    damage(catalog.storage, f"step-00000002/{shard_files(catalog, 2)[0]}")
    with pytest.raises(CheckpointError, match=r"step 2: .* is damaged: .*; step 1: .*manifest.json: the manifest"):
        catalog.newest()


def test_a_folder_with_the_manifest_of_another_step_is_rejected(catalog: CheckpointCatalog) -> None:
    save_checkpoint(catalog, 1)
    save_checkpoint(catalog, 2)
    for name in catalog.storage.list("step-00000001"):
        catalog.storage.write(f"step-00000003/{name}", catalog.storage.read(f"step-00000001/{name}"))
    found = catalog.newest()
    assert found.manifest.step == 2
    assert "holds the manifest of step 1" in found.rejected[0][1]


def test_damage_that_sizes_do_not_show_is_found_while_reading(catalog: CheckpointCatalog) -> None:
    save_checkpoint(catalog, 2)
    damage(catalog.storage, f"step-00000002/{shard_files(catalog, 2)[0]}")
    manifest = catalog.newest(verify="sizes").manifest
    with catalog.open(manifest, verify=True) as reader, pytest.raises(CheckpointError, match="is damaged"):
        reader.load()


def test_a_prefix_means_whole_parts_of_a_name(catalog: CheckpointCatalog) -> None:
    save_checkpoint(catalog, 1, layers=12)
    with catalog.open(catalog.newest().manifest) as reader:
        assert sorted(reader.load("1")) == ["1.bias", "1.weight"]
        assert sorted(reader.load("1.")) == ["1.bias", "1.weight"]
        assert sorted(reader.load("optimizer.1")) == ["optimizer.1.weight.exp_avg", "optimizer.1.weight.step"]
        assert reader.load("99") == {}


def test_scalars_are_read_by_prefix_with_their_values(catalog: CheckpointCatalog) -> None:
    receipt = catalog.write_shard(1, catalog.shard_name(1, 0), {})
    scalars = {"optimizer.0.weight.step": 3, "optimizer.0.weight.best": math.inf, "optimizer.1.weight.step": None}
    catalog.commit(1, [receipt], scalars, {}, 0.0)
    reader = catalog.open(catalog.newest().manifest)
    assert reader.scalars() == scalars
    assert reader.scalars("optimizer.0") == {"optimizer.0.weight.step": 3, "optimizer.0.weight.best": math.inf}


def test_an_unknown_tensor_gets_a_suggestion(catalog: CheckpointCatalog) -> None:
    save_checkpoint(catalog, 1)
    with pytest.raises(CheckpointError, match=r"step 1 has no tensor '0.weigth': did you mean '0.weight'\?"):
        catalog.open(catalog.newest().manifest).tensor("0.weigth")


def test_reading_one_layer_touches_the_files_of_that_layer_only(catalog: CheckpointCatalog) -> None:
    save_checkpoint(catalog, 1, workers=2)
    manifest = catalog.newest().manifest
    for name in set(manifest.files) - {manifest.weight_map["0.weight"]}:
        catalog.storage.delete(f"step-00000001/{name}")
    reader = catalog.open(manifest)
    assert same_bits(reader.tensor("0.weight"), state_tensors(1)["0.weight"])
    with pytest.raises(CheckpointError):
        reader.tensor("1.weight")


def test_a_remote_file_is_read_once(memory_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = CheckpointCatalog(Storage(memory_url))
    manifest = save_checkpoint(catalog, 1, workers=2)
    reads: list[str] = []
    read = Storage.read

    def noted(storage: Storage, name: str) -> bytes:
        reads.append(name)
        return read(storage, name)

    monkeypatch.setattr(Storage, "read", noted)
    catalog.open(manifest).load()
    assert sorted(reads) == [f"step-00000001/{name}" for name in sorted(manifest.files)]


def test_remote_files_are_read_in_parallel(memory_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No read returns before all have begun."""
    catalog = CheckpointCatalog(Storage(memory_url))
    manifest = save_checkpoint(catalog, 1, workers=3)
    begun = threading.Barrier(len(manifest.files))
    read = Storage.read

    def together(storage: Storage, name: str) -> bytes:
        begun.wait(timeout=60)
        return read(storage, name)

    monkeypatch.setattr(Storage, "read", together)
    assert same_tensors(catalog.open(manifest).load(), state_tensors(1))


def test_of_several_files_the_damaged_one_is_named(memory_url: str) -> None:
    catalog = CheckpointCatalog(Storage(memory_url))
    manifest = save_checkpoint(catalog, 1, workers=3)
    bad = shard_files(catalog, 1)[1]
    damage(catalog.storage, f"step-00000001/{bad}")
    with pytest.raises(CheckpointError, match=bad):
        catalog.open(manifest).load()


def test_a_tensor_belongs_to_the_caller(catalog: CheckpointCatalog) -> None:
    reader = catalog.open(save_checkpoint(catalog, 1))
    reader.tensor("0.weight").zero_()
    assert same_bits(reader.tensor("0.weight"), state_tensors(1)["0.weight"])


def test_a_tensor_outlives_its_file(tmp_path: Path) -> None:
    catalog = CheckpointCatalog(Storage(tmp_path))
    kept = catalog.open(save_checkpoint(catalog, 1)).tensor("0.weight")
    for path in (tmp_path / "step-00000001").iterdir():
        path.write_bytes(b"\xff" * path.stat().st_size)
    assert same_bits(kept, state_tensors(1)["0.weight"])


def test_prune_keeps_the_last_ones(catalog: CheckpointCatalog) -> None:
    for step in (1, 2, 3, 4):
        save_checkpoint(catalog, step)
    assert catalog.prune(2) == (1, 2)
    assert catalog.steps() == [3, 4]
    assert catalog.storage.list() == ["step-00000003", "step-00000004"]
    assert catalog.prune(2) == ()


def test_prune_never_deletes_the_newest_intact_checkpoint(catalog: CheckpointCatalog) -> None:
    for step in (1, 2, 3):
        save_checkpoint(catalog, step)
    damage(catalog.storage, f"step-00000003/{shard_files(catalog, 3)[0]}")
    assert catalog.prune(1) == (1,)
    assert catalog.newest().manifest.step == 2


def test_a_damaged_checkpoint_does_not_take_the_place_of_an_intact_one(catalog: CheckpointCatalog) -> None:
    """As after a resume that has passed over it: otherwise one more damaged file would leave nothing."""
    for step in (1, 2, 3, 4):
        save_checkpoint(catalog, step)
    damage(catalog.storage, f"step-00000003/{shard_files(catalog, 3)[0]}")
    assert catalog.prune(2) == (1,)
    assert catalog.steps() == [2, 3, 4]


def test_prune_deletes_no_checkpoint_when_none_is_intact(catalog: CheckpointCatalog) -> None:
    for step in (1, 2):
        save_checkpoint(catalog, step)
        damage(catalog.storage, f"step-{step:08d}/manifest.json")
    before = shard_files(catalog, 2)
    assert catalog.prune(1) == ()
    assert catalog.steps() == [1, 2]
    assert shard_files(catalog, 2) == before


def test_prune_takes_abandoned_folders_but_not_the_one_being_written(catalog: CheckpointCatalog) -> None:
    for step in (1, 3):
        catalog.write_shard(step, catalog.shard_name(step, 0), state_tensors(step))
    save_checkpoint(catalog, 2)
    assert catalog.prune(5) == (1,)
    assert catalog.storage.list() == ["step-00000002", "step-00000003"]


def test_a_shard_written_while_others_complete_its_checkpoint_is_only_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = CheckpointCatalog(Storage(tmp_path))
    others = [catalog.write_shard(1, catalog.shard_name(1, 0), {"0.weight": torch.ones(2)})]
    write = storage_module._write_and_sync

    def overtaken(path: Path, data: memoryview) -> None:
        write(path, data)
        if others:
            catalog.commit(1, [others.pop()], {}, {}, created=0.0)
            catalog.prune(1)
            assert not path.exists()

    monkeypatch.setattr(storage_module, "_write_and_sync", overtaken)
    late = catalog.write_shard(1, catalog.shard_name(1, 1), {"0.weight": torch.ones(2)})
    assert (tmp_path / "step-00000001" / late.name).exists()
    assert late.name not in catalog.check(1).files


def test_prune_takes_an_empty_folder_that_a_dead_worker_left(tmp_path: Path) -> None:
    catalog = CheckpointCatalog(Storage(tmp_path))
    (tmp_path / "step-00000001").mkdir()
    save_checkpoint(catalog, 2)
    assert catalog.prune(1) == (1,)
    assert catalog.storage.list() == ["step-00000002"]


def test_prune_takes_what_a_dead_worker_left_in_a_committed_folder(tmp_path: Path) -> None:
    catalog = CheckpointCatalog(Storage(tmp_path))
    committed = save_checkpoint(catalog, 1)
    (tmp_path / "step-00000001" / ".shard.safetensors.0011.tmp").write_bytes(b"half")
    catalog.prune(1)
    assert files(tmp_path) == {f"step-00000001/{name}" for name in [*committed.files, "manifest.json"]}
    assert check_newest_checkpoint(tmp_path) == 1


def test_prune_reads_no_checkpoint_when_there_is_nothing_to_delete(
    catalog: CheckpointCatalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(catalog, 1)

    def refuse(storage: Storage, name: str) -> str:
        raise AssertionError(name)

    monkeypatch.setattr(Storage, "sha256", refuse)
    assert catalog.prune(1) == ()


@pytest.mark.parametrize("keep_last", [0, -1])
def test_prune_refuses_to_keep_nothing(catalog: CheckpointCatalog, keep_last: int) -> None:
    with pytest.raises(UsageError, match=f"keep_last is {keep_last}: keep at least 1"):
        catalog.prune(keep_last)
