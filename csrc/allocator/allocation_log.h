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

#include <cstddef>
#include <cstdint>
#include <ctime>
#include <mutex>
#include <string>

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

/// Thread-safe, and does not throw. Rows are in the file in the order of the calls, which write the file in blocks. A
/// write error (such as a full disk) is reported by `close`; the file then ends with a complete row, and the rows of
/// the failed block and later ones are lost. In a forked child all calls do nothing. The mutex is a leaf.
class AllocationLog {
 public:
  /// \throws InvalidArgument with the reason if the file cannot be created
  explicit AllocationLog(std::string path);
  ~AllocationLog();
  AllocationLog(const AllocationLog&) = delete;
  AllocationLog& operator=(const AllocationLog&) = delete;

  /// \param bytes as requested, here and below
  void allocated(const void* ptr, std::size_t bytes, Stream stream) noexcept {
    append("allocate", ptr, bytes, stream);
  }
  /// \param stream the stream in whose order it is freed
  void freed(const void* ptr, std::size_t bytes, Stream stream) noexcept {
    append("free", ptr, bytes, stream);
  }
  /// A request that raises OutOfMemory.
  void refused(std::size_t bytes, Stream stream) noexcept {
    append("allocate failure", nullptr, bytes, stream);
  }

  /// Writes the remaining rows. Later calls are not recorded.
  AllocationLogEnd close() noexcept;

 private:
  void append(const char* action, const void* ptr, std::size_t bytes, Stream stream) noexcept;
  void write_block() noexcept; ///< requires the mutex

  const std::string path_;
  const ForkWatch forks_;
  std::mutex mutex_; // guards the rest
  int file_ = -1; ///< -1: closed
  std::string block_; ///< rows to write
  std::uint64_t in_block_ = 0; ///< number of these rows
  std::int64_t whole_ = 0; ///< bytes in the file
  std::time_t second_ = -1; ///< of `time_`
  char time_[16] = {}; ///< hours, minutes and seconds
  AllocationLogEnd end_;
};

} // namespace torch_uvm
