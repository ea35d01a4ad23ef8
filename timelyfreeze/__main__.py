"""``python -m timelyfreeze``."""

from __future__ import annotations

import sys

from timelyfreeze.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
