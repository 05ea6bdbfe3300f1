"""Adopted tensors: files mapped into memory that are managed where they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from _one_memory import PROFILES, run_on_profile  # noqa: F401  (the fixture `on_profile`)
from _spawn import Run

SAVED = """
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(16)))  # 64 MiB
weights = {name: value.clone() for name, value in model.state_dict().items()}
torch.save(weights, "weights.pt")
total, batch = sum(value.nbytes for value in weights.values()), torch.randn(4, 1024)
expected = model(batch)
del model
gc.collect()

def empty_model():
    with torch.device("meta"):
        return torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(16)))
"""


@pytest.mark.parametrize("profile", PROFILES)
class TestAdoption:
    def test_a_state_dict_is_not_held_twice(self, on_profile: Run) -> None:
        on_profile(
            SAVED
            + """
del weights
gc.collect()
torch_uvm.enable()
torch.ones(8, device="emu").sum().item()  # what first use costs is not the model's
before, reserved = anonymous(), managed_bytes()
loaded = empty_model()
loaded.load_state_dict(torch.load("weights.pt", mmap=True), assign=True)
addresses = [each.data_ptr() for each in loaded.parameters()]
torch_uvm.to(loaded, "emu")
assert [each.data_ptr() for each in loaded.parameters()] == addresses
assert all(each.device.type == "emu" and torch_uvm.is_managed(each) for each in loaded.parameters())
assert managed_bytes() == reserved, "adopted bytes are no allocation"
with torch.no_grad():
    result = loaded(batch.to("emu"))
assert torch.equal(result.cpu(), expected)
assert anonymous() - before < total / 4, (anonymous() - before, total)
assert "bytes_copied_to_device" not in moved() or moved()["bytes_copied_to_device"] <= batch.nbytes

# a copy holds them twice, which shows that the figure above could be another
copied = empty_model()
copied.load_state_dict(torch.load("weights.pt", mmap=True), assign=True)
before = anonymous()
torch_uvm.to(copied, "emu", copy=True)
assert anonymous() - before > total * 3 / 4, (anonymous() - before, total)
"""
        )

    def test_training_writes_copies_of_pages_and_not_the_file(self, on_profile: Run) -> None:
        on_profile(
            SAVED
            + """
torch_uvm.enable()
loaded = empty_model()
loaded.load_state_dict(torch.load("weights.pt", mmap=True), assign=True)
torch_uvm.to(loaded, "emu")
optimizer = torch.optim.SGD(loaded.parameters(), lr=0.1)
loaded(batch.to("emu")).square().mean().backward()
optimizer.step()
name, trained = next(iter(loaded.state_dict().items()))
assert trained.device.type == "emu" and not torch.equal(trained.cpu(), weights[name])
again = torch.load("weights.pt", mmap=True)
assert all(torch.equal(again[key], weights[key]) for key in weights)
del loaded, optimizer, trained
gc.collect()
"""
        )

    def test_safetensors_and_the_managed_keyword(self, on_profile: Run) -> None:
        pytest.importorskip("safetensors")
        on_profile("""
import safetensors.torch
weights = {"a": torch.randn(512, 512), "b": torch.randn(300)}
safetensors.torch.save_file(weights, "weights.safetensors")
loaded = safetensors.torch.load_file("weights.safetensors")
for name, value in weights.items():
    moved_one = loaded[name].to("emu", managed=True)  # the switch is off
    assert moved_one.data_ptr() == loaded[name].data_ptr() and torch_uvm.is_managed(loaded[name])
    assert torch.equal(moved_one.cpu(), value) and moved_one.device.type == "emu"
    assert torch_uvm.residency(moved_one) and torch_uvm.emulated.residency(moved_one) == {
        torch.device("cpu"): value.nbytes
    }
assert managed_bytes() == (0, 0, 0)
""")

    def test_a_model_of_transformers(self, on_profile: Run) -> None:
        pytest.importorskip("transformers")
        on_profile("""
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
size = dict(n_layer=2, n_embd=64, n_head=2, vocab_size=100, bos_token_id=1, eos_token_id=2)
GPT2LMHeadModel(GPT2Config(**size)).save_pretrained("model")
model = AutoModelForCausalLM.from_pretrained("model").eval()
tokens = torch.arange(5)[None]
with torch.no_grad():
    expected = model(tokens).logits
    torch_uvm.enable()
    addresses = [each.data_ptr() for each in model.parameters()]
    torch_uvm.to(model, "emu")
    assert [each.data_ptr() for each in model.parameters()] == addresses
    assert managed_bytes()[0] == sum(each.nbytes for each in model.buffers())
    assert torch.equal(model(tokens.to("emu")).logits.cpu(), expected)
""")

    def test_both_labels_share_the_bytes(self, on_profile: Run) -> None:
        on_profile("""
