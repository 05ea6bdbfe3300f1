"""Moves in and around compiled regions: the graph breaks where a move changes a label; results equal
eager."""

# torch has no stub for `managed=`.
# mypy: disable-error-code="call-overload, no-any-return"

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from _managed_tensors import managed
from _spawn import Spawn
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed, Unsupported
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import torch_uvm

BACKENDS = ["eager", "aot_eager"]


@pytest.mark.parametrize("make", [False, True], ids=["input", "made inside"])
def test_inductor_says_what_is_accepted_on_emu(make: bool) -> None:
    """Inductor has code generators for other devices only."""

    def double(x: torch.Tensor) -> torch.Tensor:
        return (torch.ones(4, device="emu") if make else x) * 2

    x = torch.ones(4, device="cpu" if make else "emu")
    with pytest.raises(BackendCompilerFailed, match="emulated accelerator 'emu'.*aot_eager"):
        torch.compile(double)(x)
    for backend in BACKENDS:
        assert torch.compile(double, backend=backend)(x).tolist() == [2.0] * 4


@pytest.fixture(autouse=True)
def forget_compiled_code() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def by_name(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    y = torch_uvm.to(x, "cpu")
    y.mul_(3)
    x.sub_(1)
    return y


def by_keyword(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    y = x.to("cpu", managed=True)
    y.mul_(3)
    x.sub_(1)
    return y


def there_and_back(x: torch.Tensor) -> torch.Tensor:
    y = torch_uvm.to(torch_uvm.to(x, "cpu").add_(1), "emu")
    return y.mul_(2)


def to_ordinary(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    y = x.to("cpu", managed=False)
    y.mul_(3)
    x.sub_(1)
    return y


def plain(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    y = x.to("cpu")
    y.mul_(3)
    x.sub_(1)
    return y


def a_copy(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    y = x.to("cpu", managed=True, copy=True)
    y.mul_(3)
    x.sub_(1)
    return y


def asks(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if torch_uvm.is_managed(x) else x - 1


@pytest.mark.parametrize("backend", BACKENDS)
class TestInsideARegion:
    @pytest.mark.parametrize(
        ("function", "graphs", "breaks", "shares"),
        [
            (by_name, 1, 1, True),
            (by_keyword, 1, 1, True),
            (there_and_back, 2, 2, True),
            (to_ordinary, 2, 1, False),
            (plain, 1, 0, False),
            (a_copy, 1, 0, False),
            (asks, 1, 1, False),
        ],
    )
    def test_equals_eager(
        self,
        backend: str,
        function: Callable[[torch.Tensor], torch.Tensor],
        graphs: int,
        breaks: int,
        shares: bool,
    ) -> None:
        """Graphs with two labels of the same bytes are neither passed to the backend nor counted."""
        counters["graph_break"].clear()
        counter = CompileCounterWithBackend(backend)
        compiled = torch.compile(function, backend=counter)
        for _ in range(2):  # the second call uses the cache
            ours, expected = managed(8), managed(8)
            result, right = compiled(ours), function(expected)
            assert result.device == right.device
            assert torch.equal(result.cpu(), right.cpu())
            assert torch.equal(ours.cpu(), expected.cpu())
            assert (
                (result.data_ptr() == ours.data_ptr()) == shares == (right.data_ptr() == expected.data_ptr())
            )
            assert counter.frame_count == graphs
            assert counters["graph_break"].total() == breaks

    @pytest.mark.parametrize("function", [by_name, by_keyword, there_and_back, to_ordinary])
    def test_moves_in_one_full_graph_are_refused(
        self, backend: str, function: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        with pytest.raises(Unsupported, match=r"managed_copy"):
            torch.compile(function, backend=backend, fullgraph=True)(managed(8))

    @pytest.mark.parametrize("function", [plain, a_copy])
    def test_copies_in_one_full_graph(
        self, backend: str, function: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        x, twin = managed(8), managed(8)
        y = torch.compile(function, backend=backend, fullgraph=True)(x)
        assert torch.equal(y, function(twin)) and torch.equal(x, twin)

    def test_a_copy_is_managed(self, backend: str) -> None:
        for function in (
            lambda x: x.sin().to("cpu", managed=True, copy=True),
            lambda x: torch.ops.torch_uvm.managed_copy(
                x.sin(), torch.device("cpu"), torch.float32, False, torch.preserve_format
            ),
        ):
            y = torch.compile(function, backend=backend, fullgraph=True)(managed(8))
            assert torch_uvm.is_managed(y)
            assert torch.equal(y, managed(8).sin().cpu())

    def test_a_module_that_is_moved(self, backend: str) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(0)
                self.layer = nn.Linear(4, 4)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                torch_uvm.to(self.layer, x.device)
                y: torch.Tensor = self.layer(x * 2)
                return y

        model, twin = (torch_uvm.to(Model(), "emu", managed=True) for _ in range(2))
        compiled = torch.compile(model, backend=backend)
        address = model.layer.weight.data_ptr()
        for device in ("cpu", "emu", "cpu"):
            x = torch.ones(2, 4, device=device)
            assert torch.equal(compiled(x), twin(x))
            assert model.layer.weight.device == x.device
            assert model.layer.weight.data_ptr() == address

    def test_training_equals_eager(self, backend: str) -> None:
        """Equal to the last bit. Two layers on two devices, with moves in both directions."""

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(0)
                self.there = torch_uvm.to(nn.Linear(8, 8), "emu", managed=True)
                self.here = nn.Linear(8, 1)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = torch_uvm.to(self.there(torch_uvm.to(x, "emu")).relu(), "cpu")
                z: torch.Tensor = self.here(y.sin())
                return z

        def train(compile_it: bool) -> list[torch.Tensor]:
            model = Model()
            run = torch.compile(model, backend=backend) if compile_it else model
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            torch.manual_seed(1)
            losses = []
            with torch_uvm.enabled():
                for _ in range(5):
                    x = torch.rand(16, 8).to("cpu", managed=True)
                    loss = run(x).square().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.detach())
            return [*losses, *(p.detach().cpu() for p in model.parameters())]

        assert all(torch.equal(a, b) for a, b in zip(train(True), train(False), strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
class TestInputs:
    @pytest.mark.parametrize("detached", [False, True])
    def test_both_labels_read(self, backend: str, detached: bool) -> None:
        x = managed(8)
        y = torch_uvm.to(x, "cpu")
        y = y.detach() if detached else y
        function = torch.compile(lambda x, y: (x * 2, y + 1), backend=backend)
        for _ in range(2):
            doubled, more = function(x, y)
            assert (doubled.device, more.device) == (x.device, y.device)
            assert torch.equal(doubled.cpu(), x.cpu() * 2) and torch.equal(more, x.cpu() + 1)
            y.add_(1)

    @pytest.mark.parametrize("detached", [False, True])
    @pytest.mark.parametrize("apart_first", [False, True])
    def test_one_label_written_and_the_other_read(
        self, backend: str, detached: bool, apart_first: bool
    ) -> None:
        """Also in code that was compiled for tensors that do not share bytes."""

        def write_and_read(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            return y * 2

        compiled = torch.compile(write_and_read, backend=backend)
        if apart_first:
            assert torch.equal(compiled(managed(8), torch.ones(8)), torch.full((8,), 2.0))
        for _ in range(2):
            x = managed(8)
            y = torch_uvm.to(x, "cpu")
            y = y.detach() if detached else y
            expected = 2 * (x.cpu() + 1)
            result = compiled(x, y)
            assert result.device == y.device
            assert torch.equal(result, expected)
        assert torch.equal(compiled(managed(8), torch.ones(8)), torch.full((8,), 2.0))

    def test_both_labels_written_under_autograd(self, backend: str) -> None:
        def function(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            x.mul_(2)
            y.add_(1)
            return (x.cpu() * y * w).sum()

        gradients = []
        for run in (function, torch.compile(function, backend=backend)):
            x, w = managed(8), torch.ones(8, requires_grad=True)
            run(x, torch_uvm.to(x, "cpu").detach(), w).backward()
            gradients.append(w.grad)
        assert gradients[0] is not None and torch.equal(gradients[0], (2.0 * managed(8).cpu() + 1) ** 2)
        assert gradients[1] is not None and torch.equal(gradients[0], gradients[1])

    def test_weights_moved_between_calls(self, backend: str) -> None:
        layer = torch_uvm.to(nn.Linear(4, 4), "emu", managed=True)
        counter = CompileCounterWithBackend(backend)
        compiled = torch.compile(layer, backend=counter)
        for device, graphs in (("emu", 1), ("cpu", 2), ("emu", 2)):
            torch_uvm.to(layer, device)
            x = torch.ones(2, 4, device=device)
            assert torch.equal(compiled(x), layer(x))
            assert counter.frame_count == graphs

    def test_plain_calls_that_move(self, backend: str) -> None:
        torch_uvm.enable(moves="alias")
        try:

            def function(x: torch.Tensor) -> torch.Tensor:
                y = x.cpu()
                y.mul_(3)
                return x.add_(1).to("cpu")

            x = managed(8)
            y = torch.compile(function, backend=backend)(x)
            assert y.data_ptr() == x.data_ptr()
            assert y.tolist() == [3.0 * i + 1 for i in range(1, 9)]
            torch.compiler.reset()
            with pytest.raises(Unsupported, match="managed_copy"):
                torch.compile(function, backend=backend, fullgraph=True)(x)
        finally:
            torch_uvm.enable(moves="copy")
            torch_uvm.disable()

    def test_a_changed_meaning_of_plain_calls_recompiles(self, backend: str) -> None:
        """enable(moves=) invalidates code that was compiled for the previous setting."""
        function = torch.compile(lambda x: x.cpu(), backend=backend)
        try:
            x = managed(8)
            for moves in ("copy", "alias", "copy"):
                torch_uvm.enable(moves=moves)
                assert (function(x).data_ptr() == x.data_ptr()) == (moves == "alias")
        finally:
            torch_uvm.enable(moves="copy")
            torch_uvm.disable()


def test_nothing_imports_the_compiler(spawn: Spawn) -> None:
    spawn(
        """
        import sys, torch, torch_uvm
        x = torch_uvm.to(torch_uvm.memory.zeros(3), "cpu")
        x.to("emu", managed=True, copy=True)
        assert torch_uvm.is_managed(x)
        assert "torch._dynamo" not in sys.modules
        """
    )


def test_compiler_that_was_imported_before(spawn: Spawn) -> None:
    spawn(
        """
        import torch, torch._dynamo
        import torch_uvm

        def write_and_read(x, y):
            x.add_(1)
            return y * 2

        x = torch_uvm.memory.zeros(3)
        result = torch.compile(write_and_read, backend="aot_eager")(x, torch_uvm.to(x, "cpu").detach())
        assert result.tolist() == [2.0] * 3
        """
    )
