// Contract of every Allocator for work that is still queued when its memory is freed. Part of allocator_face.h.
#pragma once

#include <cstring>
#include <deque>
#include <random>

#include "face_rig.h"

namespace face {

/// Checks that each reuse of `freed` on the stream is ordered after `work`.
inline void expect_reuse_after(FaceRig& rig, Event work, const Allocation& freed, Allocator& from, Stream on) {
  std::vector<Allocation> taken;
  for (int i = 0; i < 24; ++i) {
    taken.push_back(from.allocate(freed.bytes, kHome, on));
    if (overlap(taken.back(), freed)) {
      CHECK(rig.runtime->query_event(work) || (!on.is_host() && !rig.runtime->query_event(rig.mark(on))));
    }
  }
  for (const Allocation& allocation : taken) {
    from.free(allocation);
  }
}

/// Checks the same for every possible reuse: by the allocator on any stream and, after a release, by the upstream.
inline void expect_reuse_after(FaceRig& rig, Event work, const Allocation& freed,
                               std::initializer_list<Stream> streams) {
  for (const Stream stream : streams) {
    expect_reuse_after(rig, work, freed, *rig.allocator, stream);
  }
  rig.again();
  for (const Stream stream : streams) {
    expect_reuse_after(rig, work, freed, *rig.allocator, stream);
  }
  rig.again();
  rig.allocator->release();
  for (const Stream stream : streams) {
    expect_reuse_after(rig, work, freed, *rig.upstream, stream);
  }
}

inline void reuse_waits_for_recorded_streams(const MakeRig& make) {
  for (const std::size_t bytes : {std::size_t{512}, 3 * MiB, 12 * MiB}) {
    FaceRig rig = make();
    const Stream a = rig.stream(), b = rig.stream(), c = rig.stream();
    const Allocation shared = rig.allocate(bytes, a);
    rig.allocator->record_stream(shared, b);
    rig.allocator->record_stream(shared, b);
    rig.allocator->record_stream(shared, a);
    rig.allocator->record_stream(shared, Stream::host());
    rig.calls().hold(b);
    const Event work = rig.mark(b);
    rig.allocator->free(shared);
    expect_reuse_after(rig, work, shared, {a, c, Stream::host()});
    expect_empty(rig);
  }
}

inline void reuse_on_another_stream_waits_for_the_first(const MakeRig& make) {
  for (const std::size_t bytes : {std::size_t{512}, 3 * MiB, 12 * MiB}) {
    FaceRig rig = make();
    const Stream a = rig.stream(), b = rig.stream();
    const Allocation freed = rig.allocate(bytes, a);
    rig.calls().hold(a);
    const Event work = rig.mark(a);
    rig.allocator->free(freed);
    expect_reuse_after(rig, work, freed, {b, Stream::host()});
    expect_empty(rig);
  }
}

/// Work that the emulated runtime delays at random. A stream, and the streams that wait for it, must read the bytes
/// that it wrote to its memory, regardless of other allocations and frees.
class DelayedWork {
 public:
  DelayedWork(FaceRig& rig, std::uint64_t seed)
      : rig_(rig), streams_{kStream, rig.stream(), rig.stream()}, random_(seed) {}

  void run(int steps) {
    for (int i = 0; i < steps; ++i) {
      step();
    }
    while (!held_.empty()) {
      free();
    }
    for (int device = 0; device < rig_.runtime->device_count(); ++device) {
      rig_.runtime->synchronize_device(device);
    }
    for (const Read& read : reads_) {
      CHECK(read.bytes == *read.expected);
    }
  }

 private:
  static constexpr std::size_t kCopied = 256;
  using Bytes = std::vector<unsigned char>;
  struct Read {
    Bytes bytes;
    const Bytes* expected;
  };

  void step() {
    const std::uint64_t roll = random_() % 100;
    if (roll < 45) {
      allocate();
    } else if (roll < 90) {
      free();
    } else if (roll < 97) {
      rig_.again();
    } else {
      rig_.allocator->release();
    }
  }
  Stream any() {
    return streams_[random_() % streams_.size()];
  }
  void read(const Allocation& from, Stream stream) {
    reads_.push_back({Bytes(kCopied), &written_.back()});
    rig_.runtime->copy_async(reads_.back().bytes.data(), from.ptr, kCopied, stream);
  }
  void allocate() {
    const Stream own = any();
    const std::size_t bytes = kCopied + random_() % (random_() % 8 == 0 ? 4 * MiB : 16 * KiB);
    held_.push_back(rig_.allocate(bytes, own));
    written_.emplace_back(kCopied, static_cast<unsigned char>(random_()));
    rig_.runtime->copy_async(held_.back().ptr, written_.back().data(), kCopied, own);
    read(held_.back(), own);
    if (const Stream other = any(); other != own && random_() % 2 == 0) {
      rig_.allocator->record_stream(held_.back(), other);
      rig_.runtime->wait_event(other, rig_.mark(own));
      read(held_.back(), other);
    }
  }
  void free() {
    if (!held_.empty()) {
      std::swap(held_[random_() % held_.size()], held_.back());
      rig_.allocator->free(held_.back());
      held_.pop_back();
    }
  }

  FaceRig& rig_;
  const std::vector<Stream> streams_;
  std::mt19937_64 random_;
  std::vector<Allocation> held_;
  std::deque<Bytes> written_; // copies are in flight: elements must not move
  std::deque<Read> reads_;
};

inline void delayed_work_keeps_its_bytes(const Face& face, bool nested) {
  for (std::uint64_t seed = 1; seed <= 12; ++seed) {
    FaceRig rig(emulated_runtime(seed), face, nested);
    rig.make();
    DelayedWork(rig, seed).run(200);
    expect_empty(rig);
  }
}

} // namespace face
