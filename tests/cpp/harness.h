// A minimal test harness for pytest: named cases, and checks that print the compared values. (Catch2, doctest and
// GoogleTest are not on PyPI, and the tests must build from PyPI alone.)
//
//   TEST(free_blocks_coalesce) { CHECK(a == b); CHECK_THROWS(OutOfMemory, allocate(1)); }
//
// The binary runs the cases named as arguments, or all; `--list` prints their names.
#pragma once

#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace harness {

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Case {
  std::string name;
  std::function<void()> body;
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

struct Registrar {
  Registrar(std::string name, std::function<void()> body) {
    cases().push_back({std::move(name), std::move(body)});
  }
};

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  std::ostringstream message;
  message << file << ':' << line << ": " << what;
  throw Failure(message.str());
}

inline int run(int argc, char** argv) {
  if (argc == 2 && std::strcmp(argv[1], "--list") == 0) {
    for (const Case& test : cases()) {
      std::printf("%s\n", test.name.c_str());
    }
    return 0;
  }
  int ran = 0, failed = 0;
  for (const Case& test : cases()) {
    bool wanted = argc == 1;
    for (int i = 1; i < argc; ++i) {
      wanted = wanted || test.name == argv[i];
    }
    if (!wanted) {
      continue;
    }
    ++ran;
    try {
      test.body();
    } catch (const std::exception& error) {
      ++failed;
      std::printf("FAILED %s\n  %s\n", test.name.c_str(), error.what());
    }
  }
  std::printf("%d ran, %d failed\n", ran, failed);
  return failed != 0 || ran == 0 || (argc > 1 && ran != argc - 1) ? 1 : 0;
}

} // namespace harness

#define TEST(name)                                                \
  static void test_##name();                                      \
  static harness::Registrar registrar_##name(#name, test_##name); \
  static void test_##name()

#define CHECK(condition)                                          \
  do {                                                            \
    if (!(condition)) {                                           \
      harness::fail(__FILE__, __LINE__, "not true: " #condition); \
    }                                                             \
  } while (false)

/// Compares with ==, and prints both sides, which must be streamable.
#define CHECK_EQ(left, right)                                                              \
  do {                                                                                     \
    const auto left_value = (left);                                                        \
    const auto right_value = (right);                                                      \
    if (!(left_value == right_value)) {                                                    \
      std::ostringstream shown;                                                            \
      shown << #left " == " #right " is not so: " << left_value << " and " << right_value; \
      harness::fail(__FILE__, __LINE__, shown.str());                                      \
    }                                                                                      \
  } while (false)

/// Passes if the expression throws this type or one derived from it.
#define CHECK_THROWS(type, expression)                                        \
  do {                                                                        \
    bool threw = false;                                                       \
    try {                                                                     \
      static_cast<void>(expression);                                          \
    } catch (const type&) {                                                   \
      threw = true;                                                           \
    }                                                                         \
    if (!threw) {                                                             \
      harness::fail(__FILE__, __LINE__, #expression " did not throw " #type); \
    }                                                                         \
  } while (false)

#define HARNESS_MAIN()               \
  int main(int argc, char** argv) {  \
    return harness::run(argc, argv); \
  }
