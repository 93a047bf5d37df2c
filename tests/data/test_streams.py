"""Streams of other libraries as Job.data: torch's IterableDataset and DataLoader, Hugging Face datasets."""

from __future__ import annotations

import os
import pickle
import random
import signal
import time
from collections.abc import Iterator
from typing import Any, cast

import numpy
import pytest
import torch
from tests import tiny_jobs
from torch.utils.data import DataLoader, IterableDataset

import culm
from culm.cluster.prepare_run import prepare_run
from culm.config import RunConfig
from culm.data import Mapped, Stream
from culm.data.item_digest import digest_items
from culm.errors import JobError, LayerFailed
from culm.runtime.compute.model_check import check_model
from culm.testing import reference


class Lines(IterableDataset[Any]):
    """An IterableDataset that fails at one item, and that is shuffled by its epoch."""

    def __init__(self, size: int = 32, fails_at: int = -1) -> None:
        self.size, self.fails_at, self.epoch = size, fails_at, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.size):
            if number == self.fails_at:
                raise OSError("no connection")
            yield tiny_jobs.DATA[(number + self.epoch) % self.size]


def test_streams_in_the_order_of_a_list_train_what_the_list_trains_in_that_order() -> None:
    """A stream of items equals a map-style data set whose order is that of the stream."""
    sources: list[Any] = [Lines(), DataLoader(cast(Any, tiny_jobs.DATA), batch_size=None, shuffle=False)]
    for source in sources:
        job = tiny_jobs.job(data=source)
        assert isinstance(job.data, Stream)
        items = [job.data[number] for number in range(24)]
        assert all(torch.equal(item[0], tiny_jobs.DATA[number][0]) for number, item in enumerate(items))
        assert reference(job).losses == reference(tiny_jobs.job(data=Stream(Lines()))).losses


def test_each_pass_gets_its_number_and_the_reader_finds_its_way_back() -> None:
    stream = Stream(Lines(5), block=3)
    order = [next(i for i, item in enumerate(tiny_jobs.DATA) if item is stream[n]) for n in range(12)]
    assert order == [0, 1, 2, 3, 4, 1, 2, 3, 4, 0, 2, 3]
    for number in (4, 0, 11, 7, 2, 9):
        assert stream[number] is tiny_jobs.DATA[order[number]]


def test_hugging_face_data_sets_are_used_by_index_and_as_streams() -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": [item[0].tolist() for item in tiny_jobs.DATA]})

    def to_item(row: dict[str, Any]) -> Any:
        return torch.tensor(row["x"]), torch.zeros(4)

    mapped = Mapped(rows, to_item)
    assert reference(tiny_jobs.job(data=mapped)).losses == reference(tiny_jobs.job()).losses


@pytest.mark.parametrize("buffer", [1, 5])
def test_shuffled_streams_continue_with_the_same_items(buffer: int) -> None:
    """With a shuffle buffer the state of the library does not suffice: the digest shows it, and items are skipped."""
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"n": list(range(32))})
    source = rows.to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=buffer)
    stream = Stream(source, lambda row: row["n"], block=6)
    items = [stream[number] for number in range(50)]
    assert sorted(items[:32]) == list(range(32))
    other = Stream(source, lambda row: row["n"], block=6)
    other.add_positions(stream.positions(24))
    assert other._states[24].state is not None
    assert [other[number] for number in range(24, 50)] == items[24:]
    assert (other._states[24].state is None) is (buffer > 1)


def test_hugging_face_streams_continue_from_their_state() -> None:
    """Without a shuffle buffer, whose contents are not part of the state."""
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": [item[0].tolist() for item in tiny_jobs.DATA]})
    source = rows.to_iterable_dataset(num_shards=4)
    stream = Stream(source, lambda row: row["x"], block=8)
    items = [stream[number] for number in range(30)]
    other = Stream(source, lambda row: row["x"], block=8)
    other.add_positions(stream.positions(16))
    assert [other[number] for number in range(16, 30)] == items[16:]


