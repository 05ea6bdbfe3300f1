"""`python -m torch_uvm`."""

from __future__ import annotations

import sys

from torch_uvm.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
