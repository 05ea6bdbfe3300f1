"""A selection of the C++ tests under TSAN and ASAN, and the fuzzers for some seconds.

`make sanitized` builds them. `make sanitize` runs all tests under all sanitizers; `make fuzz` runs the
fuzzers without end.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
THREAD, ADDRESS = ROOT / "build" / "short-thread", ROOT / "build" / "short-address"
CORPUS = ROOT / "tests" / "cpp" / "corpus"

#: Cases of each program; empty: all cases.
THREADED: dict[str, list[str]] = {
    "test_allocator_stress": ["four_threads_on_the_emulated_runtime"],
    "test_arena": [],
    "test_emulated_queue": [
        "events_order_streams_of_several_devices",
        "several_threads_may_queue_concurrently",
        "freeing_waits_for_copies_that_use_the_memory",
        "a_runtime_can_be_destroyed_with_queued_work",
    ],
    "test_residency_room": [],
}
ADDRESSED = ["test_allocator_failures", "test_replay"]

#: Inputs besides the corpus: some seconds for each fuzzer.
FUZZERS = {"fuzz_options": 2000, "fuzz_replay": 1500, "fuzz_allocator": 300}


def run(
    folder: Path, program: str, *arguments: object, check: bool = True
) -> subprocess.CompletedProcess[str]:
    binary = folder / program
    assert binary.exists(), f"{binary} is not there; `make sanitized` builds it"
    done = subprocess.run(
        [binary, *map(str, arguments)],
        env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=600,
        check=False,
    )
    if check:
        assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.mark.parametrize("program", THREADED)
def test_threads(program: str) -> None:
    assert " 0 failed" in run(THREAD, program, *THREADED[program]).stdout


@pytest.mark.parametrize("program", ADDRESSED)
def test_addresses_and_leaks(program: str) -> None:
    assert " 0 failed" in run(ADDRESS, program).stdout


@pytest.mark.parametrize("fuzzer", FUZZERS)
def test_fuzzer_finds_nothing(fuzzer: str, tmp_path: Path) -> None:
    """The seed is fixed, so a finding is reproducible."""
    folder = CORPUS / fuzzer.removeprefix("fuzz_")
    done = run(
        ADDRESS, fuzzer, f"-runs={FUZZERS[fuzzer]}", "-seed=7", f"-artifact_prefix={tmp_path}/", folder
    )
    assert f"{FUZZERS[fuzzer]} runs with seed 7" in done.stdout


def test_every_fuzzer_is_run() -> None:
    sources = {it.stem for it in (ROOT / "tests" / "cpp").glob("fuzz_*.cpp")}
    assert sources - {"fuzz_driver", "fuzz_coverage"} == set(FUZZERS)
    assert all(any((CORPUS / it.removeprefix("fuzz_")).iterdir()) for it in FUZZERS)


def test_the_driver_finds_a_fault_and_its_input_repeats_it(tmp_path: Path) -> None:
    """Without knowledge of the code that inputs reach, one input in four thousand million would find it."""
    found = run(ADDRESS, "planted_fault", "-runs=2000000", f"-artifact_prefix={tmp_path}/", check=False)
    assert found.returncode != 0 and "input.byte() != 'l'" in found.stderr
    assert (tmp_path / "crash").read_bytes().startswith(b"faul")
    again = run(
        ADDRESS, "planted_fault", f"-artifact_prefix={tmp_path}/again-", tmp_path / "crash", check=False
    )
    assert again.returncode != 0
