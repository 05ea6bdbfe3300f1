"""Trains a GPT whose working set is four times the memory of its (emulated) accelerator.

Runs the same script, train_gpt.py, four times: on the CPU as a reference, on a plain emulated accelerator,
and twice there through `python -m torch_uvm run`, once with page migration by the driver and once with the
residency engine, the default. Writes demo-output/residency.png. `make demo` runs this file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = "examples/train_gpt.py"
LAUNCHER = ["-m", "torch_uvm", "run"]
MIB = 1 << 20
AMPLE = "emulated_memory:8GiB"  # enough memory that a short run shows the whole working set
NOTHING = "-"
ERROR = re.compile(r"^([A-Za-z_][\w.]*(?:Error|Exception|Interrupt))\b", flags=re.MULTILINE)


@dataclass
class Run:
    """The outcome of a run of the training script."""

    returncode: int
    seconds: float
    errors: str  # its standard error, if captured
    result: dict[str, Any] | None  # the output of train_gpt.py --json
    stats: dict[str, Any] | None  # the output of torch_uvm run --stats


def clean_environment(**extra: str) -> dict[str, str]:
    """This process's environment, without the variables that enable torch_uvm, plus ``extra``."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("TORCH_UVM") and key != "PYTORCH_ENABLE_UNIFIED_MEMORY"
    }
    # Idle OpenMP threads that spin slow each other down by several times on shared cores.
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if not sys.stderr.isatty():
        environment["TQDM_MININTERVAL"] = "5"  # limits progress output in logs
    return environment | extra


def run(
    launcher: Sequence[str],
    arguments: Sequence[str],
    *,
    name: str,
    folder: Path,
    capture: bool = False,
    environment: dict[str, str] | None = None,
) -> Run:
    """Announces and runs the training script, and reads the files that it wrote.

    Args:
        launcher: the arguments between ``python`` and the script.
        arguments: the script's own.
        name: the prefix of the files in ``folder``: NAME.json, and NAME-stats.json with torch_uvm's launcher.
        capture: keep standard error for the report instead of showing it.
        environment: variables to set besides a clean environment.
    """
    result, stats = folder / f"{name}.json", folder / f"{name}-stats.json"
    for path in (result, stats):
        path.unlink(missing_ok=True)
    if launcher:
        launcher = [*launcher, "--stats", os.path.relpath(stats, ROOT)]
    command = [*launcher, SCRIPT, *arguments, "--json", os.path.relpath(result, ROOT)]
    variables = [f"{key}={value}" for key, value in (environment or {}).items()]
    print("\n$ " + shlex.join([*variables, "python", *command]), flush=True)
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=clean_environment(**(environment or {})),
        stderr=subprocess.PIPE if capture else None,
        text=True,
        check=False,
    )
    return Run(
        done.returncode,
        time.perf_counter() - begin,
        done.stderr or "",
        json.loads(result.read_text()) if result.exists() else None,
        json.loads(stats.read_text()) if stats.exists() else None,
    )


def quarter(working_set: int) -> int:
    """A quarter of a working set in bytes, in whole MiB, rounded down, at least 1."""
    return max(1, working_set // 4 // MIB)


def last_step(errors: str) -> int | None:
    """The last step that a progress bar showed; None without a progress bar."""
    bars = re.findall(r"(\d+)/\d+ \[", errors)
    return int(bars[-1]) if bars else None


def last_error(errors: str) -> str | None:
    """The name, without its module, of the exception at the end of a traceback."""
    found = ERROR.findall(errors)
    return found[-1].rpartition(".")[2] if found else None


def ending(errors: str, lines: int = 12) -> str:
    """The message of the exception at the end of the text, or else its last lines; indented.

    A progress bar, which overwrites its line, counts as its last state.
    """
    found = list(ERROR.finditer(errors))
    if found:
        errors = errors[found[-1].start() :]
    shown = [line.rpartition("\r")[2].rstrip() for line in errors.split("\n")]
    return "\n".join("    " + line for line in [line for line in shown if line][-lines:])


def format_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"


def how_it_ended(run: Run) -> str:
    if run.returncode == 0:
        return "trained"
    step, error = last_step(run.errors), last_error(run.errors)
    return (error or f"exit code {run.returncode}") + ("" if step is None else f", step {step}")


def equality(run: Run, reference: Run) -> str:
    """Whether all losses, training and validation, are those of the reference, bit for bit."""
    if run is reference or run.result is None or reference.result is None:
        return NOTHING
    keys = ("losses_hex", "validation_loss_hex")
    return "yes" if all(run.result[key] == reference.result[key] for key in keys) else "NO"


def figures(run: Run, reference: Run) -> dict[str, str]:
    """A run as a column of the table: measured figures first, then the emulator's modelled ones."""
    emulated = run.stats and run.stats["emulated"]
    column = {
        "ended": how_it_ended(run),
        "final validation loss": repr(run.result["validation_loss"]) if run.result else NOTHING,
        "losses as the CPU's, bit for bit": equality(run, reference),
        "wall time": f"{run.seconds:.1f} s",
    }
    if run.stats and emulated:
        total, device = emulated["counters"], emulated["devices"][0]
        column |= {
            "peak resident on the device": format_bytes(device["peak_resident_bytes"]),
            "page faults by the device": f"{total['faults_on_device']:,}",
            "bytes to the device, by faults": format_bytes(total["bytes_to_device"]),
            "bytes to the device, copied": format_bytes(total["bytes_copied_to_device"]),
            "bytes to the host, evicted": format_bytes(total["bytes_to_host"]),
            "bytes to the host, copied": format_bytes(total["bytes_copied_to_host"]),
            "bytes used in place, on the host": format_bytes(total["bytes_in_place"]),
            "modelled time of memory traffic": f"{emulated['time_us'] / 1e6:.2f} s",
        }
        residency = run.stats["residency"]
        if residency["plan_hits"]:
            seen = residency["plan_hits"] + residency["plan_misses"]
            column["operators that came as planned"] = f"{residency['plan_hits']:,} of {seen:,}"
            column["operators that exceeded the budget"] = f"{residency['over_budget']:,}"
    return column


def format_table(columns: dict[str, dict[str, str]]) -> str:
    """A table with one column per entry and the union of their rows, in order of appearance."""
    rows = list(dict.fromkeys(row for column in columns.values() for row in column))
    lines = [["", *columns]] + [[row, *(c.get(row, NOTHING) for c in columns.values())] for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns) + 1)]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join([text[0], "  ".join("-" * width for width in widths), *text[1:]])


