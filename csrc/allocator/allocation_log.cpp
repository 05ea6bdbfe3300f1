#include "allocator/allocation_log.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <limits>
#include <utility>

#include "runtime/error.h"

namespace torch_uvm {
namespace {

constexpr std::size_t kBlockBytes = 64 * 1024;
constexpr unsigned kHandleBits = 48;
constexpr std::uint64_t kHandle = (std::uint64_t{1} << kHandleBits) - 1;
constexpr std::uint64_t kHost = 0xffff;

} // namespace

std::uint64_t logged_stream(Stream stream) {
  const std::uint64_t device = stream.is_host() ? kHost : static_cast<std::uint64_t>(stream.device);
  return device << kHandleBits | (reinterpret_cast<std::uintptr_t>(stream.handle) & kHandle);
}

Stream stream_from_log(std::uint64_t logged) {
  const std::uint64_t device = logged >> kHandleBits;
  if (logged == kHost << kHandleBits) {
    return Stream::host();
  }
  if (device > static_cast<std::uint64_t>(std::numeric_limits<std::int16_t>::max())) {
    throw InvalidArgument("stream " + std::to_string(logged) + " is of no device");
  }
  return {static_cast<int>(device), reinterpret_cast<void*>(logged & kHandle)};
}

AllocationLog::AllocationLog(std::string path) : path_(std::move(path)) {
  block_.reserve(kBlockBytes + 256);
  block_ = "Thread,Time,Action,Pointer,Size,Stream\n";
  file_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file_ < 0) {
    throw InvalidArgument("cannot write a log of allocations to '" + path_ + "': " + std::strerror(errno));
  }
}

AllocationLog::~AllocationLog() {
  close();
}

void AllocationLog::append(const char* action, const void* ptr, std::size_t bytes, Stream stream) noexcept {
  if (forks_.in_child()) {
    return;
  }
  const std::lock_guard lock(mutex_);
  if (file_ < 0) {
    return;
  }
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now); // under the mutex, so that rows are in order of time
  if (now.tv_sec != second_) {
    std::tm local{};
    ::localtime_r(&now.tv_sec, &local);
    std::strftime(time_, sizeof(time_), "%H:%M:%S", &local);
    second_ = now.tv_sec;
  }
  char row[256];
  const int length = std::snprintf(row, sizeof(row), "%ld,%s.%06ld,%s,%p,%zu,%#" PRIx64 "\n", ::syscall(SYS_gettid),
                                   time_, now.tv_nsec / 1000, action, ptr, bytes, logged_stream(stream));
  block_.append(row, static_cast<std::size_t>(length)); // within its capacity
  ++in_block_;
  if (block_.size() >= kBlockBytes) {
    write_block();
  }
}

void AllocationLog::write_block() noexcept {
  std::size_t written = 0;
  while (written < block_.size() && end_.error.empty()) {
    const ssize_t now = ::write(file_, block_.data() + written, block_.size() - written);
    if (now > 0) {
      written += static_cast<std::size_t>(now);
    } else if (errno != EINTR) {
      end_.error = std::strerror(errno);
      static_cast<void>(::ftruncate(file_, whole_)); // fails if it is not a regular file
    }
  }
  (end_.error.empty() ? end_.rows : end_.lost) += in_block_;
  whole_ += end_.error.empty() ? static_cast<std::int64_t>(written) : 0;
  in_block_ = 0;
  block_.clear();
}

AllocationLogEnd AllocationLog::close() noexcept {
  if (forks_.in_child()) {
    return {}; // the parent completes the file
  }
  const std::lock_guard lock(mutex_);
  if (file_ >= 0) {
    write_block();
    if (::close(std::exchange(file_, -1)) != 0 && end_.error.empty()) {
      end_.error = std::strerror(errno);
    }
    if (!end_.error.empty()) {
      end_.error = "the log of allocations in '" + path_ + "' is not complete, " + std::to_string(end_.lost) +
                   " rows are missing: " + end_.error;
    }
  }
  return end_;
}

} // namespace torch_uvm
