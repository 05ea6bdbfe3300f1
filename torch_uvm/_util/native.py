"""Chooses the extension `torch_uvm._C`, which fits one minor version of torch.

torch_uvm/_native has a folder for each minor version of torch and each flavour that was built, such as
``torch_2_13_cpu`` and ``torch_2_13_cu13``. A build from source makes one; a wheel of `make wheels` has many.
"""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).absolute().parents[1] / "_native"  # of the package, which may be a link to this one


def described(folder: str) -> str:
    """`torch_2_13_cu13` as "2.13 (CUDA 13)"."""
    _, major, minor, flavour = folder.split("_")
    return f"{major}.{minor} ({'CPU' if flavour == 'cpu' else flavour.replace('cu', 'CUDA ')})"


def search_path(version: str, cuda: str | None, here: Path = HERE) -> list[str]:
    """The folder of the extension for a torch, in a list.

    Args:
        version: `torch.__version__`; its minor version has to be there.
        cuda: `torch.version.cuda`. Without a folder for its major version the CPU flavour is taken, with
            which the emulated accelerator works and `python -m torch_uvm info` says what is missing.
        here: the folder to search.

    Raises:
        ImportError: no extension is for this torch. The message names those there are.
    """
    there = [path.name for path in here.glob("torch_*_*_*") if path.is_dir()]
    major, minor = version.split(".")[:2]
    flavours = ["cpu"] if cuda is None else [f"cu{cuda.split('.')[0]}", "cpu"]
    for name in (f"torch_{major}_{minor}_{flavour}" for flavour in flavours):
        if name in there:
            return [str(here / name)]
    there.sort(key=lambda name: (*map(int, name.split("_")[1:3]), name))
    raise ImportError(
        f"this torch_uvm has no extension for torch {version} with {f'CUDA {cuda}' if cuda else 'no CUDA'}; "
        + (f"it has those for torch {', '.join(map(described, there))}" if there else "it has none")
    )
