"""Whether a CUDA graph is being captured.

[Note: captured backwards] A replay makes new gradients, and no host hears of it: who has read a whole one would keep
it, and peers would be asked for another replay's parts. So a backward that is captured leaves whole gradients, in the
memory that its replays write to.
"""

from __future__ import annotations

import torch


def capturing(device: torch.device) -> bool:
    """Tell whether the current stream of a device is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
