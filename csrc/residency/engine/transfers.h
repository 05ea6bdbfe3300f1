// Queues the engine's copies, and times some of them with a pair of events, which are read once the copy is done,
// without blocking. Timing a copy takes four driver calls, as many as a small copy itself.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>

#include "allocator/events.h"
#include "residency/engine/residency_statistics.h"
#include "residency/engine/staging.h"
#include "residency/trace/access_recorder.h"
#include "runtime/bytes.h"
#include "runtime/managed_runtime.h"

namespace torch_uvm {

/// Not thread-safe: the engine's mutex guards it.
class Transfers {
 public:
  explicit Transfers(ManagedRuntime& runtime)
      : runtime_(runtime), events_(runtime, runtime.device_count(), /*timing=*/true) {}
  Transfers(const Transfers&) = delete;
  Transfers& operator=(const Transfers&) = delete;

  enum class Kind { kFetch, kWriteBack };

  /// Queues a copy on `stream` and counts it.
  /// \param staging the staging buffer of that direction, or nullptr for a direct copy
  /// \param timed time it in any case
  /// \param read for a write-back: an event to record once `src` has been read
  /// \throws the runtime's errors
  void copy(Kind kind, void* dst, const void* src, std::size_t bytes, Stream stream, Staging* staging, bool timed,
            Event read = {});
  /// Reports the duration of the latest copy to the recorder once the copy is done, if it is timed.
  /// \param number the recorder's number of the transfer
  void record_latest(AccessRecorder& recorder, std::uint64_t number) noexcept;
  /// Called before the recorder is closed. Reports the copies that are done and forgets the recorder.
  void end_recording(ResidencyStatistics& statistics) noexcept;
  /// Adds the counts so far, and the times of copies that are done, to the statistics. Copies that are not timed count
  /// as long as the timed ones of their direction, by their bytes.
  void collect(ResidencyStatistics& statistics) noexcept;

 private:
  struct Timed {
    Kind kind;
    int device;
    std::size_t bytes;
    Event begin;
    Event end;
    std::uint64_t copy = 0; ///< value of `copies_` for this copy
    AccessRecorder* recorder = nullptr; ///< receives the duration
    std::uint64_t transfer = 0; ///< the recorder's number of the transfer
  };
  /// What is known about the copies of one direction.
  struct Rate {
    std::size_t bytes = 0; ///< of the timed copies that are done
    double ms = 0; ///< that they took
    std::size_t untimed = 0; ///< bytes since the last `collect` of copies that are not timed
    std::size_t since_timed = 0; ///< bytes of copies since the latest timed one
    bool known = false; ///< a copy has been timed
  };
  bool is_due(Rate& rate, std::size_t bytes, bool timed) noexcept;
  void time(Kind kind, std::size_t bytes, Event begin, Stream stream) noexcept;
  void read_times(std::size_t most, ResidencyStatistics& statistics) noexcept;
  void give(int device, Event event) noexcept {
    events_.give(Stream::default_of(device), event);
  }

  /// Limit on copies that are timed at once. Copies beyond it are counted but not timed.
  static constexpr std::size_t kMaxTimed = 4096;
  static constexpr std::size_t kReadAtOnce = 2;
  /// At most so many bytes in a row are not timed.
  static constexpr std::size_t kUntimed = 64 * MiB;

  ManagedRuntime& runtime_;
  ResidencyStatistics counted_; ///< since the last `collect`
  std::array<Rate, 2> rates_; ///< by Kind
  std::deque<Timed> timed_;
  std::uint64_t copies_ = 0;
  EventPool events_;
};

} // namespace torch_uvm
