"""`python _two_ranks.py CASE,... DEVICE FOLDER`: two ranks of _distributed.py; when one fails, both end.

It imports no torch: that would cost more than all it does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("_distributed.py")


def main(arguments: list[str]) -> int:
    ranks = [
        subprocess.Popen([sys.executable, str(SCRIPT), str(number), *arguments], stdin=subprocess.DEVNULL)
        for number in range(2)
    ]
    running = {rank.pid: rank for rank in ranks}
    try:
        while running:
            ended, status = os.wait()
            rank = running.pop(ended)
            rank.returncode = os.waitstatus_to_exitcode(status)
            if rank.returncode != 0:
                return rank.returncode
        return 0
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
