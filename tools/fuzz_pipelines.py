"""Run random pipelines stock and patched, and report where feature ``pipeline`` differs in a bit.

    $ python -m tools.fuzz_pipelines --seconds 300 --seed 1      # pipelines of seeds 1, 2, 3 ... for five minutes
    $ python -m tools.fuzz_pipelines --seed 41 --seconds 0       # one of them

A seed makes the class of the schedule, its order, the modules of its stages, whether they are recomputed, and what the
loop does between steps. Each fourth seed makes a model that ``cut()`` cuts; the full model is its reference. What
stock cannot run is left out. The program ends with 1 if one failed.
"""

from __future__ import annotations

import sys
from typing import Final

from tools.random_pipelines import make_program, name_program, run_both, run_stock
from tools.random_runs import Kind, main

KIND: Final = Kind("pipeline", make_program, name_program, run_stock, run_both)

if __name__ == "__main__":
    sys.exit(main(KIND))
