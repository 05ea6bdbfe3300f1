// A log of allocations: CSV rows as RMM's logging_resource_adaptor writes them, so that either side reads the other's.
//
//   Thread,Time,Action,Pointer,Size,Stream
//   4711,14:02:08.123456,allocate,0x7f0c3a000000,1048576,0
//   4711,14:02:08.123460,free,0x7f0c3a000000,1048576,0
//   4711,14:02:08.123471,allocate failure,(nil),68719476736,0
//
// Thread is the operating system's number, Time the local time of day, Size in bytes as asked for. Stream is the
// runtime's handle, as RMM has it; where a log is of one device, that is all. Ours is of all homes, and a user's
// address leaves the upper 16 bits of a handle free: they hold the device's index, or 0xffff for the host, which has no
// stream.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "allocator/allocation_observer.h"
#include "runtime/location.h"

namespace torch_uvm {

/// A stream as the log has it.
std::uint64_t logged_stream(Stream stream);
/// The reverse. \throws InvalidArgument for one that the log cannot have
Stream stream_from_log(std::uint64_t logged);

/// What became of a log.
struct AllocationLogEnd {
  std::uint64_t rows = 0; ///< in the file
  std::uint64_t lost = 0; ///< that could not be written
  std::string error; ///< in words; empty: nothing went wrong
};

/// Thread-safe. Rows are in the file in the order of the calls that wrote them down. Those calls neither throw nor
/// write: they leave a row in a block of memory, and a thread of the log's own writes blocks out, once they are half
/// full or a second has gone by. There are two blocks; where the disk does not keep up the calls wait for it, since a
/// log with holes cannot be replayed. An error while writing (a full disk) is kept for `close`; the file then ends
/// with the last whole row, and what comes after is counted and left out.
///
/// A forked child has the file and not the thread: there all calls do nothing.
///
/// Its mutex is a leaf: nothing is called with it held.
class AllocationLog final : public AllocationObserver {
 public:
  /// \throws InvalidArgument with the reason, if the file cannot be made; RuntimeFailure if there is no thread to be
  /// had
  explicit AllocationLog(std::string path);
  ~AllocationLog() override;
  AllocationLog(const AllocationLog&) = delete;
  AllocationLog& operator=(const AllocationLog&) = delete;

  void allocated(const void* ptr, std::size_t bytes, Stream stream) noexcept override;
  void freed(const void* ptr, std::size_t bytes, Stream stream) noexcept override;
  void refused(std::size_t bytes, Stream stream) noexcept override;

  /// Writes what is left. What comes after is not recorded.
  AllocationLogEnd close() noexcept;

  static constexpr std::size_t kBlockRows = std::size_t{1} << 15; ///< of each of two blocks, 1.5 MiB

 private:
  enum class Action : std::uint8_t { kAllocate, kFree, kFailure };
  struct Row {
    const void* ptr;
    std::size_t bytes;
    Stream stream;
    std::int64_t time_us; ///< since the epoch
    int thread;
    Action action;
  };
  class Writer;
  struct Shared {
    std::mutex mutex; ///< guards the next three
    std::condition_variable rows_came, room_came;
    std::vector<Row> filling;
    bool closing = false;
    std::thread thread;
  };

  void append(Action action, const void* ptr, std::size_t bytes, Stream stream) noexcept;
  void write_blocks() noexcept; ///< what the thread does

  const std::string path_;
  const unsigned forks_; ///< that this process had been through when the log was made
  int file_ = -1;
  AllocationLogEnd end_; ///< the thread's until it is joined
  /// Leaked in a forked child: the thread cannot be joined there, and a condition that was waited for when the process
  /// was copied is waited for ever.
  Shared* shared_ = nullptr;
};

} // namespace torch_uvm
