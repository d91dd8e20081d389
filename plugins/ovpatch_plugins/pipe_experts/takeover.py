"""Where the feature can run."""

from __future__ import annotations

import torch


def reasons_against() -> list[str]:
    """Return why the feature cannot run in this process at all."""
    return [] if torch.distributed.is_available() else ["this build of torch has no torch.distributed"]
