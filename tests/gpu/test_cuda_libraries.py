"""cuDNN, cuBLAS, Triton through torch.compile, the profiler and CuPy work with managed tensors as with native
ones."""

# torch has no stubs for its own DLPack functions.
# mypy: disable-error-code="attr-defined, arg-type"

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from _cuda import MIB, is_managed_by_cuda
from _spawn import Spawn
from torch.nn import functional as F

import torch_uvm


class TestCudnn:
    @pytest.fixture
    def benchmark(self) -> Iterator[None]:
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = True
        yield
        torch.backends.cudnn.benchmark = before

    def test_benchmark_mode(self, benchmark: None) -> None:
        """Algorithms may differ from run to run, so the test uses double precision and a matching
        tolerance."""

        def run() -> list[torch.Tensor]:
            generator = torch.Generator("cuda").manual_seed(0)
            x = torch.randn(8, 16, 40, 40, device="cuda", dtype=torch.float64, generator=generator)
            weight = torch.randn(32, 16, 3, 3, device="cuda", dtype=torch.float64, generator=generator)
            x.requires_grad_(), weight.requires_grad_()
            y = F.conv2d(x, weight, padding=1)
            y.square().sum().backward()
            assert x.grad is not None and weight.grad is not None
            return [y.detach(), x.grad, weight.grad]

        native = run()
        with torch_uvm.enabled():
            managed = run()
        assert all(map(is_managed_by_cuda, managed))
        for a, b in zip(native, managed, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


class TestCublas:
    @pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
    @pytest.mark.parametrize("product", ["a @ a", "torch.nn.functional.linear(a, a, a[0])"])
    def test_workspaces_stay_native(self, spawn: Spawn, backward: bool, product: str) -> None:
        """Workspaces of cuBLAS, and of cuBLASLt, which adds biases."""
        spawn(
            f"""
            import gc, torch, torch_uvm
            torch_uvm.enable()
            a = torch.ones(512, 512, device="cuda", requires_grad={backward})
            b = {product}
            if {backward}:
                b.sum().backward()
            torch.cuda.synchronize()
            del a, b
            gc.collect()
            assert torch_uvm.memory.memory_allocated() == 0, torch_uvm.memory_summary()
            """
        )

    def test_a_budget_below_a_workspace(self, spawn: Spawn) -> None:
        """A thread's first product allocates a workspace and frees it at once, so it need not fit into the
        budget."""
        spawn(
            """
            import threading, torch, torch_uvm
            torch_uvm.enable(budget="8MiB")
            a = torch.eye(256, device="cuda") * 2
            found = []
            def multiply():
                found.append((a @ a).diagonal().sum().item())
            multiply()
            thread = threading.Thread(target=multiply)
            thread.start(), thread.join()
            assert found == [1024, 1024], found
            stats = torch_uvm.stats()
            assert max(stats["peak_device_bytes"].values()) <= 8 << 20, stats
            """
        )

    def test_products_equal(self) -> None:
        a, b = torch.randn(256, 384, device="cuda"), torch.randn(384, 128, device="cuda")
        with torch_uvm.enabled():
            x, y = a.clone(), b.clone()
            assert torch.equal(x @ y, a @ b)
            assert torch.equal(torch.linalg.qr(x)[0], torch.linalg.qr(a)[0])


class TestProfiler:
    def test_has_the_same_memory_events(self) -> None:
        def bytes_by_operator(scope: contextlib.AbstractContextManager[Any]) -> int:
            activities = [torch.profiler.ProfilerActivity.CPU]
            with scope, torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
                kept = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
            del kept
            return sum(
                row.self_device_memory_usage
                for row in profiler.key_averages()
                if row.key.startswith("aten::empty")
            )

        native = bytes_by_operator(torch_uvm.disabled())
        assert native == 3 * MIB
        assert bytes_by_operator(torch_uvm.enabled()) == native


class TestCompiled:
    def test_inductor_on_managed_tensors(self) -> None:
        pytest.importorskip("triton")

        def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return F.gelu(x @ w).sum(1) + x.sin().mean()

        with torch_uvm.enabled():
            x = torch.randn(64, 128, device="cuda")
            w = torch.randn(128, 32, device="cuda", requires_grad=True)
            expected = function(x, w)
            expected.sum().backward()
            assert w.grad is not None
            gradient, w.grad = w.grad, None
            result = torch.compile(function)(x, w)
            result.sum().backward()
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(w.grad, gradient, rtol=1e-4, atol=1e-4)

    def test_inductor_after_a_move(self) -> None:
        pytest.importorskip("triton")
        x = torch_uvm.memory.ones(1000, device="cpu")
        compiled = torch.compile(lambda t: t * 2 + 1)
        assert compiled(torch_uvm.to(x, "cuda")).tolist() == [3.0] * 1000


class _Capsule:
    """Exports a DLPack object of type 13 to a consumer that accepts any version."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __dlpack_device__(self) -> tuple[int, int]:
        return 13, 0

    def __dlpack__(self, **keywords: Any) -> Any:
        return self.x.__dlpack__(stream=keywords.get("stream"), dl_device=(13, 0))


class TestCupy:
    """CuPy never allocates managed memory here, because no limit would bound it."""

    @pytest.fixture
    def cupy(self) -> Any:
        cupy = pytest.importorskip("cupy")
        if not cupy.cuda.is_available():
            pytest.skip("CuPy has no GPU")
        return cupy

    @pytest.mark.parametrize("way", ["dlpack", "array interface", "type 13"])
    def test_reads_and_writes_our_bytes(self, cupy: Any, way: str) -> None:
        x = torch_uvm.memory.zeros(4, 6)
        if way == "dlpack":
            array = cupy.from_dlpack(x)
        elif way == "array interface":
            array = cupy.asarray(x)
        else:
            array = cupy.from_dlpack(_Capsule(x))
        assert array.data.ptr == x.data_ptr() and array.shape == (4, 6)
        array += 3
        cupy.cuda.Device().synchronize()
        assert x.sum().item() == 72

    def test_holds_our_bytes(self, cupy: Any) -> None:
        before = torch_uvm.memory.memory_allocated()
        x = torch_uvm.memory.ones(1000)
        array = cupy.from_dlpack(x)
        del x
        assert torch_uvm.memory.memory_allocated() > before and float(array.sum()) == 1000
        del array
        assert torch_uvm.memory.memory_allocated() == before

    def test_its_arrays_come_back(self, cupy: Any) -> None:
        array = cupy.arange(6, dtype=cupy.float32).reshape(2, 3)
        for x in (
            torch_uvm.memory.from_dlpack(array),
            torch.from_dlpack(array),
            torch.as_tensor(array, device="cuda"),
        ):
            assert x.data_ptr() == array.data.ptr and not torch_uvm.is_managed(x)
            assert x.tolist() == [[0, 1, 2], [3, 4, 5]]
        with torch_uvm.enabled():
            assert torch_uvm.is_managed(torch.from_dlpack(array).clone())
