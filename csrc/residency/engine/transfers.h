// How long the engine's copies take, by timed events around each; read when they are over, without waiting.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "residency/engine/residency_statistics.h"
#include "residency/engine/staging.h"
#include "residency/trace/access_recorder.h"
#include "runtime/managed_runtime.h"

namespace torch_uvm {

/// Not thread-safe: the engine's mutex guards it.
class Transfers {
 public:
  explicit Transfers(ManagedRuntime& runtime) : runtime_(runtime) {}
  Transfers(const Transfers&) = delete;
  Transfers& operator=(const Transfers&) = delete;

  enum class Kind { kFetch, kWriteBack };

  /// Copies in `stream`'s order, and counts it.
  /// \param staging of that direction, through which it goes, or nullptr
  /// \throws what the runtime throws
  void copy(Kind kind, void* dst, const void* src, std::size_t bytes, Stream stream, Staging* staging);
  /// Has the recorder told how long the latest copy takes, once it is over, if it is timed.
  /// \param number the recorder's, of the transfer
  void record_latest(AccessRecorder& recorder, std::uint64_t number) noexcept;
  /// The recorder is about to be closed: it is told of the copies that are over.
  void end_recording(ResidencyStatistics& statistics) noexcept;
  /// Adds the times of copies that are over to the statistics.
  void collect(ResidencyStatistics& statistics) noexcept;

 private:
  struct Timed {
    Kind kind;
    int device;
    Event begin;
    Event end;
    std::uint64_t copy = 0; ///< its number among all
    AccessRecorder* recorder = nullptr; ///< to tell of its time
    std::uint64_t transfer = 0; ///< the recorder's number
  };
  Event timed_event(Stream stream);
  void time(Kind kind, Event begin, Stream stream) noexcept;
  void read_times(std::size_t most, ResidencyStatistics& statistics) noexcept;
  void give(int device, Event event) noexcept;

  /// As many as are timed at once; copies beyond them are counted and not timed.
  static constexpr std::size_t kMostTimed = 4096;
  static constexpr std::size_t kReadAtOnce = 4;

  ManagedRuntime& runtime_;
  ResidencyStatistics counted_; ///< since the last `collect`
  std::deque<Timed> timed_;
  std::uint64_t copies_ = 0;
  std::vector<std::vector<Event>> unused_; ///< by device
};

} // namespace torch_uvm