def test_a_stream_that_fails_names_the_item_and_an_empty_one_the_fix() -> None:
    with pytest.raises(LayerFailed, match=r"Job.data raised OSError for item 6: no connection"):
        Stream(Lines(fails_at=6))[8]
    stream = Stream(Generated())
    for _ in range(2):  # a generator that raised is at its end: the second try must not begin another pass
        with pytest.raises(LayerFailed, match="for item 3: row 3"):
            stream[4]
    assert stream[2] == 2
    with pytest.raises(JobError, match="it needs at least one item"):
        Stream(Lines(0))[0]
    with pytest.raises(JobError, match="use a data set with len"):
        Stream(3)


class Generated(IterableDataset[Any]):
    """A generator that fails in its fourth item."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(9):
            if number == 3:
                raise OSError("row 3")
            yield number


class Shuffled(IterableDataset[Any]):
    """A stream whose order depends on what `draw` gives when it is opened."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def __iter__(self) -> Iterator[Any]:
        order = list(range(32))
        random.Random(self.draw()).shuffle(order)
        return iter([tiny_jobs.DATA[number] for number in order])


@pytest.mark.parametrize("draw", [random.random, time.perf_counter_ns, lambda: torch.rand(1).item()])
def test_a_stream_that_is_not_repeatable_is_refused_before_the_run(draw: Any) -> None:
    with pytest.raises(
        JobError, match=r"Job.data is a stream that gives another item \d when it is read again: .*seed"
    ):
        check_model(tiny_jobs.job(data=Shuffled(draw)))


@pytest.mark.real
def test_readers_that_get_different_items_end_the_run_before_the_commit(forked_programs: None) -> None:
    job = tiny_jobs.job(data=Shuffled(os.getpid))
    check_model(job)
    with pytest.raises(JobError, match=r"gave worker \d other items in step 0 than worker \d: every worker reads it"):
        culm.train(job, pipelines=1, stages=2, strategy="none")


def test_a_reader_that_gets_other_items_the_second_time_says_so() -> None:
    order = iter(range(9))
    stream = Stream(Shuffled(lambda: 0), block=4)
    stream._source.draw = lambda: next(order)
    assert stream.block_digest(0) is None
    assert [stream[number] for number in range(0, 40, 4)]
    assert stream.block_digest(36) is not None
    with pytest.raises(JobError, match="gave other items 0 to 3 when they were read again"):
        [stream[number] for number in range(5)]


def test_a_stream_without_a_state_is_reported_before_the_run() -> None:
    setup = prepare_run(tiny_jobs.job(data=Lines()), RunConfig(pipelines=1, stages=1), measure=False)
    assert (
        "Job.data has no state_dict: after a loss or a resume the stream is read again from its begin" in setup.reason
    )


def test_digests_depend_on_the_content_of_items_only() -> None:
    text = "".join(["a", "b"])
    same = {"x": [text, text], "y": torch.arange(4)[2:], "z": numpy.float32(1), "n": None}
    copied = pickle.loads(pickle.dumps({**same, "x": ["ab", "".join(["a", "b"])]}))
    assert digest_items([same]) == digest_items([copied])
    others: list[Any] = [{**same, "y": torch.arange(2)}, {**same, "x": [text]}, {**same, "n": 0}, {**same, "z": 1.0}]
    assert len({digest_items([each]) for each in (same, *others)}) == 5


class DyingWorker(IterableDataset[tuple[int, int]]):
    """The process of a DataLoader that reads it ends after some items."""

    def __iter__(self) -> Iterator[tuple[int, int]]:
        yield from ((number, number) for number in range(9))  # no tensors: they are sent by the process that ends
        os._exit(3)


def test_a_worker_of_a_data_loader_that_dies_is_an_error_that_names_the_item() -> None:
    """Torch raises in a signal handler otherwise, wherever the main thread is: in a run in its event loop."""
    before = signal.getsignal(signal.SIGCHLD)
    stream = Stream(DataLoader(DyingWorker(), batch_size=None, num_workers=1))
    with pytest.raises(LayerFailed, match=r"Job\.data raised RuntimeError for item \d: DataLoader worker .* exited"):
        for number in range(10):
            stream[number]
            assert signal.getsignal(signal.SIGCHLD) is before
