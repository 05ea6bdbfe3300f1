// A file for an allocation log, a parser of its rows, and an observed allocator.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "allocator/adaptors/caching_allocator.h"
#include "allocator/replay/allocation_log.h"
#include "harness.h"
#include "runtime/bytes.h"
#include "runtime/error.h"
#include "runtime/testing/recording_runtime.h"

namespace logs {

using namespace torch_uvm;

constexpr Location kDevice = Location::device(0);
constexpr Stream kStream = Stream::default_of(0);

/// The path of a log in a folder of its own. The destructor removes the folder.
class ScratchFile {
 public:
  ScratchFile() {
    std::string name = (std::filesystem::temp_directory_path() / "torch_uvm_log_XXXXXX").string();
    folder_ = ::mkdtemp(name.data());
  }
  ~ScratchFile() {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  std::string path() const {
    return (folder_ / "log.csv").string();
  }
  std::vector<std::string> lines() const {
    std::ifstream file(path());
    std::vector<std::string> all;
    for (std::string line; std::getline(file, line);) {
      all.push_back(line);
    }
    return all;
  }

 private:
  std::filesystem::path folder_;
};

struct Row {
  std::string thread, action, pointer;
  std::size_t bytes = 0;
  std::string stream;
};

/// Parses a file with a header; a malformed row fails the test.
inline std::vector<Row> rows_of(const ScratchFile& file) {
  static const std::regex form(
      R"((\d+),\d\d:\d\d:\d\d\.\d{6},(allocate|free|allocate failure),(0x[0-9a-f]+|\(nil\)),(\d+),(0|0x[0-9a-f]+))");
  const std::vector<std::string> lines = file.lines();
  CHECK(!lines.empty());
  CHECK_EQ(lines[0], "Thread,Time,Action,Pointer,Size,Stream");
  std::vector<Row> rows;
  for (std::size_t at = 1; at < lines.size(); ++at) {
    std::smatch match;
    if (!std::regex_match(lines[at], match, form)) {
      harness::fail(__FILE__, __LINE__, "no row: " + lines[at]);
    }
    rows.push_back({match[1], match[2], match[3], std::stoull(match[4]), match[5]});
  }
  return rows;
}

/// Replays rows: checks that no live address is allocated again and that only live addresses are freed.
/// \return the allocations that are live at the end
inline std::map<std::string, std::size_t> replayed(const std::vector<Row>& rows) {
  std::map<std::string, std::size_t> live;
  for (const Row& row : rows) {
    if (row.action == "allocate") {
      CHECK(live.emplace(row.pointer, row.bytes).second);
    } else if (row.action == "free") {
      const auto known = live.find(row.pointer);
      CHECK(known != live.end());
      CHECK_EQ(known->second, row.bytes);
      live.erase(known);
    }
  }
  return live;
}

inline std::string text_of(const void* ptr) {
  std::ostringstream text;
  text << ptr;
  return text.str();
}

struct Rig {
  RecordingRuntime runtime{2};
  CachingManagedAllocator memory{runtime, std::make_unique<ManagedSegmentSource>(runtime)};
  std::shared_ptr<Allocator> caching = std::make_shared<CachingAllocator>(memory);
};

} // namespace logs
