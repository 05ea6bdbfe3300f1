// Fuzzer of replays. Arbitrary log columns must either throw InvalidArgument or be replayed on each allocator in turn
// without leaks. Stream numbers are taken from the input.
#include <algorithm>
#include <memory>
#include <vector>

#include "allocator/allocation_log.h"
#include "allocator/replay/replay.h"
#include "fuzz_input.h"
#include "recording/recording_runtime.h"
#include "runtime/bytes.h"

using namespace torch_uvm;

namespace {

using Kind = ReplayEvent::Kind;

constexpr std::size_t kMaxEvents = 400;
constexpr std::size_t kLimit = 64 * MiB;

std::vector<Stream> streams_of(fuzz::Input& input) {
  std::vector<Stream> streams;
  for (std::size_t left = input.below(8); left > 0; --left) {
    const auto logged = input.number<std::uint64_t>();
    const Stream stream = stream_from_log(logged);
    FUZZ_CHECK(stream_from_log(logged_stream(stream)) == stream);
    streams.push_back(stream);
  }
  return streams;
}

/// Half of the logs are plausible; otherwise almost no log would be valid.
ReplayLog log_of(fuzz::Input& input) {
  ReplayLog log;
  const bool plausible = input.below(2) == 0;
  log.streams =
      plausible ? std::vector<Stream>{Stream::host(), Stream::default_of(0), Stream::default_of(1)} : streams_of(input);
  log.allocations = plausible ? 0 : input.number<std::uint16_t>();
  std::vector<ReplayEvent> live;
  bool inside = false;
  while (!input.empty() && log.events.size() < kMaxEvents) {
    ReplayEvent event;
    event.kind = static_cast<Kind>(input.below(plausible ? 4 : 6));
    event.stream = input.byte();
    event.bytes = std::size_t{input.number<std::uint16_t>()} << input.below(plausible ? 12 : 64);
    if (!plausible) {
      event.allocation = input.number<std::uint16_t>();
      log.events.push_back(event);
      continue;
    }
    event.stream %= log.streams.size();
    event.bytes += 1;
    if (event.kind == Kind::kAllocate) {
      event.allocation = log.allocations++;
      live.push_back(event);
    } else if (event.kind == Kind::kFree && !live.empty()) {
      const auto which = live.begin() + static_cast<std::ptrdiff_t>(input.below(live.size()));
      event.allocation = which->allocation;
      event.bytes = which->bytes;
      live.erase(which);
    } else {
      event.kind = inside ? Kind::kIterationEnds : Kind::kIterationBegins;
      inside = !inside;
    }
    log.events.push_back(event);
  }
  return log;
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Input input(data, size);
  const std::vector<std::string> names = replay_allocators();
  const std::string& name = names[input.below(names.size())];
  RecordingRuntime runtime(2);
  runtime.set_limit(kLimit);
  try {
    const ReplayLog log = log_of(input);
    const auto rows = std::ranges::count_if(log.events, [](const auto& event) { return event.kind <= Kind::kFree; });
    const ReplayOptions options{Location::device(0), input.below(64) * MiB, {}};
    const ReplayResult result = replay(log, runtime, name, options, true);
    FUZZ_CHECK(!result.failure.empty() || result.reserved.size() == static_cast<std::size_t>(rows));
  } catch (const InvalidArgument&) {
  }
  FUZZ_CHECK(runtime.managed_bytes() == 0);
  FUZZ_CHECK(runtime.live_objects() == 0);
  return 0;
}
