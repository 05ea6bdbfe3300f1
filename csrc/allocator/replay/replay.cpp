#include "allocator/replay/replay.h"

#include <algorithm>
#include <chrono>
#include <limits>

#include "runtime/error.h"

namespace torch_uvm {
namespace {

using Clock = std::chrono::steady_clock;
using Kind = ReplayEvent::Kind;

constexpr std::size_t kPiece = std::size_t{1} << 15; ///< events between two progress reports

bool is_row(const ReplayEvent& event) {
  return event.kind == Kind::kAllocate || event.kind == Kind::kFree;
}

/// The streams of a replay, and an event for each. Must outlive the allocators that file blocks under them.
class Streams {
 public:
  Streams(const std::vector<Stream>& logged, ManagedRuntime& runtime) : runtime_(runtime) {
    try {
      for (const Stream stream : logged) {
        const bool made = !stream.is_host() && stream.handle != nullptr;
        streams_.push_back(made ? runtime.create_stream(stream.device, 0) : stream);
        made_.push_back(made);
        events_.push_back(stream.is_host() ? Event{} : runtime.create_event(stream.device, false));
      }
    } catch (...) {
      destroy();
      throw;
    }
  }
  ~Streams() {
    destroy();
  }
  Streams(const Streams&) = delete;
  Streams& operator=(const Streams&) = delete;

  Stream operator[](std::uint32_t number) const {
    return streams_[number];
  }
  /// \return whether the stream has an event
  bool record(std::uint32_t number) const {
    if (events_[number]) {
      runtime_.record_event(events_[number], streams_[number]);
    }
    return static_cast<bool>(events_[number]);
  }

 private:
  void destroy() noexcept {
    for (const Event event : events_) {
      if (event) {
        runtime_.destroy_event(event);
      }
    }
    for (std::size_t number = 0; number < made_.size(); ++number) {
      if (made_[number]) {
        runtime_.destroy_stream(streams_[number]);
      }
    }
  }

  ManagedRuntime& runtime_;
  std::vector<Stream> streams_;
  std::vector<bool> made_;
  std::vector<Event> events_;
};

/// One run through a log.
class Pass {
  struct Held {
    Allocation allocation;
    Allocator* owner = nullptr; ///< null: freed, or not yet allocated
  };

 public:
  Pass(const ReplayLog& log, const Streams& streams, ReplaySubject subject)
      : log_(log), streams_(streams), subject_(std::move(subject)), held_(log.allocations) {}
  ~Pass() {
    for (const Held& held : held_) {
      if (held.owner != nullptr) {
        held.owner->free(held.allocation);
      }
    }
  }
  Pass(const Pass&) = delete;
  Pass& operator=(const Pass&) = delete;

  const ReplaySubject& subject() const {
    return subject_;
  }
  /// Index of the next event, or of the event that threw.
  std::size_t at() const {
    return at_;
  }

  /// \param after called after each row
  template <typename After>
  void do_next(std::size_t count, After&& after) {
    Allocator* const inner = subject_.allocator.get();
    Allocator* const outer = subject_.outside == nullptr ? inner : subject_.outside.get();
    const std::size_t end = std::min(at_ + count, log_.events.size());
    for (; at_ < end; ++at_) {
      const ReplayEvent& event = log_.events[at_];
      switch (event.kind) {
        case Kind::kAllocate: {
          const Stream stream = streams_[event.stream];
          const Location home{stream.device};
          Allocator* const owner = inside_ && home == subject_.home ? inner : outer;
          held_[event.allocation] = {owner->allocate(event.bytes, home, stream), owner};
          break;
        }
        case Kind::kFree:
          if (subject_.event_per_free) {
            recorded_ += streams_.record(event.stream) ? 1 : 0;
          }
          held_[event.allocation].owner->free(held_[event.allocation].allocation);
          held_[event.allocation].owner = nullptr;
          break;
        case Kind::kIterationBegins:
          inside_ = true;
          began_ = Clock::now();
          if (subject_.begin_iteration) {
            subject_.begin_iteration();
          }
          continue;
        case Kind::kIterationEnds:
          inside_ = false;
          if (subject_.end_iteration) {
            subject_.end_iteration();
          }
          last_iteration_ = Clock::now() - began_;
          continue;
      }
      after(event);
    }
  }

