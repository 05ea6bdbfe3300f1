// Plays operations on a subject, as a caller that follows the rules and checks every promised byte.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "soak_subject.h"

namespace soak {

/// State shared by the threads of a round.
class Table {
 public:
  Table(Subject& subject, unsigned threads) : subject(subject), own(threads, std::vector<Held>(kSlots)) {
    for (int device = 0; device < kDevices; ++device) {
      streams.push_back(Stream::default_of(device));
      for (int i = 1; i < kStreamsPerDevice; ++i) {
        streams.push_back(subject.runtime.create_stream(device, 0));
      }
    }
    subject.set_callback([this] { return make_room(); });
  }
  ~Table() {
    subject.set_callback(nullptr);
  }
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;

  void play(const Operation& operation);
  /// Checks the subject's invariants. The check reads tags, so it locks the mutex under which they are set.
  void walk() {
    const std::lock_guard lock(mutex_);
    if (const auto wrong = subject.check()) {
      harness::fail(__FILE__, __LINE__, "invariants: " + *wrong);
    }
  }
  /// Verifies and frees every allocation; then the subject must be empty.
  void finish();

  Subject& subject;
  std::vector<Stream> streams;
  std::vector<std::vector<Held>> own; ///< one vector for each thread; only that thread accesses it
  std::atomic<std::uint64_t> refused{0}; ///< requests refused for lack of memory
  std::atomic<std::uint64_t> made_room{0};

 private:
  static constexpr std::size_t kSite = 16; ///< marked bytes, at each of three places
  static constexpr std::size_t kPlug = 160 * KiB; ///< larger than the copies that the emulated queue does at once

  Location home_of(std::uint32_t choice) const {
    return Location{static_cast<int>(choice % (kDevices + 1)) - 1};
  }
  /// A stream of the home; for host memory, the host or any stream.
  Stream stream_of(Location home, std::uint32_t choice) const {
    if (home.is_host()) {
      return choice % 3 != 0 ? Stream::host() : streams[choice / 3 % streams.size()];
    }
    return streams[static_cast<std::size_t>(home.index) * kStreamsPerDevice + choice % kStreamsPerDevice];
  }
  static const unsigned char* pattern(unsigned char mark) {
    static const auto all = [] {
      std::array<std::array<unsigned char, kSite>, 256> made{};
      for (std::size_t value = 0; value < made.size(); ++value) {
        made[value].fill(static_cast<unsigned char>(value));
      }
      return made;
    }();
    return all[mark].data();
  }
  template <typename Body>
  static void at_each_site(const Held& held, Body body) {
    const std::size_t bytes = std::min(held.bytes, kSite);
    body(held.data, bytes);
    if (held.bytes > kSite) {
      body(held.data + (held.bytes - bytes) / 2, bytes);
      body(held.data + held.bytes - bytes, bytes);
    }
  }

  void write(Held& held, unsigned char mark) {
    held.mark = mark == 0 ? 1 : mark;
    at_each_site(held, [&](unsigned char* site, std::size_t bytes) {
      if (held.stream.is_host()) {
        std::memcpy(site, pattern(held.mark), bytes);
      } else {
        subject.runtime.copy_async(site, pattern(held.mark), bytes, held.stream);
      }
    });
  }
  void verify(const Held& held) {
    if (held.mark == 0) {
      return;
    }
    if (!held.stream.is_host()) {
      subject.runtime.synchronize_stream(held.stream);
    }
    at_each_site(held, [&](const unsigned char* site, std::size_t bytes) {
      if (std::memcmp(site, pattern(held.mark), bytes) != 0) {
        harness::fail(__FILE__, __LINE__,
                      "an allocation of " + std::to_string(held.bytes) + " bytes has lost its mark, " +
                          std::to_string(held.mark) + ": at byte " + std::to_string(site - held.data) + " there is " +
                          std::to_string(site[0]));
      }
    });
  }
  void free(Held& held) {
    const Held gone = std::exchange(held, {});
    subject.free(gone);
  }
  void allocate(Held& held, const Operation& operation, bool only_try) {
    if (held) {
      if (operation.choice / 16 % 4 == 0) {
        verify(held);
      }
      free(held);
    }
    const Location home = home_of(operation.choice);
    if (!subject.serves(home)) {
      return;
    }
    const Stream stream = stream_of(home, operation.choice / (kDevices + 1));
    try {
      held = only_try ? subject.try_allocate(operation.bytes, home, stream)
                      : subject.allocate(operation.bytes, home, stream);
    } catch (const OutOfMemory&) {
    }
    if (held) {
      write(held, static_cast<unsigned char>(operation.choice >> 8));
    } else {
      ++refused;
    }
  }
  /// Frees the allocation after an event. Work on it may still be queued.
  void free_after(Held& held) {
    if (held.stream.is_host() || held.home.is_host() || held.stream.device != held.home.index) {
      free(held);
      return;
    }
    const Event ready = subject.runtime.create_event(held.stream.device, false);
    subject.runtime.record_event(ready, held.stream);
    if (subject.free_after(held, ready)) {
      held = {};
    } else {
      subject.runtime.destroy_event(ready);
      free(held);
    }
  }
  /// The memory-pressure callback: frees every other shared slot.
  bool make_room() {
    std::vector<Held> given;
    {
      const std::lock_guard lock(mutex_);
      for (std::size_t slot = 0; slot < shared_.size(); slot += 2) {
        if (shared_[slot]) {
          given.push_back(std::exchange(shared_[slot], {}));
        }
      }
    }
    for (Held& each : given) {
      verify(each);
      free(each);
    }
    ++made_room;
    return !given.empty();
  }
  void plug(Stream stream) {
    // Never read: only the duration of the copy matters.
    static std::array<std::array<unsigned char, kPlug>, 64> scratch;
    static std::array<unsigned char, kPlug> source;
    const auto at = static_cast<std::size_t>(std::ranges::find(streams, stream) - streams.begin());
    subject.runtime.copy_async(scratch[at].data(), source.data(), kPlug, stream);
  }
  void play_on(Held& held, const Operation& operation);

