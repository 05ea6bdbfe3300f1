// A log of allocations in the CSV format of RMM's logging_resource_adaptor. Either side can read the other's logs.
//
//   Thread,Time,Action,Pointer,Size,Stream
//   4711,14:02:08.123456,allocate,0x7f0c3a000000,1048576,0
//   4711,14:02:08.123460,free,0x7f0c3a000000,1048576,0
//   4711,14:02:08.123471,allocate failure,(nil),68719476736,0
//
// Thread is the kernel's thread id, Time the local time of day, Size the requested bytes. Stream is the runtime's
// handle, as in RMM's logs, which cover a single device. This log covers all homes, so the upper 16 bits, which
// user-space addresses leave unused, hold the device index, or 0xffff for the host, which has no stream.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "allocator/allocation_observer.h"
#include "runtime/forks.h"
#include "runtime/location.h"

namespace torch_uvm {

/// Encodes a stream for the log.
std::uint64_t logged_stream(Stream stream);
/// Decodes a stream. \throws InvalidArgument for a value that no stream encodes to
Stream stream_from_log(std::uint64_t logged);

/// Result of a log.
struct AllocationLogEnd {
  std::uint64_t rows = 0; ///< written to the file
  std::uint64_t lost = 0; ///< not written
  std::string error; ///< message; empty: no error
};

/// Thread-safe. Rows are in the file in the order of the calls. The calls neither throw nor write to the file: they
/// append a row to a buffer, which a writer thread writes out once it is half full or after a second. There are two
/// buffers. If the disk cannot keep up, the calls wait for it, because a log with gaps cannot be replayed. A write
/// error (such as a full disk) is reported by `close`; the file then ends with the last complete row, and later rows
/// are counted as lost.
///
/// A forked child has the file but not the writer thread: all calls do nothing there.
///
/// The mutex is a leaf: nothing is called with it held.
class AllocationLog final : public AllocationObserver {
 public:
  /// \throws InvalidArgument with the reason if the file cannot be created; RuntimeFailure if no thread can be started
  explicit AllocationLog(std::string path);
  ~AllocationLog() override;
  AllocationLog(const AllocationLog&) = delete;
  AllocationLog& operator=(const AllocationLog&) = delete;

  void allocated(const void* ptr, std::size_t bytes, Stream stream) noexcept override;
  void freed(const void* ptr, std::size_t bytes, Stream stream) noexcept override;
  void refused(std::size_t bytes, Stream stream) noexcept override;

  /// Writes the remaining rows. Later calls are not recorded.
  AllocationLogEnd close() noexcept;

  static constexpr std::size_t kBlockRows = std::size_t{1} << 15; ///< rows of each of the two buffers, 1.5 MiB

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
  void write_blocks() noexcept; ///< body of the writer thread

  const std::string path_;
  const ForkWatch forks_;
  int file_ = -1;
  AllocationLogEnd end_; ///< owned by the writer thread until it is joined
  /// Leaked in a forked child: the thread cannot be joined there, and a condition variable that had waiters at the fork
  /// must not be destroyed, because that would wait forever.
  Shared* shared_ = nullptr;
};

} // namespace torch_uvm
