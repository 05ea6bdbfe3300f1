"""Dry runs of whole scripts: beside real runs on the emulated accelerator, and where they fail."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path

import _dry_scripts as scripts
import pytest
import torch
from _spawn import Spawn
from _traced_schedules import schedule_of

from torch_uvm._tools.cards import load_card
from torch_uvm._tools.dry_runs import DryRun, DryRunError, dry_run
from torch_uvm._tools.plans import Loop
from torch_uvm.traces import Trace, read_trace

H200 = load_card("h200")

# Runs a script, records what a dry run records, and prints the peak.
REAL = """
    import json, os, runpy, sys
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook
    import torch_uvm
    from torch_uvm._dry.run import as_on_cuda

    kernels = as_on_cuda()
    done = 0
    def stepped(optimizer, args, kwargs):
        global done, recording
        done += 1
        if done == 1:
            torch_uvm.memory.reset_peak_memory_stats()
            recording = torch_uvm.tools.record_accesses("real.trace")
        elif done == 5:
            recording.stop()
            print(json.dumps(torch_uvm.memory.max_memory_allocated()), flush=True)
            os._exit(0)
    register_optimizer_step_post_hook(stepped)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def real_run(spawn: Spawn, argv: Sequence[str]) -> tuple[Trace, int]:
    """The trace, and the peak of the steps after the first."""
    env = {"TORCH_UVM": "1", "TORCH_UVM_DEVICE": "emu"}
    env["TORCH_UVM_CONF"] = "limit:4GiB,budget:4GiB,emulated_memory:4GiB"
    done = spawn(REAL, args=argv, env=env)
    return read_trace(spawn.folder / "real.trace"), json.loads(done.stdout.splitlines()[-1])


