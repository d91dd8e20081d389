#!/usr/bin/env bash
# ruff on everything, mypy --strict on ovpatch/ and plugins/, by the modules of $PYTHON. Arguments go to mypy.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}

echo "== ruff check"
"$PYTHON" -m ruff check .

# setup.cfg maps plugins/ to the package ovpatch_plugins. mypy knows nothing of that mapping (nor of the import hook of
# an editable install), and by the name "plugins" it could not follow imports of ovpatch_plugins. Hence a folder on its
# search path in which the package has its real name.
names=build/typing
mkdir -p "$names"
ln -sfn ../../plugins "$names/ovpatch_plugins"

# What mypy infers for unions of types can depend on the order of a set: one seed, one verdict on every machine.
echo "== mypy --strict: ovpatch, ovpatch_plugins"
PYTHONHASHSEED=0 MYPYPATH=$names "$PYTHON" -m mypy --strict "$@" -p ovpatch -p ovpatch_plugins
