"""Runs the suite with a wheel of scripts/wheels.py and each torch that it is for, and prints a table.

    python scripts/versions.py WHEEL                              each torch of requirements/wheels.txt
    python scripts/versions.py WHEEL 2.13.0 2.14.1                these
    python scripts/versions.py WHEEL 2.13.0 --tests test_moves.py test_budget.py

The wheel must have the test doubles (`wheels.py --test`). It is unpacked beside a torch, and this
interpreter's other packages serve both. Two kinds of torch are tried:

- CUDA builds, as unpacked by wheels.py. Stand-ins take the places of CUDA's libraries, as in
  check_cuda_flavour.py; no GPU is found, so the tests run on the emulated accelerator. Then comes what needs
  CUDA but no GPU: the audit of the allocator's virtual functions, and control paths over the fake runtime. At
  last a few files of the suite run with the wheel's CPU flavour, which differs in two source files.
- The torch of this interpreter, for its own minor version, if it is a CPU build.

The results are in build/versions/results.json, one for each torch: that of its latest run.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import audit_cuda_allocator as audit
import check_cuda_flavour as flavour
import wheels

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "versions"
RESULTS = FOLDER / "results.json"
FAKE_CUDA = ROOT / "build" / "cpp" / "libfake_cuda.so"
# Tests of C++ alone, of CUDA, and of the repository. They do not depend on the version of torch.
LEFT_OUT = [
    "test_cpp_layers.py",
    "test_sanitizers.py",
    "test_cuda_*.py",
    "test_packages.py",
    "test_wheels.py",
]
LEFT_OUT += [
    "test_docs*.py",
    "test_documented_code.py",
    "test_repository.py",
    "test_imports.py",
    "test_bench_*.py",
]
CPU_FLAVOUR = [
    "test_stubs.py",
    "test_moves.py",
    "test_operators.py",
    "test_budget_training.py",
    "test_cli_info.py",
]
CONTROL_PATHS = ["test_cuda_control.py", "test_cuda_control_memory.py", "test_cuda_control_switch.py"]
CHECKS = ["emulator", "audit", "control", "cpu"]


def emulator_tests() -> list[str]:
    names = sorted(path.name for path in (ROOT / "tests").glob("test_*.py"))
    return [name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in LEFT_OUT)]


def site(wheel: Path, name: str, left_out: str | None = None) -> Path:
    """The wheel's files, for the torch of that name, without the extensions of a flavour."""
    folder = FOLDER / name / (f"site-without-{left_out}" if left_out else "site")
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install", "--no-deps"]
    flavour.output_of([*command, "--no-compile", "--target", folder, str(wheel)])
    for extension in folder.glob(f"torch_uvm/_native/*_{left_out}"):
        shutil.rmtree(extension)
    return folder


def cuda_environment(wheel: Path, version: str, left_out: str | None = None) -> dict[str, str]:
    """The variables with which this interpreter imports a CUDA build of torch, and the wheel's files, without
    the extensions of a flavour."""
    torch = wheels.torch_folder(version)
    library = FOLDER / version / "lib"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        flavour.make_stand_ins(torch / "torch" / "lib", library)
    return {
        "PYTHONPATH": f"{site(wheel, version, left_out)}:{torch}",
        "LD_LIBRARY_PATH": f"{library}:{flavour.cudart().parent}",
        "LD_PRELOAD": str(library / "libabsent.so"),
    }