def run_dry(folder: Path, text: str, *arguments: str, **options: int) -> DryRun:
    script = folder / "script.py"
    script.write_text(text)
    return dry_run([str(script), *arguments], cards=[H200], folder=folder, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def transformer(tmp_path_factory: pytest.TempPathFactory) -> DryRun:
    """TRANSFORMER, which saves its weights after each step, in the place of an earlier run's."""
    folder = tmp_path_factory.mktemp("transformer")
    (folder / "weights.pt").write_text("an earlier run's")
    file = str(folder / "weights.pt")
    return run_dry(folder, scripts.TRANSFORMER + f"    torch.save(model.state_dict(), {file!r})\n")


def sequence(trace: Trace) -> list[tuple[str, tuple[int, ...]]]:
    """The operators, and the sizes of their operands. A dry run sums gradients into new tensors."""
    return [
        (op.name.removesuffix("_"), tuple(sorted(trace.storages[it].bytes for it in {*op.reads, *op.writes})))
        for op in trace.operators
    ]


def are_alike(found: DryRun, real: Trace, peak: int, tolerance: float = 0.02) -> None:
    assert sequence(read_trace(found.traces[0])) == sequence(real)
    assert found.step_peak_bytes == pytest.approx(peak, rel=tolerance)
    assert found.peak_bytes >= found.step_peak_bytes
    assert found.steps == 4
    assert not found.ended


@pytest.mark.parametrize(
    ("text", "arguments"),
    [(scripts.TRANSFORMER, ("--checkpoint", "--fused")), (scripts.CNN, ()), (scripts.CAUSAL_LM, ())],
    ids=["checkpointing", "cnn", "causal_lm"],
)
def test_operators_and_peak_are_those_of_a_real_run(
    spawn: Spawn, tmp_path: Path, text: str, arguments: tuple[str, ...]
) -> None:
    if "transformers" in text:
        pytest.importorskip("transformers")
    found = run_dry(tmp_path, text, *arguments)
    tolerance = 0.06 if text is scripts.CNN else 0.02  # the CPU's convolutions copy their operands
    are_alike(found, *real_run(spawn, [str(tmp_path / "script.py"), *arguments]), tolerance)


def test_operators_and_peak_of_the_transformer(spawn: Spawn, tmp_path: Path, transformer: DryRun) -> None:
    (tmp_path / "real.py").write_text(scripts.TRANSFORMER)
    are_alike(transformer, *real_run(spawn, ["real.py"]))


def test_the_trace_makes_a_schedule_with_the_card_s_times(transformer: DryRun) -> None:
    found = transformer
    trace = read_trace(found.traces[0])
    assert [(it.first, it.operators) for it in trace.groups] == [
        (it, 1) for it in range(len(trace.operators))
    ]
    assert not trace.transfers
    schedule = schedule_of(trace, budget=1 << 40)
    assert sum(it.ms for it in schedule.operators) == pytest.approx(found.step_ms, rel=1e-3)
    # At the end of each step the host waits for the loss.
    assert found.step_ms >= len(schedule.operators) * H200.host_us / 1e3


def test_stand_ins_and_allocations_are_named_by_line(transformer: DryRun) -> None:
    found = transformer
    script = str(found.output.with_name("script.py"))
    lines = scripts.TRANSFORMER.splitlines()
    items = [it for it in found.stand_ins if it.what == "item"]
    places = {int(it.place.rpartition(":")[2]): it.count for it in items}
    assert {
        lines[number - 1].strip(): count for number, count in places.items() if "print" in lines[number - 1]
    }
    printed = next(number for number, line in enumerate(lines, 1) if "loss.item()" in line)
    assert places[printed] == 4  # the fifth step is cut off at its optimizer
    assert all(it.place.startswith(script) for it in items)
    mine = [it.partition(" ")[0] for it in found.by_line if f"{Path(script).name}:" in it]
    wide = next(number for number, line in enumerate(lines, 1) if "self.narrow(F.gelu" in line)
    assert int(mine[0].rpartition(":")[2]) in (wide, wide - 1, printed - 5)
    assert any(it.startswith("the backward, ") for it in found.by_line)
    assert not any("_dry" in it for it in found.by_line)
    assert "0 1.0" in found.output.read_text()


def test_what_operators_keep_for_the_backward_is_what_they_keep_on_cuda(tmp_path: Path) -> None:
    """A T5 on an H100 has a peak of 33.26 GiB, and a dry run of it one of 33.22."""
    script = """
        import torch
        from torch.nn import functional as F
        device = torch.accelerator.current_accelerator()
        heads = torch.nn.Parameter(torch.randn(2, 4, 256, 64, device=device, dtype=torch.bfloat16))
        bias = torch.nn.Parameter(torch.randn(2, 4, 256, 256, device=device, dtype=torch.bfloat16))
        optimizer = torch.optim.SGD([heads, bias])
        for _ in range(6):
            F.dropout(F.scaled_dot_product_attention(heads, heads, heads, bias), 0.1).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    """
    trace = read_trace(run_dry(tmp_path, textwrap.dedent(script)).traces[0])

    def kept(name: str) -> list[int]:
        op = next(it for it in trace.operators if it.name == name)
        return sorted(trace.storages[it].bytes for it in op.births)

    elements = 2 * 4 * 256 * 64
    # No fused kernel runs with a bias that requires a gradient: scores are in float32.
    assert kept("aten::scaled_dot_product_attention")[-1] == 4 * 2 * 4 * 256 * 256
    assert kept("aten::dropout") == [2 * elements]  # and a mask of `elements` bytes, too small for a record


def test_memory_of_the_host_is_not_committed(tmp_path: Path) -> None:
    found = run_dry(tmp_path, scripts.HUGE, steps=2)
    kib = int(found.output.read_text().split()[-1])
    assert found.peak_bytes > 500e9
    assert kib * 1024 < 1e9


def test_several_optimizers_are_recorded_from_a_whole_step_on(tmp_path: Path) -> None:
    text = scripts.TRANSFORMER.replace(
        "optimizer = torch.optim.AdamW(model.parameters()",
        "head = torch.optim.SGD(model.head.parameters(), lr=0.1)\n"
        "optimizer = torch.optim.AdamW(model.blocks.parameters()",
    ).replace("    optimizer.step()", "    head.step()\n    optimizer.step()")
    text = text.replace("range(6)", "range(8)")
    found = run_dry(tmp_path, text)
    assert found.steps == 4
    assert Loop(read_trace(found.traces[0]), H200, on_gpu=False).steps == 2


def test_gradients_of_tables_may_be_sparse(tmp_path: Path) -> None:
    found = run_dry(tmp_path, scripts.SPARSE)
    tables = 2 * 65536 * 64 * 4
    assert (
        found.steps == 4 and 3 * tables < found.peak_bytes < 3.2 * tables
    )  # two moments, and no dense gradient


def test_nothing_is_saved(transformer: DryRun) -> None:
    assert transformer.output.with_name("weights.pt").read_text() == "an earlier run's"
    assert ("torch.save", 4) in [(it.what, it.count) for it in transformer.stand_ins]


BAD = [
    ("raise ValueError('of the script')", "ValueError: of the script"),
    ("import torch; torch.ones(1 << 20, device='emu')", "before its second optimizer step"),
    ("import os; os.abort()", "ended with -6 and no result"),
    ("import torch; torch.ones(3).to('xpu')", "XPU"),
]


@pytest.mark.parametrize(("text", "message"), BAD, ids=[it[1] for it in BAD])
def test_a_script_that_cannot_be_run_dry_says_why(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DryRunError, match=message) as raised:
        run_dry(tmp_path, text)
    assert raised.value.output == tmp_path / "output.txt"
    if text.startswith("raise V"):
        assert 'script.py", line 1, in <module>' in raised.value.output.read_text()
        assert "dry_child" not in raised.value.output.read_text()


def test_scripts_that_name_cuda_get_the_emulated_accelerator(tmp_path: Path) -> None:
    ones = str(tmp_path / "ones.pt")
    torch.save(torch.ones(4), ones)
    found = run_dry(tmp_path, scripts.CUDA.replace("ones.pt", ones))
    assert found.output.read_text().splitlines()[-1] == "the end"
    assert found.ended
    assert found.peak_bytes > 3 * 4 * 1024 * 1024
    assert ("torch.compile", 1) in [(it.what, it.count) for it in found.stand_ins]


def test_autocast_has_the_lists_of_cuda(tmp_path: Path) -> None:
    """Its parameters are lazy: of a class that PyTorch derives from Parameter. It asserts dtypes itself."""
    assert run_dry(tmp_path, scripts.AUTOCAST, steps=1).steps == 1


RECURRENT = """
    import sys
    import torch
    from torch import nn

    layer = getattr(nn, sys.argv[1])(512, 512, 2, dropout=0.1).to("cuda")
    optimizer = torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9)
    x = torch.randn(128, 64, 512, device="cuda")
    for _ in range(12):
        with torch.autocast("cuda", torch.bfloat16, enabled=sys.argv[2] == "autocast"):
            if sys.argv[2] == "packed":
                y = layer(nn.utils.rnn.pack_padded_sequence(x, [128] * 64))[0]
                y, lengths = nn.utils.rnn.pad_packed_sequence(y)
                assert lengths.tolist() == [128] * 64
            else:
                y = layer(x)[0]
        y.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("how", ["float32", "autocast", "packed"])
def test_recurrent_layers_are_cudnn_s_operators(tmp_path: Path, kind: str, how: str) -> None:
    found = run_dry(tmp_path, textwrap.dedent(RECURRENT), kind, how)
    names = [op.name for op in read_trace(found.traces[0]).operators]
    assert {"aten::_cudnn_rnn", "aten::_cudnn_rnn_backward"} <= set(names) and "aten::mm" not in names
    # cuDNN on an H200 keeps so many elements for one of a layer's results.
    kept = {"LSTM": 5.5, "GRU": 6.5, "RNN": 1.5}[kind] * 2 * 128 * 64 * 512 * (2 if how == "autocast" else 4)
    weights = 2 * 2 * 512 * 512 * {"LSTM": 4, "GRU": 3, "RNN": 1}[kind] * 4
    assert kept + 2 * weights < found.peak_bytes < kept + 8 * weights + 11 * 128 * 64 * 512 * 4


def test_inference_runs_dry_between_its_steps(tmp_path: Path) -> None:
    text = """
        import torch
        import torch_uvm

        layers = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(8))).to("cuda")
        with torch.no_grad():
            while True:
                layers(torch.randn(512, 2048, device="cuda")).argmax(-1).cpu()
                torch_uvm.step()
    """
    found = run_dry(tmp_path, textwrap.dedent(text))
    assert found.steps == 4 and 128 << 20 < found.peak_bytes < 160 << 20 and found.step_ms is not None


def test_fake_tensors_are_left_to_their_mode(tmp_path: Path) -> None:
    """DTensor asks for shapes under FakeTensorMode. Modes of PyTorch's own come after those of scripts."""
    found = run_dry(tmp_path, scripts.FAKE, steps=1)
    assert "FakeTensor cpu" in found.output.read_text()


