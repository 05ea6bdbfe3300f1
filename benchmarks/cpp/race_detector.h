// Finds accesses of streams that no event orders, and accesses that find other bytes than the ones expected.
//
// Each stream has a vector clock, as the threads of a program have in ThreadSanitizer. An access is a race if an
// earlier access to the same byte, one of them a write, does not happen before it. The result does not depend on how
// long work takes: a missing wait is found even if the modelled time happens to order the two accesses.
//
// Each byte also has the version of the contents that was written to it and its offset in them. Copies carry both. A
// write that is not ordered after a copy out of the same bytes spoils what that copy wrote. This is a fault only if the
// spoilt bytes are used: the storage may have been freed or changed since.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "runtime/managed_runtime.h"

namespace play {

using namespace torch_uvm;

class RaceDetector {
 public:
  /// Contents of a storage between two writes; 0 is unknown.
  using Version = std::uint64_t;

  /// A vector clock: for each stream, the number of its operations that happen before.
  class Clock {
   public:
    std::uint64_t of(std::size_t stream) const {
      return stream < times_.size() ? times_[stream] : 0;
    }
    void join(const Clock& other) {
      times_.resize(std::max(times_.size(), other.times_.size()));
      for (std::size_t stream = 0; stream < other.times_.size(); ++stream) {
        times_[stream] = std::max(times_[stream], other.times_[stream]);
      }
    }
    std::uint64_t tick(std::size_t stream) {
      times_.resize(std::max(times_.size(), stream + 1));
      return ++times_[stream];
    }

   private:
    std::vector<std::uint64_t> times_;
  };

  // What the host observes and queues.
  void host_saw(Stream stream) {
    host_.join(clock_of(stream));
  }
  void host_saw(Event event) {
    host_.join(events_[event.handle]);
  }
  void record(Event event, Stream stream) {
    Clock& at = events_[event.handle];
    at = clock_of(stream);
    at.join(host_);
  }
  void wait(Stream stream, Event event) {
    clock_of(stream).join(events_[event.handle]);
  }
  void forget(Event event) {
    events_.erase(event.handle);
  }

  void copy(void* dst, const void* src, std::size_t bytes, Stream stream) {
    const std::uint64_t now = queue(stream);
    const std::uintptr_t from = address(src), to = address(dst);
    if (from < to + bytes && to < from + bytes) {
      fail("a copy whose source and destination overlap", to, stream);
    }
    ++copies_;
    read(from, bytes, stream, now, copies_);
    std::vector<std::pair<std::uintptr_t, Piece>> copied;
    for (auto piece = split(from); piece != pieces_.end() && piece->first < from + bytes; ++piece) {
      copied.emplace_back(piece->first - from + to, piece->second);
    }
    split(from + bytes);
    write(to, bytes, stream, now);
    for (const auto& [at, piece] : copied) {
      Piece& written = split(at)->second;
      written.version = piece.version;
      written.origin = piece.origin + to - from;
      written.path = std::make_shared<const Hop>(Hop{copies_, piece.path});
    }
  }

  /// A kernel's accesses follow, all of the same operation.
  void begin_kernel(Stream stream) {
    kernel_ = queue(stream);
  }
  /// \param version what must be there
  void kernel_reads(const void* ptr, std::size_t bytes, Stream stream, Version version, const std::string& what) {
    read(address(ptr), bytes, stream, kernel_, 0);
    for (auto piece = split(address(ptr)); piece != pieces_.end() && piece->first < address(ptr) + bytes; ++piece) {
      const bool spoilt = is_spoilt(piece->second);
      if (spoilt || piece->second.version != version || piece->second.origin != address(ptr)) {
        fail(what + (spoilt ? " reads spoilt bytes;" : "") + " has version " + std::to_string(piece->second.version) +
                 " in place of " + std::to_string(version) + " at byte " + std::to_string(piece->first - address(ptr)) +
                 " of " + std::to_string(bytes),
             piece->first, stream);
      }
    }
  }
  Version kernel_writes(void* ptr, std::size_t bytes, Stream stream) {
    write(address(ptr), bytes, stream, kernel_);
    for (auto piece = split(address(ptr)); piece != pieces_.end() && piece->first < address(ptr) + bytes; ++piece) {
      piece->second.version = latest_ + 1;
      piece->second.origin = address(ptr);
    }
    return ++latest_;
  }

  std::uint64_t faults() const {
    return faults_;
  }
  const std::string& first_fault() const {
    return first_fault_;
  }

