"""Train random models under tensor parallelism, stock and patched, and report where feature ``tp_linear`` differs.

    $ python -m tools.fuzz_tensor_parallel --seconds 300 --seed 1    # models of seeds 1, 2, 3 ... for five minutes
    $ python -m tools.fuzz_tensor_parallel --seed 41 --seconds 0     # one of them

A seed makes the branches of the model, its plan, the options of the feature, and what the loop does. What stock PyTorch
cannot run is left out. The program ends with 1 if one failed.
"""

from __future__ import annotations

import sys
from typing import Final

from tools.random_runs import Kind, main
from tools.random_tensor_parallel import make_model, run_both, run_stock

KIND: Final = Kind("model", make_model, lambda model: f"{model.world} ranks", run_stock, run_both)

if __name__ == "__main__":
    sys.exit(main(KIND))
