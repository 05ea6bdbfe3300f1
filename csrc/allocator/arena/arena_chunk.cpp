#include "allocator/arena/arena_chunk.h"

#include <algorithm>

namespace torch_uvm {

Arena::Chunk::Chunk(Arena& arena, std::size_t bytes, Stream stream)
    : arena(arena), stream(stream), memory(arena.upstream_->allocate(bytes, arena.options_.home, stream)) {
  const std::lock_guard lock(arena.bump_);
  AllocatorFigures& figures = arena.figures_;
  figures.reserved_bytes += static_cast<std::int64_t>(bytes);
  figures.peak_reserved_bytes = std::max(figures.peak_reserved_bytes, figures.reserved_bytes);
  ++figures.upstream_allocations;
}

Arena::Chunk::~Chunk() {
  for (const std::unique_ptr<Span>& span : spans) {
    for (const Stream other : span->others) {
      try {
        arena.upstream_->record_stream(memory, other);
      } catch (...) {
        try {
          arena.runtime_.synchronize_device(other.device);
        } catch (...) {
          // The device has failed, so no work queued there is running any more.
        }
      }
    }
  }
  arena.upstream_->free(memory);
  const std::lock_guard lock(arena.bump_);
  arena.figures_.reserved_bytes -= static_cast<std::int64_t>(memory.bytes);
  ++arena.figures_.upstream_frees;
}

bool Arena::Chunk::in_use() const noexcept {
  return std::ranges::any_of(spans, [](const auto& span) { return span->allocations != 0; });
}

Arena::Ordering::~Ordering() {
  for (const Recorded& each : recorded_) {
    if (each.event) {
      arena_.events_.give(each.stream, each.event);
    }
  }
}

const Arena::Ordering::Recorded& Arena::Ordering::recorded(Stream stream) {
  const auto found = std::ranges::find(recorded_, stream, &Recorded::stream);
  if (found != recorded_.end()) {
    return *found;
  }
  recorded_.push_back({stream, Event{}});
  try {
    if (!arena_.runtime_.query_stream(stream)) {
      recorded_.back().event = arena_.events_.record(stream);
      const std::lock_guard lock(arena_.bump_);
      ++arena_.figures_.events_recorded;
    }
  } catch (...) {
    recorded_.pop_back();
    throw;
  }
  return recorded_.back();
}

bool Arena::Ordering::after(const Span& span, const Chain& chain) noexcept {
  try {
    for (const Stream other : span.others) {
      const Event event = recorded(other).event;
      if (!event) {
        continue;
      }
      if (chain.stream.is_host()) {
        arena_.runtime_.synchronize_event(event);
      } else {
        arena_.runtime_.wait_event(chain.stream, event);
      }
    }
    return true;
  } catch (...) {
    return false;
  }
}

} // namespace torch_uvm
