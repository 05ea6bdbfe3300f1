// Known ordering between streams. Lets a batch of blocks that moves from one stream to another share one event.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "allocator/caching/block.h"
#include "allocator/events.h"

namespace torch_uvm {

/// Times are ticks of the heap's clock: an event recorded on a stream at a tick covers all blocks filed under that
/// stream by then. Not thread-safe; guarded by the allocator's mutex.
class StreamOrder {
 public:
  explicit StreamOrder(EventPool& events) : events_(events) {}
  StreamOrder(const StreamOrder&) = delete;
  StreamOrder& operator=(const StreamOrder&) = delete;

  /// Whether `later` is known to run after all work on blocks filed under `earlier` by `tick`.
  bool holds(Stream earlier, Stream later, std::uint64_t tick) const;
  /// Records a new event, which becomes the stream's latest. \param now the current tick
  /// \throws what the runtime throws; std::bad_alloc
  std::shared_ptr<const Readiness> record(Stream stream, std::uint64_t now);
  /// An event that covers the blocks filed under `earlier` by `tick`: the latest event if it is recent enough,
  /// otherwise one recorded now. `fresh` is set if it was recorded now. \throws what the runtime throws; std::bad_alloc
  std::shared_ptr<const Readiness> event_of(Stream earlier, std::uint64_t tick, std::uint64_t now, bool& fresh);
  /// Notes that `later` waits for the latest event of `earlier`.
  void note_wait(Stream earlier, Stream later);
  /// Notes that all work on blocks filed under `earlier` by `tick` is done.
  void note_done(Stream earlier, std::uint64_t tick);
  /// Forgets everything. A stream may be destroyed and its handle reused for a new one, which cannot be told apart.
  void forget() noexcept {
    known_.clear();
  }

 private:
  struct Known {
    std::uint64_t done = 0;
    std::uint64_t recorded = 0; ///< tick of `event`
    std::shared_ptr<const Readiness> event;
    std::vector<std::pair<Stream, std::uint64_t>> waiting; ///< stream, and the tick up to which it has waited
  };

  EventPool& events_;
  std::map<Stream, Known> known_; ///< by the earlier stream
};

} // namespace torch_uvm
