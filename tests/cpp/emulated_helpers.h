// Helpers shared by the emulated runtime's tests.
#pragma once

#include <span>
#include <sstream>
#include <string>

#include "runtime/bytes.h"
#include "runtime/emulated/emulated_runtime.h"

namespace emulated_helpers {

using namespace torch_uvm;

constexpr std::size_t kPage = EmulatedRuntime::kPageBytes;
constexpr std::size_t kDeviceBytes = MiB; // 16 pages

inline EmulatedConfig devices(int count, std::optional<std::uint64_t> seed = std::nullopt) {
  EmulatedConfig config;
  config.devices = count;
  config.memory = kDeviceBytes;
  config.schedule_seed = seed;
  return config;
}

/// Pages of managed memory, with short functions for their use.
struct Managed {
  EmulatedRuntime& runtime;
  std::size_t pages;
  void* ptr;

  Managed(EmulatedRuntime& runtime, std::size_t pages)
      : runtime(runtime), pages(pages), ptr(runtime.allocate_managed(pages * kPage, Location::device(0))) {}
  ~Managed() {
    runtime.free_managed(ptr);
  }
  Managed(const Managed&) = delete;

  void* at(std::size_t page) const {
    return static_cast<char*>(ptr) + page * kPage;
  }
  void use(std::size_t first, std::size_t count, int device, bool write) const {
    const Touch access{at(first), count * kPage, write};
    runtime.begin_kernel(Stream::default_of(device), std::span(&access, 1));
    runtime.end_kernel(Stream::default_of(device), {});
  }
  void use_on_host(std::size_t first, std::size_t count, bool write) const {
    const Touch access{at(first), count * kPage, write};
    runtime.touch_from_host(std::span(&access, 1));
  }
  void prefetch(std::size_t first, std::size_t count, Location to) const {
    runtime.prefetch(at(first), count * kPage, to, Stream::default_of(to.is_host() ? 0 : to.index));
  }
  void advise(std::size_t first, std::size_t count, Advice advice, Location location) const {
    runtime.advise(at(first), count * kPage, advice, location);
  }

  /// A summary in pages, such as "host 2, device 0 1, untouched 1".
  std::string where(std::size_t first, std::size_t count) const {
    const ResidencyInfo info = runtime.residency(at(first), count * kPage);
    std::ostringstream text;
    auto add = [&text, first_word = true](const std::string& place, std::size_t bytes) mutable {
      if (bytes > 0) {
        text << (first_word ? "" : ", ") << place << ' ' << bytes / kPage;
        first_word = false;
      }
    };
    add("host", info.host);
    for (std::size_t device = 0; device < info.devices.size(); ++device) {
      add("device " + std::to_string(device), info.devices[device]);
    }
    add("untouched", info.untouched);
    return text.str();
  }
  std::string where() const {
    return where(0, pages);
  }
};

} // namespace emulated_helpers