 private:
  struct Use {
    std::size_t stream;
    std::uint64_t time;
    std::uint64_t copy; ///< its number; 0: a kernel
  };
  /// A copy that contents came by.
  struct Hop {
    std::uint64_t copy;
    std::shared_ptr<const Hop> before;
  };
  /// Bytes with the same history, up to the next piece.
  struct Piece {
    std::vector<Use> readers; ///< since the last write
    Use writer{0, 0, 0};
    Version version = 0;
    std::uintptr_t origin = 0; ///< the address at which the first byte of the contents would be
    std::shared_ptr<const Hop> path; ///< since a kernel wrote the contents
  };

  static std::uintptr_t address(const void* ptr) {
    return reinterpret_cast<std::uintptr_t>(ptr);
  }
  std::size_t index_of(Stream stream) {
    const auto found = std::ranges::find(streams_, stream);
    if (found == streams_.end()) {
      streams_.push_back(stream);
      clocks_.emplace_back();
      return streams_.size() - 1;
    }
    return static_cast<std::size_t>(found - streams_.begin());
  }
  Clock& clock_of(Stream stream) {
    const std::size_t index = index_of(stream);
    return clocks_[index];
  }
  std::uint64_t queue(Stream stream) {
    Clock& clock = clock_of(stream);
    clock.join(host_);
    return clock.tick(index_of(stream));
  }
  /// The piece that begins at the address, cut off the one before if necessary.
  std::map<std::uintptr_t, Piece>::iterator split(std::uintptr_t at) {
    auto after = pieces_.lower_bound(at);
    if (after != pieces_.end() && after->first == at) {
      return after;
    }
    return pieces_.emplace_hint(after, at, after == pieces_.begin() ? Piece{} : std::prev(after)->second);
  }
  bool ordered(const Use& earlier, Stream stream) {
    return earlier.time <= clock_of(stream).of(earlier.stream);
  }
  void read(std::uintptr_t at, std::size_t bytes, Stream stream, std::uint64_t now, std::uint64_t copy) {
    const std::size_t self = index_of(stream);
    const auto end = split(at + bytes);
    for (auto piece = split(at); piece != end; ++piece) {
      if (!ordered(piece->second.writer, stream)) {
        fail("a read that is not ordered after a write", piece->first, stream);
      }
      auto& readers = piece->second.readers;
      std::erase_if(readers, [&](const Use& use) { return use.stream == self && use.copy == 0 && copy == 0; });
      readers.push_back({self, now, copy});
    }
  }
  void write(std::uintptr_t at, std::size_t bytes, Stream stream, std::uint64_t now) {
    const auto end = split(at + bytes);
    const auto begin = split(at);
    for (auto piece = begin; piece != end; ++piece) {
      if (!ordered(piece->second.writer, stream)) {
        fail("a write that is not ordered after a write", piece->first, stream);
      }
      const auto readers = std::move(piece->second.readers);
      for (const Use& reader : readers) {
        if (ordered(reader, stream)) {
          continue;
        }
        if (reader.copy == 0) {
          fail("a write that is not ordered after a kernel's read", piece->first, stream);
        } else {
          spoil(reader.copy);
        }
      }
    }
    pieces_.erase(std::next(begin), end);
    begin->second = Piece{};
    begin->second.writer = {index_of(stream), now, 0};
  }
  void spoil(std::uint64_t copy) {
    spoilt_.resize(copies_ + 1);
    spoilt_[copy] = true;
  }
  bool is_spoilt(const Piece& piece) const {
    const Hop* hop = piece.path.get();
    while (hop != nullptr && (hop->copy >= spoilt_.size() || !spoilt_[hop->copy])) {
      hop = hop->before.get();
    }
    return hop != nullptr;
  }
  void fail(const std::string& what, std::uintptr_t at, Stream stream) {
    if (faults_++ == 0) {
      first_fault_ = what + ", by stream " + std::to_string(index_of(stream)) + " at " + std::to_string(at);
    }
  }

  std::vector<Stream> streams_;
  std::vector<Clock> clocks_; ///< by stream, in the order of `streams_`
  Clock host_; ///< what the host knows to be done
  std::map<void*, Clock> events_;
  std::map<std::uintptr_t, Piece> pieces_;
  std::uint64_t kernel_ = 0;
  Version latest_ = 0;
  std::uint64_t copies_ = 0;
  std::vector<bool> spoilt_; ///< by copy: its source was written before it had been read
  std::uint64_t faults_ = 0;
  std::string first_fault_;
};

} // namespace play
