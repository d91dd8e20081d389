"""What devices can do at most, by their data sheets, and what a measured rate is of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

#: Dense bf16 and fp16 matrix products, FLOP/s, by a part of the device's name; the first that fits counts.
PEAKS: Final = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989.4e12,
    "H200 NVL": 835e12,
    "H200": 989.4e12,
    "GH200": 989.4e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
    "V100 PCIE": 112e12,
    "V100": 125e12,
    "MI300X": 1307.4e12,
}

HALF: Final = ("bfloat16", "float16")
_MOSTLY: Final = 0.9  # of a step's operations: the loss and the norms of a bf16 model are done in float32


def peak(device: str, flops: Mapping[str, float]) -> tuple[float | None, str]:
    """Return the device's peak in FLOP/s for a step in half precision, or None with the reason.

    Args:
        device: Its name.
        flops: Operations of the step by dtype.
    """
    total = sum(flops.values())
    half = sum(flops.get(dtype, 0) for dtype in HALF)
    if not total:
        return None, "operations were not counted"
    if _named("MIG", device):
        return None, f"{device} is a part of a device. Give --peak-tflops"
    known = next((value for words, value in PEAKS.items() if _named(words, device)), None)
    if known is None:
        return None, f"the peak of {device} is not known. Give --peak-tflops"
    if half < _MOSTLY * total:
        most = max(flops, key=lambda dtype: flops[dtype])
        return None, f"the step computes mostly in {most}; the peak that is known is for bf16. Give --peak-tflops"
    return known, ""


def _named(words: str, device: str) -> bool:
    """Whether the words are in the name as words, so that L4 is not found in L40."""
    return f" {words} " in f" {device.replace('-', ' ')} "
