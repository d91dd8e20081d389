"""The peak rates of GPUs, by their makers' data sheets; for MFU."""

from __future__ import annotations

from typing import Final

#: Dense bf16 TFLOP/s, by device name.
PEAK_TFLOPS: Final = {"NVIDIA H200": 989.0, "NVIDIA H100 80GB HBM3": 989.0}
