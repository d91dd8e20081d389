#!/usr/bin/env bash
# Sets $VENV up for work on ovpatch: what `make demo` and `make test` do first. Safe to run again.
#
#   PYTHON       interpreter to build on (python3)
#   VENV         where (.venv)
#   TORCH        what to install if PYTHON has no torch >= 2.11 (torch==2.13.0)
#   EXTRAS       of pyproject.toml: what is installed beside ovpatch (test,integration)
#   TORCH_INDEX  package index to take it from; by default pip's own if one is configured or there is an NVIDIA GPU,
#                else the index of CPU builds, which are ten times smaller
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3} VENV=${VENV:-.venv} TORCH=${TORCH:-torch==2.13.0} TORCH_INDEX=${TORCH_INDEX:-} EXTRAS=${EXTRAS:-test,integration}
CPU_INDEX=https://download.pytorch.org/whl/cpu
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# The environment may be one in which an unfinished ovpatch is installed: importing torch must not load it here.
export TORCH_DEVICE_BACKEND_AUTOLOAD=0

say() { printf '== %s\n' "$*"; }
fail() { # what is missing, then the remedy
    printf '\nset-up failed: %s\n' "$1" >&2
    printf '       remedy: %s\n' "$2" >&2
    exit 1
}

check_python() {
    command -v "$PYTHON" >/dev/null ||
        fail "there is no $PYTHON" "install Python 3.10 or later, or name one: make PYTHON=/path/to/python3 ..."
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "$PYTHON is $("$PYTHON" -V 2>&1), ovpatch needs 3.10 or later" "make PYTHON=/path/to/a/later/python3 ..."
    "$PYTHON" -c 'import venv, ensurepip' 2>/dev/null ||
        fail "$PYTHON cannot make virtual environments" \
            "install its venv and ensurepip modules (Debian and Ubuntu: apt install python3-venv)"
}

# Prints the version of an importable torch that pip knows as well, and the folder it is in; nothing if there is none.
find_torch() {
    "$PYTHON" - <<'PY' 2>/dev/null || true
import pathlib
from importlib.metadata import version
import torch
if tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 11):
    print(version("torch"), pathlib.Path(torch.__file__).parent.parent)
PY
}

make_venv() { # $1: folder of a torch to reuse, or nothing
    if [ -e "$VENV" ] && [ ! -e "$VENV/pyvenv.cfg" ]; then
        fail "$VENV exists and is no virtual environment" "move it away, or name another folder: make VENV=..."
    fi
    rm -rf "$VENV"
    "$PYTHON" -m venv "$VENV" || fail "$PYTHON -m venv $VENV failed" "see its message above; is the disk full?"
    [ -z "$1" ] && return
    # Not --system-site-packages: that would leave out a torch in the user's folder or in a virtual environment.
    "$VENV/bin/python" - "$1" <<'PY'
import pathlib, sys, sysconfig
line = f"import site; site.addsitedir({sys.argv[1]!r})\n"
pathlib.Path(sysconfig.get_path("purelib"), "zz_reuse_torch.pth").write_text(line)
PY
}

has_gpu() {
    local gpus
    gpus=$(nvidia-smi -L 2>/dev/null) && [[ $gpus == GPU* ]]
}

sources_configured() { # whether somebody has told pip where to look; matched as text, as grep -q would break the pipe
    local settings
    settings=$(pip config list)
    [[ $settings =~ \.(index-url|extra-index-url|find-links|no-index)= ]]
}

install_torch() {
    local index=$TORCH_INDEX
    if [ -z "$index" ] && [ "$(uname -s)" = Linux ] && ! has_gpu && ! sources_configured; then
        index=$CPU_INDEX
    fi
    say "installing $TORCH${index:+ from $index}"
    pip install --quiet ${index:+--index-url "$index"} "$TORCH" ||
        fail "pip could not install $TORCH" \
            "see its message above; name another source (PIP_INDEX_URL or TORCH_INDEX), or a Python that has torch >= 2.11 (make PYTHON=...)"
}

pip() { "$VENV/bin/python" -m pip "$@"; }

check_python
read -r torch_version torch_folder <<<"$(find_torch)" || true
if [ -n "${torch_version:-}" ]; then
    say "environment $VENV, with torch $torch_version from $torch_folder"
    make_venv "$torch_folder"
else
    say "environment $VENV; $PYTHON has no torch >= 2.11"
    make_venv ""
    install_torch
    torch_version=$("$VENV/bin/python" -c 'from importlib.metadata import version; print(version("torch"))')
fi

say "installing ovpatch with its extras $EXTRAS"
printf 'torch==%s\n' "$torch_version" >"$VENV/constraints.txt" # whatever happens, pip leaves torch as it is
pip install --quiet --constraint "$VENV/constraints.txt" --editable ".[$EXTRAS]" ||
    fail "pip could not install ovpatch with its extras $EXTRAS" \
        "see its message above; without a network, give pip a mirror (PIP_INDEX_URL) or wheels (PIP_FIND_LINKS)"

TORCH_DEVICE_BACKEND_AUTOLOAD=1 "$VENV/bin/python" -c 'import ovpatch, torch' ||
    fail "the new environment cannot import torch and ovpatch" "see the traceback above; make clean starts afresh"
touch "$VENV/.ready"
