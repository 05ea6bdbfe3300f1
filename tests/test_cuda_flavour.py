"""The CUDA flavour compiles and links against CUDA builds of torch without a GPU, and overrides all
functions of torch's allocator class.

Downloads 1.1 GB of wheels from pip's configured index. `TORCH_UVM_TEST_CUDA=0` skips these tests.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from _cuda_flavour import LEFT_OUT, PINNED, REASON, SCRIPTS, VERSIONS, build, flavour, script

needs_wheels = pytest.mark.skipif(LEFT_OUT, reason=REASON)
audit, unity = script("audit_cuda_allocator"), script("unity")


@pytest.fixture(scope="session")
def wheels() -> None:
    flavour.fetch()


class TestAudit:
    BASE = (
        "class Allocator {\n  virtual ~Allocator() = default;\n  virtual DataPtr allocate(size_t n) = 0;\n};"
    )
    DEVICE = (
        "class DeviceAllocator : public c10::Allocator {\n"
        "  virtual void emptyCache(MempoolId_t id = {0, 0}) = 0;\n"
        "};"
    )
    CUDA = (
        "class CUDAAllocator;  // class CUDAAllocator {{ virtual void no_comment() = 0; }};\n"
        "class C10_CUDA_API CUDAAllocator : public DeviceAllocator {{\n"
        " public:\n"
        "  virtual void recordStream(const DataPtr& ptr, CUDAStream stream) = 0;\n"
        "  virtual void begin(c10::DeviceIndex device, std::function<bool(cudaStream_t)> filter) {{ }}\n"
        "  {extra}\n"
        "}};"
    )
    OURS = """
        class DelegatingAllocator final : public pytorch::CUDAAllocator {
         public:
          c10::DataPtr allocate(std::size_t bytes) override;
          void emptyCache(c10::MempoolId_t pool = {0, 0}) override;
          void recordStream(const c10::DataPtr& data, c10::cuda::CUDAStream stream) override;
          void begin(c10::DeviceIndex device, std::function<bool(cudaStream_t)> filter) override;
        #if TORCH_UVM_TORCH_AT_LEAST(12)
          void annotate(const std::string& metadata) const override;
        #endif
        };
    """

    def lacking(self, folder: Path, minor: int, extra: str, ours: str = OURS) -> list[str]:
        """Missing overrides for a torch 2.`minor` whose class has an additional function."""
        files = {
            "c10/core/Allocator.h": self.BASE,
            "c10/core/CachingDeviceAllocator.h": self.DEVICE,
            "c10/cuda/CUDACachingAllocator.h": self.CUDA.format(extra=extra),
            "torch/headeronly/version.h": "#define TORCH_VERSION_MAJOR 2\n"
            f"#define TORCH_VERSION_MINOR {minor}\n",
            "ours.h": ours,
        }
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        found: list[str] = audit.missing(folder, folder / "ours.h")
        return found

    def test_all_overridden(self, tmp_path: Path) -> None:
        assert self.lacking(tmp_path, 11, "") == []
        assert self.lacking(tmp_path, 12, "virtual void annotate(const std::string&) const {}") == []

    def test_a_new_function_is_found(self, tmp_path: Path) -> None:
        found = self.lacking(tmp_path, 11, "virtual void newcomer(int level = 3, void* ptr = nullptr) {}")
        assert found == ["newcomer(int, void *)"]

    def test_another_overload_is_another_function(self, tmp_path: Path) -> None:
        extra = "virtual void recordStream(const DataPtr& ptr, c10::Stream stream) = 0;"
        assert self.lacking(tmp_path, 11, extra) == ["recordStream(const DataPtr &, Stream)"]

    def test_a_guard_for_a_later_version_does_not_count(self, tmp_path: Path) -> None:
        extra = "virtual void annotate(const std::string& metadata) const {}"
        assert self.lacking(tmp_path, 11, extra) == ["annotate(const string &)"]

    def test_one_that_is_not_an_override_does_not_count(self, tmp_path: Path) -> None:
        ours = self.OURS.replace("allocate(std::size_t bytes) override", "allocate(std::size_t bytes)")
        assert self.lacking(tmp_path, 11, "", ours) == ["allocate(size_t)"]

    @needs_wheels
    @pytest.mark.parametrize("version", PINNED)
    def test_of_real_headers(self, wheels: None, version: str) -> None:
        assert audit.missing(flavour.torch_include(version)) == []

    @needs_wheels
    def test_a_real_header_with_one_more(self, wheels: None, tmp_path: Path) -> None:
        """Runs the command and checks its exit status."""
        include = flavour.torch_include(PINNED[0])
        for _, header in [*audit.CLASSES, ("", "torch/headeronly/version.h")]:
            (tmp_path / header).parent.mkdir(parents=True, exist_ok=True)
            text = (include / header).read_text()
            text = text.replace("virtual void enable(bool value) = 0;", "virtual void enable(int value) = 0;")
            (tmp_path / header).write_text(text)
        command = [sys.executable, str(SCRIPTS / "audit_cuda_allocator.py")]
        done = subprocess.run([*command, tmp_path], capture_output=True, text=True, check=False)
        assert done.returncode == 1 and "enable(int)" in done.stdout
        done = subprocess.run([*command, include], capture_output=True, text=True, check=False)
        assert done.returncode == 0 and "all are overridden" in done.stdout


@needs_wheels
@pytest.mark.parametrize("version", VERSIONS)
def test_compiles_and_links(version: str) -> None:
    wrong = build(version)
    assert not wrong, wrong


class TestBuilding:
    """How the script compiles a layer of three files."""

    FILES = {
        "one.cpp": "static int helper() { return 1; }\nint one() { return helper(); }\n",
        "three.cpp": "int three() { return 3; }\n",
        "two.cpp": "static int helper() { return 2; }\nint two() { return helper(); }\n",
    }

    def compiled(self, folder: Path, files: dict[str, str]) -> list[str]:
        layer = folder / "layer"
        layer.mkdir()
        for name, text in files.items():
            (layer / name).write_text(text)
        objects = flavour.compile_together(sorted(layer.glob("*.cpp")), ["-fPIC"], folder)
        done = subprocess.run(["nm", "-C", *objects], capture_output=True, text=True, check=True)
        return [name for name in ("one", "two", "three") if f" T {name}()" in done.stdout]

    def test_helpers_of_one_name_are_kept_apart(self, tmp_path: Path) -> None:
        """Names are found by clang-format's layout. The compiler finds the others."""
        texts = {
            "one.cpp": "namespace {\nint helper(int x) {\n  return x;\n}\n} // namespace\nint shown();\n",
            "two.cpp": "namespace {\nconstexpr int helper = 2;\n} // namespace\nint shown();\n",
            "three.cpp": "int helper();\nnamespace {\nstruct Row {\n  int at = 0;\n};\n} // namespace\n",
            "four.cpp": "namespace {\nusing Row = int;\nconst char* const kNames[] = {};\n} // namespace\n",
        }
        for name, text in texts.items():
            (tmp_path / name).write_text(text)
        files = [tmp_path / name for name in texts]
        assert [unity.own_names(file.read_text()) for file in files] == [
            {"helper"},
            {"helper"},
            {"Row"},
            {"Row", "kNames"},
        ]
        one, two, three, four = files
        assert unity.groups(files) == [[one, three], [two, four]]
        assert unity.groups(files, 1) == [[one], [two], [three], [four]]

    def test_files_that_do_not_go_together(self, tmp_path: Path) -> None:
        assert self.compiled(tmp_path, self.FILES) == ["one", "two", "three"]

    @pytest.mark.parametrize("name", sorted(FILES))
    def test_a_file_that_is_wrong(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(flavour.Failed, match=rf"(?s){name}:\d.*unknown_thing"):
            self.compiled(tmp_path, {**self.FILES, name: self.FILES[name] + "unknown_thing();\n"})
