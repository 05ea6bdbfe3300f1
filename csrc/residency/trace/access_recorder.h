// Records a trace of storage accesses to a file, as JSON lines. docs/annex.md describes the format.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <string_view>

#include "residency/policy/decision.h"

namespace torch_uvm {

enum class TransferKind : std::uint8_t {
  kFetch, ///< host to device
  kWriteBack, ///< device to host
  kDrop, ///< a clean device copy was evicted; nothing is copied
  kInPlace, ///< an operator used the host copy
};

/// Writes in blocks while recording. The caller serialises all calls. Only the constructor throws. A write error, such
/// as a full disk, stops the recording and is returned by `close`.
class AccessRecorder {
 public:
  /// \param budgets budget in bytes, by device; 0: none
  /// \throws InvalidArgument with the reason if the file cannot be created
  AccessRecorder(const std::string& path, std::span<const std::size_t> budgets);
  ~AccessRecorder();
  AccessRecorder(const AccessRecorder&) = delete;
  AccessRecorder& operator=(const AccessRecorder&) = delete;

  /// A storage that existed before the recording, or that no operator created.
  void storage(StorageId storage, int device, std::size_t bytes, bool on_device) noexcept;
  /// An outermost operator begins. \param time_us monotonic time, from any origin
  void operator_begin(std::string_view name, double time_us, std::span<const Access> accesses,
                      bool in_place_ok) noexcept;
  /// The device time of consecutive operators, reported once it is known. \param first their first one, from 0
  void ran(std::uint64_t first, std::uint64_t operators, double us) noexcept;
  /// Before the next operator the device waits that long, so that the host gets ahead.
  void held(double us) noexcept;
  /// A storage created by the latest operator that outlives it.
  void birth(StorageId storage, int device, std::size_t bytes) noexcept;
  void death(StorageId storage) noexcept;
  /// What the latest operator had allocated at most, beyond operands and results.
  void workspace(std::size_t bytes) noexcept;
  /// \param begin_us when the transfer was queued
  /// \return the transfer's number in this recording, from 0
  std::uint64_t transfer(TransferKind kind, StorageId storage, std::size_t bytes, double begin_us) noexcept;
  /// The duration of a transfer's copy, reported once it is known.
  void took(std::uint64_t transfer, double us) noexcept;
  /// Allocated bytes of a device after the latest operator.
  void resident(int device, std::size_t bytes) noexcept;
  void mark_step() noexcept;

  /// Numbers of calls so far.
  struct Counts {
    std::uint64_t operators = 0;
    std::uint64_t transfers = 0;
    std::uint64_t holds = 0;
  };
  const Counts& counts() const {
    return counts_;
  }

  /// Writes the rest and closes the file. Later calls record nothing.
  /// \return the first error of the recording; empty if there was none
  std::string close() noexcept;

 private:
  /// Appends a line of these parts.
  template <typename... Parts>
  void line(const Parts&... parts) noexcept;
  void flush() noexcept;
  void fail(const char* reason) noexcept;

  std::FILE* file_ = nullptr;
  std::string path_;
  std::string buffer_;
  std::string error_;
  Counts counts_;
};

} // namespace torch_uvm
