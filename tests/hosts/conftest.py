"""The hosts of the tests that do not measure their links."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.hosts import Cluster, hosts, reason_to_skip


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two hosts, which the tests of a module share."""
    if reason := reason_to_skip():
        pytest.skip(reason)
    with hosts(2, rate="1gbit") as made:
        yield made
