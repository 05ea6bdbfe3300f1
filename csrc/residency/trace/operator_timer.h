// Times operators on the device, for traces and schedules.
//
// An operator's time is what the device spends from an event before it to one before the next operator, or what the
// program took to queue it if that was longer. What the engine adds to the operators' stream, such as fetches and waits
// for operands and for the memory of results, is excluded: an operator is a list of parts, with a pair of events each.
//
// For the device's own times, a device that has caught up with the host is held for a moment, in which the host gets
// ahead, and an operator's time ends with it.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <utility>
#include <vector>

#include "allocator/events.h"
#include "runtime/managed_runtime.h"

namespace torch_uvm {

/// Not thread-safe: the engine's mutex guards it.
class OperatorTimer {
 public:
  static constexpr double kHoldMs = 1;

  struct Timed {
    std::uint64_t number = 0; ///< counted from 0 in order of `begin`
    double ms = 0;
    double host_ms = 0; ///< what the program took to queue it; 0: not known
    bool in_place = false; ///< it used operands on the host, at the link's rate
    bool waited = false; ///< the host waited for it
  };
  /// Called for each operator.
  using Report = std::function<void(const Timed&)>;

  OperatorTimer(ManagedRuntime& runtime, Report report);
  /// Reports the operators that are done, without waiting for the others.
  ~OperatorTimer();
  OperatorTimer(const OperatorTimer&) = delete;
  OperatorTimer& operator=(const OperatorTimer&) = delete;

  /// From now on the device's own times are taken.
  void hold_from_now_on() noexcept {
    holds_ = true;
  }
  void begin(Stream stream) noexcept;
  void end() noexcept;
  void used_in_place() noexcept {
    latest_.timed.in_place = true;
  }
  /// The host has spent that long in the engine, for the latest operator.
  void engine_took(double ms) noexcept {
    latest_.engine_ms += ms;
  }
  /// The time until the next operator is not the latest one's.
  void finish() noexcept;

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
  struct Operator {
    Timed timed;
    double began_ms = 0, ended_ms = 0; ///< by the host's clock
    double engine_ms = 0; ///< what the engine took the host meanwhile
    bool kept_up = false; ///< the device had begun it when it ended
    Stream stream;
    std::vector<std::pair<Event, Event>> parts; ///< begin and end
    double pause_ms = 0; ///< from its end until the host queued `resumed`, by when the device was idle
    Event resumed;
    bool running = false; ///< the last part has no end yet
    bool failed = false; ///< an event could not be recorded: the operator is not timed
  };
  void begin_part() noexcept;
  /// Ends the part that runs on the stream. \return whether there was one
  bool end_part(Stream stream) noexcept;
  /// Reports an operator if it is done. \return whether it was
  bool report(Operator& done);
  void report_finished() noexcept;
  void forget(Operator& done) noexcept;

  ManagedRuntime& runtime_;
  const Report report_;
  bool holds_ = false;
  EventPool events_;
  std::uint64_t begun_ = 0;
  Operator latest_; ///< without parts: none
  std::deque<Operator> ended_;
};

} // namespace torch_uvm
