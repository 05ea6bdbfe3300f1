// Which ranges lie in private mappings of files.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <filesystem>
#include <sstream>
#include <string>
#include <vector>

#include "harness.h"
#include "runtime/host_memory.h"

using namespace torch_uvm;

namespace {

constexpr std::size_t kPage = 4096;

bool in_maps(const std::string& text, std::uintptr_t begin, std::uintptr_t end) {
  std::istringstream maps(text);
  return is_private_file_mapping(maps, {begin, end});
}

/// A file of two pages that is mapped.
struct Mapped {
  void* ptr;

  Mapped(int protection, int flags) {
    std::string name = (std::filesystem::temp_directory_path() / "mapped_file_XXXXXX").string();
    const int file = mkstemp(name.data());
    CHECK(file >= 0 && ftruncate(file, 2 * kPage) == 0);
    ptr = mmap(nullptr, 2 * kPage, protection, flags, file, 0);
    CHECK(ptr != MAP_FAILED);
    close(file);
    unlink(name.c_str());
  }
  ~Mapped() {
    munmap(ptr, 2 * kPage);
  }
  Mapped(const Mapped&) = delete;
};

} // namespace

TEST(a_writable_private_mapping_of_a_file_is_one) {
  const Mapped mapped(PROT_READ | PROT_WRITE, MAP_PRIVATE);
  auto* const bytes = static_cast<char*>(mapped.ptr);
  CHECK(is_private_file_mapping(bytes, 2 * kPage));
  CHECK(is_private_file_mapping(bytes + 5, kPage));
  CHECK(!is_private_file_mapping(bytes, 0));
  bytes[0] = 1; // the page is a copy from now on
  CHECK(is_private_file_mapping(bytes, 2 * kPage));
  CHECK(mprotect(bytes + kPage, kPage, PROT_READ) == 0);
  CHECK(is_private_file_mapping(bytes, kPage));
  CHECK(!is_private_file_mapping(bytes, kPage + 1));
}

TEST(other_memory_is_none) {
  const Mapped shared(PROT_READ | PROT_WRITE, MAP_SHARED), read_only(PROT_READ, MAP_PRIVATE);
  CHECK(!is_private_file_mapping(shared.ptr, kPage));
  CHECK(!is_private_file_mapping(read_only.ptr, kPage));
  const std::vector<char> heap(64 * kPage);
  CHECK(!is_private_file_mapping(heap.data(), heap.size()));
  const int stack = 0;
  CHECK(!is_private_file_mapping(&stack, sizeof stack));
  CHECK(!is_private_file_mapping(nullptr, kPage));
}

TEST(a_range_may_span_neighbours_but_no_gap) {
  const std::string text =
      "1000-2000 rw-p 00000000 08:01 7    /a file\n"
      "2000-3000 rw-p 00001000 08:01 7    /a file\n"
      "4000-5000 rw-p 00003000 08:01 7    /a file\n"
      "5000-6000 rw-p 00000000 00:00 0\n";
  CHECK(in_maps(text, 0x1000, 0x3000));
  CHECK(in_maps(text, 0x1fff, 0x2001));
  CHECK(!in_maps(text, 0x2fff, 0x4001));
  CHECK(!in_maps(text, 0x0fff, 0x1001));
  CHECK(in_maps(text, 0x4000, 0x5000));
  CHECK(!in_maps(text, 0x4000, 0x5001)); // anonymous memory follows
  CHECK(!in_maps(text, 0x7000, 0x7001));
}

TEST(text_that_does_not_parse_is_refused) {
  CHECK(!in_maps("", 0x1000, 0x2000));
  CHECK(!in_maps("nothing of the kind\n", 0x1000, 0x2000));
  CHECK(!in_maps("1000-2000 rw-p\n", 0x1000, 0x2000));
}

HARNESS_MAIN()
