"""The faults that ``tools/plant_faults.py`` plants, one module for each room of the sources.

A fault is in the module that has the name of the nearest folder around the file that it changes. A fault in
``ovpatch/overlap/comm/`` is in ``comm.py``. A room with few faults has no own module, and its faults are in the
module of a folder further out, such as ``overlap.py`` or ``ovpatch.py``.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Final

from tools.faults.fault import Fault, FaultNotFoundError

__all__ = ["FAULTS", "FAULTS_BY_ROOM", "Fault", "FaultNotFoundError"]

#: The faults of each module, by the name of the folder that the module is about.
FAULTS_BY_ROOM: Final[dict[str, tuple[Fault, ...]]] = {
    module.name: importlib.import_module(f"{__name__}.{module.name}").FAULTS
    for module in pkgutil.iter_modules(__path__)
    if module.name != "fault"
}
FAULTS: Final = tuple(fault for faults in FAULTS_BY_ROOM.values() for fault in faults)
