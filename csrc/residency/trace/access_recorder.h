// A trace of accesses in a file, to be drawn and judged later: JSON lines, as docs/traces.md has them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "residency/policy/policy.h"

namespace torch_uvm {

enum class TransferKind : std::uint8_t {
  kFetch, ///< host to device
  kWriteBack, ///< device to host
  kDrop, ///< a device copy given up that was clean: no bytes cross
  kInPlace, ///< used on the host by a running operator
};

/// Writes as it goes, in blocks; the caller serialises all calls. Nothing throws but the constructor: an error while
/// writing (a full disk) is kept, what comes after it is left out, and `close` says it.
class AccessRecorder {
 public:
  /// \param budgets device-resident bytes allowed, by device; 0: no budget
  /// \throws InvalidArgument with the reason, if the file cannot be made
  AccessRecorder(const std::string& path, std::span<const std::size_t> budgets);
  ~AccessRecorder();
  AccessRecorder(const AccessRecorder&) = delete;
  AccessRecorder& operator=(const AccessRecorder&) = delete;

  /// A storage that was there before the recording, or that no operator gave birth to.
  /// \param on_device where its bytes are
  void storage(StorageId storage, int device, std::size_t bytes, bool on_device) noexcept;
  /// An outermost operator. \param time_us since any one moment, never less than what was told before
  void operator_begin(std::string_view name, double time_us, std::span<const Access> accesses,
                      bool in_place_ok) noexcept;
  /// An output or temporary of the latest operator.
  void birth(StorageId storage, int device, std::size_t bytes) noexcept;
  void death(StorageId storage) noexcept;
  /// \param begin_us when it was asked for
  /// \return its number among those of the recording, from 0 on
  std::uint64_t transfer(TransferKind kind, StorageId storage, std::size_t bytes, double begin_us) noexcept;
  /// How long the copy of a transfer took, once that is known.
  void took(std::uint64_t transfer, double us) noexcept;
  /// Bytes that storages have on a device as of the latest operator.
  void resident(int device, std::size_t bytes) noexcept;
  void mark_step() noexcept;

  /// Writes what is left. Nothing is recorded after it.
  /// \return what went wrong since the beginning, in words; empty: nothing
  std::string close() noexcept;

 private:
  /// \param append appends one line to a string, without its end
  template <typename F>
  void line(F&& append) noexcept;
  void flush() noexcept;
  void fail(const char* reason) noexcept;

  std::FILE* file_ = nullptr;
  std::string path_;
  std::string buffer_;
  std::string error_;
  std::uint64_t transfers_ = 0;
};

} // namespace torch_uvm
