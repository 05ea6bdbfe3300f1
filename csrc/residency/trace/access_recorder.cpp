#include "residency/trace/access_recorder.h"

#include <cerrno>
#include <cinttypes>
#include <cmath>
#include <cstdarg>
#include <cstring>

#include "runtime/error.h"

namespace torch_uvm {

namespace {

constexpr std::size_t kBlock = 256 * 1024; ///< bytes per write

void append_format(std::string& to, const char* format, ...) __attribute__((format(printf, 2, 3)));

void append_format(std::string& to, const char* format, ...) {
  char text[192];
  va_list arguments;
  va_start(arguments, format);
  const int length = std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  to.append(text, static_cast<std::size_t>(length));
}

/// Appends the text as a JSON string.
void append_quoted(std::string& to, std::string_view text) {
  to += '"';
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      to += '\\';
      to += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      append_format(to, "\\u%04x", static_cast<unsigned>(c));
    } else {
      to += c;
    }
  }
  to += '"';
}

const char* name_of(TransferKind kind) {
  switch (kind) {
    case TransferKind::kFetch:
      return "fetch";
    case TransferKind::kWriteBack:
      return "write_back";
    case TransferKind::kDrop:
      return "drop";
    case TransferKind::kInPlace:
      return "in_place";
  }
  return "unknown";
}

} // namespace

AccessRecorder::AccessRecorder(const std::string& path, std::span<const std::size_t> budgets) : path_(path) {
  file_ = std::fopen(path.c_str(), "wb");
  if (file_ == nullptr) {
    throw InvalidArgument("cannot write a trace of accesses to '" + path + "': " + std::strerror(errno));
  }
  std::setvbuf(file_, nullptr, _IONBF, 0); // `buffer_` does the buffering
  buffer_.reserve(kBlock + kBlock / 4);
  buffer_ += R"({"format": "torch_uvm accesses", "version": 5, "units": {"time": "us", "size": "bytes"}, "budgets": [)";
  for (std::size_t device = 0; device < budgets.size(); ++device) {
    buffer_ += device == 0 ? "" : ", ";
    buffer_ += budgets[device] == 0 ? "null" : std::to_string(budgets[device]);
  }
  buffer_ += "]}\n";
}

AccessRecorder::~AccessRecorder() {
  close();
}

template <typename F>
void AccessRecorder::line(F&& append) noexcept {
  if (file_ == nullptr || !error_.empty()) {
    return;
  }
  try {
    append(buffer_);
    buffer_ += '\n';
    if (buffer_.size() >= kBlock) {
      flush();
    }
  } catch (const std::exception& error) {
    fail(error.what());
  }
}

void AccessRecorder::fail(const char* reason) noexcept {
  buffer_.clear();
  try {
    error_ = "the trace of accesses in '" + path_ + "' is not complete: " + reason;
  } catch (const std::exception&) {
    error_.assign(1, '?'); // needs no allocation
  }
}

void AccessRecorder::flush() noexcept {
  const bool written = std::fwrite(buffer_.data(), 1, buffer_.size(), file_) == buffer_.size();
  const int error = errno;
  buffer_.clear();
  if (!written) {
    fail(std::strerror(error));
  }
}

void AccessRecorder::storage(StorageId storage, int device, std::size_t bytes, bool on_device) noexcept {
  line([&](std::string& to) {
    append_format(to, R"({"storage": %)" PRIu64 R"(, "device": %d, "bytes": %zu, "resident": %s})", storage, device,
                  bytes, on_device ? "true" : "false");
  });
}

void AccessRecorder::operator_begin(std::string_view name, double time_us, std::span<const Access> accesses,
                                    bool in_place_ok) noexcept {
  ++counts_.operators;
  line([&](std::string& to) {
    to += R"({"operator": )";
    append_quoted(to, name);
    append_format(to, R"(, "time": %.3f, "in_place_ok": %s)", std::isfinite(time_us) ? time_us : 0.0,
                  in_place_ok ? "true" : "false");
    for (const bool writes : {false, true}) {
      to += writes ? R"(, "writes": [)" : R"(, "reads": [)";
      const char* separator = "";
      for (const Access& access : accesses) {
        if (access.writes == writes) {
          to += separator;
          append_format(to, "%" PRIu64, access.storage);
          separator = ", ";
        }
      }
      to += ']';
    }
    to += '}';
  });
}

void AccessRecorder::ran(std::uint64_t first, std::uint64_t operators, double us) noexcept {
  line([&](std::string& to) {
    append_format(to, R"({"ran": %)" PRIu64 R"(, "operators": %)" PRIu64 R"(, "us": %.3f})", first, operators, us);
  });
}

void AccessRecorder::held(double us) noexcept {
  ++counts_.holds;
  line([&](std::string& to) { append_format(to, R"({"held": %.3f})", us); });
}

void AccessRecorder::birth(StorageId storage, int device, std::size_t bytes) noexcept {
  line([&](std::string& to) {
    append_format(to, R"({"birth": %)" PRIu64 R"(, "device": %d, "bytes": %zu})", storage, device, bytes);
  });
}

void AccessRecorder::workspace(std::size_t bytes) noexcept {
  line([&](std::string& to) { append_format(to, R"({"workspace": %zu})", bytes); });
}

void AccessRecorder::death(StorageId storage) noexcept {
  line([&](std::string& to) { append_format(to, R"({"death": %)" PRIu64 "}", storage); });
}

std::uint64_t AccessRecorder::transfer(TransferKind kind, StorageId storage, std::size_t bytes,
                                       double begin_us) noexcept {
  line([&](std::string& to) {
    append_format(to, R"({"transfer": "%s", "storage": %)" PRIu64 R"(, "bytes": %zu, "time": %.3f})", name_of(kind),
                  storage, bytes, std::isfinite(begin_us) ? begin_us : 0.0);
  });
  return counts_.transfers++;
}

void AccessRecorder::took(std::uint64_t transfer, double us) noexcept {
  line([&](std::string& to) { append_format(to, R"({"took": %)" PRIu64 R"(, "us": %.3f})", transfer, us); });
}

void AccessRecorder::resident(int device, std::size_t bytes) noexcept {
  line([&](std::string& to) { append_format(to, R"({"resident": %zu, "device": %d})", bytes, device); });
}

void AccessRecorder::mark_step() noexcept {
  line([](std::string& to) { to += R"({"step": "end"})"; });
}

std::string AccessRecorder::close() noexcept {
  if (file_ != nullptr) {
    if (error_.empty()) {
      flush();
    }
    std::FILE* const file = file_;
    file_ = nullptr;
    if (std::fclose(file) != 0 && error_.empty()) {
      fail(std::strerror(errno));
    }
  }
  try {
    return error_;
  } catch (const std::exception&) {
    return "?";
  }
}

} // namespace torch_uvm
