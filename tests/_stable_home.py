"""Runs the suite with the other home of device copies, `segments:stable`: `make test-stable`.

`pytest tests --stable-home` sets the option for the process that runs the tests, and for those that tests
start and that do not choose a home themselves. LEFT_OUT names the tests that need managed segments, with the
reason. They are skipped.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

import pytest

VARIABLE = "TORCH_UVM_CONF"
CONF = "segments:stable,stable_min:1MiB"

LOOKS = "test_deferred_looks.py::TestLooks::test_finds_the_bits_of_a_step_at_once"
GUARD = "test_guard.py::TestEveryWay"
LOG = "test_log.py::TestTheEngine"
#: The ways to managed memory that make a range. Those by name make managed segments.
WAYS = ("the switch", "plain to", "a tensor from a file's sizes", "an operator", "a gradient", "resize_")
LEFT_OUT: dict[str, tuple[str, ...]] = {
    "gives the storage a second label, or exports it as managed memory, which a range refuses": (
        "test_budget_devices.py::test_labels_of_both",
        "test_budget_devices.py::test_a_pin_through_another_devices_label",
        "test_budget_foreign_code.py::TestForeignCode::test_numpy_on_a_cpu_label",
        "test_checkpoint_files.py::test_safetensors_of_a_cpu_label",
        "test_deferred_at_once.py::TestNotDeferred::test_parameters_with_a_cpu_label",
        "test_fork_and_exit.py::TestDataLoader::test_two_forked_workers_read_a_managed_dataset",
        "test_fork_and_exit.py::TestExit::test_with_live_objects[moved]",
        "test_fork_and_exit.py::TestFork::test_child_reads_the_parents_host_tensors",
        "test_interruptions.py::TestEnds::test_a_child_with_shared_memory_and_aliases_is_killed",
        f"{LOOKS}[adamw fused-numpy of the cpu label]",
        f"{LOOKS}[adamw fused-dlpack]",
        f"{LOOKS}[adamw foreach-numpy of the cpu label]",
        f"{LOOKS}[adamw foreach-dlpack]",
        "test_exports_and_budgets.py::test_an_export_of_a_labelled_tensor_stays_when_the_label_is_gone",
        "test_pointer_escapes.py::TestEscapes::test_an_export_pins_until_it_is_freed[managed]",
        "test_pointer_escapes.py::TestEscapes::test_bare_addresses_are_materialised",
        "test_pointer_escapes.py::TestEscapes::test_bytes_with_only_a_cpu_label_are_not_waited_for",
        "test_pointer_escapes.py::TestEscapes::test_imported_tensors_are_not_pinned",
        "test_pointer_escapes.py::TestEscapes::test_it_is_evicted_again_after_the_cpu_label_is_gone",
        "test_pointer_escapes.py::TestEscapes::test_numpy_under_the_cpus_label_sees_what_the_device_writes",
        "test_races.py::test_race[random_programs_beside_set_budget]",
        "test_races.py::test_race[writes_through_another_label]",
    ),
    "counts pages, advice or prefetches of managed memory; hints do nothing to a range": (
        "test_advise.py::test_copied_modules_carry_no_advice",
        "test_hint_calls.py::TestCompiled::test_operators_are_traced_and_not_removed",
        "test_hint_calls.py::TestCompiled::test_public_functions",
        "test_hints.py::TestDiscard::test_never_covers_a_gap",
        "test_kernels.py::TestKernels::test_first_touch_faults_each_page_once",
        "test_prefetch.py::TestContainers::test_optimizer_state",
        "test_prefetch.py::TestContainers::test_optimizer_with_lists_and_numbers",
    ),
    "needs more than the device has; pages of managed segments leave it, ranges are refused": (
        "test_device_memory.py::TestPlainMemory::test_other_devices_have_their_own",
        "test_environment.py::TestOptions::test_set_options_and_configure_the_accelerator",
        "test_device_memory.py::TestManagedMemory::test_leaves_plain_memory_as_it_is",
        "test_device_memory.py::TestManagedMemory::test_one_tensor_may_be_larger",
        "test_device_memory.py::TestSwitching::test_resizing_follows_the_switch",
    ),
    "counts managed memory, or reaches its limit, of which the memory of ranges is no part": (
        "test_budget_devices.py::test_a_budget_that_cannot_be_lifted_leaves_the_others",
        "test_device_memory.py::TestManagedMemory::test_ends_at_the_limit_by_name",
        *(f"{GUARD}::test_serves_a_request_that_fits[{way}]" for way in WAYS[:3]),
        *(f"{GUARD}::test_stops_at_the_hosts_memory[{way}]" for way in WAYS),
        *(f"{GUARD}::test_stops_at_the_limit[{way}]" for way in WAYS),
        "test_memory_stats.py::TestLevels::test_reserved_is_what_the_runtime_allocated",
        "test_memory_stats.py::TestStats::test_a_refusal_is_counted_and_names_the_bytes",
        "test_out_of_memory.py::TestUnderALimit::test_retried_with_smaller_batches",
    ),
    "has a budget, or a bound on bytes, without room for sizes rounded up to 2 MiB": (
        "test_budget_training.py::TestInference::test_equal_layers_are_one_step",
        "test_deferred_bits.py::TestBits::test_equal_at_every_budget[sgd]",
        "test_dry_runs.py::test_operators_and_peak_are_those_of_a_real_run",
        "test_interruptions.py::TestMemory::test_pinned_memory_is_refused",
        "test_loops.py::test_a_growing_cache_moves_what_the_budget_lacks",
        "test_schedules.py::TestBesideTheEngine::test_it_moves_at_least_what_the_schedule_says",
        "test_tight_budgets.py::TestGraphNetwork::test_operators_that_fit_stay_within_the_budget[1.1]",
    ),
    "limits the size of files, which is the memory of ranges on the emulated accelerator": (
        "test_interruptions.py::TestDisk::test_a_recording_on_a_full_disk",
    ),
    "counts the bytes of staging buffers; copies of ranges have none": (
        "test_staging.py::test_slots_count_against_the_budget_and_end_with_it[64KiB-262144]",
        "test_staging.py::test_slots_count_against_the_budget_and_end_with_it[1GiB-2097152]",
        "test_staging.py::test_under_delayed_schedules",
    ),
    "expects the environment of other tests in a message": (
        "test_cli_info.py::TestInfo::test_a_failed_import_is_reported_in_one_line",
    ),
    "has no device memory of its own: documents, packages, C++, CUDA, plans": (
        "gpu",
        "test_bench_residency.py",
        "test_bench_residency_processes.py",
        "test_bench_schedules.py",
        "test_cpp_layers.py",
        "test_cuda_control.py",
        "test_cuda_control_memory.py",
        "test_cuda_control_switch.py",
        "test_cuda_flavour.py",
        "test_docs.py",
        "test_docs_site.py",
        "test_dry_operators.py",
        "test_imports.py",
        "test_lower_bound.py",
        "test_packages.py",
        "test_plan.py",
        "test_plan_errors.py",
        "test_repository.py",
        "test_sanitizers.py",
        "test_stubs.py",
        "test_trace_races.py",
        "test_wheels.py",
    ),
}


def choose() -> None:
    """Sets the option for this process. torch_uvm reads it when it is imported."""
    assert "torch_uvm" not in sys.modules
    os.environ[VARIABLE] = CONF


def leave_out(items: Iterable[pytest.Item], whole: bool) -> None:
    """Marks the tests that need managed segments as skipped.

    whole: all files were collected; a name without a test is then an error
    """
    reasons = {name: reason for reason, names in LEFT_OUT.items() for name in names}
    unknown = set(reasons)
    for item in items:
        file, _, test = item.nodeid.rpartition("tests/")[2].partition("::")
        names = {file, file.partition("/")[0], f"{file}::{test}", f"{file}::{test.partition('[')[0]}"}
        unknown -= names
        known = [reasons[name] for name in names if name in reasons]
        if known:
            item.add_marker(pytest.mark.skip(reason=known[0]))
    if whole and unknown:
        raise pytest.UsageError(f"tests/_stable_home.py names tests that do not exist: {sorted(unknown)}")


def options_of_children() -> str | None:
    """The options of the processes that tests start; None: those of the tests."""
    return CONF if os.environ.get(VARIABLE) == CONF else None
