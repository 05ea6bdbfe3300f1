"""The residency engine on a GPU: results under a hard budget are those without one, to the last bit, and the
device never has more, by the driver's own figures.

Programs here are small, of some tens of MiB: budgets are shares of what they use.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

# Read when cuBLAS starts; in another process of the suite it may have: then only this file's own cases pay.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from _cuda import MIB, runtime
from _spawn import Spawn
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_uvm
from torch_uvm import _C

Program = Callable[[], list[torch.Tensor]]


@pytest.fixture(autouse=True)
def to_the_last_bit() -> Iterator[None]:
    """Two plain runs are equal then; afterwards there is no budget."""
    if not torch.cuda.is_available():
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        gc.collect()
        torch.cuda.synchronize()
        _C.request_budget(None, None)
        torch_uvm.empty_cache()


class Run(NamedTuple):
    results: list[torch.Tensor]
    figures: dict[str, Any]
    used: int  # bytes of managed memory at most
    reserved: int


def run(program: Program, budget: int | str | None) -> Run:
    gc.collect()
    torch.cuda.synchronize()
    torch_uvm.empty_cache()
    torch_uvm.reset_peak_memory_stats()
    torch_uvm.enable(budget=budget)
    torch_uvm.reset_residency_stats()
    torch.manual_seed(0)
    try:
        results = [result.detach().cpu() for result in program()]
        figures = torch_uvm.residency_stats()
        assert _C.check_residency() is None
        return Run(results, figures, torch_uvm.max_memory_allocated(0), torch_uvm.max_memory_reserved(0))
    finally:
        torch_uvm.disable()


def check(program: Program, share: float = 0.6) -> Run:
    """Runs the program in a `share` of what it uses."""
    plain = run(program, None)
    budget = int(plain.used * share)
    assert budget >= 8 * MIB, "too small: it would not be moved"
    bounded = run(program, budget)
    assert len(bounded.results) == len(plain.results) > 0
    for number, (result, wanted) in enumerate(zip(bounded.results, plain.results, strict=True)):
        assert torch.equal(result, wanted), number
    assert bounded.figures["written_back"]["bytes"] > 0 and bounded.figures["failures"] == 0
    if bounded.figures["over_budget"] == 0:
        assert bounded.reserved <= budget
    return bounded


# --- programs


def mlp(width: int = 1024, layers: int = 6) -> nn.Module:
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*parts, nn.Linear(width, 16))


class Transformer(nn.Module):
    def __init__(self, checkpointed: bool = False, width: int = 256, layers: int = 4) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embedding = nn.Embedding(1024, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 1024)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            if self.checkpointed:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


def vectors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(512, 1024), torch.randint(0, 16, (512,))


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.randint(0, 1024, (16, 65))
    return words[:, :-1], words[:, 1:]


def training(
    make_model: Callable[[], nn.Module],
    make_batch: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    dtype: torch.dtype = torch.float32,
    steps: int = 5,
    **options: Any,
) -> Program:
    def program() -> list[torch.Tensor]:
        model = make_model().to("cuda", dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
        losses = []
        for _ in range(steps):
            inputs, target = make_batch()
            inputs = inputs.to("cuda", dtype if inputs.is_floating_point() else None)
            logits = model(inputs)
            loss = F.cross_entropy(logits.flatten(0, -2).float(), target.to("cuda").flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [*losses, *model.state_dict().values()]

    return program


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


class TestTraining:
    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_mlp(self, optimizer: str) -> None:
        check(training(mlp, vectors, **OPTIMIZERS[optimizer]))

    def test_mlp_in_a_third(self) -> None:
        check(training(mlp, vectors, steps=8, foreach=True), share=0.35)

    def test_mlp_in_bfloat16(self) -> None:
        check(training(mlp, vectors, dtype=torch.bfloat16, fused=True))

    @pytest.mark.parametrize("checkpointed", [False, True])
    def test_transformer(self, checkpointed: bool) -> None:
        check(training(lambda: Transformer(checkpointed), tokens, fused=True))

    def test_steps_that_repeat_come_as_planned(self) -> None:
        figures = check(training(mlp, vectors, steps=12, foreach=True)).figures
        assert figures["plan_hits"] > figures["plan_misses"]


def churn(kept: list[torch.Tensor]) -> None:
    """Takes and uses more than any budget of this file, so that what may leave the device has to."""
    for each in kept:
        each.add_(1)


def copy(target: int, source: int, count: int) -> None:
    """By CUDA itself, which nobody announces; it is done on return."""
    default = 4  # cudaMemcpyDefault
    status = runtime().cudaMemcpy(
        ctypes.c_void_p(target), ctypes.c_void_p(source), ctypes.c_size_t(count), default
    )
    assert status == 0, status


class TestAddresses:
    """Bytes are where their address says, whoever asks for it."""

    @pytest.fixture
    def pressure(self) -> Iterator[list[torch.Tensor]]:
        torch_uvm.enable(budget=24 * MIB)
        yield [torch.zeros(MIB, device="cuda") for _ in range(10)]  # 40 MiB

    def test_numpy_on_a_cpu_label(self, pressure: list[torch.Tensor]) -> None:
        table = torch.arange(float(MIB), device="cuda")
        array = torch_uvm.to(table, "cpu").numpy()
        for turn in range(1, 4):
            churn(pressure)
            array[:] += 1
            assert torch.equal(table, torch.arange(float(MIB), device="cuda") + 2 * turn - 1)
            churn(pressure)
            table += 1
            torch.cuda.synchronize()
            assert array[5] == 5 + 2 * turn

    def test_dlpack(self, pressure: list[torch.Tensor]) -> None:
        table = torch.arange(float(MIB), device="cuda")
        other = torch.utils.dlpack.from_dlpack(table)
        for turn in range(1, 4):
            churn(pressure)
            other += 1
            churn(pressure)
            assert torch.equal(table, torch.arange(float(MIB), device="cuda") + turn)
        assert other.data_ptr() == table.data_ptr()

    def test_a_bare_address(self, pressure: list[torch.Tensor]) -> None:
        source, target = torch.arange(float(MIB), device="cuda"), torch.zeros(MIB, device="cuda")
        for turn in range(1, 4):
            churn(pressure)
            source += 1
            torch.cuda.synchronize()
            copy(target.data_ptr(), source.data_ptr(), source.nbytes)
            churn(pressure)
            assert torch.equal(target, torch.arange(float(MIB), device="cuda") + turn)

    def test_what_is_kept_resident_stays(self, pressure: list[torch.Tensor]) -> None:
        table = torch.ones(MIB, device="cuda")
        with torch_uvm.resident(table):
            address = table.data_ptr()
            churn(pressure)
            assert table.data_ptr() == address
            assert torch_uvm.residency(table) == {torch.device("cuda:0"): table.nbytes}
        assert table.sum().item() == MIB


class TestGraphs:
    @pytest.fixture(autouse=True)
    def budget(self) -> None:
        torch_uvm.enable(budget=32 * MIB)

    def test_operands_stay_while_the_graph_lives(self) -> None:
        kept = [torch.zeros(MIB, device="cuda") for _ in range(10)]
        x = torch.ones(MIB, device="cuda")
        weight = torch.full((MIB,), 3.0, device="cuda")
        (x * weight).sum()  # as one warms up
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x * weight
            weight += 1
        address = weight.data_ptr()
        for turn in range(4):
            churn(kept)
            x.fill_(turn + 2.0)
            graph.replay()
            assert y[-1].item() == (turn + 2) * (3 + turn)
            assert weight.data_ptr() == address
        del graph, y
        gc.collect()
        torch.cuda.synchronize()
        before = torch_uvm.residency_stats()["written_back"]["bytes"]
        churn(kept)
        churn(kept)
        assert torch_uvm.residency_stats()["written_back"]["bytes"] > before
        assert torch.device("cpu") in torch_uvm.residency(weight), "nobody holds it any more"
        assert weight[7].item() == 7, "the graph's writes are there"

    def test_captured_before_there_is_a_budget(self) -> None:
        torch_uvm.set_budget(None)
        x = torch.ones(MIB, device="cuda")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x + 1
        torch_uvm.set_budget(32 * MIB)
        kept = [torch.zeros(MIB, device="cuda") for _ in range(12)]
        for turn in range(3):
            churn(kept)
            x.fill_(float(turn))
            graph.replay()
            assert y[5].item() == turn + 1


COMPILED = """
import sys
import torch, torch_uvm
from torch import nn
from torch._inductor import config

