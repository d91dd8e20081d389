"""Memory of each rank that the others can copy from and to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from ovpatch.overlap.copies.driver import Driver
from ovpatch.overlap.copies.meeting import BYTES, Meeting
from ovpatch.overlap.copies.spans import Batch
from ovpatch.overlap.side_streams import quietly_on
from ovpatch.overlap.symm_mem import memory

SLOT_BYTES: Final = 64 * 1024 * 1024  # of a half: copies of some MiB each come near to a link's rate


@dataclass(frozen=True)
class Window:
    """One allocation on every rank.

    Attributes:
        ranks: All ranks' memory, bytes, by group rank; the own one among them.
        meet: Makes a stream (the host, without streams) wait until all ranks' are here.
        copy: Copies, on a stream.
        unheard: Returns the ranks whose memory cannot be used, by trial; called once all ranks have windows.
        keeps: What keeps the memory.
    """

    ranks: list[Tensor]
    meet: Callable[[int], None]
    copy: Callable[[Batch, int], None]
    unheard: Callable[[], list[int]] = list
    keeps: Any = None


Allocate = Callable[[int, dist.ProcessGroup, torch.device], Window]


def allocate(size: int, group: dist.ProcessGroup, device: torch.device) -> Window:
    """Allocate symmetric memory on all ranks, which call this together.

    Args:
        size: Bytes, the same on all ranks.
        group: The ranks.
        device: Where.

    Raises:
        RuntimeError: Memory cannot be shared, or streams cannot wait for it.
    """
    found = memory.allocate_on_all(size + BYTES, group, device, lambda own: _clear(own[size:]))
    whole = [found.keeps.get_buffer(rank, (size + BYTES,), torch.uint8) for rank in range(group.size())]
    ranks = [one[:size] for one in whole]
    try:
        driver = Driver()
    except (OSError, AttributeError) as error:  # no such library, or function
        raise RuntimeError(f"the CUDA driver's library lacks what is needed: {error}") from error
    meeting = Meeting(driver, [one[size:] for one in whole], group.rank())
    stream = torch.cuda.Stream(device)
    with quietly_on(stream):
        meeting.try_out(stream.cuda_stream)
    torch.cuda.synchronize(device)

    def unheard() -> list[int]:
        with quietly_on(stream):
            return meeting.unheard(stream.cuda_stream)

    return Window(ranks, meeting, driver.copy, unheard, found)


def _clear(signals: Tensor) -> None:
    signals.zero_()
