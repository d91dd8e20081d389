"""Marks and facts that depend on the version of torch."""

from __future__ import annotations

from typing import Final

import pytest
import torch
from packaging.version import Version
from torch.distributed.pipelining import PipelineStage

# Lists of torch's names and words are kept for the version that tools/bootstrap.sh installs.
ON_LISTED_TORCH: Final = pytest.mark.skipif(
    Version(torch.__version__).release[:2] != (2, 13), reason="its list is of torch 2.13"
)

#: Whether torch has the stages of version 2.11. They demand a gradient for each tensor that they receive, and send
#: messages between two stages of a rank as between ranks.
HAS_OLD_STAGES: Final = hasattr(PipelineStage, "_shape_inference")
