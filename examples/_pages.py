"""Images for both_sides.py: pages of the standard library's own source files."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

LINES, COLUMNS = 64, 64  # size of a page
MIN_LINES = 24  # shorter files make pages with little content
PAGES = 4  # maximum number of pages from one file
Floats = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Page:
    lines: tuple[bytes, ...]
    is_test: bool


def draw(page: Page, image: Floats) -> None:
    """Draws a page into `image`, (LINES, COLUMNS), and clips it at the edges."""
    image.fill(0)
    for row, line in enumerate(page.lines):
        codes = np.frombuffer(line[:COLUMNS], dtype=np.uint8)
        image[row, : len(codes)] = codes


def is_test(path: Path) -> bool:
    """Whether a file of the standard library, by its path inside it, belongs to Python's own tests."""
    return any(part in ("test", "tests", "idle_test") for part in path.parts[:-1])


def read_pages(count: int, seed: int) -> tuple[list[Page], list[Page]]:
    """Returns training pages and held-out pages, `count` in all. A quarter is held out, from other files.

    No two pages are equal. The seed decides the order of the files, so that any count is a fair sample.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path.relative_to(folder) for path in folder.rglob("*.py"))
    files = [path for path in files if path.parts[0] not in ("site-packages", "dist-packages")]
    wanted = (count - count // 4, count // 4)
    sets: tuple[list[Page], list[Page]] = ([], [])
    seen: set[tuple[bytes, ...]] = set()
    for number, which in enumerate(np.random.default_rng(seed).permutation(len(files))):
        held_out = number % 4 == 3
        lines = (folder / files[which]).read_bytes().expandtabs().splitlines()
        for start in range(0, min(len(lines), PAGES * LINES), LINES):
            page = Page(tuple(line[:COLUMNS] for line in lines[start : start + LINES]), is_test(files[which]))
            if page.lines in seen or sum(map(bool, page.lines)) < MIN_LINES:
                continue
            seen.add(page.lines)
            if len(sets[held_out]) < wanted[held_out]:
                sets[held_out].append(page)
    if (len(sets[0]), len(sets[1])) != wanted:
        found = len(sets[0]) + len(sets[1])
        raise ValueError(f"{count} pages wanted; {folder} has no more than {found} in that proportion")
    return sets


def normalise(images: Floats, train: int) -> None:
    """Normalises to mean 0 and deviation 1 of the first `train` images, in place, one image at a time."""
    mean, deviation = images[:train].mean(dtype=np.float64), images[:train].std(dtype=np.float64)
    for image in images:
        image -= mean
        image /= deviation


def augment(images: Floats, labels: Labels, random: np.random.Generator) -> None:
    """Shuffles images and labels alike, and rotates each page by some lines. Works in place.

    Rotating a rotated page again is still one rotation, so the originals need not be kept.
    """
    for i in range(len(images) - 1, 0, -1):
        j = int(random.integers(i + 1))
        images[[i, j]] = images[[j, i]]
        labels[[i, j]] = labels[[j, i]]
    for image, shift in zip(images, random.integers(LINES, size=len(images)), strict=True):
        image[...] = np.roll(image, int(shift), axis=-2)
