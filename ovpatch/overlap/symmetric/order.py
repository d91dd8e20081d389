"""In which order kernels that wait for other ranks run on a device.

[Note: one at a time] A kernel that fills a device and waits for its peers' would wait for ever if one of them sat
behind another such kernel, which waits for one that sits behind ours. Hosts launch in the same order on all ranks, so
all devices run these kernels in the order of launches, whatever their streams and groups. Within a graph they are
ordered among themselves; whoever replays it orders it against what runs on other streams, as for any graph.
"""

from __future__ import annotations

import torch

_last: dict[tuple[int | None, bool], tuple[int, torch.cuda.Stream]] = {}


def take_turn(device: torch.device, capturing: bool) -> None:
    """Have the current stream wait for the kernels that were launched before on other streams.

    Args:
        device: Whose kernels.
        capturing: Whether the current stream is being captured.
    """
    if device.type != "cuda":
        return
    handle = torch._C._cuda_getCurrentRawStream(device.index)  # in a tenth of the time that a stream object takes
    before = _last.get((device.index, capturing))
    if before is not None and before[0] == handle:
        return
    current = torch.cuda.current_stream(device)
    if before is not None and (not capturing or _is_capturing(before[1])):
        current.wait_stream(before[1])
    _last[device.index, capturing] = handle, current


def _is_capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
