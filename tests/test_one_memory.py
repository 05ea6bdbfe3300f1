"""Machines on which host and devices have one memory: the emulated profiles gb10 and gh200."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from _one_memory import PROFILES, run_on_profile  # noqa: F401  (the fixture `on_profile`)
from _spawn import Run, Spawn

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("profile", PROFILES)
class TestMoves:
    def test_a_move_adds_no_bytes_and_copies_none(self, on_profile: Run) -> None:
        on_profile("""
x = torch_uvm.memory.ones(MiB, device="emu")
before = managed_bytes()
y = torch_uvm.to(x, "cpu")
y[0] = 7
z = torch_uvm.to(y, "emu")
assert x.data_ptr() == y.data_ptr() == z.data_ptr() and float(z.sum()) == MiB + 6
torch_uvm.prefetch(x, "cpu"); torch_uvm.prefetch(x); torch_uvm.discard(x)
assert managed_bytes() == before and moved() == {}, moved()
""")

    def test_a_module_moves_both_ways(self, on_profile: Run) -> None:
        on_profile("""
torch_uvm.enable()
model = torch.nn.Linear(512, 512, device="emu")
at, before = model.weight.data_ptr(), managed_bytes()
torch_uvm.to(model, "cpu")
assert model.weight.device.type == "cpu" and model.weight.data_ptr() == at
torch_uvm.to(model, "emu")
assert model.weight.data_ptr() == at and managed_bytes() == before and moved() == {}
""")


@pytest.mark.parametrize("profile", PROFILES)
class TestBudgets:
    @pytest.mark.parametrize("budget", ["4MiB", "50%"])
    def test_a_size_is_accepted_and_said_to_do_nothing(self, on_profile: Run, budget: str) -> None:
        on_profile(f"""
torch_uvm.enable(budget="{budget}")
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    layers = [torch.ones(MiB, device="emu", requires_grad=True) for _ in range(8)]  # 32 MiB
    sum((layer * layer).sum() for layer in layers).backward()
texts = [str(each.message) for each in said if "one memory" in str(each.message)]
assert len(texts) == 1 and "set_limit" in texts[0], texts
assert torch_uvm.get_budget() is None
assert all(float(layer.grad.sum()) == 2 * MiB for layer in layers)
stats = torch_uvm.stats()
assert not any(stats[key]["count"] for key in ("fetched", "written_back", "used_in_place", "waited")), stats
assert stats["host_bytes"] == 0 and moved() == {{}}
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    torch_uvm.set_budget("8MiB")
assert ["one memory" in str(each.message) for each in said] == [True]
""")

    @pytest.mark.parametrize("request_one", ["", "budget='auto'", "budget=None"])
    def test_the_default_is_silent(self, on_profile: Run, request_one: str) -> None:
        on_profile(f"""
warnings.simplefilter("error")
torch_uvm.enable({request_one})
assert torch_uvm.get_budget() is None
assert float(torch.ones(MiB, device="emu").sum()) == MiB
assert torch_uvm.get_budget() is None
""")

    def test_training_equals_the_cpus(self, on_profile: Run) -> None:
        on_profile("""
def losses(device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    batch = torch.randn(32, 64).to(device)
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        yield loss.item()
expected = list(losses("cpu"))
torch_uvm.enable()
assert list(losses("emu")) == expected
""")


class TestFreeMemory:
    @pytest.mark.parametrize("profile", ["gb10,emulated_memory:64MiB"])
    def test_one_memory_is_what_is_left_of_it(self, on_profile: Run) -> None:
        on_profile("""
free, total = torch_uvm.mem_get_info()
assert free == total == 64 * MiB, (free, total)
assert torch.accelerator.get_memory_info() == (free, total)
x = torch_uvm.memory.empty(8 * MiB, device="emu")  # 32 MiB
free, total = torch_uvm.mem_get_info()
assert total == 64 * MiB and free == 32 * MiB, (free, total)
with torch_uvm.disabled():
    plain = torch.empty(4 * MiB, device="emu")
assert torch_uvm.mem_get_info()[0] <= 16 * MiB
with raises(torch.OutOfMemoryError, "backed by the host"):
    torch_uvm.memory.empty(8 * MiB, device="emu")
""")

    @pytest.mark.parametrize("profile", ["gh200"])
    def test_coherent_memories_are_the_hosts_figures(self, on_profile: Run) -> None:
        on_profile("""
def in_kibibytes(name):
    return next(int(line.split()[1]) for line in open("/proc/meminfo") if line.startswith(name)) * 1024
free, total = torch.accelerator.get_memory_info()
assert total <= in_kibibytes("MemTotal:") and 0 < free <= total  # less in a control group
assert abs(free - _C.host_memory_available()) < 1 << 30
managed, _ = torch_uvm.mem_get_info()
assert abs(managed - free) < 1 << 30
assert _C.device_properties(0)["free_memory"] > 256 * MiB  # more than the emulated device has
""")

    @pytest.mark.parametrize("profile", PROFILES)
    def test_info_says_so(self, spawn: Spawn, profile: str) -> None:
        env = {"TORCH_UVM_DEVICE": "emu", "TORCH_UVM_CONF": f"emulated_profile:{profile}"}
        facts = json.loads(spawn(args=["-m", "torch_uvm", "info", "--json"], env=env).stdout)
        (device,) = facts["devices"]
        assert device["one_memory"] and device["integrated"] == (profile == "gb10")
        assert device["budget_bytes"] is None
        assert any("one memory with the host" in each["what"] for each in facts["off"])


@pytest.mark.parametrize("profile", PROFILES)
def test_the_owners_script(spawn: Spawn, profile: str) -> None:
    env = {"TORCH_UVM_DEVICE": "emu", "TORCH_UVM_CONF": f"emulated_profile:{profile},emulated_memory:1GiB"}
    done = spawn(args=[str(ROOT / "scripts" / "check_one_memory.py"), "--mebibytes", "16"], env=env)
    assert "EMULATED" in done.stdout and "FAILED" not in done.stdout
    assert done.stdout.count("ok  ") >= 6, done.stdout


def test_the_owners_script_elsewhere(spawn: Spawn) -> None:
    """On a machine with two memories it stops, and says why."""
    env = {"TORCH_UVM_DEVICE": "emu"}
    done = spawn(args=[str(ROOT / "scripts" / "check_one_memory.py")], env=env, check=False)
    assert done.returncode == 2 and "two memories" in done.stdout + done.stderr
