"""CUDA graphs: whether one is being captured, and whether any has been."""

from __future__ import annotations

import torch


class Captures:
    """How many captures have begun in this process, as far as was seen."""

    total: int = 0


captures = Captures()


def capturing(device: torch.device) -> bool:
    """Tell whether the current stream of a device is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
