"""CUDA graphs: whether one is being captured, and whether any has been.

[Note: captured backwards] A replay makes new gradients, and no host hears of it: who has read a whole one would keep
it, and peers would be asked for another replay's parts. So a backward that is captured leaves whole gradients, in the
memory that its replays write to.
"""

from __future__ import annotations

import torch


class Captures:
    """How many captures have begun in this process, as far as was seen."""

    total: int = 0


captures = Captures()


def capturing(device: torch.device) -> bool:
    """Tell whether the current stream of a device is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
