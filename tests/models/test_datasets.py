"""Datasets: item i depends only on i and the seed, and there is something to learn."""

from __future__ import annotations

import pickle

import pytest
import torch

from culm.errors import JobError
from culm.models import Characters, RandomImages, RandomTokens


def test_characters_predict_the_ones_that_follow() -> None:
    data = Characters(length=5, text="abracadabra")
    x, y = data[0]
    assert (data.alphabet, data.vocab, len(data)) == ("abcdr", 5, 6)
    assert (data.decode(x), data.decode(y)) == ("abrac", "braca")
    assert data.decode(data[5][1]) == "dabra"


def test_the_sonnets_come_with_the_package() -> None:
    data = Characters(length=39)
    assert data.decode(data[0][0]) == "Shall I compare thee to a summer's day?"
    assert len(data) > 4000
    assert all(character.isascii() for character in data.alphabet)


def test_the_whole_text_is_used() -> None:
    data = Characters(length=3, text="abcdefg")
    assert data.decode(data[len(data) - 1][1]) == "efg"
    with pytest.raises(IndexError):
        data[len(data)]


@pytest.mark.parametrize("length", [0, 7, 100])
def test_a_length_beyond_the_text_is_refused(length: int) -> None:
    with pytest.raises(JobError, match=f"Characters.length is {length}: use 1 to 6, since the text has 7"):
        Characters(length=length, text="abcdefg")


def test_random_tokens_are_a_function_of_seed_and_index() -> None:
    data, again = (
        RandomTokens(vocab=50, length=16, count=100, seed=3),
        RandomTokens(vocab=50, length=16, count=7, seed=3),
    )
    _ = again[2], again[0]
    x, y = data[5]
    assert torch.equal(x, again[5][0]) and torch.equal(y, again[5][1])
    assert torch.equal(x[1:], y[:-1])
    assert not torch.equal(x, data[6][0])
    assert not torch.equal(x, RandomTokens(vocab=50, length=16, count=100, seed=4)[5][0])
    assert int(x.min()) >= 0 and int(x.max()) < 50


def test_random_tokens_do_not_touch_the_global_stream() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    _ = RandomTokens(vocab=50, length=16, count=100)[5], RandomImages(count=3)[1]
    assert torch.equal(torch.rand(3), expected)


def test_the_label_of_an_image_can_be_computed_from_it() -> None:
    data = RandomImages(count=100, seed=1)
    for i in range(50):
        image, label = data[i]
        assert image.shape == (3, 32, 32)
        spectrum = torch.fft.rfft(image.mean(dim=(0, 1))).abs()
        assert int(spectrum[1:].argmax()) == label
    assert {data[i][1] for i in range(100)} == set(range(10))


def test_random_images_are_a_function_of_seed_and_index() -> None:
    data = RandomImages(count=10, seed=1)
    assert torch.equal(data[4][0], RandomImages(count=5, seed=1)[4][0])
    assert not torch.equal(data[4][0], RandomImages(count=5, seed=2)[4][0])


def test_an_index_outside_is_an_error_and_a_negative_one_counts_from_the_end() -> None:
    for data in (RandomTokens(vocab=5, length=3, count=4), RandomImages(count=4)):
        with pytest.raises(IndexError):
            data[4]
        assert torch.equal(torch.as_tensor(data[-1][0]), torch.as_tensor(data[3][0]))


def test_images_too_small_for_the_classes_are_refused() -> None:
    with pytest.raises(JobError, match=r"RandomImages.classes is 10: use 1 to 7 for size 16"):
        RandomImages(count=4, size=16)


def test_data_sets_can_be_pickled() -> None:
    for data in (Characters(), RandomTokens(vocab=5, length=3, count=4), RandomImages(count=4)):
        again = pickle.loads(pickle.dumps(data))
        assert torch.equal(again[1][0], data[1][0])