config.compile_threads = 1
config.fallback_random = True
MIB = 1 << 20
torch.use_deterministic_algorithms(True)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 64, 3, padding=1)
        self.norm = nn.BatchNorm2d(64)
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(6))

    def forward(self, x):
        x = self.norm(self.first(x)).relu().mean(1).flatten(1)
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x)) + x
        return x.square().mean()


def train(mode, budget, compile_optimizer):
    torch._dynamo.reset()
    torch_uvm.enable(budget=budget)
    torch_uvm.reset_residency_stats()
    torch.manual_seed(0)
    model = Network().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    compiled = torch.compile(model, mode=mode)
    update = torch.compile(optimizer.step) if compile_optimizer else optimizer.step
    losses = []
    for step in range(8):
        torch.compiler.cudagraph_mark_step_begin()
        x = torch.randn(32, 3, 32, 32).cuda()
        loss = compiled(x)
        loss.backward()
        update()
        optimizer.zero_grad()
        losses.append(loss.item())
        pressure = [torch.ones(MIB, device="cuda") for _ in range(6)]
    state = [value.detach().cpu().clone() for value in model.state_dict().values()]
    state += [each["exp_avg"].cpu().clone() for each in optimizer.state.values()]
    figures = torch_uvm.residency_stats()
    del model, compiled, optimizer, update, loss, pressure
    torch._dynamo.reset()
    torch.cuda.synchronize()
    return losses, state, figures


