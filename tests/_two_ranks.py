"""`python _two_ranks.py CASE,... DEVICE FOLDER`: runs two ranks of _distributed.py; if one fails, ends both.

Does not import torch, which would take longer than this whole program.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

SCRIPT = Path(__file__).with_name("_distributed.py")
MOMENT = 0.05  # seconds between two polls


def main(arguments: list[str]) -> int:
    ranks = [
        subprocess.Popen([sys.executable, str(SCRIPT), str(number), *arguments], stdin=subprocess.DEVNULL)
        for number in range(2)
    ]
    try:
        while True:
            statuses = [rank.poll() for rank in ranks]
            if any(statuses):
                return next(status for status in statuses if status)
            if None not in statuses:
                return 0
            time.sleep(MOMENT)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
