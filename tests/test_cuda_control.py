"""Control paths of the CUDA flavour, with no GPU: over the fake CUDA runtime (tests/fake_cuda), preloaded.

Kernels do nothing there, so nothing is computed: what is seen is who allocates, where, and what the runtime
is asked to do. Each program runs with every torch of requirements/cuda.txt, as scripts/check_cuda_flavour.py
has it, and with this environment's own where that has CUDA; their torch is the real one.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from _cuda_flavour import LEFT_OUT, REASON, VERSIONS, build, flavour
from _spawn import Spawn

import torch_uvm

OWN = torch.version.cuda is not None and torch_uvm._C.built_with_cuda()
pytestmark = pytest.mark.skipif(LEFT_OUT and not OWN, reason=REASON)

PRELUDE = """
import ctypes
import torch, torch_uvm
fake = ctypes.CDLL(None)
fake.fake_cuda_misuse.restype = ctypes.c_char_p
fake.fake_cuda_live_bytes.restype = fake.fake_cuda_count.restype = ctypes.c_size_t
MiB = 1 << 20
def count(name): return fake.fake_cuda_count(name.encode())
def managed_bytes(): return fake.fake_cuda_live_bytes(b"cudaMallocManaged")
assert torch.cuda.is_available() and torch.cuda.device_count() == 2
torch_uvm.set_limit(64 * MiB)
"""
EPILOGUE = """
misuse = fake.fake_cuda_misuse().decode()
assert not misuse, misuse
"""
Run = Callable[..., None]


@pytest.fixture(scope="session")
def environments(pytestconfig: pytest.Config) -> dict[str, dict[str, str]]:
    """By the torch that a program gets there."""
    library: Path = pytestconfig.getoption("--cpp-build").resolve() / "libfake_cuda.so"
    assert library.exists(), f"{library} is not there; `make cpp` builds it"
    found = {f"torch {torch.__version__}": {"LD_PRELOAD": str(library)}} if OWN else {}
    for version in [] if LEFT_OUT else VERSIONS:
        wrong = build(version)
        assert not wrong, wrong
        found[f"torch {version}"] = flavour.environment(version, library)
    return found


@pytest.fixture
def over_fake(spawn: Spawn, environments: dict[str, dict[str, str]]) -> Run:
    def run(code: str, **env: str) -> None:
        def one(name: str) -> None:
            version = name.partition(" ")[2]
            said = f"assert torch.__version__.startswith({version!r}), torch.__version__"
            environment = {"FAKE_CUDA_DEVICES": "2", **environments[name], **env}
            try:
                spawn("\n".join([PRELUDE, said, textwrap.dedent(code), EPILOGUE]), env=environment)
            except AssertionError as error:
                raise AssertionError(f"with {name}: {error}") from None

        with ThreadPoolExecutor() as pool:
            list(pool.map(one, environments))

    return run


class TestSwitch:
    def test_managed_while_on(self, over_fake: Run) -> None:
        over_fake(
            """
            before = torch.empty(1000, device="cuda")
            assert not torch_uvm.is_managed(before) and managed_bytes() == 0
            torch_uvm.enable()
            x = torch.empty(MiB, device="cuda")
            assert torch_uvm.is_managed(x) and managed_bytes() >= 4 * MiB
            torch_uvm.disable()
            y = torch.empty(1000, device="cuda")
            assert not torch_uvm.is_managed(y)
            del x, before, y
            torch.cuda.empty_cache()
            assert managed_bytes() == 0 and torch.cuda.memory_allocated() == 0
            """
        )

    def test_each_device_has_its_own(self, over_fake: Run) -> None:
        over_fake(
            """
            torch_uvm.enable()
            x = torch.empty(MiB, device="cuda:1")
            assert torch_uvm.is_managed(x) and x.device.index == 1
            assert torch.cuda.memory_allocated(1) == 4 * MiB and torch.cuda.memory_allocated(0) == 0
            """
        )

    def test_a_capture_wins(self, over_fake: Run) -> None:
        over_fake(
            """
            torch_uvm.enable()
            before = torch.empty(MiB, device="cuda")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                inside = torch.empty(100, device="cuda")
            assert torch_uvm.is_managed(before) and not torch_uvm.is_managed(inside)
            graph.replay()
            """
        )

    def test_a_pool_wins(self, over_fake: Run) -> None:
        over_fake(
            """
            torch_uvm.enable()
            with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
                inside = torch.empty(100, device="cuda")
            assert not torch_uvm.is_managed(inside) and torch_uvm.is_managed(torch.empty(1, device="cuda"))
            """
        )

    def test_a_pool_of_another_thread_takes_nothing(self, over_fake: Run) -> None:
        over_fake(
            """
            import threading
            torch_uvm.enable()
            made = []
            with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
                thread = threading.Thread(target=lambda: made.append(torch.empty(100, device="cuda")))
                thread.start()
                thread.join()
                made.append(torch.empty(100, device="cuda"))
            made.append(torch.empty(100, device="cuda"))
            assert [torch_uvm.is_managed(x) for x in made] == [True, False, True], made
            """
        )

    def test_a_capture_of_another_stream_takes_nothing(self, over_fake: Run) -> None:
        over_fake(
            """
            import threading
            torch_uvm.enable()
            kept = torch.empty(100, device="cuda")
            made = []
            with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
                thread = threading.Thread(target=lambda: made.append(torch.empty(MiB, device="cuda")))
                thread.start()
                thread.join()
                made.append(torch.empty(MiB, device="cuda"))
            assert [torch_uvm.is_managed(x) for x in made] == [True, False], made
            """
        )

    def test_scopes_hold_for_their_thread(self, over_fake: Run) -> None:
        over_fake(
            """
            import threading
            def managed(): return torch_uvm.is_managed(torch.empty(100, device="cuda"))
            seen = []
            def elsewhere():
                thread = threading.Thread(target=lambda: seen.append(managed()))
                thread.start()
                thread.join()
                return seen[-1]
            with torch_uvm.enabled():
                assert managed() and not elsewhere()
                with torch_uvm.disabled():
                    assert not managed()
                assert managed()
            assert not managed()
            torch_uvm.enable()
            with torch_uvm.disabled():
                assert not managed() and elsewhere()
            """
        )

    def test_backward_threads_have_the_scope(self, over_fake: Run) -> None:
        over_fake(
            """
            x = torch.empty(MiB, device="cuda", requires_grad=True)
            y = x * 2
            with torch_uvm.enabled():
                y.backward(torch.empty(MiB, device="cuda"))
            assert torch_uvm.is_managed(x.grad) and not torch_uvm.is_managed(y)
            # PyTorch's thread lets go of the pass, and of Python objects in it, after `backward` has
            # returned: with torch 2.15 an interpreter that ends at that moment is aborted from its
            # ~ThreadLocalState, whoever allocates.
            import time
            time.sleep(0.5)
            """
        )


class TestRouting:
    """What is freed goes back to whom it came from, whatever the switch says by then."""

    def test_frees_against_the_switch(self, over_fake: Run) -> None:
        over_fake(
            """
            import threading
            native = [torch.empty(MiB, device="cuda") for _ in range(3)]
            torch_uvm.enable()
            managed = [torch.empty(MiB, device="cuda") for _ in range(3)]
            native.pop()
            torch_uvm.disable()
            managed.pop()
            thread = threading.Thread(target=lambda: (managed.pop(), native.pop()))
            thread.start()
            thread.join()
            assert torch.cuda.memory_allocated() == 8 * MiB
            assert torch_uvm.memory_allocated("cuda") == 4 * MiB, "of managed memory alone"
            del native, managed
            assert torch.cuda.memory_allocated() == 0
            torch.cuda.empty_cache()
            assert torch.cuda.memory_reserved() == managed_bytes() == 0
            assert fake.fake_cuda_live_bytes(b"cudaMalloc") == 0
            """
        )

    def test_bare_addresses(self, over_fake: Run) -> None:
        over_fake(
            """
            torch_uvm.enable()
            managed = torch.cuda.caching_allocator_alloc(MiB)
            assert managed_bytes() > 0 and fake.fake_cuda_live(b"cudaMalloc") == 0
            torch_uvm.disable()
            native = torch.cuda.caching_allocator_alloc(MiB)
            assert fake.fake_cuda_live(b"cudaMalloc") == 1 and torch.cuda.memory_allocated() == 2 * MiB
            torch_uvm.enable()
            torch.cuda.caching_allocator_delete(native)
            torch_uvm.disable()
            torch.cuda.caching_allocator_delete(managed)
            assert torch.cuda.memory_allocated() == 0
            torch.cuda.empty_cache()
            assert managed_bytes() == fake.fake_cuda_live(b"cudaMalloc") == 0
            """
        )

    def test_sharing_managed_memory_between_processes_is_refused(self, over_fake: Run) -> None:
        over_fake(
            """
            torch_uvm.enable()
            x = torch.empty(MiB, device="cuda")
            try:
                x.untyped_storage()._share_cuda_()
            except RuntimeError as error:
                assert "managed" in str(error), error
            else:
                raise AssertionError("shared")
            assert count("cudaIpcGetMemHandle") == 0
            """
        )


class TestStatistics:
    def test_are_the_sums_and_peaks_of_both(self, over_fake: Run) -> None:
        over_fake(
            """
            def now(name): return torch.cuda.memory_stats()[f"{name}.all.current"]
            native = torch.empty(MiB, device="cuda")
            torch_uvm.enable()
            managed = torch.empty(MiB, device="cuda")
            assert now("allocated_bytes") == 8 * MiB and now("allocation") == now("segment") == 2
            assert torch.cuda.memory_reserved() == managed_bytes() + fake.fake_cuda_live_bytes(b"cudaMalloc")
            del managed
            torch_uvm.disable()
            more = torch.empty(MiB // 2, device="cuda")
            assert torch.cuda.memory_allocated() == 6 * MiB
            assert torch.cuda.max_memory_allocated() == 8 * MiB, "not at once: not 10"
            torch.cuda.reset_peak_memory_stats()
            assert torch.cuda.max_memory_allocated() == 6 * MiB
            assert torch.cuda.memory_stats()["num_ooms"] == 0 and "CUDA" in torch.cuda.memory_summary()
            """
        )

    def test_a_snapshot_has_managed_segments(self, over_fake: Run) -> None:
        over_fake(
            """
            native = torch.empty(MiB, device="cuda")
            torch_uvm.enable()
            managed = torch.empty(MiB, device="cuda:1")
            segments = torch.cuda.memory_snapshot()
            assert [segment["address"] for segment in segments] == sorted(s["address"] for s in segments)
            for x in (native, managed):
                (own,) = [s for s in segments if s["device"] == x.device.index]
                assert own["address"] <= x.data_ptr() < own["address"] + own["total_size"]
                assert own["allocated_size"] == 4 * MiB
            """
        )


class TestRunningShort:
    def test_observers_and_statistics_hear_of_it(self, over_fake: Run) -> None:
        over_fake(
            """
            heard = []
            torch_uvm.enable()
            kept = torch.empty(MiB, device="cuda")
            torch._C._cuda_attach_out_of_memory_observer(lambda *args: heard.append(args))
            try:
                torch.empty(1 << 30, device="cuda")
            except torch.OutOfMemoryError:
                pass
            assert [(args[0], args[1]) for args in heard] == [(0, 4 << 30)], heard
            assert torch.cuda.memory_stats()["num_ooms"] == 1
            torch_uvm.disable()
            try:
                torch.empty(1 << 30, device="cuda")
            except torch.OutOfMemoryError:
                pass
            assert len(heard) == 2 and torch.cuda.memory_stats()["num_ooms"] == 2
            """
        )

    def test_past_the_limit(self, over_fake: Run) -> None:
        over_fake(
            """
            torch_uvm.enable()
            kept = torch.empty(MiB, device="cuda")
            asked = count("cudaMallocManaged")
            try:
                torch.empty(1 << 30, device="cuda")
            except torch.OutOfMemoryError as error:
                assert "limit" in str(error), error
            else:
                raise AssertionError("4 GiB in 64 MiB")
            assert count("cudaMallocManaged") == asked
            assert torch_uvm.is_managed(torch.empty(MiB, device="cuda"))
            """
        )

    def test_the_runtime_refuses(self, over_fake: Run) -> None:
        over_fake(
            """
            torch_uvm.enable()
            try:
                torch.empty(MiB, device="cuda")
            except torch.OutOfMemoryError as error:
                assert "cudaMallocManaged" in str(error), error
            else:
                x = torch.empty(MiB, device="cuda")  # the retry of the allocator
            assert torch_uvm.is_managed(torch.empty(MiB, device="cuda"))
            """,
            FAKE_CUDA_FAIL="cudaMallocManaged:1",
        )


@pytest.mark.parametrize("segments", ["malloc", "pool"])
def test_segments_come_from(over_fake: Run, segments: str) -> None:
    name = {"malloc": "cudaMallocManaged", "pool": "cudaMallocFromPoolAsync"}[segments]
    other = {"pool": "cudaMallocManaged", "malloc": "cudaMallocFromPoolAsync"}[segments]
    over_fake(
        f"""
        torch_uvm.enable()
        x = torch.empty(MiB, device="cuda")
        assert torch_uvm.is_managed(x) and count("{name}") == 1 and count("{other}") == 0
        try:
            torch_uvm._C.set_option("cuda_segments", "{"malloc" if segments == "pool" else "pool"}")
        except RuntimeError as error:
            assert "cuda_segments" in str(error), error
        else:
            raise AssertionError("changed while in use")
        """,
        TORCH_UVM_CONF=f"cuda_segments:{segments}",
    )


def test_copies_and_streams(over_fake: Run) -> None:
    over_fake(
        """
        torch_uvm.enable()
        y = torch.arange(10.0).cuda()
        other = torch.cuda.Stream()
        with torch.cuda.stream(other):
            z = y.clone()
        z.record_stream(torch.cuda.current_stream())
        assert z.tolist() == list(range(10)) and y.to("cuda:1").tolist() == z.tolist()
        del y, z
        torch.cuda.empty_cache()
        """
    )


def test_a_forked_child_calls_nothing(over_fake: Run) -> None:
    over_fake(
        """
        import os, sys
        torch_uvm.enable()
        x = torch.empty(MiB, device="cuda")
        child = os.fork()
        if child == 0:
            del x
            quiet = not fake.fake_cuda_misuse()
            os._exit(0 if quiet else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        """
    )


class TestWithoutConcurrentAccess:
    """Where the host may touch no managed memory while a device works, it waits for the device as a whole."""

    CODE = """
        import os
        x, unrelated = torch_uvm.empty(MiB, device="cuda"), torch_uvm.empty(MiB, device="cuda")
        side, waits = torch.cuda.Stream(), CONCURRENT == 0
        fake.fake_cuda_hold(1)

        def pending():
            with torch.cuda.stream(side):
                unrelated.fill_(1)
            assert not side.query()

        pending()
        moved = torch_uvm.to(x, "cpu", non_blocking=True)
        assert not side.query(), "waiting is the caller's duty"
        moved = torch_uvm.to(x, "cpu")
        assert side.query() == waits
        for _ in range(2):  # of a fresh segment, and from the cache
            pending()
            made = torch_uvm.empty(MiB, device="cpu")
            assert side.query() == waits
            del made
        pending()
        child = os.fork()  # gets a copy of `moved`
        if child == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert side.query() == waits
        pending()
        made = torch_uvm.empty(MiB, device="cuda")
        assert not side.query(), "no business of the host's"
        assert not fake.fake_cuda_has_context(1), "nobody uses the other device"
        """

    @pytest.mark.parametrize("concurrent", [0, 1])
    def test_the_host_waits_for_the_device(self, over_fake: Run, concurrent: int) -> None:
        over_fake(self.CODE.replace("CONCURRENT", str(concurrent)), FAKE_CUDA_CONCURRENT=str(concurrent))


def test_exit_with_live_tensors(over_fake: Run, tmp_path: Path) -> None:
    report = tmp_path / "report.txt"
    over_fake(
        """
        torch_uvm.enable()
        x = torch.empty(MiB, device="cuda")
        sys_holds_it = __import__("sys").x = x
        """,
        FAKE_CUDA_REPORT=str(report),
    )
    assert not report.exists(), report.read_text()


class TestTensors:
    def test_a_resize_of_shared_bytes_is_refused_before_anything_has_changed(self, over_fake: Run) -> None:
        over_fake(
            """
            x = torch_uvm.empty(8, device="cuda")
            y = torch_uvm.to(x, "cpu")
            for label in (x, y):
                try:
                    label.resize_(1 << 20)
                except RuntimeError as error:
                    assert "a resize to [1048576] needs 4194304 bytes" in str(error), error
                else:
                    raise AssertionError("it was resized")
                assert label.shape == (8,) and label.untyped_storage().nbytes() == 32
            assert x.resize_(2, 2).shape == (2, 2)
            del y, label
            assert x.resize_(1 << 16).untyped_storage().nbytes() == 1 << 18, "alone again, it can grow"
            plain = torch.empty(0, device="cuda").resize_(2, 3, 4, 4, memory_format=torch.channels_last)
            assert plain.stride() == (48, 1, 12, 3)
            """
        )

    def test_hints_in_a_forked_child_ask_cuda_nothing(self, over_fake: Run) -> None:
        over_fake(
            """
            import os, traceback
            x = torch_uvm.empty(1 << 20, device="cpu")
            torch_uvm.advise(x, read_mostly=True)
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    torch_uvm.prefetch(x, "cuda:0")
                    torch_uvm.advise(x, False, "cpu")
                    torch_uvm.discard(x)
                    assert not fake.fake_cuda_misuse(), fake.fake_cuda_misuse()
                    status = 0
                except BaseException:
                    traceback.print_exc()
                os._exit(status)
            assert os.waitpid(child, 0)[1] == 0
            """
        )
