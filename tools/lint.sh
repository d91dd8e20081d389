#!/usr/bin/env bash
# ruff and the style of prose on everything, mypy --strict on ovpatch/, plugins/, benchmarks/ and tools/, by the modules
# of $PYTHON. Arguments go to mypy.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}

echo "== ruff check"
"$PYTHON" -m ruff check .

echo "== prose: the ceilings of tools/prose_ceilings.txt"
"$PYTHON" -m tools.prose

# What mypy infers for unions of types can depend on the order of a set: one seed, one verdict on every machine.
echo "== mypy --strict: ovpatch, ovpatch_plugins, benchmarks, tools"
PYTHONHASHSEED=0 "$PYTHON" -m mypy --strict "$@" -p ovpatch -p ovpatch_plugins -p benchmarks -p tools
