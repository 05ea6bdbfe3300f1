#include "residency/trace/access_recorder.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <concepts>
#include <cstring>

#include "runtime/error.h"

namespace torch_uvm {

namespace {

constexpr std::size_t kBlock = 256 * 1024; ///< bytes per write

// Not printf, which takes several times as long: a recording should not slow the program down.

void append(std::string& to, std::string_view text) {
  to += text;
}

void append(std::string& to, std::integral auto number) {
  char text[20]; // the digits of 2^64, or of -2^63 and its sign
  to.append(text, std::to_chars(text, text + sizeof(text), number).ptr);
}

/// Rounds to thousandths.
void append(std::string& to, double number) {
  constexpr double kMost = 1e15;
  char text[24]; // the sign, 16 digits, and the fraction
  const double shown = std::isfinite(number) ? std::clamp(number, -kMost, kMost) : 0;
  to.append(text, std::to_chars(text, text + sizeof(text), shown, std::chars_format::fixed, 3).ptr);
}

/// A JSON string.
struct Quoted {
  std::string_view text;
};

void append(std::string& to, Quoted quoted) {
  to += '"';
  for (const char c : quoted.text) {
    if (c == '"' || c == '\\') {
      to += '\\';
      to += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      constexpr char kDigits[] = "0123456789abcdef";
      to += "\\u00";
      to += kDigits[c >> 4];
      to += kDigits[c & 15];
    } else {
      to += c;
    }
  }
  to += '"';
}

/// The storages that are read, or those that are written.
struct Accessed {
  std::span<const Access> accesses;
  bool writes;
};

void append(std::string& to, Accessed accessed) {
  std::string_view separator;
  for (const Access& access : accessed.accesses) {
    if (access.writes == accessed.writes) {
      to += separator;
      append(to, access.storage);
      separator = ", ";
    }
  }
}

constexpr std::array<std::string_view, 4> kKindNames{"fetch", "write_back", "drop", "in_place"}; ///< by TransferKind

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

template <typename... Parts>
void AccessRecorder::line(const Parts&... parts) noexcept {
  if (file_ == nullptr || !error_.empty()) {
    return;
  }
  try {
    (append(buffer_, parts), ...);
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
  line(R"({"storage": )", storage, R"(, "device": )", device, R"(, "bytes": )", bytes,
       on_device ? R"(, "resident": true})" : R"(, "resident": false})");
}

void AccessRecorder::operator_begin(std::string_view name, double time_us, std::span<const Access> accesses,
                                    bool in_place_ok) noexcept {
  ++counts_.operators;
  line(R"({"operator": )", Quoted{name}, R"(, "time": )", time_us,
       in_place_ok ? R"(, "in_place_ok": true)" : R"(, "in_place_ok": false)", R"(, "reads": [)",
       Accessed{accesses, false}, R"(], "writes": [)", Accessed{accesses, true}, "]}");
}

void AccessRecorder::ran(std::uint64_t first, std::uint64_t operators, double us) noexcept {
  line(R"({"ran": )", first, R"(, "operators": )", operators, R"(, "us": )", us, "}");
}

void AccessRecorder::held(double us) noexcept {
  ++counts_.holds;
  line(R"({"held": )", us, "}");
}

void AccessRecorder::birth(StorageId storage, int device, std::size_t bytes) noexcept {
  line(R"({"birth": )", storage, R"(, "device": )", device, R"(, "bytes": )", bytes, "}");
}

void AccessRecorder::workspace(std::size_t bytes) noexcept {
  line(R"({"workspace": )", bytes, "}");
}

void AccessRecorder::death(StorageId storage) noexcept {
  line(R"({"death": )", storage, "}");
}

std::uint64_t AccessRecorder::transfer(TransferKind kind, StorageId storage, std::size_t bytes,
                                       double begin_us) noexcept {
  line(R"({"transfer": ")", kKindNames.at(static_cast<std::size_t>(kind)), R"(", "storage": )", storage,
       R"(, "bytes": )", bytes, R"(, "time": )", begin_us, "}");
  return counts_.transfers++;
}

void AccessRecorder::took(std::uint64_t transfer, double us) noexcept {
  line(R"({"took": )", transfer, R"(, "us": )", us, "}");
}

void AccessRecorder::resident(int device, std::size_t bytes) noexcept {
  line(R"({"resident": )", bytes, R"(, "device": )", device, "}");
}

void AccessRecorder::mark_step() noexcept {
  line(R"({"step": "end"})");
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
