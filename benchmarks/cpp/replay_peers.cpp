// Replays logs on our allocators and on other libraries' allocators, in one process, over one runtime and one limit.
//
// It is a Python module of its own. It links the layers that need no torch, and creates no second runtime.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "allocator/replay/replay.h"
#include "config/options.h"
#include "cuda/cuda_runtime.h"
#include "replay_peers.h"
#include "runtime/bytes.h"

namespace torch_uvm::peers {
namespace {

namespace py = pybind11;

std::unique_ptr<cuda::CudaRuntime>& runtime_if_started() {
  // leaked: PyTorch's static objects may be destroyed later
  static auto* runtime = new std::unique_ptr<cuda::CudaRuntime>();
  return *runtime;
}

cuda::CudaRuntime& runtime() {
  if (runtime_if_started() == nullptr) {
    throw RuntimeFailure("start() comes first: it sets the limit");
  }
  return *runtime_if_started();
}

/// Returns the free bytes of each device.
/// \throws RuntimeFailure if a device has less than the limit and `margin` free
std::vector<std::size_t> start(std::size_t limit, std::size_t margin) {
  auto made = std::make_unique<cuda::CudaRuntime>();
  std::vector<std::size_t> free;
  for (int device = 0; device < made->device_count(); ++device) {
    free.push_back(made->memory_info(device).free);
    if (free.back() < limit + margin) {
      throw RuntimeFailure("device " + std::to_string(device) + " has " + format_bytes(free.back()) +
                           " free; a limit of " + format_bytes(limit) + " of managed memory takes " +
                           format_bytes(margin) + " more");
    }
  }
  made->set_limit(limit);
  runtime_if_started() = std::move(made);
  return free;
}

ReplayLog make_log(const std::vector<std::uint8_t>& kinds, const std::vector<std::uint32_t>& allocations,
                   const std::vector<std::uint64_t>& bytes, std::uint32_t count) {
  if (allocations.size() != kinds.size() || bytes.size() != kinds.size()) {
    throw InvalidArgument("columns of different lengths");
  }
  ReplayLog log;
  log.allocations = count;
  log.streams = {Stream::default_of(0)};
  log.events.reserve(kinds.size());
  for (std::size_t at = 0; at < kinds.size(); ++at) {
    log.events.push_back({static_cast<ReplayEvent::Kind>(kinds[at]), 0, allocations[at], bytes[at]});
  }
  return log;
}

const std::vector<std::string>& peer_names() {
  static const auto* names = new std::vector<std::string>{
      "torch",
#ifdef TORCH_UVM_WITH_RMM
      "rmm-pool",
      "rmm-arena",
#endif
  };
  return *names;
}

/// Like make_subject for our allocators: the runtime's allocator is the lowest layer.
ReplaySubject make_peer(const std::string& name, const ReplayOptions& options) {
  ReplaySubject subject;
  subject.runtime = counted_runtime(runtime());
  const auto below = subject.runtime;
#ifdef TORCH_UVM_WITH_RMM
  if (name != "torch") {
    subject.allocator = (name == "rmm-pool" ? make_rmm_pool : make_rmm_arena)(below, options.home, options.initial);
    return subject;
  }
#endif
  subject.allocator = make_torch_native(below, options.home);
  return subject;
}

/// \param options in the format of TORCH_UVM_CONF; only our caching allocator uses its options
/// \param bytes initial size of a pool or an arena
/// \param repeat timed replays, after one that is not timed
py::dict replay_on(const std::string& name, const ReplayLog& log, const std::string& options, std::size_t bytes,
                   int repeat) {
  std::size_t calls = 0, last_calls = 0, in_iteration = 0, live = 0, peak_live = 0;
  for (const ReplayEvent& event : log.events) {
    const bool is_row = event.kind <= ReplayEvent::Kind::kFree;
    calls += is_row ? 1 : 0;
    in_iteration = event.kind == ReplayEvent::Kind::kIterationBegins ? 0 : in_iteration + (is_row ? 1 : 0);
    last_calls = event.kind == ReplayEvent::Kind::kIterationEnds ? in_iteration : last_calls;
    live += event.kind == ReplayEvent::Kind::kAllocate ? event.bytes : 0;
    live -= event.kind == ReplayEvent::Kind::kFree ? event.bytes : 0;
    peak_live = std::max(peak_live, live);
  }
  std::vector<ReplayResult> results;
  {
    const py::gil_scoped_release no_gil;
    const ReplayOptions how{Location::device(0), bytes, parse_options(options).allocator};
    const bool others = std::ranges::find(peer_names(), name) != peer_names().end();
    const auto make = [&] { return others ? make_peer(name, how) : make_subject(name, runtime(), how); };
    for (int turn = 0; turn <= repeat; ++turn) {
      results.push_back(replay(log, runtime(), make, turn == 0));
    }
  }
  std::vector<double> seconds, last_iteration_seconds;
  for (std::size_t turn = 1; turn < results.size(); ++turn) {
    seconds.push_back(results[turn].seconds);
    last_iteration_seconds.push_back(results[turn].last_iteration_seconds);
  }
  const ReplayResult& result = results.front();
  py::dict dict;
  dict["seconds"] = seconds;
  dict["last_iteration_seconds"] = last_iteration_seconds;
  dict["calls"] = calls;
  dict["last_iteration_calls"] = last_calls;
  dict["peak_live"] = peak_live;
  dict["peak_reserved"] = result.peak_reserved;
  dict["runtime_allocations"] = result.runtime_allocations;
  dict["runtime_frees"] = result.runtime_frees;
  dict["failure"] = results.back().failure;
  dict["failed_at"] = results.back().failed_at;
  return dict;
}

} // namespace
} // namespace torch_uvm::peers

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace torch_uvm;
  using namespace torch_uvm::peers;
  pybind11::class_<ReplayLog>(module, "Log");
  module.def("start", &start, pybind11::arg("limit"), pybind11::arg("margin"));
  module.def("make_log", &make_log);
  module.def("peers", &peer_names);
  module.def("replay", &replay_on, pybind11::arg("name"), pybind11::arg("log"), pybind11::arg("options"),
             pybind11::arg("bytes"), pybind11::arg("repeat"));
  module.def("managed_bytes", [] { return runtime().managed_bytes(); });
  module.def("peak_managed_bytes", [] { return runtime().peak_managed_bytes(); });
}
