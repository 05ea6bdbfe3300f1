"""Saving, loading, pickling and copying tensors and modules of the emulated accelerator."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _spawn import Spawn

import torch_uvm

emu: Any = torch.get_device_module("emu")


@pytest.fixture(params=["plain", "managed"], autouse=True)
def memory(request: pytest.FixtureRequest) -> Iterator[bool]:
    with torch_uvm.enabled() if request.param == "managed" else torch_uvm.disabled():
        yield request.param == "managed"


def _saved(value: Any, **options: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    buffer.seek(0)
    return buffer


def _model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))


class TestSaveAndLoad:
    @pytest.mark.parametrize("saved", ["cpu", "emu"])
    @pytest.mark.parametrize(
        ("where", "loaded"),
        [
            (None, None),
            ("cpu", "cpu"),
            ("emu", "emu"),
            ("emu:0", "emu"),
            (torch.device("emu", 0), "emu"),
            ({"emu:0": "cpu"}, "cpu"),
            (lambda storage, location: storage, "cpu"),
        ],
    )
    def test_follows_map_location(self, saved: str, where: Any, loaded: str | None) -> None:
        x = torch.arange(6.0).view(2, 3).t().to(saved)
        y = torch.load(_saved(x), map_location=where)
        assert y.device.type == (loaded or saved) and y.stride() == x.stride()
        assert (
            torch.equal(y.cpu(), x.cpu()) and y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        )

    def test_keeps_the_device_by_default(self, memory: bool) -> None:
        y = torch.load(_saved(torch.ones(3, device="emu")))
        assert y.device == torch.device("emu", 0)
        assert torch_uvm.is_managed(y) == memory, "memory as the switch says"

    @pytest.mark.parametrize(
        "dtype",
        [torch.bool, torch.int64, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e4m3fn],
        ids=str,
    )
    def test_keeps_dtypes(self, dtype: torch.dtype) -> None:
        x = torch.tensor([0.0, 1.0, 1.0]).to("emu", dtype)
        y = torch.load(_saved(x))
        assert y.dtype == dtype and y.cpu().float().tolist() == [0, 1, 1]

    def test_keeps_shared_storages(self) -> None:
        x = torch.arange(10.0, device="emu")
        loaded = torch.load(_saved({"whole": x, "part": x[2:5], "matrix": x.view(2, 5).t()}))
        loaded["whole"].add_(100)
        assert loaded["part"].tolist() == [102, 103, 104]
        assert loaded["matrix"].tolist() == (x + 100).view(2, 5).t().tolist()

    def test_files_and_mmap(self, tmp_path: Path) -> None:
        path = tmp_path / "tensor.pt"
        torch.save(torch.arange(1000.0, device="emu"), path)
        assert torch.load(path).device.type == "emu"
        for where in ("cpu", "emu"):
            y = torch.load(path, mmap=True, map_location=where)
            assert y.sum() == 499500 and y.device.type == where

    def test_old_format(self) -> None:
        x = torch.arange(5.0, device="emu")
        y = torch.load(_saved([x, x[1:]], _use_new_zipfile_serialization=False))
        assert y[0].device == x.device and y[1].tolist() == [1, 2, 3, 4]

    def test_requires_grad_and_parameters(self) -> None:
        x = torch.ones(2, device="emu", requires_grad=True)
        p = torch.nn.Parameter(torch.zeros(2, device="emu"))
        y, q = torch.load(_saved([x, p]))
        assert y.requires_grad and y.is_leaf and isinstance(q, torch.nn.Parameter) and q.device == x.device

    def test_conjugate_views(self) -> None:
        x = torch.tensor([1 + 2j], device="emu").conj()
        y = torch.load(_saved(x))
        assert y.is_conj() and y.tolist() == [1 - 2j]

    def test_a_device_that_is_not_there_is_named(self) -> None:
        with pytest.raises(RuntimeError, match=r"(?i)emu.*7.*device_count\(\) is \d"):
            torch.load(_saved(torch.ones(1)), map_location="emu:7")

    def test_a_file_of_another_device_index(self, spawn: Spawn, tmp_path: Path) -> None:
        path = tmp_path / "there.pt"
        spawn(
            f"""
            import torch, torch_uvm
            torch.save(torch.arange(3.0, device="emu:1"), {str(path)!r})
            assert torch.load({str(path)!r}).device.index == 1
            assert torch.load({str(path)!r}, map_location="emu:0").device.index == 0
            """,
            env={"TORCH_UVM_CONF": "emulated_devices:2"},
        )
        with pytest.raises(RuntimeError, match="map_location"):
            torch.load(path)
        assert torch.load(path, map_location={"emu:1": "emu:0"}).tolist() == [0, 1, 2]

    def test_a_file_is_read_without_torch_uvm(self, spawn: Spawn, tmp_path: Path) -> None:
        path = tmp_path / "there.pt"
        torch.save({"weight": torch.arange(3.0, device="emu")}, path)
        spawn(
            f"""
            import torch
            loaded = torch.load({str(path)!r}, map_location="cpu")
            assert loaded["weight"].tolist() == [0, 1, 2] and loaded["weight"].is_cpu
            """
        )


class TestPickleAndCopy:
    def test_pickle(self) -> None:
        x = torch.arange(6.0, device="emu").view(2, 3)
        y = pickle.loads(pickle.dumps(x))
        assert y.device == x.device and torch.equal(y, x) and y.data_ptr() != x.data_ptr()

    def test_devices_streams_and_dtypes(self) -> None:
        device = torch.device("emu", 0)
        assert pickle.loads(pickle.dumps(device)) == device == copy.deepcopy(device)

    def test_copies_are_independent(self, memory: bool) -> None:
        x = torch.arange(6.0, device="emu")
        y = copy.deepcopy(x)
        x.zero_()
        assert y.tolist() == [0, 1, 2, 3, 4, 5] and y.device == x.device
        assert torch_uvm.is_managed(y) == memory
        assert copy.copy(x).data_ptr() == x.data_ptr()

    def test_copies_keep_shared_storages(self) -> None:
        x = torch.arange(6.0, device="emu")
        whole, part = copy.deepcopy([x, x[2:4]])
        whole.add_(10)
        assert part.tolist() == [12, 13] and x[0] == 0

    def test_copies_of_modules(self) -> None:
        model = _model().to("emu")
        twin = copy.deepcopy(model)
        with torch.no_grad():
            model[0].weight.zero_()
        assert twin[0].weight.device.type == "emu" and twin[0].weight.abs().sum() > 0
        pickled = pickle.loads(pickle.dumps(twin))
        x = torch.rand(5, 4, device="emu")
        assert torch.equal(pickled.eval()(x), twin.eval()(x))

    def test_storages(self) -> None:
        storage: Any = torch.arange(6, dtype=torch.uint8, device="emu").untyped_storage()
        for twin in (storage.clone(), copy.deepcopy(storage), torch.load(_saved(storage))):
            assert twin.device == storage.device and twin.cpu().tolist() == list(range(6))
            assert twin.data_ptr() != storage.data_ptr()


def _both_labels() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch_uvm.memory.empty(2, 3, device="emu").copy_(torch.arange(6.0).view(2, 3))
    return x, torch_uvm.to(x, "cpu")


class TestLabels:
    """Moved tensors: two labels of the same bytes are saved and copied as two storages."""

    @pytest.mark.parametrize("weights_only", [True, False])
    @pytest.mark.parametrize(
        ("where", "devices"),
        [
            (None, ["emu", "cpu"]),
            ("cpu", ["cpu", "cpu"]),
            ("emu", ["emu", "emu"]),
            ({"emu:0": "cpu"}, ["cpu", "cpu"]),
            (lambda storage, location: None, ["emu", "cpu"]),
        ],
    )
    def test_both_in_one_file_become_two_copies(
        self, where: Any, devices: list[str], weights_only: bool, memory: bool
    ) -> None:
        x, y = _both_labels()
        loaded = torch.load(_saved([x, y, x.t()]), map_location=where, weights_only=weights_only)
        assert [t.device.type for t in loaded[:2]] == devices
        assert all(torch.equal(t.cpu(), y) for t in loaded[:2])
        assert [torch_uvm.is_managed(t) for t in loaded[:2]] == [memory and d == "emu" for d in devices]
        loaded[0].add_(1)
        assert torch.equal(loaded[1].cpu(), y), "the other label has its own copy"
        assert torch.equal(loaded[2].cpu(), (y + 1).t()), "a view of the same label"
        assert x.tolist() == [[0, 1, 2], [3, 4, 5]]

    def test_mmap_and_the_old_format(self, tmp_path: Path) -> None:
        labels = _both_labels()
        torch.save(labels, tmp_path / "new.pt")
        torch.save(labels, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
        mapped = torch.load(tmp_path / "new.pt", mmap=True)
        old = torch.load(tmp_path / "old.pt")
        assert all(torch.equal(t.cpu(), labels[1]) for t in (*mapped, *old))

    def test_pickle_copy_and_deepcopy(self, memory: bool) -> None:
        labels = x, y = _both_labels()
        for twins in (pickle.loads(pickle.dumps(labels)), copy.deepcopy(labels)):
            here, there = twins
            assert torch_uvm.is_managed(here) == memory and not torch_uvm.is_managed(there)
            here.zero_()
            assert torch.equal(there, y) and x.sum() == 15
        again = copy.copy(y)
        assert again.data_ptr() == x.data_ptr() and torch_uvm.is_managed(again)

    def test_forms_of_the_cpus_label(self) -> None:
        _, y = _both_labels()
        parameter = torch.nn.Parameter(y)
        loaded = torch.load(_saved([y.t()[1:], y[:, ::2], y[0, 1], parameter, y.detach().requires_grad_()]))
        assert [t.stride() for t in loaded] == [(1, 3), (3, 2), (), (3, 1), (3, 1)]
        assert loaded[0].tolist() == [[1, 4], [2, 5]] and loaded[2].item() == 1
        assert isinstance(loaded[3], torch.nn.Parameter) and loaded[4].requires_grad

    def test_modules_moved_in_place(self, memory: bool) -> None:
        model = torch_uvm.to(_model(), "emu", managed=True)
        labels = {key: torch_uvm.to(value, "cpu") for key, value in model.state_dict().items()}
        addresses = [value.data_ptr() for value in labels.values()]
        other = {key: value + 1 for key, value in _model().state_dict().items()}
        model.load_state_dict(torch.load(_saved(other)))
        assert [value.data_ptr() for value in model.state_dict().values()] == addresses
        assert all(torch.equal(labels[key], other[key]) for key in other), "loaded in place"
        model.load_state_dict(torch.load(_saved(other), map_location="emu"), assign=True)
        assert all(value.data_ptr() not in addresses for value in model.state_dict().values())
        assert {torch_uvm.is_managed(value) for value in model.state_dict().values()} == {memory}

    @pytest.mark.parametrize("trained", ["emu", "cpu"])
    def test_optimizers_resume_with_state_beside_their_parameters(self, trained: str, memory: bool) -> None:
        def step(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
            optimizer.zero_grad()
            model(torch.arange(8.0).view(2, 4).to(trained)).square().sum().backward()
            optimizer.step()
            return [value.double().sum().item() for value in model.state_dict().values()]

        torch.manual_seed(0)
        model = torch_uvm.to(torch_uvm.to(_model(), "emu", managed=True), trained)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        step(model, optimizer)
        saved = _saved([model.state_dict(), optimizer.state_dict()])
        expected = step(model, optimizer)

        twin = torch_uvm.to(torch_uvm.to(_model(), "emu", managed=True), trained)
        resumed = torch.optim.Adam(twin.parameters(), lr=0.1)
        weights, state = torch.load(saved, map_location="cpu")
        twin.load_state_dict(weights)
        resumed.load_state_dict(state)
        moments = [resumed.state[parameter]["exp_avg"] for parameter in twin.parameters()]
        assert {moment.device.type for moment in moments} == {trained}
        # Storages show whether memory is managed: loaded state goes where the switch puts new memory.
        assert {torch_uvm.is_managed(moment) for moment in moments} == {memory and trained == "emu"}
        assert all(torch_uvm.is_managed(parameter) for parameter in twin.parameters())
        assert step(twin, resumed) == expected


class TestModules:
    def test_parameters_keep_their_identity(self) -> None:
        model = _model()
        before = list(model.parameters())
        values = [p.detach().clone() for p in before]
        for device in ("emu", "cpu", "emu"):
            model.to(device)
            assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
            assert {p.device.type for p in before} == {device}
        assert all(torch.equal(p.cpu(), v) for p, v in zip(before, values, strict=True))

    def test_ties_hold(self) -> None:
        embedding, head = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False)
        head.weight = embedding.weight
        model = torch.nn.ModuleList([embedding, head]).to("emu")
        assert head.weight is embedding.weight and len(list(model.parameters())) == 1
        head(embedding(torch.tensor([1, 2], device="emu"))).sum().backward()
        assert embedding.weight.grad is head.weight.grad is not None

    def test_optimizers_made_before_a_move_go_on(self) -> None:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model.to("emu")
        before = model.weight.detach().clone()
        model(torch.ones(1, 2, device="emu")).sum().backward()
        optimizer.step()
        assert torch.equal(model.weight, before - 0.5)

    def test_gradients_go_along(self) -> None:
        model = torch.nn.Linear(2, 1)
        model(torch.ones(1, 2)).sum().backward()
        gradient = model.weight.grad
        model.to("emu")
        assert model.weight.grad is not None and model.weight.grad.device.type == "emu"
        assert model.weight.grad.tolist() == [[1, 1]] and gradient is not None

    def test_state_dicts_cross_devices(self) -> None:
        here, there = _model(), _model().to("emu")
        with torch.no_grad():
            there[0].weight.fill_(3)
        here.load_state_dict(there.state_dict())
        assert here[0].weight.is_cpu and here[0].weight.eq(3).all()
        there.load_state_dict({key: value + 1 for key, value in here.state_dict().items()})
        assert there[0].weight.device.type == "emu" and there[0].weight.eq(4).all()

    def test_state_dict_is_a_view_and_cpu_a_copy(self) -> None:
        """Keeping the best weights of a run: a copy must not change with further training."""
        model = _model().to("emu")
        state = model.state_dict()
        best = {key: value.cpu() for key, value in state.items()}
        assert state["0.weight"].data_ptr() == model[0].weight.data_ptr()
        with torch.no_grad():
            model[0].weight.zero_()
        assert best["0.weight"].abs().sum() > 0 and state["0.weight"].abs().sum() == 0

    def test_checkpoints_resume_exactly(self) -> None:
        def steps(
            model: torch.nn.Module, optimizer: torch.optim.Optimizer, count: int, device: str
        ) -> list[float]:
            losses = []
            for step in range(count):
                x = torch.arange(20.0).view(5, 4).add(step).div(10).to(device)
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            return losses

        model = _model().to("emu")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        steps(model, optimizer, 3, "emu")
        saved = _saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        expected = steps(model, optimizer, 3, "emu")
        for device in ("emu", "cpu"):
            saved.seek(0)
            loaded = torch.load(saved, map_location=device)
            twin = _model().to(device)
            other = torch.optim.AdamW(twin.parameters(), lr=0.1)
            twin.load_state_dict(loaded["model"])
            other.load_state_dict(loaded["optimizer"])
            # The emulated accelerator uses the CPU's kernels, but a GPU rounds differently.
            exact = device == "emu" or torch_uvm._C.backend() == "emulated"
            assert steps(twin, other, 3, device) == (expected if exact else pytest.approx(expected, rel=1e-3))

    def test_meta_modules_are_filled_on_the_device(self) -> None:
        with torch.device("meta"):
            model = torch.nn.Linear(3, 2)
        model.to_empty(device="emu").load_state_dict(torch.nn.Linear(3, 2).state_dict())
        assert model.weight.device.type == "emu"
        with pytest.raises(NotImplementedError, match="meta"):
            torch.nn.Linear(3, 2, device="meta").to("emu")

    def test_dtype_and_device_change_together(self) -> None:
        model = _model().to("emu", torch.bfloat16)
        assert model[0].weight.dtype == torch.bfloat16 and model[0].weight.device.type == "emu"
        assert model[1].num_batches_tracked.dtype == torch.int64


class TestData:
    def test_default_collate_stacks_on_the_device(self) -> None:
        batch = torch.utils.data.default_collate([torch.ones(2, device="emu"), torch.zeros(2, device="emu")])
        assert batch.device.type == "emu" and batch.tolist() == [[1, 1], [0, 0]]

    def test_tensor_datasets_on_the_device(self) -> None:
        data = torch.utils.data.TensorDataset(torch.arange(10.0, device="emu"))
        seen = [x for (batch,) in torch.utils.data.DataLoader(data, batch_size=3) for x in batch.tolist()]
        assert seen == list(range(10))

    def test_random_split_and_subset(self) -> None:
        data: Any = torch.arange(10, device="emu")
        parts: Any = torch.utils.data.random_split(data, [7, 3])
        values = [int(x) for part in parts for x in part]
        assert sorted(values) == list(range(10))
