#include "runtime/host_memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>

#include "runtime/bytes.h"

namespace torch_uvm {
namespace {

constexpr std::size_t kUnbounded = std::numeric_limits<std::size_t>::max();
/// Larger than any machine's memory. Version 1 reports "no limit" as a number above it.
constexpr std::size_t kNoLimit = std::numeric_limits<std::size_t>::max() / 4;

// File names of the two versions of control groups.
struct GroupFiles {
  const char* mount;
  const char* limit;
  const char* usage;
  const char* reclaimable; // a key of memory.stat
};
constexpr GroupFiles kVersion1{"/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                               "total_inactive_file"};
constexpr GroupFiles kVersion2{"/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"};

// The number in a file; nullopt if the file does not exist or contains "max".
std::optional<std::size_t> read_number(const std::string& path) {
  std::ifstream file(path);
  std::size_t value = 0;
  return file >> value ? std::optional(value) : std::nullopt;
}

std::size_t read_stat(const std::string& path, const std::string& wanted) {
  std::ifstream file(path);
  std::string key;
  std::size_t value = 0;
  while (file >> key >> value) {
    if (key == wanted) {
      return value;
    }
  }
  return 0;
}

std::size_t limit_of_group(const std::string& folder, const GroupFiles& files) {
  const auto limit = read_number(folder + "/" + files.limit);
  return !limit || *limit >= kNoLimit ? kUnbounded : *limit;
}

std::size_t available_in_group(const std::string& folder, const GroupFiles& files) {
  const std::size_t limit = limit_of_group(folder, files);
  if (limit == kUnbounded) {
    return kUnbounded; // the usual case: saves reading further files, since every segment's allocation comes here
  }
  const auto usage = read_number(folder + "/" + files.usage);
  if (!usage) {
    return kUnbounded;
  }
  // The kernel reclaims inactive file pages before the group runs out of memory.
  const std::size_t reclaimable = std::min(*usage, read_stat(folder + "/memory.stat", files.reclaimable));
  const std::size_t held = *usage - reclaimable;
  return limit > held ? limit - held : 0;
}

/// What one group allows: its limit, or what is left of it.
using OfGroup = std::size_t (*)(const std::string& folder, const GroupFiles& files);

// The limits of all parent groups apply too. In a container the path may be the host's and not be mounted here; then
// only the mount's root folder has the files.
std::size_t least_on_path(const std::string& root, std::string path, const GroupFiles& files, OfGroup of_group) {
  std::size_t least = kUnbounded;
  while (true) {
    least = std::min(least, of_group(root + files.mount + path, files));
    const std::size_t slash = path.find_last_of('/');
    if (slash == std::string::npos) {
      return least;
    }
    path.erase(slash);
  }
}

std::size_t least_in_groups(const std::string& root, OfGroup of_group) {
  std::ifstream groups(root + "/proc/self/cgroup");
  std::size_t least = kUnbounded;
  std::string line; // "4:memory:/path" in version 1, "0::/path" in version 2
  while (std::getline(groups, line)) {
    std::istringstream fields(line);
    std::string number, controllers, path;
    std::getline(fields, number, ':');
    std::getline(fields, controllers, ':');
    std::getline(fields, path);
    const bool version1 = ("," + controllers + ",").find(",memory,") != std::string::npos;
    if (version1 || controllers.empty()) {
      least = std::min(least, least_on_path(root, path, version1 ? kVersion1 : kVersion2, of_group));
    }
  }
  return least;
}

/// \param wanted "MemAvailable:" or "MemTotal:"
std::size_t bytes_in_system(const std::string& root, const std::string& wanted) {
  std::ifstream meminfo(root + "/proc/meminfo");
  std::string line; // "MemAvailable:   123 kB"
  while (std::getline(meminfo, line)) {
    std::istringstream fields(line);
    std::string key;
    std::size_t kibibytes = 0;
    if (fields >> key >> kibibytes && key == wanted) {
      return kibibytes * KiB;
    }
  }
  // A kernel before 3.14, or a sandbox, has no MemAvailable. Then the only bound is the host's refusal to allocate.
  return kUnbounded;
}

} // namespace

std::size_t operating_system_memory_available(const std::string& root) {
  return std::min(bytes_in_system(root, "MemAvailable:"), least_in_groups(root, &available_in_group));
}

std::size_t operating_system_memory_total(const std::string& root) {
  return std::min(bytes_in_system(root, "MemTotal:"), least_in_groups(root, &limit_of_group));
}

std::size_t spare_host_memory(std::size_t available, std::size_t total) {
  if (available == kUnbounded) {
    return kUnbounded;
  }
  const std::size_t sixteenth = total == kUnbounded ? 0 : total / 16;
  return available - std::min(std::max(sixteenth, 2 * GiB), available / 2);
}

} // namespace torch_uvm