def check(mode, compile_optimizer, budget):
    first = train(mode, None, compile_optimizer)
    second = train(mode, None, compile_optimizer)
    found = train(mode, budget, compile_optimizer)
    figures = found[2]
    assert figures["written_back"]["bytes"] > 0, figures
    assert figures["failures"] == 0, figures
    assert torch_uvm._C.check_residency() is None
    same = first[0] == second[0] and all(map(torch.equal, first[1], second[1]))
    if same:
        assert found[0] == first[0], (found[0], first[0])
        for number, (one, other) in enumerate(zip(found[1], first[1])):
            assert torch.equal(one, other), number
    else:  # the kernels themselves are not deterministic
        torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(first[0]), rtol=1e-4, atol=1e-5)
"""


class TestCompiled:
    """Inductor's kernels are launched without an operator."""

    @pytest.fixture
    def compiling(self, spawn: Spawn) -> Callable[[str], None]:
        pytest.importorskip("triton")

        def compile_and_run(code: str) -> None:
            spawn(COMPILED + code, timeout=170)

        return compile_and_run

    @pytest.mark.timeout(180)
    def test_training(self, compiling: Callable[[str], None]) -> None:
        """Parameters, gradients and moments are 96 MiB; a region of it takes some 60 at once."""
        compiling("check('default', False, 80 * MIB)")

    @pytest.mark.timeout(180)
    def test_training_with_a_compiled_optimizer(self, compiling: Callable[[str], None]) -> None:
        """Its one region takes all: part of it is used on the host."""
        compiling("check('default', True, 72 * MIB)")

    @pytest.mark.timeout(180)
    def test_training_with_captured_graphs(self, compiling: Callable[[str], None]) -> None:
        compiling("check('reduce-overhead', False, 88 * MIB)")


