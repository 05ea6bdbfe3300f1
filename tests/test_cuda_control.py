"""Control paths of the CUDA flavour without a GPU: streams, forks, exits, hints and waits of the host."""

from __future__ import annotations

from pathlib import Path

import pytest
from _cuda_control import (
    Run,
    environments_by_torch,  # noqa: F401  (the fixture `environments`)
    only_with_cuda_flavour,
    run_over_fake,  # noqa: F401  (the fixture `over_fake`)
)

pytestmark = only_with_cuda_flavour


def test_copies_and_streams(over_fake: Run) -> None:
    over_fake(
        """
        torch_uvm.enable()
        y = torch.arange(10.0).cuda()
        other = torch.cuda.Stream()
        with torch.cuda.stream(other):
            z = y.clone()
        z.record_stream(torch.cuda.current_stream())
        assert z.tolist() == list(range(10)) and y.to("cuda:1").tolist() == z.tolist()
        del y, z
        torch.cuda.empty_cache()
        """
    )


def test_a_forked_child_calls_nothing(over_fake: Run) -> None:
    over_fake(
        """
        import os, sys
        torch_uvm.enable()
        x = torch.empty(MiB, device="cuda")
        child = os.fork()
        if child == 0:
            del x
            quiet = not fake.fake_cuda_misuse()
            os._exit(0 if quiet else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        """
    )


class TestWithoutConcurrentAccess:
    """If the host may not touch managed memory while a device works, it waits for the whole device."""

    CODE = """
        import os
        x, unrelated = torch_uvm.memory.empty(MiB, device="cuda"), torch_uvm.memory.empty(MiB, device="cuda")
        side, waits = torch.cuda.Stream(), CONCURRENT == 0
        fake.fake_cuda_hold(1)

        def pending():
            with torch.cuda.stream(side):
                unrelated.fill_(1)
            assert not side.query()

        pending()
        moved = torch_uvm.to(x, "cpu", non_blocking=True)
        assert not side.query(), "waiting is the caller's duty"
        moved = torch_uvm.to(x, "cpu")
        assert side.query() == waits
        for _ in range(2):  # first from a fresh segment, then from the cache
            pending()
            made = torch_uvm.memory.empty(MiB, device="cpu")
            assert side.query() == waits
            del made
        pending()
        child = os.fork()  # inherits a copy of `moved`
        if child == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert side.query() == waits
        pending()
        made = torch_uvm.memory.empty(MiB, device="cuda")
        assert not side.query(), "no business of the host's"
        assert not fake.fake_cuda_has_context(1), "the other device is unused"
        """

    @pytest.mark.parametrize("concurrent", [0, 1])
    def test_the_host_waits_for_the_device(self, over_fake: Run, concurrent: int) -> None:
        over_fake(self.CODE.replace("CONCURRENT", str(concurrent)), FAKE_CUDA_CONCURRENT=str(concurrent))


def test_exit_with_live_tensors(over_fake: Run, tmp_path: Path) -> None:
    report = tmp_path / "report.txt"
    over_fake(
        """
        torch_uvm.enable()
        x = torch.empty(MiB, device="cuda")
        sys_holds_it = __import__("sys").x = x
        """,
        FAKE_CUDA_REPORT=str(report),
    )
    assert not report.exists(), report.read_text()


class TestTensors:
    def test_a_resize_of_shared_bytes_is_refused_before_anything_has_changed(self, over_fake: Run) -> None:
        over_fake(
            """
            x = torch_uvm.memory.empty(8, device="cuda")
            y = torch_uvm.to(x, "cpu")
            for label in (x, y):
                try:
                    label.resize_(1 << 20)
                except RuntimeError as error:
                    assert "a resize to [1048576] needs 4194304 bytes" in str(error), error
                else:
                    raise AssertionError("it was resized")
                assert label.shape == (8,) and label.untyped_storage().nbytes() == 32
            assert x.resize_(2, 2).shape == (2, 2)
            del y, label
            assert x.resize_(1 << 16).untyped_storage().nbytes() == 1 << 18, "alone again, it can grow"
            plain = torch.empty(0, device="cuda").resize_(2, 3, 4, 4, memory_format=torch.channels_last)
            assert plain.stride() == (48, 1, 12, 3)
            """
        )

    def test_hints_in_a_forked_child_ask_cuda_nothing(self, over_fake: Run) -> None:
        over_fake(
            """
            import os, traceback
            x = torch_uvm.memory.empty(1 << 20, device="cpu")
            torch_uvm.advise(x, read_mostly=True)
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    torch_uvm.prefetch(x, "cuda:0")
                    torch_uvm.advise(x, False, "cpu")
                    torch_uvm.discard(x)
                    assert not fake.fake_cuda_misuse(), fake.fake_cuda_misuse()
                    status = 0
                except BaseException:
                    traceback.print_exc()
                os._exit(status)
            assert os.waitpid(child, 0)[1] == 0
            """
        )