torch.save(torch.arange(4096.0), "one.pt")
x = torch.load("one.pt", mmap=True)
y = torch_uvm.to(x, "emu", managed=True)
assert y._base is x and y._version == x._version
before = x._version
y.add_(1)
assert x.tolist() == torch.arange(1.0, 4097).tolist() and x._version == y._version == before + 1
back = torch_uvm.to(y, "cpu")
assert back.data_ptr() == x.data_ptr()
w = torch.load("one.pt", mmap=True).requires_grad_()
(torch_uvm.to(w, "emu", managed=True) * 2).sum().backward()
assert w.grad.tolist() == [2.0] * 4096
torch_uvm.prefetch(y)
torch_uvm.advise(y, read_mostly=True)
assert x.tolist() == torch.arange(1.0, 4097).tolist()
with raises(RuntimeError, "resize"):
    y.resize_(1 << 20)
""")

    def test_the_mapping_outlives_queued_work(self, on_profile: Run, profile: str) -> None:
        """A seeded schedule delays copies out of the mapping; its release waits for them."""
        conf = f"emulated_profile:{profile},emulated_schedule_seed:3"
        on_profile(
            """
torch.save(torch.arange(float(MiB)), "one.pt")
targets = [torch_uvm.memory.empty(MiB, device="emu") for _ in range(16)]
delayed = 0
for target in targets:
    x = torch.load("one.pt", mmap=True)
    y = torch_uvm.to(x, "emu", managed=True)
    target.copy_(x, non_blocking=True)
    delayed += _C.emu_pending_operations() > 0
    del x, y
    assert _C.emu_pending_operations() == 0
assert delayed > 4
assert all(torch.equal(target.cpu(), torch.arange(float(MiB))) for target in targets)
""",
            env={"TORCH_UVM_DEVICE": "emu", "TORCH_UVM_CONF": conf},
        )

    def test_what_is_copied_instead(self, on_profile: Run) -> None:
        on_profile("""
torch.save(torch.arange(4096.0), "one.pt")
def mapped(): return torch.load("one.pt", mmap=True)
def copied(x, **how):
    y = torch_uvm.to(x, "emu", managed=True, **how)
    assert y.data_ptr() != x.data_ptr() and torch_uvm.is_managed(y), how
    assert torch.equal(y.cpu(), x.to(y.dtype)) and not torch_uvm.is_managed(x)
copied(torch.arange(4096.0))  # memory of the heap
copied(mapped(), copy=True)
copied(mapped(), dtype=torch.float64)
open("bytes", "wb").write(bytes(1 << 16))
copied(torch.from_file("bytes", shared=True, size=1 << 14))  # writes would reach the file
storage = torch.UntypedStorage.from_file("bytes", False, 1 << 16)[1 : 1 + (1 << 14)]
copied(torch.tensor([], dtype=torch.float32).set_(storage, 0, (1 << 12,)))  # not aligned to its elements
y = mapped().to("emu")  # a plain call, and the switch is off
assert not torch_uvm.is_managed(y)
torch_uvm.enable()
x = mapped()
y = x.to("emu")  # a plain call copies
assert torch_uvm.is_managed(y) and y.data_ptr() != x.data_ptr() and not torch_uvm.is_managed(x)
""")

    def test_managed_memory_of_dlpack_is_refused(self, on_profile: Run) -> None:
        on_profile("""
torch.save(torch.arange(4096.0), "one.pt")
y = torch_uvm.to(torch.load("one.pt", mmap=True), "cpu", managed=True)
assert torch_uvm.is_managed(y)
with raises(BufferError, "file's mapping"):
    y.__dlpack__(dl_device=(13, 0))
assert y.numpy()[5] == 5
""")

    def test_a_forked_child_reads_and_frees_its_own_mapping(self, on_profile: Run) -> None:
        on_profile("""
torch.save(torch.arange(4096.0), "one.pt")
x = torch.load("one.pt", mmap=True)
y = torch_uvm.to(x, "emu", managed=True)
child = os.fork()
if child == 0:
    right = x.sum().item() == 4095 * 2048
    del x, y
    gc.collect()
    os._exit(0 if right else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert y.sum().item() == 4095 * 2048
""")


@pytest.mark.parametrize("profile", ["h200"])
def test_separate_memories_adopt_nothing(on_profile: Run) -> None:
    on_profile("""
torch.save(torch.arange(4096.0), "one.pt")
x = torch.load("one.pt", mmap=True)
y = torch_uvm.to(x, "emu", managed=True)
assert y.data_ptr() != x.data_ptr() and not torch_uvm.is_managed(x)
""")


def test_this_machines_torch_maps_files_privately(tmp_path: Path) -> None:
    """What adoption relies on: torch.load(mmap=True) makes storages that cannot grow."""
    torch.save(torch.arange(8.0), tmp_path / "one.pt")
    assert not torch.load(tmp_path / "one.pt", mmap=True).untyped_storage().resizable()
