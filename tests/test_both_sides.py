"""The example both_sides.py: its output is recomputed, and its checks notice a copy."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from _spawn import Spawn

import torch_uvm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

np = pytest.importorskip("numpy")
import _pages  # noqa: E402
import both_sides  # noqa: E402

SCRIPT = str(ROOT / "examples" / "both_sides.py")
EPOCHS, IMAGES, SEED = 10, 1024, 0
IMAGE_BYTES = 64 * 64 * 4


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    arguments = [SCRIPT, f"--epochs={EPOCHS}", f"--images={IMAGES}", f"--seed={SEED}"]
    # Selects the emulator on CUDA builds too, because only it has counters.
    return Spawn(tmp_path_factory.mktemp("both"))(args=arguments, env={"TORCH_UVM_DEVICE": "emu"}).stdout


def row(printed: str, name: str) -> tuple[str, str]:
    """A row of the table: the columns "copies" and "moves"."""
    (line,) = [line for line in printed.splitlines() if line.startswith(name + "  ")]
    copies, moves = re.split(r" {2,}", line[len(name) :].strip())
    return copies, moves


def number(text: str) -> int:
    return int(text.removesuffix(" B").replace(",", ""))


@pytest.fixture
def device() -> torch.device:
    return both_sides.accelerator()


class TestWhatItPrints:
    def test_one_address_for_moves_and_two_for_copies(self, printed: str) -> None:
        host, there = row(printed, "address for numpy"), row(printed, "address for the device")
        assert int(host[1], 16) == int(there[1], 16) != 0
        assert int(host[0], 16) != int(there[0], 16)

    def test_only_the_ordinary_way_copies_the_images(self, printed: str) -> None:
        copies, moves = map(number, row(printed, "copied to the device"))
        assert moves == EPOCHS * IMAGES * 8  # the labels
        assert copies == EPOCHS * IMAGES * (8 + IMAGE_BYTES)
        assert row(printed, "copied to the host") == ("0 B", "0 B")

    def test_memory_has_the_images_once(self, printed: str) -> None:
        size = f"{IMAGES * IMAGE_BYTES / 2**20:.1f} MiB"
        assert f"{IMAGES} images, {size}, on emu; {EPOCHS} epochs" in printed
        assert row(printed, "peak managed memory") == ("0 B", size)
        assert row(printed, "numpy's own copy of the images") == (size, "0 B")

    def test_losses_equal_a_training_in_this_process(self, printed: str) -> None:
        result = both_sides.train(both_sides.Managed, EPOCHS, IMAGES, SEED)
        assert row(printed, "last loss") == (repr(result.losses[-1]),) * 2
        assert "All losses are equal to the last bit" in printed

    def test_accuracy_is_above_the_baseline(self, printed: str) -> None:
        held_out = _pages.read_pages(IMAGES, SEED)[1]
        tests = sum(page.is_test for page in held_out)
        baseline = max(tests, len(held_out) - tests) / len(held_out)
        assert row(printed, "always the same answer") == (f"{baseline:.4f}",) * 2
        copies, moves = row(printed, "held-out accuracy")
        assert copies == moves
        assert float(moves) > baseline

    @pytest.mark.parametrize(
        ("argument", "accepted"), [("--epochs=0", "1"), ("--images=7", "8"), ("--seed=-1", "0")]
    )
    def test_bad_arguments_are_refused(
        self,
        argument: str,
        accepted: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr(sys, "argv", [SCRIPT, argument])
        with pytest.raises(SystemExit) as exit_:
            both_sides.parse_arguments()
        assert exit_.value.code == 2
        assert f"accepted: at least {accepted}" in capsys.readouterr().err


class TestChecks:
    def test_same_bytes(self, device: torch.device) -> None:
        host = torch_uvm.memory.zeros(8, device="cpu")
        there = torch_uvm.to(host, device)
        both_sides.check_same_bytes(host, there, host.numpy())
        for broken in (
            (host, there.clone(), host.numpy()),
            (host, host.to(device), host.numpy()),
            (host, there, host.numpy().copy()),
            (host.clone(), there, host.numpy()),
        ):
            with pytest.raises(AssertionError, match="a copy: cpu at 0x"):
                both_sides.check_same_bytes(*broken)
        ordinary = torch.zeros(8)
        with pytest.raises(AssertionError, match="wanted: managed memory"):
            both_sides.check_same_bytes(ordinary, ordinary, ordinary.numpy())

    def test_nothing_copied(self, device: torch.device) -> None:
        host = torch_uvm.memory.zeros(1024, device="cpu")
        with both_sides.nothing_copied(device):
            torch_uvm.to(torch_uvm.to(host, device), "cpu").numpy()[:] = 1
        with pytest.raises(AssertionError, match="managed bytes"), both_sides.nothing_copied(device):
            kept = torch_uvm.to(host, device, copy=True)
        del kept
        if device.type == "emu":
            for target in ("bytes_copied_to_device", "bytes_copied_to_host"):
                x = torch.ones(1024, device="cpu" if target.endswith("device") else device)
                with pytest.raises(AssertionError, match=target), both_sides.nothing_copied(device):
                    x.to(device if x.is_cpu else "cpu")

    @pytest.mark.parametrize("method", ["for_numpy", "for_device"])
    def test_a_way_that_copies_is_noticed(
        self, device: torch.device, method: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        images = both_sides.Managed(8, device)
        getattr(images, method)()
        plain = torch.Tensor.to
        monkeypatch.setattr(torch_uvm, "to", lambda x, where: plain(x, where, copy=True))
        with pytest.raises(AssertionError, match="a copy: "):
            getattr(images, method)()

    def test_results(self, device: torch.device) -> None:
        ordinary = both_sides.train(both_sides.Ordinary, 1, 64, 1)
        managed = both_sides.train(both_sides.Managed, 1, 64, 1)
        both_sides.check_results(ordinary, managed, 1)
        last = managed.losses[-1]
        others = [*managed.losses[:-1], float(np.nextafter(last, 1))]
        with pytest.raises(AssertionError, match="losses differ"):
            both_sides.check_results(ordinary, replace(managed, losses=others), 1)
        for peak in (0, 2 * managed.image_bytes):
            with pytest.raises(AssertionError, match=f"{peak} managed bytes at the peak"):
                both_sides.check_results(ordinary, replace(managed, peak_managed=peak), 1)
        if device.type == "emu":
            with pytest.raises(AssertionError, match="0 bytes were not copied"):
                both_sides.check_results(replace(ordinary, counted=managed.counted), managed, 1)


class TestPages:
    def test_held_out_pages_are_of_other_files(self) -> None:
        train, held_out = _pages.read_pages(400, 5)
        assert (len(train), len(held_out)) == (300, 100)
        assert not {page.lines for page in train} & {page.lines for page in held_out}
        assert _pages.read_pages(400, 5) == (train, held_out)
        assert _pages.read_pages(400, 6) != (train, held_out)

    def test_more_pages_than_there_are(self) -> None:
        with pytest.raises(ValueError, match="1000000 pages wanted"):
            _pages.read_pages(1_000_000, 0)

    def test_a_page_is_drawn_within_its_edges(self) -> None:
        image = np.full((64, 64), 7, dtype=np.float32)
        _pages.draw(_pages.Page((b"ab", b"", b"x" * 100), False), image)
        assert image[0, :3].tolist() == [97, 98, 0]
        assert not image[1].any() and not image[3:].any()
        assert (image[2] == ord("x")).all()

    def test_normalised_in_place_by_the_training_part(self) -> None:
        images = np.random.default_rng(0).normal(5, 3, (6, 1, 64, 64)).astype(np.float32)
        images[4:] = 100
        address = images.__array_interface__["data"]
        _pages.normalise(images, 4)
        assert images.__array_interface__["data"] == address
        assert abs(images[:4].mean()) < 1e-5 and abs(images[:4].std() - 1) < 1e-5
        assert images[4:].min() > 10

    def test_augmentation_keeps_labels_with_their_pages(self) -> None:
        images = np.zeros((20, 1, 64, 64), dtype=np.float32)
        images[:, 0, 0, :] = np.arange(20)[:, None]
        labels = np.arange(20)
        _pages.augment(images, labels, np.random.default_rng(0))
        assert labels.tolist() != list(range(20)) and sorted(labels) == list(range(20))
        # A page of code 0 is all dark, so its maximum is 0 too.
        assert images.max(axis=(1, 2, 3)).tolist() == labels.tolist()
        assert len(set(images.argmax(axis=2)[:, 0, 0].tolist())) > 5  # shifted by different numbers of lines
