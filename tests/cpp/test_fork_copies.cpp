// The copies of host blocks for forked children: lack of memory, occupied addresses, leaks in the parent, and the
// madvise mark that makes copies necessary.
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <string>
#include <utility>

#include "fork_helpers.h"
#include "recording/recording_runtime.h"
#include "runtime/host_memory.h"

using namespace contract;

namespace {

/// Redirects stderr to a file. `text` ends that and returns the output.
class CapturedStderr {
 public:
  CapturedStderr() : file_(std::tmpfile()), kept_(dup(STDERR_FILENO)) {
    dup2(fileno(file_), STDERR_FILENO);
  }
  ~CapturedStderr() {
    static_cast<void>(text());
    std::fclose(file_);
  }
  CapturedStderr(const CapturedStderr&) = delete;
  CapturedStderr& operator=(const CapturedStderr&) = delete;

  std::string text() {
    if (kept_ >= 0) {
      dup2(kept_, STDERR_FILENO);
      close(std::exchange(kept_, -1));
    }
    std::rewind(file_);
    std::string all(1000, '\0');
    all.resize(std::fread(all.data(), 1, all.size(), file_));
    return all;
  }

 private:
  std::FILE* file_;
  int kept_;
};

} // namespace

TEST(blocks_without_memory_for_a_copy_are_omitted_with_a_message) {
  Rig rig(std::make_unique<RecordingRuntime>(1), true);
  auto& runtime = static_cast<RecordingRuntime&>(*rig.runtime);
  Block* const first = filled(rig, 12 * MiB, Location::host(), 1);
  // separates the host blocks, which would otherwise be copied as one
  Block* const device = filled(rig, 12 * MiB, kDevice, 2);
  Block* const second = filled(rig, 32 * MiB, Location::host(), 3);
  runtime.set_host_memory_available(20 * MiB);
  CapturedStderr captured;
  const int code = in_child(*rig.allocator, [&] {
    if (!holds(rig, first, 12 * MiB, 1)) {
      return 1;
    }
    return is_mapped(rig.address(second)) ? 2 : 0;
  });
  const std::string said = captured.text();
  CHECK_EQ(code, 0);
  CHECK(said.find("cannot read " + std::to_string(32 * MiB) + " bytes") != std::string::npos);
  CHECK_EQ(std::count(said.begin(), said.end(), '\n'), 1);
  CHECK(holds(rig, second, 32 * MiB, 3));
  for (Block* const block : {first, device, second}) {
    rig.allocator->free(block);
  }
}