  std::mutex mutex_; // guards the shared slots; locked before the subject's locks
  std::vector<Held> shared_ = std::vector<Held>(kShared);
};

inline void Table::play(const Operation& operation) {
  const std::uint32_t choice = operation.choice;
  const Stream stream = streams[choice % streams.size()];
  Held& held = own[operation.thread][operation.slot];
  switch (operation.kind) {
    case Kind::k_allocate:
    case Kind::k_try_allocate:
      return allocate(held, operation, operation.kind == Kind::k_try_allocate);
    case Kind::k_share: {
      const std::lock_guard lock(mutex_);
      return std::swap(held, shared_[operation.other]);
    }
    case Kind::k_plug:
      return plug(stream);
    case Kind::k_wait:
      return subject.runtime.synchronize_stream(stream);
    case Kind::k_look:
      return subject.look(held ? &held : nullptr, choice);
    case Kind::k_special: {
      const std::lock_guard lock(mutex_);
      return subject.special(choice, shared_);
    }
    case Kind::k_limit: {
      const std::size_t most = (64 + operation.bytes % 448) * MiB;
      if (choice % 2 == 0) {
        return subject.runtime.set_limit(choice % 4 == 0 ? std::optional(most) : std::nullopt);
      }
      return subject.set_cap(static_cast<int>(choice / 2 % kDevices),
                             choice / 8 % 3 != 0 ? std::optional(most / 4) : std::nullopt);
    }
    case Kind::k_options:
      return subject.set_options(choice);
    case Kind::k_empty_cache:
      return subject.empty_cache();
    default:
      if (held) {
        play_on(held, operation);
      }
  }
}

inline void Table::play_on(Held& held, const Operation& operation) {
  const std::uint32_t choice = operation.choice;
  const Stream stream = streams[choice % streams.size()];
  const auto mark = static_cast<unsigned char>(choice >> 8);
  switch (operation.kind) {
    case Kind::k_free:
      if (choice % 4 == 0) { // verifying waits, which would complete all delayed work
        verify(held);
      }
      return free(held);
    case Kind::k_free_after:
      return free_after(held);
    case Kind::k_write:
      return write(held, mark);
    case Kind::k_verify:
      return verify(held);
    case Kind::k_record_stream:
      subject.record_stream(held, stream);
      order(subject.runtime, held.stream, stream);
      held.stream = stream;
      return write(held, mark);
    case Kind::k_set_home: {
      const Location home = home_of(choice / 64);
      const Stream to = stream_of(home, choice / 256);
      order(subject.runtime, held.stream, to);
      if (subject.set_home(held, home, to)) {
        held.home = home;
        held.stream = to;
        write(held, mark);
      }
      return;
    }
    case Kind::k_hand_over: {
      const Stream to = stream_of(held.home, choice / 256);
      order(subject.runtime, held.stream, to);
      if (subject.hand_over(held, to)) {
        held.stream = to;
        write(held, mark);
      }
      return;
    }
    default:
      return;
  }
}

inline void Table::finish() {
  subject.runtime.set_limit(std::nullopt);
  own.push_back(std::exchange(shared_, {}));
  for (std::vector<Held>& slots : own) {
    for (Held& held : slots) {
      if (held) {
        verify(held);
        free(held);
      }
    }
  }
  if (const auto wrong = subject.check()) {
    harness::fail(__FILE__, __LINE__, *wrong);
  }
  subject.expect_empty();
  CHECK_EQ(subject.runtime.managed_bytes(), std::size_t{0});
}

} // namespace soak
