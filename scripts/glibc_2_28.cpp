// Linked into wheels: what a newer compiler takes from a newer glibc and libstdc++ than manylinux_2_28 has. The linker
// hides these symbols.
#include <pthread.h>
#include <time.h>

#include <cerrno>
#include <new>
#include <sstream>

namespace {

constexpr long kNanoseconds = 1'000'000'000;

timespec now(clockid_t clock) {
  timespec read{};
  clock_gettime(clock, &read);
  return read;
}

} // namespace

extern "C" {

/// glibc 2.32. If it is false, shared_ptr counts atomically.
char __libc_single_threaded = 0;

/// glibc 2.30. The deadline is translated to the realtime clock, which all versions wait by.
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const timespec* deadline) {
  if (clock == CLOCK_REALTIME) {
    return pthread_cond_timedwait(condition, mutex, deadline);
  }
  const timespec here = now(clock), real = now(CLOCK_REALTIME);
  timespec translated{real.tv_sec + deadline->tv_sec - here.tv_sec, real.tv_nsec + deadline->tv_nsec - here.tv_nsec};
  while (translated.tv_nsec < 0) {
    translated.tv_nsec += kNanoseconds;
    --translated.tv_sec;
  }
  while (translated.tv_nsec >= kNanoseconds) {
    translated.tv_nsec -= kNanoseconds;
    ++translated.tv_sec;
  }
  return translated.tv_sec < 0 ? ETIMEDOUT : pthread_cond_timedwait(condition, mutex, &translated);
}

/// GCC 9: the move constructor of std::runtime_error, for bases. The copy constructor does not throw either.
void _ZNSt13runtime_errorC2ERKS_(void* made, const void* from);
void _ZNSt13runtime_errorC2EOS_(void* made, void* from) {
  _ZNSt13runtime_errorC2ERKS_(made, from);
}
}

namespace std {

/// GCC 11.
[[noreturn]] void __throw_bad_array_new_length() {
  throw bad_array_new_length();
}

/// GCC 11, for C++20.
template string basic_stringbuf<char>::str() const&;

} // namespace std
