"""Compares the virtual functions of PyTorch's CUDA allocator class with those that our class overrides.

    python scripts/audit_cuda_allocator.py TORCH/include [TORCH/include ...]

A virtual function with a do-nothing default that is not forwarded compiles and then misbehaves silently. A
missing override is therefore an error here, for each folder of headers and the torch version that it
declares.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

OURS = Path(__file__).resolve().parent.parent / "csrc" / "cuda" / "delegating_allocator.h"
# The headers of the class and its bases, from the root class on.
CLASSES = [
    ("Allocator", "c10/core/Allocator.h"),
    ("DeviceAllocator", "c10/core/CachingDeviceAllocator.h"),
    ("CUDAAllocator", "c10/cuda/CUDACachingAllocator.h"),
]


def without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL)


def class_body(text: str, name: str) -> str:
    """The body of a class's definition."""
    found = re.search(rf"\b(?:class|struct)\s+(?:\w+\s+)*{name}\s*(?:final\s*)?(?::[^;{{]*)?\{{", text)
    if found is None:
        raise ValueError(f"no definition of the class {name}")
    depth, end = 1, found.end()
    while depth:
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        end += 1
    return text[found.end() : end - 1]


def split_at_commas(text: str) -> list[str]:
    """Splits at the commas that are outside all brackets."""
    parts, depth, start = [], 0, 0
    for index, letter in enumerate(text):
        depth += {"(": 1, "<": 1, "{": 1, ")": -1, ">": -1, "}": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    return [part for part in [*parts, text[start:]] if part.strip()]


def type_of(parameter: str) -> str:
    """A parameter without its name, its default and optional namespaces."""
    text = re.sub(r"=.*$", "", parameter, flags=re.DOTALL)
    text = re.sub(r"\b(?:\w+::)+", "", text)
    words = re.findall(r"\w+|[^\w\s]", text)
    if len(words) > 1 and re.fullmatch(r"\w+", words[-1]) and words[-2] not in ("const", "unsigned"):
        words.pop()
    return " ".join(words)


def signatures(declarations: list[tuple[str, str]]) -> dict[str, str]:
    """Maps "name(types)" to its name, which messages show."""
    return {
        f"{name}({', '.join(map(type_of, split_at_commas(parameters)))})": name
        for name, parameters in declarations
    }


def closing(text: str, opening: int) -> int:
    """The index of the bracket that closes the one at `opening`."""
    depth = 0
    for index in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    raise ValueError("a bracket that is not closed")


def virtuals(body: str) -> dict[str, str]:
    declarations = []
    for found in re.finditer(r"\bvirtual\b[^;{(~]*?\b(\w+)\s*\(", body):
        end = closing(body, found.end() - 1)
        declarations.append((found[1], body[found.end() : end]))
    return signatures(declarations)


def overridden(body: str) -> dict[str, str]:
    declarations = []
    for found in re.finditer(r"\b(\w+)\s*\(", body):
        end = closing(body, found.end() - 1)
        if re.match(r"\s*(?:const\s*)?(?:noexcept\s*)?override\b", body[end + 1 :]):
            declarations.append((found[1], body[found.end() : end]))
    return signatures(declarations)


def for_version(text: str, version: tuple[int, int]) -> str:
    """The part of our header that is compiled for that version; guards are #if
    TORCH_UVM_TORCH_AT_LEAST(minor)."""
    kept, taken = [], [True]
    for line in text.splitlines():
        guard = re.match(r"\s*#\s*if\s+TORCH_UVM_TORCH_AT_LEAST\((\d+)\)", line)
        if guard:
            taken.append(version >= (2, int(guard[1])))
        elif re.match(r"\s*#\s*if", line):
            taken.append(True)
        elif re.match(r"\s*#\s*else", line):
            taken[-1] = not taken[-1]
        elif re.match(r"\s*#\s*endif", line):
            taken.pop()
        elif all(taken):
            kept.append(line)
    return "\n".join(kept)


def version_of(include: Path) -> tuple[int, int]:
    text = (include / "torch" / "headeronly" / "version.h").read_text()
    numbers = [re.search(rf"TORCH_VERSION_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR")]
    if None in numbers:
        raise ValueError(f"{include} does not say its version")
    major, minor = (int(number[1]) for number in numbers if number is not None)
    return major, minor


def missing(include: Path, ours: Path = OURS) -> list[str]:
    """The virtual functions of torch's class that ours does not override."""
    theirs: dict[str, str] = {}
    for name, header in CLASSES:
        found = virtuals(class_body(without_comments((include / header).read_text()), name))
        if not found:
            raise ValueError(f"{header}: {name} has no virtual functions?")
        theirs |= found
    own = overridden(
        class_body(
            for_version(without_comments(ours.read_text()), version_of(include)), "DelegatingAllocator"
        )
    )
    return sorted(set(theirs) - set(own))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("include", type=Path, nargs="+", help="a folder of torch's headers")
    parser.add_argument("--ours", type=Path, default=OURS, help="the header with our class")
    arguments = parser.parse_args()
    wrong = False
    for include in arguments.include:
        lacking = missing(include, arguments.ours)
        major, minor = version_of(include)
        print(f"torch {major}.{minor}: {'all are overridden' if not lacking else 'not overridden:'}")
        for signature in lacking:
            print(f"  {signature}")
        wrong = wrong or bool(lacking)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