def pytest(name: str, what: str, tests: list[str], environment: dict[str, str], jobs: int) -> str:
    """Runs test files outside of the repository; `what` names the log. Returns pytest's summary, such as "812
    passed, 3 skipped"."""
    folder = FOLDER / name
    own = {key: value for key, value in os.environ.items() if not key.startswith("TORCH_UVM")}
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider"]
    command += ["-n", str(jobs), "--dist", "loadfile"]
    log = folder / f"{what}.log"
    with log.open("w") as output:
        subprocess.run(
            [*command, "--rootdir", str(ROOT), *(str(ROOT / "tests" / test) for test in tests)],
            cwd=folder,
            env=own | environment | {"OMP_WAIT_POLICY": "PASSIVE"},
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    found = re.findall(r"^=*\s*((?:\d+ \w+(?:, )?)+) in [\d.]+", log.read_text(), re.MULTILINE)
    return found[-1] if found else f"no summary; see {log}"


def loaded(environment: dict[str, str], folder: Path) -> str:
    """Which torch and which extension are imported, by its folder in the wheel."""
    code = "import torch, torch_uvm; print(torch.__version__, torch_uvm._C.__file__.split('/')[-2])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise flavour.Failed(done.stderr[-2000:])
    return done.stdout.strip()


def try_version(wheel: Path, version: str, tests: list[str], jobs: int) -> dict[str, dict[str, str]]:
    """Maps the torch to its results."""
    date = time.strftime("%Y-%m-%d")
    results = {}
    own = importlib.metadata.version("torch")
    if own.endswith("+cpu") and own.split(".")[:2] == version.split(".")[:2]:
        environment = {"PYTHONPATH": str(site(wheel, own))}
        said = loaded(environment, FOLDER / own)
        print(f"{said}: emulator tests", flush=True)
        results[own] = {
            "extension": said,
            "files": str(len(tests)),
            "emulator": pytest(own, "emulator", tests, environment, jobs),
            "date": date,
        }
    environment = cuda_environment(wheel, version)
    said = loaded(environment, FOLDER / version)
    print(f"{said}: emulator tests", flush=True)
    row = {"extension": said, "date": date, "files": str(len(tests))}
    row["emulator"] = pytest(version, "emulator", tests, environment, jobs)
    missing = audit.missing(wheels.torch_folder(version) / "torch" / "include")
    row["audit"] = f"lacks {', '.join(missing)}" if missing else "passed"
    print(f"{said}: control paths over the fake runtime", flush=True)
    fake = environment | {"TORCH_UVM_TEST_CUDA": "0"}  # no other flavour than the wheel's
    row["control"] = pytest(version, "control", CONTROL_PATHS, fake, jobs)
    environment = cuda_environment(wheel, version, left_out="cu13")
    said = loaded(environment, FOLDER / version)
    print(f"{said}: a part of the emulator tests", flush=True)
    row["cpu"] = pytest(version, "cpu", CPU_FLAVOUR, environment, jobs)
    results[f"{version} (CUDA build)"] = row
    return results


def table(results: dict[str, dict[str, str]]) -> str:
    rows = ["| torch | date | files | emulator tests | virtual functions | control paths | CPU flavour |"]
    rows.append("| --- " * 7 + "|")
    for torch, row in sorted(results.items(), key=lambda item: [int(n) for n in re.findall(r"\d+", item[0])]):
        cells = [torch, row["date"], *(row.get(check, "-") for check in ["files", *CHECKS])]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("versions", nargs="*", help="of torch; without any: all that are pinned")
    parser.add_argument(
        "--tests", nargs="+", metavar="FILE", help="files of tests/; without: all of the emulator"
    )
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    if not FAKE_CUDA.exists():
        sys.exit(f"{FAKE_CUDA} is not there; `make test-versions` builds it")
    made: dict[str, dict[str, str]] = {}
    for version in arguments.versions or wheels.versions():
        try:
            made |= try_version(
                arguments.wheel.resolve(), version, arguments.tests or emulator_tests(), arguments.jobs
            )
        except flavour.Failed as error:
            made[f"{version} (CUDA build)"] = {
                "date": time.strftime("%Y-%m-%d"),
                "emulator": str(error)[-300:],
            }
        kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        RESULTS.write_text(json.dumps(kept | made, indent=1))
    print(table(json.loads(RESULTS.read_text())))
    passed = re.compile(r"(?:\d+ (?:passed|skipped|deselected|warnings?|xfailed)(?:, )?)+|passed")
    checks = [row.get(name, "passed") for row in made.values() for name in CHECKS]
    return 0 if all(passed.fullmatch(check) for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
