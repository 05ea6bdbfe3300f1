#include "allocator/replay/allocation_log.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>
#include <ctime>
#include <limits>
#include <memory>
#include <string_view>

#include "runtime/error.h"

namespace torch_uvm {
namespace {

constexpr std::string_view kHeader = "Thread,Time,Action,Pointer,Size,Stream\n";
constexpr std::size_t kTextBytes = 64 * 1024; ///< flush threshold
constexpr unsigned kHandleBits = 48;
constexpr std::uint64_t kHost = 0xffff;

int this_thread() {
  thread_local ForkWatch known_in;
  thread_local int known = 0;
  if (known == 0 || known_in.in_child()) {
    known = static_cast<int>(::syscall(SYS_gettid)); // a forked child's thread has a new id
    known_in = ForkWatch();
  }
  return known;
}

template <typename Number>
void append_number(std::string& to, Number number, int base = 10) {
  char text[24];
  to.append(text, std::to_chars(text, text + sizeof(text), number, base).ptr);
}

void append_digits(std::string& to, std::int64_t number, int width) {
  char text[8];
  for (int at = width; at-- > 0; number /= 10) {
    text[at] = static_cast<char>('0' + number % 10);
  }
  to.append(text, static_cast<std::size_t>(width));
}

/// Formats the local time of day. Caches hours and minutes, which change rarely.
class TimeOfDay {
 public:
  void append(std::string& to, std::int64_t time_us) {
    constexpr std::int64_t kMinute = 60'000'000;
    const std::int64_t minute = time_us / kMinute;
    if (minute != minute_) {
      minute_ = minute;
      const auto seconds = static_cast<std::time_t>(minute * 60);
      std::tm local{};
      ::localtime_r(&seconds, &local);
      hours_and_minutes_.clear();
      append_digits(hours_and_minutes_, local.tm_hour, 2);
      hours_and_minutes_ += ':';
      append_digits(hours_and_minutes_, local.tm_min, 2);
      hours_and_minutes_ += ':';
    }
    to += hours_and_minutes_;
    append_digits(to, time_us % kMinute / 1'000'000, 2);
    to += '.';
    append_digits(to, time_us % 1'000'000, 6);
  }

 private:
  std::int64_t minute_ = -1;
  std::string hours_and_minutes_;
};

} // namespace

std::uint64_t logged_stream(Stream stream) {
  constexpr std::uint64_t kHandle = (std::uint64_t{1} << kHandleBits) - 1;
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
  const std::uint64_t handle = logged & ((std::uint64_t{1} << kHandleBits) - 1);
  return {static_cast<int>(device), reinterpret_cast<void*>(handle)};
}

/// Formats rows and writes them to the file. Used by the writer thread only.
class AllocationLog::Writer {
 public:
  Writer(int file, AllocationLogEnd& end) : file_(file), end_(end) {
    text_.reserve(kTextBytes + 256);
    text_ = kHeader;
  }

  void write(const std::vector<Row>& rows) {
    for (const Row& row : rows) {
      if (!end_.error.empty()) {
        ++end_.lost;
        continue;
      }
      append(row);
      ++in_text_;
      if (text_.size() >= kTextBytes) {
        flush();
      }
    }
    flush();
  }

 private:
  void append(const Row& row) {
    append_number(text_, row.thread);
    text_ += ',';
    time_.append(text_, row.time_us);
    text_ += row.action == Action::kAllocate ? ",allocate,"
             : row.action == Action::kFree   ? ",free,"
                                             : ",allocate failure,";
    if (row.ptr == nullptr) {
      text_ += "(nil),"; // as glibc's %p
    } else {
      text_ += "0x";
      append_number(text_, reinterpret_cast<std::uintptr_t>(row.ptr), 16);
      text_ += ',';
    }
    append_number(text_, row.bytes);
    text_ += ',';
    const std::uint64_t stream = logged_stream(row.stream);
    text_ += stream == 0 ? "" : "0x";
    append_number(text_, stream, 16);
    text_ += '\n';
  }

  void flush() {
    std::size_t written = 0;
    while (written < text_.size()) {
      const ssize_t now = ::write(file_, text_.data() + written, text_.size() - written);
      if (now < 0 && errno == EINTR) {
        continue;
      }
      if (now <= 0) {
        fail(errno, std::string_view(text_).substr(0, written));
        return;
      }
      written += static_cast<std::size_t>(now);
    }
    whole_ += static_cast<off_t>(written);
    end_.rows += in_text_;
    in_text_ = 0;
    text_.clear();
  }

