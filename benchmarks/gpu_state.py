"""The clock and the power of a GPU while a program runs on it."""

from __future__ import annotations

import importlib
import statistics
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch

T = TypeVar("T")

# NVML renews its values about every 20 to 100 ms.
_INTERVAL_S: Final = 0.02


class GpuState:
    """Samples of one GPU, taken by a thread; none without a GPU, or if pynvml is not installed.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # MHz of the multiprocessors and watts.
        self._samples: list[tuple[float, float]] = []
        # The joules that the GPU took in the watched runs; None if they are not known.
        self.joules: float | None = 0.0
        # The reason why there are no samples, or "".
        self.problem = "" if device.type == "cuda" else "no GPU"

    def watch(self, run: Callable[..., T], *args: Any) -> T:
        """Call a function, and sample until it returns."""
        if self.problem:
            return run(*args)
        ended = threading.Event()
        thread = threading.Thread(target=self._sample_until, args=(ended,), daemon=True)
        before = self._read_joules()
        thread.start()
        try:
            return run(*args)
        finally:
            ended.set()
            thread.join()
            after = self._read_joules()
            if self.joules is None or before is None or after is None:
                self.joules = None
            else:
                self.joules += after - before

    def medians(self) -> dict[str, float]:
        """Return the medians of the clock and the power; empty without samples."""
        if not self._samples:
            return {}
        clocks, powers = zip(*self._samples, strict=True)
        return {
            "mhz": statistics.median(clocks),
            "watts": round(statistics.median(powers)),
            "samples": len(clocks),
        }

    def _read_joules(self) -> float | None:
        """Return the joules since the driver was loaded; None if the GPU does not count them."""
        try:
            nvml = importlib.import_module("pynvml")
            # torch has made NVML ready, and knows which of its GPUs this one is.
            handle = torch.cuda._get_pynvml_handler(self._device)
        except (ModuleNotFoundError, RuntimeError):
            return None
        try:
            return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3
        except nvml.NVMLError:
            return None

    def _sample_until(self, ended: threading.Event) -> None:
        while not ended.wait(_INTERVAL_S):
            try:
                clock = torch.cuda.clock_rate(self._device)
                power = torch.cuda.power_draw(self._device)
            except (ModuleNotFoundError, RuntimeError) as error:
                self.problem = f"{type(error).__name__}: {error}"
                return
            self._samples.append((clock, power / 1e3))
