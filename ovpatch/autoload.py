"""The entry point of the group ``torch.backends``, which torch calls at the end of ``import torch``.

Without ``OVPATCH_AUTO`` it imports nothing. It never breaks ``import torch``: a process that cannot be patched goes on
as stock, says so once on stderr and leaves a record for ``ovpatch run``, which then stops the job, because all ranks of
a job must be patched alike.

``verify``, ``bench`` and ``timeline`` start their workers here too, in stock and in patched processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable

_OFF = ("", "0", "off", "false", "no")


def on_torch_import() -> None:
    """Apply ovpatch if ``OVPATCH_AUTO`` is on, and register its logger if ``TORCH_LOGS`` names it."""
    asked = os.environ.get("OVPATCH_AUTO", "").strip().lower() not in _OFF
    if "ovpatch" in os.environ.get("TORCH_LOGS", ""):
        _register_log(at_once=asked)
    if asked:
        _guard(_apply, "this process runs WITHOUT ovpatch, as stock PyTorch")
    if os.environ.get("OVPATCH_INSIGHT"):
        _guard(_observe, "this process is not observed")


def _register_log(*, at_once: bool) -> None:
    """Register our logger with torch, which parses ``TORCH_LOGS`` right after this.

    Without this, torch takes the name for a module and imports all our subpackages to list them. With ``at_once`` torch
    parses ``TORCH_LOGS`` now as well, so that records of ``apply()`` are not lost.
    """
    try:
        from torch._logging._internal import _init_logs, register_log

        register_log("ovpatch", "ovpatch")
        if at_once:
            _init_logs()
    except Exception as error:  # noqa: BLE001  # a private function of torch: without it only the log name is lost
        _complain(
            f"TORCH_LOGS=+ovpatch is not available with this torch: {error!r}. Use "
            "OVPATCH_LOG=debug instead."
        )


def _guard(act: Callable[[], None], problem: str) -> None:
    try:
        act()
    except Exception as error:  # noqa: BLE001  # any exception here would kill the user's `import torch`
        _complain(f"{problem}: {str(error) or repr(error)}", record=True)


def _apply() -> None:
    from ovpatch.session import worker_exit
    from ovpatch.settings import settings

    if settings.read_environment().auto and worker_exit.get_process_role() != "launcher":
        from ovpatch import api

        api.apply()


def _observe() -> None:
    from ovpatch.session import worker_orders

    worker_orders.follow_orders()


def _complain(message: str, *, record: bool = False) -> None:
    """Log a problem on stderr; never raises, for the same reason."""
    try:
        from ovpatch import logs
        from ovpatch.session import worker_exit

        logs.log_visibly(message)
        if record:
            worker_exit.write_failure(message)
    except Exception:  # noqa: BLE001  # there is no other channel to report it
        pass
