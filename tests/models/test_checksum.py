"""A checksum of weights changes with any of their bytes and with nothing else."""

import mlx.core as mx
import numpy as np
import pytest

from models import loader as module
from models.loader import checksum

INTEGERS = (mx.uint8, mx.int8, mx.uint16, mx.int16, mx.uint32, mx.int32, mx.uint64, mx.int64)
DTYPES = (*INTEGERS, mx.bool_, mx.float16, mx.bfloat16, mx.float32, mx.complex64)


def weights(num_rows: int = 7) -> mx.array:
    return mx.array(np.random.default_rng(1).normal(size=(num_rows, 5)).astype(np.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (5, 7), (2, 0)], ids=str)
def test_arrays_of_every_type_and_size_have_one(dtype: mx.Dtype, shape: tuple[int, ...]) -> None:
    assert checksum([("a", mx.zeros(shape, dtype))]) == checksum([("a", mx.zeros(shape, dtype))])
    if mx.zeros(shape).size:
        assert checksum([("a", mx.zeros(shape, dtype))]) != checksum([("a", mx.ones(shape, dtype))])


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.uint8], ids=str)
def test_any_one_element_counts(dtype: mx.Dtype) -> None:
    before = mx.arange(35).reshape(7, 5).astype(dtype)
    found = {checksum([("a", before)])}
    for index in range(35):
        changed = np.array(before.astype(mx.float32)).reshape(-1)
        changed[index] += 1
        found.add(checksum([("a", mx.array(changed).reshape(7, 5).astype(dtype))]))
    assert len(found) == 36


def test_chunks_and_elements_have_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK_WORDS", 8)
    array = weights(16)
    rows = np.array(array)
    swapped = [mx.array(rows[::-1].copy()), mx.array(np.roll(rows.reshape(-1), 8).reshape(16, 5))]
    assert len({checksum([("a", each)]) for each in (array, *swapped)}) == 3


def test_names_types_and_shapes_count_but_not_the_order() -> None:
    array = weights()
    assert checksum([("a", array), ("b", array + 1)]) == checksum([("b", array + 1), ("a", array)])
    assert checksum([("a", array), ("b", array + 1)]) != checksum([("a", array + 1), ("b", array)])
    others = [("b", array), ("a", array.reshape(5, 7)), ("a", mx.view(array, mx.int32))]
    assert len({checksum([each]) for each in [("a", array), *others]}) == 4


def test_an_array_of_more_bytes_than_a_shape_can_count_is_seen_as_words() -> None:
    assert module._words(mx.zeros(2**30 + 8, mx.bfloat16)).shape == (2**29 + 4,)  # never evaluated


def test_a_view_counts_as_what_it_shows() -> None:
    array = weights()
    assert checksum([("a", array.T)]) == checksum([("a", mx.array(np.array(array).T.copy()))])
