"""Programs over the fake CUDA runtime (tests/fake_cuda), which is preloaded. They need no GPU.

The fake runtime does not run kernels. A program checks its allocations and the runtime's calls. Each program
runs with the torches that _cuda_flavour.py names, as scripts/check_cuda_flavour.py installs them, and with
this environment's torch if that was built with CUDA.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from _cuda_flavour import LEFT_OUT, REASON, VERSIONS, build, flavour
from _spawn import Spawn

import torch_uvm

OWN = torch.version.cuda is not None and torch_uvm._C.built_with_cuda()
only_with_cuda_flavour = pytest.mark.skipif(LEFT_OUT and not OWN, reason=REASON)
PRELUDE = """
import ctypes
import torch, torch_uvm
fake = ctypes.CDLL(None)
fake.fake_cuda_misuse.restype = ctypes.c_char_p
fake.fake_cuda_live_bytes.restype = fake.fake_cuda_count.restype = ctypes.c_size_t
MiB = 1 << 20
def count(name): return fake.fake_cuda_count(name.encode())
def managed_bytes(): return fake.fake_cuda_live_bytes(b"cudaMallocManaged")
assert torch.cuda.is_available() and torch.cuda.device_count() == 2
torch_uvm.set_limit(64 * MiB)
"""
EPILOGUE = """
misuse = fake.fake_cuda_misuse().decode()
assert not misuse, misuse
"""
Run = Callable[..., None]


@pytest.fixture(scope="session", name="environments")
def environments_by_torch(pytestconfig: pytest.Config) -> dict[str, dict[str, str]]:
    """The environment of a program for each torch."""
    library: Path = pytestconfig.getoption("--cpp-build").resolve() / "libfake_cuda.so"
    assert library.exists(), f"{library} is not there; `make cpp` builds it"
    preloaded = " ".join([str(library), os.environ.get("LD_PRELOAD", "")])
    found = {f"torch {torch.__version__}": {"LD_PRELOAD": preloaded}} if OWN else {}
    for version in [] if LEFT_OUT else VERSIONS:
        wrong = build(version)
        assert not wrong, wrong
        found[f"torch {version}"] = flavour.environment(version, library)
    return found


@pytest.fixture(name="over_fake")
def run_over_fake(spawn: Spawn, environments: dict[str, dict[str, str]]) -> Run:
    def run(code: str, **env: str) -> None:
        def one(name: str) -> None:
            version = name.partition(" ")[2]
            said = f"assert torch.__version__.startswith({version!r}), torch.__version__"
            environment = {"FAKE_CUDA_DEVICES": "2", **environments[name], **env}
            try:
                spawn("\n".join([PRELUDE, said, textwrap.dedent(code), EPILOGUE]), env=environment)
            except AssertionError as error:
                raise AssertionError(f"with {name}: {error}") from None

        with ThreadPoolExecutor() as pool:
            list(pool.map(one, environments))

    return run
