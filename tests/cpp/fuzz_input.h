// A fuzzer's input bytes, read as numbers. Reads beyond the end return 0.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace fuzz {

/// Reports a failed check and aborts, like a sanitizer, so that the fuzzer keeps the input.
[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
  std::abort();
}

class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}

  bool empty() const {
    return size_ == 0;
  }
  std::uint8_t byte() {
    if (size_ == 0) {
      return 0;
    }
    --size_;
    return *data_++;
  }
  /// Reads a number, lowest byte first.
  template <typename Number>
  Number number() {
    std::uint64_t value = 0;
    for (std::size_t at = 0; at < sizeof(Number); ++at) {
      value |= std::uint64_t{byte()} << (8 * at);
    }
    return static_cast<Number>(value);
  }
  std::size_t below(std::size_t bound) {
    return byte() % bound;
  }
  std::string_view rest() const {
    return {reinterpret_cast<const char*>(data_), size_};
  }

 private:
  const std::uint8_t* data_;
  std::size_t size_;
};

} // namespace fuzz

#define FUZZ_CHECK(condition)                                  \
  do {                                                         \
    if (!(condition)) {                                        \
      fuzz::fail(__FILE__, __LINE__, "not true: " #condition); \
    }                                                          \
  } while (false)
