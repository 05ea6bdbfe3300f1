"""Times allocations of the caching allocator, in C++ and without a GPU, into results/allocator.json.

`make cpp` builds the program that this runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from typing import Any

from _results import RESULTS, ROOT, describe, write_results

PROGRAM = "build/cpp/bench_allocator"


def main() -> None:
    sections: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    with subprocess.Popen([ROOT / PROGRAM], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        for line in program.stdout:
            print(line, end="", flush=True)
            row = json.loads(line)
            sections[row.pop("section")].append(row)
    if program.returncode != 0:
        sys.exit(program.returncode)
    write_results(RESULTS / "allocator.json", {"environment": describe([PROGRAM]), **sections})


if __name__ == "__main__":
    main()
