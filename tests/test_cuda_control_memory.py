"""Statistics, limits and segments of the CUDA flavour without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from _cuda_control import (
    Run,
    environments_by_torch,  # noqa: F401  (the fixture `environments`)
    only_with_cuda_flavour,
    run_over_fake,  # noqa: F401  (the fixture `over_fake`)
)

TESTS = Path(__file__).parent

pytestmark = only_with_cuda_flavour


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
            assert torch.cuda.max_memory_allocated() == 10 * MiB, "the sum of both peaks"
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
    def test_observers_and_statistics_are_notified(self, over_fake: Run) -> None:
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
                x = torch.empty(MiB, device="cuda")  # the allocator's retry
            assert torch_uvm.is_managed(torch.empty(MiB, device="cuda"))
            """,
            FAKE_CUDA_FAIL="cudaMallocManaged:1",
        )


MAKE_NATIVE = {
    "tensors": """
def make_native():
    return torch.empty(40 * MiB, device="cuda")  # 160 MiB of 256
""",
    "addresses": """
def make_native():
    return torch._C._cuda_cudaCachingAllocator_raw_alloc(160 * MiB, 0)
""",
}


@pytest.mark.parametrize("made", MAKE_NATIVE)
class TestNativeMemoryRunsOut:
    """Managed memory has 144 MiB of the 256, which only a smaller budget gives back."""

    def test_the_automatic_budget_gives_way(self, over_fake: Run, made: str) -> None:
        over_fake(
            MAKE_NATIVE[made]
            + """
torch_uvm.set_limit(None)
torch_uvm.enable(budget="auto")
cached = torch.empty(36 * MiB, device="cuda")
del cached
assert managed_bytes() >= 144 * MiB and torch_uvm.get_budget() > 200 * MiB
torch_uvm.disable()
native = make_native()
assert managed_bytes() < 96 * MiB
assert 64 * MiB <= torch_uvm.get_budget() <= 80 * MiB, torch_uvm.get_budget()
x = torch_uvm.memory.ones(MiB, device="cuda")
assert torch_uvm.is_managed(x)
""",
            FAKE_CUDA_MANAGED_FIXED="1",
        )

    def test_a_budget_in_bytes_stays(self, over_fake: Run, made: str) -> None:
        over_fake(
            MAKE_NATIVE[made]
            + """
torch_uvm.set_limit(None)
torch_uvm.enable(budget="200MiB")
cached = torch.empty(36 * MiB, device="cuda")
del cached
torch_uvm.disable()
try:
    make_native()
except torch.OutOfMemoryError as error:
    assert "within a budget of 200.00 MiB that was asked for" in str(error), error
else:
    raise AssertionError("304 MiB in 256")
assert torch_uvm.get_budget() == 200 * MiB and managed_bytes() >= 144 * MiB
""",
            FAKE_CUDA_MANAGED_FIXED="1",
        )


@pytest.mark.parametrize("profile", ["gb10", "gh200"])
def test_with_one_memory_nothing_moves(over_fake: Run, profile: str) -> None:
    over_fake(
        """
        torch_uvm.enable(budget="8MiB")
        x = torch.empty(8 * MiB, device="cuda")  # 32 MiB
        assert torch_uvm.get_budget() is None
        before = managed_bytes()
        y = torch_uvm.to(x, "cpu")
        z = torch_uvm.to(y, "cuda")
        torch_uvm.prefetch(z, "cpu")
        torch_uvm.discard(z)
        assert x.data_ptr() == y.data_ptr() == z.data_ptr() and managed_bytes() == before

        torch.save(torch.arange(4096.0), "one.pt")
        mapped = torch.load("one.pt", mmap=True)
        adopted = mapped.to("cuda", managed=True)
        assert adopted.is_cuda and torch_uvm.is_managed(adopted) and adopted.data_ptr() == mapped.data_ptr()
        assert managed_bytes() == before
        waited = count("cudaDeviceSynchronize")
        del mapped, adopted
        assert count("cudaDeviceSynchronize") > waited, "released while the device may use it"

        properties = torch_uvm._C.device_properties(0)
        assert properties["one_memory"] and properties["total_memory"] == 256 * MiB
        assert properties["free_memory"] > 256 * MiB  # the host's
        assert torch_uvm.mem_get_info()[0] == 32 * MiB  # what the limit leaves
        for name in ("cudaMemPrefetchAsync", "cudaMemDiscardAndPrefetchBatchAsync", "cudaMemcpyAsync",
                     "cudaHostAlloc", "cudaHostRegister"):
            assert count(name) == 0, name
        """,
        FAKE_CUDA_PROFILE=profile,
    )


def test_a_balloon_makes_a_card_small(over_fake: Run) -> None:
    """The limit beside it is half of what the runtime reports free; the automatic budget is at most that."""
    over_fake(
        f"""
        import sys
        sys.path.insert(0, {str(TESTS)!r})
        import _gpu_guard
        from _gpu_guard import Guard, Refused, balloon, check_room, free_by_runtime, room_beside_a_balloon
        _gpu_guard.MARGIN, _gpu_guard.LEAST_FREE = 192 * MiB, 16 * MiB  # of a card of 256
        torch_uvm.set_limit(None)
        readers = {{"cudaMemGetInfo": free_by_runtime}}
        check_room(64 * MiB, readers)
        try:
            check_room(65 * MiB, readers)
        except Refused as error:
            assert "card 0" in str(error), error
        else:
            raise AssertionError("65 MiB and 192 in 256")
        device = torch.device("cuda", 0)
        held = balloon(64 * MiB, device)
        assert fake.fake_cuda_live_bytes(b"cudaMalloc") == held.nbytes == 192 * MiB
        limit = room_beside_a_balloon(readers)
        assert limit == 32 * MiB
        guard = Guard(limit).hold()
        torch_uvm.enable(budget="auto")
        assert torch_uvm.get_budget() == 32 * MiB
        x = torch.empty(4 * MiB, device="cuda")
        assert managed_bytes() <= limit
        y = torch.empty(6 * MiB, device="cuda")  # 24 MiB beside 16, in 32
        assert managed_bytes() <= limit and x.numel() + y.numel() == 10 * MiB
        guard.check()
        """
    )


def test_an_automatic_budget_evicts_once_memory_is_short(over_fake: Run) -> None:
    """Running kernels are not counted here, unlike on the emulated accelerator: operators are."""
    over_fake(
        """
        torch_uvm.set_limit(64 * MiB)
        torch_uvm.enable(budget="auto")
        kept = []
        while len(kept) < 80:
            kept.append(torch.empty(MiB // 4, device="cuda").fill_(len(kept)))  # 1 MiB each
        assert torch_uvm.stats()["written_back"]["bytes"] >= 8 * MiB
        assert managed_bytes() <= 64 * MiB
        """
    )