  /// Excludes time spent between two calls of do_next.
  void leave_out(Clock::duration elsewhere) {
    began_ += elsewhere;
  }
  Clock::duration last_iteration() const {
    return last_iteration_;
  }

  std::int64_t events_recorded() const {
    std::int64_t recorded = recorded_ + subject_.allocator->figures().events_recorded;
    for (const std::shared_ptr<Allocator>& layer : subject_.layers) {
      recorded += layer->figures().events_recorded;
    }
    return recorded;
  }

 private:
  const ReplayLog& log_;
  const Streams& streams_;
  const ReplaySubject subject_;
  std::vector<Held> held_;
  std::size_t at_ = 0;
  bool inside_ = false; ///< inside an iteration
  Clock::time_point began_; ///< start of the iteration
  Clock::duration last_iteration_{};
  std::int64_t recorded_ = 0;
};

void look(Pass& pass, const ReplayLog& log, ReplayResult& result, const std::function<void(std::size_t)>& done) {
  std::size_t live = 0;
  double live_sum = 0, reserved_sum = 0;
  const Allocator& runtime = *pass.subject().runtime;
  while (pass.at() < log.events.size()) {
    pass.do_next(kPiece, [&](const ReplayEvent& event) {
      live += event.kind == Kind::kAllocate ? event.bytes : 0;
      live -= event.kind == Kind::kFree ? event.bytes : 0;
      const auto reserved = static_cast<std::size_t>(runtime.figures().requested_bytes);
      result.live.push_back(live);
      result.reserved.push_back(reserved);
      result.peak_live = std::max(result.peak_live, live);
      live_sum += static_cast<double>(live);
      reserved_sum += static_cast<double>(reserved);
    });
    done(pass.at());
  }
  const AllocatorFigures figures = runtime.figures();
  result.peak_reserved = static_cast<std::size_t>(figures.peak_requested_bytes);
  result.runtime_allocations = figures.upstream_allocations;
  result.runtime_frees = figures.upstream_frees;
  result.events_recorded = pass.events_recorded();
  if (pass.subject().details) {
    result.details = pass.subject().details();
  }
  const auto rows = static_cast<double>(std::max<std::size_t>(result.live.size(), 1));
  result.mean_live = live_sum / rows;
  result.mean_reserved = reserved_sum / rows;
}

double timed(Pass& pass, const ReplayLog& log, const std::function<void(std::size_t)>& done) {
  Clock::duration spent{};
  while (pass.at() < log.events.size()) {
    const Clock::time_point begin = Clock::now();
    pass.do_next(kPiece, [](const ReplayEvent&) {});
    const Clock::time_point end = Clock::now();
    spent += end - begin;
    done(pass.at());
    pass.leave_out(Clock::now() - end);
  }
  return std::chrono::duration<double>(spent).count();
}

} // namespace

std::size_t ReplayLog::rows() const {
  return static_cast<std::size_t>(std::ranges::count_if(events, is_row));
}

std::size_t ReplayLog::rows_of_last_iteration() const {
  std::size_t rows = 0, last = 0;
  for (const ReplayEvent& event : events) {
    rows = event.kind == Kind::kIterationBegins ? 0 : rows + (is_row(event) ? 1 : 0);
    last = event.kind == Kind::kIterationEnds ? rows : last;
  }
  return last;
}

Location ReplayLog::busiest_home() const {
  std::map<Location, double> bytes;
  for (const ReplayEvent& event : events) {
    if (event.kind == Kind::kAllocate) {
      bytes[Location{streams.at(event.stream).device}] += static_cast<double>(event.bytes);
    }
  }
  const auto most = std::ranges::max_element(bytes, {}, [](const auto& each) { return each.second; });
  return most == bytes.end() ? Location::host() : most->first;
}

void ReplayLog::check(const ManagedRuntime& runtime) const {
  for (const Stream stream : streams) {
    if (stream.device >= runtime.device_count()) {
      throw InvalidArgument("the log has allocations of device " + std::to_string(stream.device) + "; there are " +
                            std::to_string(runtime.device_count()) + " devices");
    }
  }
  if (allocations > events.size()) { // a forged count alone could exhaust memory
    throw InvalidArgument(std::to_string(allocations) + " allocations in " + std::to_string(events.size()) + " events");
  }
  enum class State : std::uint8_t { kNone, kLive, kFreed };
  std::vector<State> states(allocations, State::kNone);
  std::vector<std::size_t> bytes(allocations, 0);
  std::size_t live = 0;
  bool inside = false;
  for (const ReplayEvent& event : events) {
    if (!is_row(event)) {
      const bool begins = event.kind == Kind::kIterationBegins;
      if (event.kind > Kind::kIterationEnds || begins == inside) {
        throw InvalidArgument("iterations begin and end by turns");
      }
      inside = begins;
      continue;
    }
    if (event.stream >= streams.size() || event.allocation >= allocations || event.bytes == 0) {
      throw InvalidArgument("an event of stream " + std::to_string(event.stream) + ", allocation " +
                            std::to_string(event.allocation) + ", " + std::to_string(event.bytes) + " bytes");
    }
    const bool allocates = event.kind == Kind::kAllocate;
    State& state = states[event.allocation];
    if (state != (allocates ? State::kNone : State::kLive) || (!allocates && bytes[event.allocation] != event.bytes)) {
      throw InvalidArgument("allocation " + std::to_string(event.allocation) +
                            " is allocated twice, freed when it is not, or freed as of another size");
    }
    state = allocates ? State::kLive : State::kFreed;
    bytes[event.allocation] = event.bytes;
    if (allocates && event.bytes > std::numeric_limits<std::size_t>::max() - live) {
      throw InvalidArgument("more bytes at once than can be counted");
    }
    live = allocates ? live + event.bytes : live - event.bytes;
  }
}

ReplayResult replay(const ReplayLog& log, ManagedRuntime& runtime, const std::function<ReplaySubject()>& make,
                    int repeat, const ReplayProgress& progress) {
  log.check(runtime);
  const Streams streams(log.streams, runtime);
  ReplayResult result;
  result.calls = log.rows();
  result.last_iteration_calls = log.rows_of_last_iteration();
  const std::size_t all = log.events.size() * static_cast<std::size_t>(std::max(repeat, 0) + 1);
  for (int turn = 0; turn <= repeat; ++turn) {
    const auto done = [&](std::size_t events) {
      if (progress) {
        progress(static_cast<std::size_t>(turn) * log.events.size() + events, all);
      }
    };
    std::optional<Pass> pass;
    try {
      pass.emplace(log, streams, make());
      result.description = pass->subject().allocator->description();
      if (turn == 0) {
        result.live.reserve(result.calls);
        result.reserved.reserve(result.calls);
        look(*pass, log, result, done);
      } else {
        result.seconds.push_back(timed(*pass, log, done));
        result.last_iteration_seconds.push_back(std::chrono::duration<double>(pass->last_iteration()).count());
      }
    } catch (const OutOfMemory& error) {
      result.failure = error.what();
      const auto end = log.events.begin() + static_cast<std::ptrdiff_t>(pass ? pass->at() : 0);
      result.failed_at = static_cast<std::size_t>(std::count_if(log.events.begin(), end, is_row));
      break;
    }
  }
  return result;
}

} // namespace torch_uvm
