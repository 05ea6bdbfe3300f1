// The access recorder: the contents of its file, and its error when the disk is full.
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "harness.h"
#include "residency/trace/access_recorder.h"
#include "runtime/error.h"

using namespace torch_uvm;

namespace {

/// A file of this test's own; the destructor deletes it.
class ScratchFile {
 public:
  ScratchFile() {
    std::string name = (std::filesystem::temp_directory_path() / "torch_uvm_recorder_XXXXXX").string();
    folder_ = ::mkdtemp(name.data());
  }
  ~ScratchFile() {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  std::string path() const {
    return (folder_ / "trace").string();
  }
  std::string text() const {
    std::ifstream file(path());
    std::ostringstream all;
    all << file.rdbuf();
    return all.str();
  }

 private:
  std::filesystem::path folder_;
};

} // namespace

TEST(the_file_is_json_lines_in_order) {
  const ScratchFile file;
  const std::vector<std::size_t> budgets = {1 << 20, 0};
  AccessRecorder recorder(file.path(), budgets);
  recorder.storage(7, 0, 4096, true);
  const std::vector<Access> accesses = {{7, false}, {8, true}, {9, false}};
  recorder.operator_begin("aten::mm \"quoted\"\n\\", 12.5, accesses, false);
  recorder.birth(10, 1, 64);
  CHECK_EQ(recorder.transfer(TransferKind::kFetch, 8, 100, 11), 0U);
  CHECK_EQ(recorder.transfer(TransferKind::kWriteBack, 7, 4096, 12), 1U);
  recorder.took(0, 1.8125);
  recorder.ran(0, 1, 250.5);
  recorder.transfer(TransferKind::kDrop, 9, 1, 12.25);
  recorder.transfer(TransferKind::kInPlace, 9, 1, std::numeric_limits<double>::quiet_NaN());
  recorder.workspace(2048);
  recorder.resident(0, 5000);
  recorder.death(10);
  recorder.mark_step();
  recorder.held(50e3);
  recorder.operator_begin("", 13, {}, true);
  CHECK_EQ(recorder.counts().operators, 2U);
  CHECK_EQ(recorder.counts().transfers, 4U);
  CHECK_EQ(recorder.counts().holds, 1U);
  CHECK_EQ(recorder.close(), "");
  recorder.death(7); // recording has stopped
  CHECK_EQ(recorder.close(), "");
  CHECK_EQ(
      file.text(),
      R"({"format": "torch_uvm accesses", "version": 5, "units": {"time": "us", "size": "bytes"}, "budgets": [1048576, null]}
{"storage": 7, "device": 0, "bytes": 4096, "resident": true}
{"operator": "aten::mm \"quoted\"\u000a\\", "time": 12.500, "in_place_ok": false, "reads": [7, 9], "writes": [8]}
{"birth": 10, "device": 1, "bytes": 64}
{"transfer": "fetch", "storage": 8, "bytes": 100, "time": 11.000}
{"transfer": "write_back", "storage": 7, "bytes": 4096, "time": 12.000}
{"took": 0, "us": 1.812}
{"ran": 0, "operators": 1, "us": 250.500}
{"transfer": "drop", "storage": 9, "bytes": 1, "time": 12.250}
{"transfer": "in_place", "storage": 9, "bytes": 1, "time": 0.000}
{"workspace": 2048}
{"resident": 5000, "device": 0}
{"death": 10}
{"step": "end"}
{"held": 50000.000}
{"operator": "", "time": 13.000, "in_place_ok": true, "reads": [], "writes": []}
)");
}

TEST(times_have_three_decimals) {
  const ScratchFile file;
  AccessRecorder recorder(file.path(), {});
  for (const double us :
       {0.0, 0.0004, 0.0625, 7.09, -1.5, -0.001, 1e12, 1e300, -std::numeric_limits<double>::infinity()}) {
    recorder.held(us);
  }
  CHECK_EQ(recorder.close(), "");
  const std::string text = file.text();
  CHECK_EQ(text.substr(text.find('\n') + 1), R"({"held": 0.000}
{"held": 0.000}
{"held": 0.062}
{"held": 7.090}
{"held": -1.500}
{"held": -0.001}
{"held": 1000000000000.000}
{"held": 1000000000000000.000}
{"held": 0.000}
)");
}

TEST(a_long_file_is_written_in_blocks_without_loss) {
  const ScratchFile file;
  std::vector<Access> accesses;
  for (StorageId storage = 0; storage < 5000; ++storage) { // one line is longer than a block
    accesses.push_back({(~StorageId{0}) - storage, storage % 2 == 0});
  }
  {
    AccessRecorder recorder(file.path(), {});
    for (int at = 0; at < 40; ++at) {
      recorder.operator_begin("aten::_foreach_add_", at, accesses, true);
    }
  } // the destructor writes the rest
  const std::string text = file.text();
  CHECK_EQ(std::count(text.begin(), text.end(), '\n'), 41);
  CHECK(text.size() > 40 * 5000 * 20);
  CHECK_EQ(text.back(), '\n');
}

TEST(a_file_that_cannot_be_created_is_refused_by_name) {
  try {
    AccessRecorder recorder("/no such folder/trace", {});
    harness::fail(__FILE__, __LINE__, "it was made");
  } catch (const InvalidArgument& error) {
    CHECK(std::string(error.what()).find("/no such folder/trace") != std::string::npos);
  }
}

TEST(a_full_disk_is_reported_at_the_end_and_stops_nothing) {
  AccessRecorder recorder("/dev/full", {});
  const std::vector<Access> accesses(1000, Access{1, true});
  for (int at = 0; at < 500; ++at) {
    recorder.operator_begin("aten::add_", at, accesses, false);
  }
  const std::string reported = recorder.close();
  CHECK(reported.find("/dev/full") != std::string::npos);
  CHECK(reported.find("No space left") != std::string::npos);
  AccessRecorder little("/dev/full", {}); // the error occurs only when the file is closed
  little.death(1);
  CHECK(little.close().find("No space left") != std::string::npos);
}

HARNESS_MAIN()
