// What streams are known to come after, so that a batch of blocks that goes from one to another shares one event.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "allocator/caching/block.h"
#include "allocator/events.h"

namespace torch_uvm {

/// In ticks of the heap's clock: an event recorded on a stream at a tick covers all that was filed under that stream by
/// then. Not thread-safe: the allocator's mutex guards it.
class StreamOrder {
 public:
  explicit StreamOrder(EventPool& events) : events_(events) {}
  StreamOrder(const StreamOrder&) = delete;
  StreamOrder& operator=(const StreamOrder&) = delete;

  /// Whether `later` comes after what was filed under `earlier` by a tick, with nothing to be done.
  bool holds(Stream earlier, Stream later, std::uint64_t tick) const;
  /// An event recorded now, which is the stream's last. \param now the tick
  /// \throws what the runtime throws; std::bad_alloc
  std::shared_ptr<const Readiness> record(Stream stream, std::uint64_t now);
  /// The event to wait for, for what was filed under `earlier` by `tick`: the last one if it was recorded since, else
  /// one recorded now. `fresh` says which. \throws what the runtime throws; std::bad_alloc
  std::shared_ptr<const Readiness> event_of(Stream earlier, std::uint64_t tick, std::uint64_t now, bool& fresh);
  /// `later` waits for the last event of `earlier`.
  void note_wait(Stream earlier, Stream later);
  /// All that was filed under `earlier` by `tick` is done.
  void note_done(Stream earlier, std::uint64_t tick);
  /// Nothing is known any more: streams may be destroyed, and others made that are told apart from them by nothing.
  void forget() noexcept {
    known_.clear();
  }

 private:
  struct Known {
    std::uint64_t done = 0;
    std::uint64_t recorded = 0; ///< of `event`
    std::shared_ptr<const Readiness> event;
    std::vector<std::pair<Stream, std::uint64_t>> waiting; ///< who has waited for what was filed by which tick
  };

  EventPool& events_;
  std::map<Stream, Known> known_; ///< by the earlier stream
};

} // namespace torch_uvm
