"""The code in README.md and docs/ runs and prints its claims, and the commands there exist."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from _documented_code import Block, Printed, blocks, claims, programs, run_program
from _documented_commands import commands
from _spawn import Spawn

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
BLOCKS = [block for document in DOCUMENTS for block in blocks(document)]
PROGRAMS = [program[0].name for document in DOCUMENTS for program in programs(blocks(document))]
COMMANDS = [
    f"{block.name} {command}" for block in BLOCKS for command in commands(block.language, block.source)
]

#: Reasons and counts of blocks that are not run. A new one must be added here explicitly.
NOT_RUN: dict[str, int] = {}

#: Languages of blocks. Blocks of other languages would not be checked.
LANGUAGES = {"", "python", "sh", "json", "{eval-rst}"}

# Programs and commands. All but the last of each are wrong.
WRONG_PROGRAMS = [
    "import os\nos._exit(3)\n",
    "x = 1\n1 / 0\n",
    "print(1 + 1)  # 3\n",
    "import torch_uvm\ntorch_uvm.no_such_function()\n",
    "x = 1\nprint(x)  # 1\n",
]
WRONG_COMMANDS = [
    "make demos",
    "make",
    "TORCH_UVM_CONFIG=limit:1GiB python train.py",
    "TORCH_UVM_CONF=limits:1GiB python train.py",
    "python examples/no_such_example.py",
    "python -m torch_uvm infos",
    "python -m torch_uvm info --yaml",
    "python -m torch_uvm run --budgets 1GiB train.py",
    "python -m torch_uvm run --budget lots train.py",
    "python -m torch_uvm tools plot",
    "torchrun --nproc-per-node 2 -m torch_uvm run --limits 1GiB train.py",
    "no-such-program-anywhere",
    "python -m torch_uvm run --budget 1GiB train.py --its --own",
]

Results = dict[str, dict[str, str | None]]


@pytest.fixture(scope="module")
def wrong_document(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("documents") / "wrong.md"
    path.write_text(
        "".join(f"```python\n{program}```\n\n" for program in WRONG_PROGRAMS)
        + "```sh\n"
        + "\n".join(WRONG_COMMANDS)
        + "\n```\n"
    )
    return path


@pytest.fixture(scope="module")
def results(wrong_document: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Results of all programs and commands. One process imports torch for them."""
    done = Spawn(tmp_path_factory.mktemp("programs"))(
        args=[str(ROOT / "tests" / "_documented_code.py"), *map(str, DOCUMENTS), str(wrong_document)],
        env={"TORCH_UVM_DEVICE": "emu", "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"},
        timeout=900,  # seconds; about ten on an idle machine
    )
    found: Results = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("program", PROGRAMS)
def test_python_runs_and_prints_its_claims(program: str, results: Results) -> None:
    assert results["programs"][program] is None, results["programs"][program]


@pytest.mark.parametrize("command", COMMANDS)
def test_command_exists(command: str, results: Results) -> None:
    assert results["commands"][command] is None, results["commands"][command]


def test_all_programs_and_commands_ran(results: Results) -> None:
    assert len(PROGRAMS) >= 20 and len(COMMANDS) >= 20
    assert list(results["programs"])[: -len(WRONG_PROGRAMS)] == PROGRAMS
    assert set(COMMANDS) <= set(results["commands"])


def test_wrong_programs_and_commands_fail(results: Results) -> None:
    programs_of_it = list(results["programs"].values())[-len(WRONG_PROGRAMS) :]
    assert [wrong is not None for wrong in programs_of_it] == [True] * (len(WRONG_PROGRAMS) - 1) + [False]
    assert "wait status" in str(programs_of_it[0]) and "ZeroDivisionError" in str(programs_of_it[1])
    commands_of_it = list(results["commands"].values())[-len(WRONG_COMMANDS) :]
    assert [wrong is not None for wrong in commands_of_it] == [True] * (len(WRONG_COMMANDS) - 1) + [False]


def test_blocks_that_are_not_run_are_listed() -> None:
    left_out = [f"{block.path.name}: {block.not_run}" for block in BLOCKS if block.not_run is not None]
    assert {reason: left_out.count(reason) for reason in left_out} == NOT_RUN


def test_every_block_has_a_known_language() -> None:
    assert [f"{block.name}: {block.language}" for block in BLOCKS if block.language not in LANGUAGES] == []


def written(folder: Path, text: str) -> list[Block]:
    path = folder / "a.md"
    path.write_text(text)
    return blocks(path)


class TestBlocks:
    def test_marks(self, tmp_path: Path) -> None:
        found = written(
            tmp_path,
            "text\n<!-- first:\na = 1\n-->\n```python\nb = a\n```\n<!-- a remark -->\nmore\n\n"
            "<!-- continues -->\n```python\nc = b\n```\n<!-- not run: a pity -->\n```python\nd(\n```\n",
        )
        assert [(block.line, block.first, block.continues, block.not_run) for block in found] == [
            (6, "a = 1\n", False, None),
            (13, "", True, None),
            (17, "", False, "a pity"),
        ]
        sources = [[block.source for block in program] for program in programs(found)]
        assert sources == [["b = a\n", "c = b\n"]]

    @pytest.mark.parametrize(
        "text",
        [
            "<!-- contineus -->\n```python\n```\n",
            "<!-- not run -->\n```python\n```\n",
            "```python\nx = 1\n",
        ],
    )
    def test_errors_in_marks_are_named(self, text: str, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"a\.md:[1-3]"):
            written(tmp_path, text)

    def test_a_block_that_continues_no_block(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="continues nothing"):
            programs(written(tmp_path, "<!-- continues -->\n```python\n```\n"))

    def test_commands(self) -> None:
        assert list(commands("sh", "# a\nmake b  # c\n\npython d.py \\\n  e\n")) == [
            "make b  # c",
            "python d.py e",
        ]
        assert list(commands("", "$ make b\nwhat it printed\n")) == ["make b"]
        assert list(commands("json", "$ make b\n")) == []


class TestClaims:
    def test_which_comments_are_claims(self) -> None:
        source = "print(1)  # 1\nprint(2)  # two\nprint(3)  # -> three\nprint(\n    4\n)  # True 4\n# 5\n"
        assert list(claims(source)) == [
            (range(1, 2), "1"),
            (range(3, 4), "three"),
            (range(4, 7), "True 4"),
        ]

    @pytest.mark.parametrize(
        ("source", "holds"),
        [
            ("print(1 + 1, True)  # 2 True\n", True),
            ("print(1 + 1)  # 3\n", False),
            ("if False:\n    print(1)  # 1\n", False),
            ("for i in range(2):\n    print(i)  # 0\n", False),
            ("print('a b')  # -> a b\nprint('a')  # of prose\n", True),
        ],
    )
    def test_checks_claims(self, source: str, holds: bool) -> None:
        printed = Printed()
        exec(compile(source, "a.md", "exec"), {"print": printed})
        assert (printed.broken(source) == []) is holds

    def test_a_program_that_raises(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
        wrong = run_program(written(tmp_path, "\n```python\nx = 1\n1 / 0\n```\n"))
        assert wrong is not None and "a.md:3" in wrong and "ZeroDivisionError" in wrong