class TestAutomatic:
    def test_sleeps_until_memory_is_short(self, spawn: Spawn) -> None:
        """The limit stands for the device, which is larger than a test may fill."""
        spawn(
            """
            import torch, torch_uvm
            MIB = 1 << 20
            torch_uvm.set_limit(256 * MIB)
            torch_uvm.enable(budget="auto")
            kept = []
            for number in range(20):
                kept.append(torch.full((2 * MIB,), float(number), device="cuda"))  # 8 MiB each
            assert torch_uvm.residency_stats()["records"] == 0, "nobody watches"
            failures = 0
            while len(kept) < 60:
                try:
                    kept.append(torch.full((2 * MIB,), float(len(kept)), device="cuda"))
                except torch.OutOfMemoryError:
                    failures += 1
                    assert failures < 3
                    for each in kept:
                        each.add_(0)  # known from now on
            assert failures == 1
            for number, each in enumerate(kept):
                assert (each == number).all().item(), number
            stats = torch_uvm.residency_stats()
            assert stats["written_back"]["bytes"] > 0 and stats["fetched"]["bytes"] > 0
            """
        )


class Watch:
    """The most that this process has on the device, sampled a thousand times a second by `used`."""

    def __init__(self, used: Callable[[], int]) -> None:
        self._used = used
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.peak = 0
        self.samples = 0

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.peak = max(self.peak, self._used())
            self.samples += 1
            time.sleep(0.001)


def used_on_the_device() -> int:
    free, total = torch.cuda.mem_get_info(0)
    return total - free


class _Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


def processes_on_the_device() -> int:
    """As NVML counts them; 1 where it does not say. It does not tell what managed memory each has there."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 1
    handle = ctypes.c_void_p()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    card = int(visible) if visible.isdigit() else 0
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByIndex_v2(card, ctypes.byref(handle)):
        return 1
    count, found = ctypes.c_uint(128), (_Process * 128)()
    if library.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), found):
        return 1
    return int(count.value)


# The driver takes memory for managed allocations from the card in pieces, which they share. Sampled on an
# H200, driver 580: with 98, 130, 258 and 434 MiB of segments, 128, 256, 384 and 512 MiB more were in use. Of
# what is freed it keeps some for later, up to a piece.
DRIVERS_PIECE = 128 * MIB


def in_pieces(count: int) -> int:
    return -(-count // DRIVERS_PIECE) * DRIVERS_PIECE


class TestDriversFigures:
    def test_the_budget_holds_while_steps_run(self) -> None:
        """By the driver's free memory, at 1 kHz. What PyTorch and the driver need besides (a context,
        kernels, workspaces, what managed memory takes) is what runs that fit have beyond their tensors."""
        torch.cuda.synchronize()
        if processes_on_the_device() > 1:
            pytest.skip("other processes use the device: its free memory does not tell what is ours")
        used = used_on_the_device
        slack = 32 * MIB  # the driver's tables for pinned memory, streams; kernels that are loaded late
        budget = 240 * MIB  # little below two of the driver's pieces: its rounding hides 16 MiB
        program = training(lambda: mlp(2048, 12), self.wide, steps=6, foreach=False)  # 800 MiB

        def clean() -> int:
            gc.collect()
            torch.cuda.synchronize()
            torch_uvm.empty_cache()
            torch.cuda.empty_cache()
            return used()

        torch.manual_seed(0)
        clean()
        expected = [result.cpu() for result in program()]  # loads kernels, takes workspaces
        start = clean()
        torch.cuda.reset_peak_memory_stats()
        with Watch(used) as plain:
            torch.manual_seed(0)
            program()
        in_core = torch.cuda.max_memory_reserved()
        own = max(plain.peak - start - in_core, 0)
        # Before the run without a budget: what the driver kept of that one's would not be seen to be taken.
        start = clean()
        with Watch(used) as watch:
            bounded = run(program, budget)
        taken = watch.peak - start
        start = clean()
        with Watch(used) as managed:
            reserved = run(program, None).reserved
        taken_without = managed.peak - start
        own = max(own, taken_without - in_pieces(reserved))

        assert watch.samples > 100
        assert all(map(torch.equal, bounded.results, expected))
        assert bounded.figures["over_budget"] == 0 and bounded.figures["written_back"]["bytes"] > 0
        assert bounded.reserved <= budget
        most = in_pieces(budget) + own + slack
        assert taken <= most, (taken, budget, own)
        assert taken > budget // 2, "or else nothing was measured"
        assert min(in_core, taken_without) > 2 * most, "the program would fit, or nearly"

    @staticmethod
    def wide() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(256, 2048), torch.randint(0, 16, (256,))
