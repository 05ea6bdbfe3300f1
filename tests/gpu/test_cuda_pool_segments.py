"""`cuda_segments:pool`: segments from the driver's pools of managed memory (CUDA 13), from Python."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from subprocess import CompletedProcess

import pytest
import torch
from _spawn import Spawn

pytestmark = pytest.mark.skipif(
    int((torch.version.cuda or "0").partition(".")[0]) < 13, reason="torch's CUDA is older than 13"
)

PRELUDE = """
import ctypes, gc
import torch, torch_uvm
from torch_uvm import _C

MiB = 1 << 20
driver = ctypes.CDLL("libcuda.so.1")


IS_MANAGED, MEMPOOL_HANDLE = 8, 17  # CU_POINTER_ATTRIBUTE_...


def attribute(found, which, x):
    assert driver.cuPointerGetAttribute(ctypes.byref(found), which, ctypes.c_uint64(x.data_ptr())) == 0
    return found.value


def pool_of(x):
    return attribute(ctypes.c_void_p(), MEMPOOL_HANDLE, x)


def managed(x):
    return bool(attribute(ctypes.c_uint(), IS_MANAGED, x))
"""
Run = Callable[[str], "CompletedProcess[str]"]


@pytest.fixture
def over_pool(spawn: Spawn) -> Run:
    def run(code: str) -> CompletedProcess[str]:
        environment = {"TORCH_UVM_CONF": "cuda_segments:pool,limit:256MiB"}
        return spawn(PRELUDE + textwrap.dedent(code), env=environment, timeout=55)

    return run


def test_training_equals_native_and_its_memory_is_the_pools(over_pool: Run) -> None:
    over_pool(
        """
        from torch import nn

        def losses():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 9))
            model.cuda()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            found = []
            for step in range(6):
                torch.manual_seed(step)
                x, y = torch.randn(32, 64).cuda(), torch.randint(0, 9, (32,)).cuda()
                loss = nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                found.append(loss.item())
            return found, model

        native, model = losses()
        assert native == losses()[0]
        assert all(pool_of(p) is None or not managed(p) for p in model.parameters())
        with torch_uvm.enabled():
            found, model = losses()
        assert found == native
        for parameter in model.parameters():
            for x in (parameter, parameter.grad):
                assert torch_uvm.is_managed(x) and managed(x) and pool_of(x) is not None
        """
    )


def test_figures_are_updated_and_empty_cache_releases_everything(over_pool: Run) -> None:
    over_pool(
        """
        with torch_uvm.enabled():
            x = torch.ones(32 * MiB, dtype=torch.uint8, device="cuda")
        assert torch_uvm.memory.memory_allocated() == 32 * MiB, torch_uvm.memory_summary()
        reserved = torch_uvm.memory.memory_reserved()
        assert _C.managed_bytes() == reserved >= 32 * MiB, torch_uvm.memory_summary()
        assert any(s["address"] == x.data_ptr() for s in torch.cuda.memory_snapshot())
        assert "32.00 MiB" in torch_uvm.memory_summary()
        pool, both = pool_of(x), torch.cuda.memory_allocated()
        del x
        gc.collect()
        assert torch.cuda.memory_allocated() == both - 32 * MiB
        assert torch_uvm.memory.memory_allocated() == 0 and _C.managed_bytes() >= 32 * MiB
        again = torch_uvm.memory.ones(32 * MiB, dtype=torch.uint8)
        assert pool_of(again) == pool and torch_uvm.memory.max_memory_allocated() == 32 * MiB
        del again
        torch.cuda.empty_cache()
        assert _C.managed_bytes() == 0 == torch_uvm.memory.memory_reserved()
        x = torch_uvm.memory.ones(8 * MiB)
        assert x.sum().item() == 8 * MiB, "and there is more"
        """
    )


def test_running_out_and_limits_that_change(over_pool: Run) -> None:
    over_pool(
        """
        torch_uvm.enable()
        kept = torch.ones(16 * MiB, dtype=torch.uint8, device="cuda")
        for bytes in (1 << 40, 512 * MiB):
            try:
                torch.empty(bytes, dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError as error:
                assert "256" in str(error) and "Where the bytes are" in str(error), error
            else:
                raise AssertionError(f"{bytes} bytes in 256 MiB")
        large = torch.ones(250 * MiB, dtype=torch.uint8, device="cuda")
        assert int(large[0]) == int(large[-1]) == 1
        del large
        assert _C.peak_managed_bytes() <= 256 * MiB
        assert int(kept[0]) == int(kept[-1]) == 1
        torch.cuda.empty_cache()
        torch_uvm.set_limit("64MiB")
        try:
            more = torch.empty(96 * MiB, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError as error:
            assert "64" in str(error), error
        else:
            raise AssertionError(f"96 MiB in {_C.get_limit()}: {pool_of(more)}", torch_uvm.memory_summary())
        torch_uvm.set_limit("192MiB")
        more = torch.ones(96 * MiB, dtype=torch.uint8, device="cuda")
        assert [int(x[i]) for x in (more, kept) for i in (0, -1)] == [1] * 4
        del kept, more
        torch.cuda.empty_cache()
        assert _C.managed_bytes() == 0
        """
    )


def test_moves_hints_and_the_hosts_reading(over_pool: Run) -> None:
    over_pool(
        """
        x = torch_uvm.memory.full((8 * MiB,), 2.0)
        host = torch_uvm.to(x, "cpu")
        assert host.data_ptr() == x.data_ptr() and float(host.numpy().sum()) == 16 * MiB
        host += 1
        torch_uvm.prefetch(x)
        assert torch_uvm.residency(x) == {torch.device("cuda:0"): x.nbytes}
        assert (torch_uvm.to(host, "cuda") * 2).sum().item() == 48 * MiB
        torch_uvm.advise(x, read_mostly=True)
        torch_uvm.prefetch(x, "cpu")
        torch.cuda.synchronize()
        assert x.sum().item() == 24 * MiB and host.sum().item() == 24 * MiB
        torch_uvm.discard(x)
        x.fill_(7)
        assert torch_uvm.to(x, "cpu").sum().item() == 56 * MiB
        made = torch_uvm.memory.ones(8 * MiB, device="cpu")
        assert torch_uvm.to(made, "cuda").sum().item() == 8 * MiB and pool_of(made) is not None
        """
    )


def test_reuse_waits_for_other_streams(over_pool: Run) -> None:
    over_pool(
        """
        torch_uvm.enable()
        side = torch.cuda.Stream()
        for turn in range(5):
            x = torch.full((MiB,), float(turn), device="cuda")
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(40_000_000)
                seen = x + 1
            x.record_stream(side)
            del x
            others = [torch.zeros(MiB, device="cuda") for _ in range(4)]
            torch.cuda.empty_cache()  # frees the segment if it is unused
            side.synchronize()
            assert seen.sum().item() == (turn + 1) * MiB
            del seen, others
        """
    )


@pytest.mark.parametrize("end", ["", "gc.disable(); kept = [x]; kept.append(kept)", "del x"])
def test_exit(over_pool: Run, end: str) -> None:
    done = over_pool(
        f"""
        torch_uvm.enable()
        x = torch.ones(8 * MiB, device="cuda") @ torch.ones(8 * MiB, 1, device="cuda")
        {end}
        """
    )
    assert done.stderr == ""