def working_set(arguments: Sequence[str], folder: Path) -> int:
    """Peak bytes in use over two steps, on an emulated accelerator with enough memory."""
    short = [*arguments, "--steps", "2", "--validation-batches", "1"]
    done = run(
        [*LAUNCHER, "--conf", AMPLE],
        short,
        name="working-set",
        folder=folder,
        environment={"TORCH_UVM_DEVICE": "emu"},
        capture=True,
    )
    if done.stats is None or done.returncode:
        sys.exit(f"the working set could not be measured:\n{ending(done.errors)}")
    return int(done.stats["memory"]["allocated_bytes.all.peak"])


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"Other arguments go to {SCRIPT}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, default=ROOT / "demo-output", help="folder for what it writes")
    return parser.parse_known_args()


def main() -> None:
    options, arguments = parse_arguments()
    if not any(entry.name == "torch_uvm" for entry in entry_points(group="torch.backends")):
        sys.exit("torch_uvm is not installed for this Python; `make demo` does that first")
    folder = options.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)

    print("1. The reference: the script on the CPU.")
    cpu = run([], [*arguments, "--device", "cpu"], name="cpu", folder=folder)
    if cpu.returncode:
        sys.exit(cpu.returncode)

    print("\n2. How much memory does it use? Two steps on an emulated accelerator with 8 GiB.")
    needed = working_set(arguments, folder)
    memory = f"emulated_memory:{quarter(needed)}MiB"
    print(f"Working set {format_bytes(needed)}; from here on the accelerator has {quarter(needed)} MiB.")

    print("\n3. The script as it is, on that accelerator.")
    emulated = {"TORCH_UVM_DEVICE": "emu"}
    plain = run(
        [],
        arguments,
        name="plain",
        folder=folder,
        capture=True,
        environment=emulated | {"TORCH_UVM_CONF": memory},
    )
    print(ending(plain.errors))

    print("\n4. The same script with torch_uvm, residency left to the driver.")
    driver = run(
        [*LAUNCHER, "--conf", memory, "--budget", "none"],
        arguments,
        name="driver",
        folder=folder,
        environment=emulated,
    )

    print("\n5. The same script with torch_uvm as it comes: the residency engine.")
    engine = run([*LAUNCHER, "--conf", memory], arguments, name="engine", folder=folder, environment=emulated)

    runs = {"CPU": cpu, "emulated, plain": plain, "torch_uvm, faults": driver, "torch_uvm, engine": engine}
    print("\n" + format_table({name: figures(each, cpu) for name, each in runs.items()}))
    if driver.stats and engine.stats:
        from _plot import plot_residency  # only this branch needs matplotlib

        picture = folder / "residency.png"
        plot_residency(driver.stats, engine.stats, needed, picture)
        print(f"\nResidency over modelled time: {os.path.relpath(picture)}")
    as_promised = last_error(plain.errors) == "OutOfMemoryError" and all(
        equality(each, cpu) == "yes" for each in (driver, engine)
    )
    sys.exit(0 if as_promised else 1)


if __name__ == "__main__":
    main()