@pytest.mark.parametrize("sharded", [(), ("--sharded",)], ids=["ddp", "fsdp2"])
def test_a_rank_runs_dry_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharded: tuple[str, ...]
) -> None:
    for name, value in {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    found = run_dry(tmp_path, scripts.RANK, *sharded)
    assert "1 of 2 on emu:1" in found.output.read_text()
    trace = read_trace(found.traces[0])
    assert {it.device for it in trace.storages.values()} == {1}
    assert "process group" in {it.what for it in found.stand_ins}


def test_the_report_of_the_environment_is_not_its(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_UVM_REPORT", str(tmp_path / "out.html"))
    script = "import os; print(os.environ.get('TORCH_UVM_REPORT'), flush=True)\n" + scripts.CNN
    assert "None" in run_dry(tmp_path, script, steps=1).output.read_text().splitlines()


def test_a_module_runs_dry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trainer.py").write_text(scripts.TRANSFORMER)
    monkeypatch.chdir(tmp_path)
    told: list[tuple[int, int]] = []
    found = dry_run(
        ["-m", "trainer", "--fused"],
        cards=[H200],
        folder=tmp_path,
        steps=1,
        progress=lambda done, steps: told.append((done, steps)),
    )
    assert found.steps == 1
    assert told == sorted(told) and (100, 200) in told and told[-1] == (200, 200)
    assert any(100 < done < 200 for done, _ in told)  # within the second step