TEST(a_foreign_mapping_at_a_blocks_address_is_not_overwritten) {
  Rig rig(std::make_unique<RecordingRuntime>(1), true);
  Block* const block = filled(rig, 12 * MiB, Location::host(), 1);
  CapturedStderr captured;
  rig.allocator->before_fork();
  rig.allocator->copy_for_child();
  const pid_t pid = fork();
  if (pid == 0) {
    // Like a fork handler of another library that runs before ours.
    void* const at = rig.allocator->data(block);
    void* const taken = mmap(at, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    static_cast<char*>(taken)[0] = 9;
    rig.allocator->after_fork_in_child();
    _exit(taken != at ? 1 : static_cast<char*>(taken)[0] != 9 ? 2 : 0);
  }
  rig.allocator->after_fork_in_parent();
  int status = 0;
  waitpid(pid, &status, 0);
  const std::string said = captured.text();
  CHECK(WIFEXITED(status));
  CHECK_EQ(WEXITSTATUS(status), 0);
  CHECK(said.find("cannot read " + std::to_string(12 * MiB) + " bytes") != std::string::npos);
  rig.allocator->free(block);
}

TEST(forks_leak_nothing_in_the_parent) {
  Rig rig(std::make_unique<RecordingRuntime>(1), true);
  Block* const block = filled(rig, 32 * MiB, Location::host(), 1);
  const auto pages = [] { // of virtual memory, which leaked copies would increase
    std::ifstream file("/proc/self/statm");
    std::size_t count = 0;
    file >> count;
    return count;
  };
  CHECK_EQ(in_child(*rig.allocator, [] { return 0; }), 0);
  const std::size_t before = pages();
  CHECK(before > 0);
  for (int i = 0; i < 20; ++i) {
    CHECK_EQ(in_child(*rig.allocator, [&] { return holds(rig, block, 32 * MiB, 1) ? 0 : 1; }), 0);
  }
  CHECK(pages() < before + 32 * MiB / 4096);
  rig.allocator->free(block);
  rig.check();
}

TEST(a_fork_waits_only_for_streams_that_write_host_blocks) {
  Rig rig(std::make_unique<RecordingRuntime>(2), true);
  auto& runtime = static_cast<RecordingRuntime&>(*rig.runtime);
  const Stream writer = rig.stream(), other = rig.stream(), elsewhere = rig.stream(1);
  Block* const moved = filled(rig, 12 * MiB, kDevice, 1);
  rig.allocator->record_stream(moved, writer);
  rig.allocator->set_home(moved, Location::host(), Stream::host());
  Block* const host = filled(rig, 12 * MiB, Location::host(), 2);
  Block* const device = rig.allocate(12 * MiB, other); // not readable in a child
  runtime.clear_calls();
  CHECK_EQ(in_child(*rig.allocator, [&] { return holds(rig, moved, 12 * MiB, 1) ? 0 : 1; }), 0);
  std::vector<Stream> waited;
  for (const RecordedCall& call : runtime.calls()) {
    if (call.name == "synchronize_stream") {
      waited.push_back(call.stream);
    }
  }
  CHECK((waited == std::vector<Stream>{writer, kStream}));
  // A failed wait does not prevent the fork.
  rig.allocator->record_stream(host, elsewhere);
  runtime.fail("synchronize_stream", 1);
  CHECK_EQ(in_child(*rig.allocator, [&] { return holds(rig, host, 12 * MiB, 2) ? 0 : 1; }), 0);
  for (Block* const block : {moved, host, device}) {
    rig.allocator->free(block);
  }
  rig.check();
}

TEST(plain_memory_is_not_copied) {
  Rig rig(std::make_unique<RecordingRuntime>(1), false);
  static_cast<RecordingRuntime&>(*rig.runtime).set_host_memory_available(0); // refused copies print a message
  Block* const block = rig.allocate(12 * MiB);
  CapturedStderr captured;
  const int code = in_child(*rig.allocator, [&] { return is_mapped(rig.address(block)) ? 0 : 1; });
  CHECK_EQ(code, 0);
  CHECK_EQ(captured.text(), "");
  rig.allocator->free(block);
}

TEST(memory_is_unmarked_before_it_is_freed) {
  // A driver may reuse the addresses for memory that children should have.
  struct Reused final : RecordingRuntime {
    Reused() : RecordingRuntime(1), kept(map_host_memory(4 * MiB, 2 * MiB)) {}
    ~Reused() override {
      unmap_host_memory(kept, 4 * MiB);
    }
    void* do_allocate_managed(std::size_t /*bytes*/, Location /*home*/) override {
      return kept;
    }
    void do_free_managed(void* /*ptr*/, std::size_t /*bytes*/) noexcept override {}
    void* const kept;
  };
  Reused runtime;
  const auto at = reinterpret_cast<std::uintptr_t>(runtime.kept);
  const auto mapped_in_child = [&](std::uintptr_t address) {
    const pid_t pid = fork();
    if (pid == 0) {
      _exit(is_mapped(address) ? 1 : 0);
    }
    int status = 0;
    waitpid(pid, &status, 0);
    return WIFEXITED(status) && WEXITSTATUS(status) == 1;
  };
  void* const ptr = runtime.allocate_managed(4 * MiB - 100, Location::host());
  CHECK(!mapped_in_child(at));
  CHECK(!mapped_in_child(at + 4 * MiB - 4097)); // the last whole page of the block
  CHECK(mapped_in_child(at + 4 * MiB - 1)); // page shared with other memory
  runtime.free_managed(ptr);
  CHECK(mapped_in_child(at));
  CHECK(mapped_in_child(at + 4 * MiB - 4097));
}

TEST(memory_that_cannot_be_marked_is_left_as_it_is) {
  int local = 7; // contains no whole page
  keep_from_children(&local, sizeof local);
  leave_to_children(&local, sizeof local);
  CHECK_EQ(local, 7);
  void* const gone = map_host_memory(MiB, 4096);
  unmap_host_memory(gone, MiB);
  errno = 0;
  keep_from_children(gone, MiB);
  leave_to_children(gone, MiB);
  CHECK_EQ(errno, 0);
}

HARNESS_MAIN()
