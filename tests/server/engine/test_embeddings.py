"""Texts get their vectors beside answers, behind them, within the budget, and whatever happens to other requests."""

from collections.abc import Sequence

import numpy as np
import pytest

from cache.budget import ASIDE
from cache.types import LayerCache
from models.errors import EmbeddingUnsupported
from models.formats import Pooling
from server.engine.embeddings import STEPS_BEHIND_CHAT, EmbeddingJob
from server.engine.request import DeviceLost, EngineStopped, PromptTooLarge, StepFailed
from tests.support.engine_driver import Harness
from tests.support.fake_embedder import vector_of

# What a budget has room for is counted in buffers, which may be left over from a test before and too large.
pytestmark = pytest.mark.usefixtures("exact_buffers")


def job_of(*lengths: int, pooling: Pooling = Pooling.MEAN) -> EmbeddingJob:
    return EmbeddingJob([np.arange(1, length + 1, dtype=np.int32) for length in lengths], pooling)


def assert_answered(job: EmbeddingJob) -> None:
    for text, vector in zip(job.texts, job.vectors.result(0), strict=True):
        np.testing.assert_array_equal(vector, vector_of(text))


def pressed(num_tokens: int, chunk_tokens: int) -> Harness:
    """A worker whose budget holds a sequence of so many tokens."""
    harness = Harness("T", chunk_tokens=chunk_tokens)
    harness.prefix_cache.layout.calibrate(calibrated(harness))
    harness.prefix_cache.ledger.budget_bytes = harness.prefix_cache.layout.bytes_for(num_tokens)
    return harness


def calibrated(harness: Harness) -> list[LayerCache]:
    caches = harness.runner.make_caches()
    harness.runner.prefill(caches, np.ones(8, np.int32))
    return list(caches)


def test_a_long_text_is_evaluated_in_chunks_and_its_memory_given_back() -> None:
    harness = Harness(chunk_tokens=16)
    job = job_of(40, 3)
    harness.worker.embed(job)
    harness.run()
    assert harness.embedder.log == [(16,), (16,), (8,), (3,)]
    assert_answered(job)
    assert harness.prefix_cache.ledger.slot_bytes(ASIDE) == 0


def test_beside_answers_a_piece_runs_once_in_so_many_steps() -> None:
    harness = Harness(chunk_tokens=4)
    answer = harness.submit(range(10, 14), max_tokens=STEPS_BEHIND_CHAT * 3)
    job = job_of(4, 4, 4)
    harness.worker.embed(job)
    harness.step(STEPS_BEHIND_CHAT - 1)
    assert harness.embedder.log == []
    harness.step(2)
    assert len(harness.embedder.log) == 1
    harness.run(answer)
    assert len(harness.embedder.log) in (2, 3)
    harness.run()
    assert_answered(job)


def test_an_answer_takes_the_memory_of_a_text_which_begins_anew_later() -> None:
    harness = pressed(64, chunk_tokens=16)
    job = job_of(60)
    harness.worker.embed(job)
    harness.step(2)
    assert harness.prefix_cache.ledger.slot_bytes(ASIDE) > 0
    answer = harness.submit(range(100, 140), max_tokens=4)
    harness.run(answer)
    assert len(answer.tokens) == 4
    harness.run()
    assert_answered(job)
    assert harness.embedder.log[:2] == [(16,), (16,)]
    assert len(harness.embedder.log) == 6, "it did not make way, or was not begun anew"


def test_a_growing_answer_takes_the_memory_of_a_text() -> None:
    harness = pressed(90, chunk_tokens=16)
    answer = harness.submit(range(10, 14), max_tokens=50)
    job = job_of(60)
    harness.worker.embed(job)
    harness.run()
    by_itself = (alone := pressed(90, chunk_tokens=16)).submit(range(10, 14), max_tokens=50)
    alone.run()
    assert answer.tokens == by_itself.tokens
    assert_answered(job)
    assert len(harness.embedder.log) > 4, "it did not make way once"


def test_a_text_that_never_fits_is_refused_and_others_go_on() -> None:
    harness = pressed(32, chunk_tokens=16)
    jobs = [job_of(3, 50), job_of(20)]
    for job in jobs:
        harness.worker.embed(job)
    harness.run()
    assert isinstance(jobs[0].vectors.exception(0), PromptTooLarge)
    assert_answered(jobs[1])
    assert harness.prefix_cache.ledger.slot_bytes(ASIDE) == 0


@pytest.mark.parametrize(
    ("error", "told"), [(RuntimeError("device"), StepFailed), (EmbeddingUnsupported("none"), EmbeddingUnsupported)]
)
def test_a_fault_ends_the_requests_it_concerns(error: Exception, told: type[Exception]) -> None:
    harness = Harness(chunk_tokens=16)

    def fault(texts: Sequence[object]) -> Exception | None:
        return error if len(texts) == 1 else None

    harness.embedder.fault = fault
    bad, good = job_of(9), job_of(3, 3)
    answer = harness.submit(range(10, 14), max_tokens=4)
    for job in (bad, good):
        harness.worker.embed(job)
    harness.run()
    assert isinstance(bad.vectors.exception(0), told)
    assert_answered(good)
    assert len(answer.tokens) == 4


def test_a_device_that_takes_no_more_work_is_no_fault_of_a_text() -> None:
    harness = Harness()
    harness.embedder.fault = lambda texts: RuntimeError("kIOGPUCommandBufferCallbackErrorSubmissionsIgnored")
    harness.worker.embed(job_of(9))
    with pytest.raises(DeviceLost):
        harness.run()


@pytest.mark.parametrize("lengths", [(3, 3), (60, 3)])
def test_texts_of_a_client_that_left_are_dropped(lengths: tuple[int, ...]) -> None:
    harness = Harness(chunk_tokens=16)
    job = job_of(*lengths)
    harness.worker.embed(job)
    if max(lengths) > 16:
        harness.step(2)
    job.vectors.cancel()
    harness.run()
    assert len(harness.embedder.log) == (2 if max(lengths) > 16 else 0)
    assert harness.prefix_cache.ledger.slot_bytes(ASIDE) == 0


def test_the_end_of_the_engine_answers_all() -> None:
    harness = Harness(chunk_tokens=16)
    jobs = [job_of(60), job_of(3)]
    for job in jobs:
        harness.worker.embed(job)
    harness.step()
    harness.worker.stop()
    for job in jobs:
        assert isinstance(job.vectors.exception(0), EngineStopped)
    assert harness.prefix_cache.ledger.slot_bytes(ASIDE) == 0
