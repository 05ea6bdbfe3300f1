"""Other processes beside CUDA: limits of forked children, and managed tensors sent to spawned ones."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import pytest
from _spawn import Run, Spawn

PRELUDE = """
import os, sys
import torch, torch_uvm
torch_uvm.enable()

def in_child(body):
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        try:
            body()
        except BaseException as error:
            print(type(error).__name__, error, file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""


@pytest.fixture(name="run")
def run_after_the_prelude(spawn: Spawn) -> Run:
    return spawn.after(PRELUDE)


class TestFork:
    @pytest.mark.parametrize(
        "make",
        ["torch.ones(8, device='cuda')", "torch_uvm.memory.ones(8)", "host.to('cuda')"],
    )
    def test_a_child_is_refused_the_device_in_pytorchs_words(self, run: Run, make: str) -> None:
        run(f"""
x = torch.ones(1 << 20, device="cuda")
host = torch_uvm.memory.ones(1 << 20, device="cpu")

def body():
    try:
        {make}
    except RuntimeError as error:
        assert "fork" in str(error) and "spawn" in str(error), error
    else:
        raise AssertionError("the child had the device")

assert in_child(body) == 0
assert x.sum().item() == 1 << 20
""")

    def test_a_child_is_refused_a_stream_by_cuda_itself(self, run: Run) -> None:
        run("""
x = torch.ones(1 << 20, device="cuda")

def body():
    try:
        torch.cuda.Stream()
    except RuntimeError as error:
        assert "initialization error" in str(error) or "spawn" in str(error), error
    else:
        raise AssertionError("the child had the device")

assert in_child(body) == 0
assert x.sum().item() == 1 << 20
""")

    @pytest.mark.parametrize("touch", ["x.cpu()", "x.sum().item()", "torch_uvm.to(x, 'cpu')", "x.add_(1)"])
    def test_a_child_that_touches_the_devices_bytes_dies_of_no_signal(self, run: Run, touch: str) -> None:
        run(f"""
x = torch.ones(1 << 20, device="cuda")

def body():
    try:
        {touch}
    except RuntimeError:
        pass
    else:
        raise AssertionError("the child had the device")

assert in_child(body) == 0
assert x.sum().item() == 1 << 20
""")

    def test_a_child_reads_the_cpus_labels(self, run: Run) -> None:
        run("""
host = torch_uvm.memory.full((1 << 20,), 3.0, device="cpu")
moved = torch_uvm.to(torch.full((1 << 20,), 4.0, device="cuda"), "cpu")

def body():
    assert host.sum().item() == 3 << 20 and moved.sum().item() == 4 << 20
    host.zero_()

assert in_child(body) == 0
assert host.sum().item() == 3 << 20
assert (torch_uvm.to(host, "cuda") + torch_uvm.to(moved, "cuda")).sum().item() == 7 << 20
""")


class TestQueues:
    def test_a_spawned_process_gets_the_contents(self, spawn: Spawn, tmp_path: Path) -> None:
        script = tmp_path / "script.py"
        script.write_text(
            """
import torch
import torch.multiprocessing as mp


def work(queue, back):
    values = queue.get()
    back.put([value.cpu().double().sum().item() for value in values])


if __name__ == "__main__":
    import torch_uvm

    context = mp.get_context("spawn")
    queue, back = context.Queue(), context.Queue()
    process = context.Process(target=work, args=(queue, back))
    process.start()
    host = torch_uvm.memory.full((1 << 16,), 2.0, device="cpu")
    x = torch_uvm.memory.full((1 << 16,), 3.0)
    queue.put([host, torch_uvm.to(x, "cpu")])
    assert back.get(timeout=90) == [2 << 16, 3 << 16]
    process.join()
    assert x.sum().item() == 3 << 16 and torch_uvm.is_managed(host)
"""
        )
        spawn(args=[str(script)])


class TestExit:
    def test_with_a_graph_a_pool_and_a_live_scope(self, run: Run) -> None:
        done = run("""
x = torch.ones(1024, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = x * 2
pool = torch_uvm.allocators.mem_pool()
with torch.cuda.use_mem_pool(pool):
    z = torch.ones(1024, device="cuda")
scope = torch_uvm.enabled()
scope.__enter__()
sys.modules["kept"] = (x, y, z, graph, pool)
""")
        assert (done.returncode, done.stderr) == (0, "")

    @pytest.mark.skipif(not entry_points(group="torch.backends", name="torch_uvm"), reason="not installed")
    def test_the_variable_turns_it_on_in_an_unchanged_script(self, spawn: Spawn) -> None:
        spawn(
            """
            import torch
            x = torch.ones(1 << 20, device="cuda")
            import torch_uvm
            assert torch_uvm.is_managed(x)
            """,
            args=[],
            env={"TORCH_UVM": "1"},
        )
