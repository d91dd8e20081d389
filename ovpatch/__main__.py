"""``python -m ovpatch``."""

from __future__ import annotations

import sys

from ovpatch.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
