"""The entry point of the group ``torch.backends``, which torch calls at the end of ``import torch``.

Without ``OVPATCH_AUTO`` it imports nothing. It never breaks ``import torch``: a process that cannot be patched
continues as stock PyTorch, reports that once on stderr and leaves a record for ``ovpatch run``. ``ovpatch run`` then
stops the job, because all ranks of a job must be patched the same.

``verify``, ``bench`` and ``timeline`` also start their workers here, in stock and in patched processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable

# ovpatch.settings has these words, too, but its import must cost nothing while autoload is off.
_OFF_WORDS = ("", "0", "off", "false", "no")


def on_torch_import() -> None:
    """Apply ovpatch if ``OVPATCH_AUTO`` is on, and register its logger if ``TORCH_LOGS`` names it."""
    is_on = os.environ.get("OVPATCH_AUTO", "").strip().lower() not in _OFF_WORDS
    if "ovpatch" in os.environ.get("TORCH_LOGS", ""):
        _register_log(should_parse_now=is_on)
    if is_on:
        _guard(_apply, "this process runs WITHOUT ovpatch, as stock PyTorch")
    if os.environ.get("OVPATCH_INSIGHT"):
        _guard(_observe, "this process is not observed")


def _register_log(*, should_parse_now: bool) -> None:
    """Register our logger with torch, which parses ``TORCH_LOGS`` right after this call.

    Without this, torch treats the name as a module and imports all our subpackages to list them. If
    ``should_parse_now``, torch also parses ``TORCH_LOGS`` now, so that records of ``apply()`` are not lost.
    """
    try:
        from torch._logging._internal import _init_logs, register_log

        register_log("ovpatch", "ovpatch")
        if should_parse_now:
            _init_logs()
    # These functions of torch are private. Without them only the name of the log is lost.
    except Exception as error:  # noqa: BLE001
        _log_problem(
            f"TORCH_LOGS=+ovpatch is not available with this torch: {error!r}. Use "
            "OVPATCH_LOG=debug instead."
        )


def _guard(act: Callable[[], None], problem: str) -> None:
    try:
        act()
    # Any exception here would break the user's `import torch`.
    except Exception as error:  # noqa: BLE001
        _log_problem(f"{problem}: {str(error) or repr(error)}", record=True)


def _apply() -> None:
    from ovpatch.session import worker_exit
    from ovpatch.settings import settings

    if settings.read_environment().auto and worker_exit.get_process_role() != "launcher":
        from ovpatch import api

        api.apply()


def _observe() -> None:
    from ovpatch.session import worker_orders

    worker_orders.follow_orders()


def _log_problem(message: str, *, record: bool = False) -> None:
    """Log a problem on stderr. Never raise, because an exception would break the user's `import torch`."""
    try:
        from ovpatch import logs
        from ovpatch.session import worker_exit

        logs.log_visibly(message)
        if record:
            worker_exit.write_failure(message)
    # No channel is left that could report this error.
    except Exception:  # noqa: BLE001
        pass
