"""ovpatch: the same training program, with its communication hidden under compute.

    import ovpatch
    ovpatch.apply()

or, without touching the script, ``ovpatch run -- torchrun ... train.py``.

Importing this package imports neither torch nor its own modules. torch calls the package's autoload entry point at the
end of every ``import torch``, and this must cost nothing while autoload is off. Public names are imported at their
first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ovpatch._version import __version__

if TYPE_CHECKING:
    from ovpatch.api import FeatureError, applied, apply, report, revert
    from ovpatch.hookspecs import (
        Feature,
        FeatureCounters,
        Level,
        Option,
        OptionError,
        Package,
        Peak,
        Registrar,
        hookimpl,
        make_feature_hooks,
    )
    from ovpatch.patching import PatchError, PatchManager
    from ovpatch.session.session_report import Report
    from ovpatch.settings.settings import SettingsError

__all__ = [
    "Feature",
    "FeatureCounters",
    "FeatureError",
    "Level",
    "Option",
    "OptionError",
    "Package",
    "PatchError",
    "PatchManager",
    "Peak",
    "Registrar",
    "Report",
    "SettingsError",
    "__version__",
    "applied",
    "apply",
    "hookimpl",
    "make_feature_hooks",
    "report",
    "revert",
]

# The public names, by the module that defines them.
_HOMES = {
    "ovpatch.api": ("FeatureError", "applied", "apply", "report", "revert"),
    "ovpatch.hookspecs": (
        "Feature",
        "FeatureCounters",
        "Level",
        "Option",
        "OptionError",
        "Package",
        "Peak",
        "Registrar",
        "hookimpl",
        "make_feature_hooks",
    ),
    "ovpatch.patching": ("PatchError", "PatchManager"),
    "ovpatch.session.session_report": ("Report",),
    "ovpatch.settings.settings": ("SettingsError",),
}


def __getattr__(name: str) -> Any:
    """Import the module of a public name, and cache the name here."""
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'ovpatch' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, including the names that nothing has used yet."""
    return sorted({*globals(), *__all__})