  /// \param written prefix of the text that was written
  void fail(int error, std::string_view written) {
    end_.error = std::strerror(error);
    const std::size_t whole = written.rfind('\n') == std::string_view::npos ? 0 : written.rfind('\n') + 1;
    if (::ftruncate(file_, whole_ + static_cast<off_t>(whole)) != 0) {
      // Not a regular file, or another error: a reader then finds an incomplete last row.
    }
    const auto lines = static_cast<std::uint64_t>(std::count(written.begin(), written.end(), '\n'));
    const std::uint64_t rows = std::min(in_text_, whole_ == 0 && lines > 0 ? lines - 1 : lines); // excluding the header
    end_.rows += rows;
    end_.lost += in_text_ - rows;
    in_text_ = 0;
    text_.clear();
  }

  const int file_;
  AllocationLogEnd& end_;
  TimeOfDay time_;
  std::string text_;
  std::uint64_t in_text_ = 0; ///< rows
  off_t whole_ = 0; ///< bytes in the file
};

AllocationLog::AllocationLog(std::string path) : path_(std::move(path)) {
  file_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file_ < 0) {
    throw InvalidArgument("cannot write a log of allocations to '" + path_ + "': " + std::strerror(errno));
  }
  auto shared = std::make_unique<Shared>();
  shared_ = shared.get();
  try {
    shared->filling.reserve(kBlockRows);
    shared->thread = std::thread([this] { write_blocks(); });
    shared.release();
  } catch (const std::exception& error) {
    ::close(file_);
    throw RuntimeFailure("no thread to write the log of allocations '" + path_ + "': " + error.what());
  }
}

AllocationLog::~AllocationLog() {
  close();
  if (!forks_.in_child()) {
    delete shared_;
  }
}

void AllocationLog::allocated(const void* ptr, std::size_t bytes, Stream stream) noexcept {
  append(Action::kAllocate, ptr, bytes, stream);
}

void AllocationLog::freed(const void* ptr, std::size_t bytes, Stream stream) noexcept {
  append(Action::kFree, ptr, bytes, stream);
}

void AllocationLog::refused(std::size_t bytes, Stream stream) noexcept {
  append(Action::kFailure, nullptr, bytes, stream);
}

void AllocationLog::append(Action action, const void* ptr, std::size_t bytes, Stream stream) noexcept {
  if (forks_.in_child()) {
    return;
  }
  const int thread = this_thread();
  std::unique_lock lock(shared_->mutex);
  shared_->room_came.wait(lock, [&] { return shared_->filling.size() < kBlockRows || shared_->closing; });
  if (shared_->closing) {
    return;
  }
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now); // under the mutex, so that rows are in order of time
  shared_->filling.push_back({ptr, bytes, stream, now.tv_sec * 1'000'000 + now.tv_nsec / 1000, thread, action});
  if (shared_->filling.size() == kBlockRows / 2) {
    shared_->rows_came.notify_one();
  }
}

void AllocationLog::write_blocks() noexcept {
  std::vector<Row> block;
  bool last = false;
  try {
    block.reserve(kBlockRows);
    Writer writer(file_, end_);
    while (!last) {
      {
        std::unique_lock lock(shared_->mutex);
        shared_->rows_came.wait_for(lock, std::chrono::seconds(1),
                                    [&] { return shared_->filling.size() >= kBlockRows / 2 || shared_->closing; });
        last = shared_->closing;
        block.swap(shared_->filling);
      }
      shared_->room_came.notify_all();
      writer.write(block);
      block.clear();
    }
  } catch (const std::exception& error) { // out of memory for the text
    std::unique_lock lock(shared_->mutex);
    end_.error = error.what();
    end_.lost += block.size();
    while (true) { // keep draining, so that no caller waits forever for space
      end_.lost += shared_->filling.size();
      shared_->filling.clear();
      shared_->room_came.notify_all();
      if (shared_->closing) {
        return;
      }
      shared_->rows_came.wait_for(lock, std::chrono::seconds(1));
    }
  }
}

AllocationLogEnd AllocationLog::close() noexcept {
  if (forks_.in_child()) {
    if (file_ >= 0) {
      ::close(file_); // the parent completes the file
      file_ = -1;
    }
    return {};
  }
  if (shared_->thread.joinable()) {
    {
      const std::lock_guard lock(shared_->mutex);
      shared_->closing = true;
    }
    shared_->rows_came.notify_one();
    shared_->room_came.notify_all();
    shared_->thread.join();
    if (::close(file_) != 0 && end_.error.empty()) {
      end_.error = std::strerror(errno);
    }
    file_ = -1;
    if (!end_.error.empty()) {
      end_.error = "the log of allocations in '" + path_ + "' is not complete, " + std::to_string(end_.lost) +
                   " rows are missing: " + end_.error;
    }
  }
  return end_;
}

} // namespace torch_uvm
