// Times groups of consecutive operators on the device, for traces and schedules.
//
// A group begins with an event before its first operator and ends with one before the next group. Its time is what the
// device spent from one to the other, or what the program took to queue the operators if that was longer. Operators of
// a group that took long are timed alone from then on, because their shares of its time would be a guess. What the
// engine adds to the operators' stream, such as fetches and waits for operands and for the memory of results, is
// excluded: a group is a list of parts, with a pair of events each.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <unordered_set>
#include <utility>
#include <vector>

#include "allocator/events.h"
#include "residency/policy/decision.h"
#include "runtime/managed_runtime.h"

namespace torch_uvm {

/// Not thread-safe: the engine's mutex guards it.
class OperatorTimer {
 public:
  /// An event costs the host about a microsecond, so not every operator has one.
  static constexpr std::uint64_t kMaxOperators = 16;

  struct Timed {
    std::uint64_t first = 0; ///< operator, counted from 0 in order of `begin`
    std::uint64_t operators = 0;
    double us = 0;
    double host_us = 0; ///< what the program took to queue them; 0: the device was behind
    bool in_place = false; ///< `isolate` was called for it
  };
  /// Called for each group.
  using Report = std::function<void(const Timed&)>;

  OperatorTimer(ManagedRuntime& runtime, Report report);
  /// Reports the groups that are done, without waiting for the others.
  ~OperatorTimer();
  OperatorTimer(const OperatorTimer&) = delete;
  OperatorTimer& operator=(const OperatorTimer&) = delete;

  /// An operator begins on the stream. It counts as the same one as before if the key of its predecessor was the same.
  void begin(Stream stream, OperatorKey key) noexcept;
  /// The latest operator becomes a group of its own: it uses operands on the host, at the link's rate.
  void isolate() noexcept;
  /// The host has spent that long in the engine, for the latest operator.
  void engine_took(double ms) noexcept {
    group_.engine_ms += ms;
  }
  /// A step ends: the next operator begins a group.
  void end_group() noexcept;

  /// A scope in which the engine queues work of its own on the stream. Scopes nest. \param timer may be nullptr
  class Pause {
   public:
    Pause(OperatorTimer* timer, Stream stream)
        : timer_(timer != nullptr && timer->end_part(stream) ? timer : nullptr) {}
    ~Pause() {
      if (timer_ != nullptr) {
        timer_->begin_part();
      }
    }
    Pause(const Pause&) = delete;
    Pause& operator=(const Pause&) = delete;

   private:
    OperatorTimer* const timer_; ///< nullptr: another scope has ended the part, or none runs on the stream
  };

 private:
  struct Group {
    std::uint64_t first = 0;
    std::uint64_t operators = 0;
    double began_ms = 0; ///< by the host's clock
    double host_ms = 0; ///< once it has ended: `Timed::host_us`
    double engine_ms = 0; ///< what the engine took the host meanwhile
    Stream stream;
    bool in_place = false; ///< its only operator uses operands on the host
    bool alone = false; ///< it has only one operator
    std::array<std::uint64_t, kMaxOperators> pairs{}; ///< by operator: of keys, its predecessor's and its own
    std::vector<std::pair<Event, Event>> parts; ///< begin and end
    bool running = false; ///< the last part has no end yet
    bool failed = false; ///< an event could not be recorded: the group is not timed
  };
  void begin_part() noexcept;
  /// Ends the part that runs on the stream. \return whether there was one
  bool end_part(Stream stream) noexcept;
  /// Reports a group if it is done. \return whether it was
  bool report(const Group& group);
  void report_finished() noexcept;
  void forget(Group& group) noexcept;

  ManagedRuntime& runtime_;
  const Report report_;
  EventPool events_;
  std::uint64_t begun_ = 0; ///< operators
  Group group_; ///< of the latest operator; without operators: none
  OperatorKey last_ = 0;
  std::unordered_set<std::uint64_t> alone_; ///< pairs of keys of operators in long groups
  std::deque<Group> ended_;
};

} // namespace torch_uvm
