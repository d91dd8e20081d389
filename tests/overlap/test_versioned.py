"""Reads of a version of tensors that may be updated concurrently: the requested version, or an error."""

from __future__ import annotations

import threading

import pytest
import torch

from ovpatch.overlap.peer_rpc.sequence_lock import PinnedStaging, SequenceLock, TornReadError


@pytest.fixture
def tensor() -> torch.Tensor:
    return torch.zeros(3)


@pytest.fixture
def versions(tensor) -> SequenceLock:
    """Return a lock after two updates, each of which sets all elements to the number of its version."""
    found = SequenceLock(torch.device("cpu"))
    for number in (1, 2):
        update(found, tensor, number)
    return found


def update(versions: SequenceLock, tensor: torch.Tensor, number: int) -> None:
    versions.begin_update()
    tensor.fill_(number)
    versions.end_update()


def test_the_newest_version_is_read(versions, tensor):
    assert versions.read_version(2, tensor.tolist, 1.0) == [2.0, 2.0, 2.0]


def test_a_read_of_an_older_version_is_an_error(versions, tensor):
    with pytest.raises(TornReadError, match="version 1 has been overwritten by version 2"):
        versions.read_version(1, tensor.tolist, 1.0)


def test_an_update_that_begins_while_a_reader_copies_is_an_error(versions, tensor):
    def interrupted() -> list[float]:
        versions.begin_update()
        return tensor.fill_(3).tolist()

    with pytest.raises(TornReadError, match="version 2 has been overwritten by version 3"):
        versions.read_version(2, interrupted, 1.0)


def test_a_retained_object_may_be_read_later(versions):
    assert versions.read_version(1, lambda: "of version 1", 1.0, is_retained=True) == "of version 1"


def test_a_reader_waits_for_a_later_version(versions, tensor):
    later = threading.Timer(0.05, update, (versions, tensor, 3))
    later.start()
    assert versions.read_version(3, tensor.tolist, 30.0) == [3.0, 3.0, 3.0]
    later.join()
    with pytest.raises(
        TornReadError, match=r"version 4 was not made within 0\.01 s\. The newest version is 3"
    ):
        versions.read_version(4, tensor.tolist, 0.01)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("priority", [0, -1])
def test_a_copy_to_the_host_waits_for_no_stream_of_other_code(priority):
    """Check streams like those of communicators, whose kernels may wait for the rank that waits for this copy."""
    device = torch.device("cuda", 0)
    tensor = torch.arange(1000.0, device=device)
    # This loads the kernel.
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    staging, streams = (
        PinnedStaging(device),
        [torch.cuda.Stream(device, priority=priority) for _ in range(33)],
    )
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000_000)  # about a second
    copied = staging.copy_to_host(tensor)
    assert not any(stream.query() for stream in streams)
    assert copied.tolist() == list(range(1000))
    torch.cuda.synchronize()
