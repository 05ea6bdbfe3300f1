"""The switch of the CUDA flavour without a GPU: the allocator of each allocation and of each free."""

from __future__ import annotations

from _cuda_control import (
    Run,
    environments_by_torch,  # noqa: F401  (the fixture `environments`)
    only_with_cuda_flavour,
    run_over_fake,  # noqa: F401  (the fixture `over_fake`)
)

pytestmark = only_with_cuda_flavour


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
            # PyTorch's thread releases the pass, and its Python objects, after `backward` has returned. With
            # torch 2.15, an interpreter that exits at that moment aborts in ~ThreadLocalState. This can
            # happen after every allocation.
            import time
            time.sleep(0.5)
            """
        )


class TestRouting:
    """A block is freed by the allocator that made it, regardless of the switch at that time."""

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
            assert torch_uvm.memory.memory_allocated("cuda") == 4 * MiB, "of managed memory alone"
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
