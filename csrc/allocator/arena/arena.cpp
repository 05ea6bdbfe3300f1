#include "allocator/arena/arena.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "allocator/arena/arena_chunk.h"
#include "allocator/size_classes.h"
#include "runtime/error.h"

namespace torch_uvm {
namespace {

ArenaOptions checked(ArenaOptions options, int devices) {
  if (options.home.index >= devices || options.home.index < Location::host().index) {
    throw InvalidArgument("an arena for " + to_string(options.home) + "; there are the host and " +
                          std::to_string(devices) + " devices");
  }
  if (options.initial == 0 || options.initial > kLargestRequest) {
    throw InvalidArgument("an arena of " + std::to_string(options.initial) + " initial bytes; 1 to " +
                          std::to_string(kLargestRequest) + " are accepted");
  }
  if (!(options.growth >= 1) || !std::isfinite(options.growth)) {
    throw InvalidArgument("an arena whose blocks grow by " + std::to_string(options.growth) +
                          "; a finite factor of at least 1 is accepted");
  }
  options.initial = round_up(options.initial, kAllocationAlignment);
  return options;
}

} // namespace

Arena::Arena(ManagedRuntime& runtime, std::shared_ptr<Allocator> upstream, const ArenaOptions& options)
    : runtime_(runtime),
      upstream_(required(std::move(upstream), "an arena")),
      options_(checked(options, runtime.device_count())),
      devices_(runtime.device_count()),
      events_(runtime, devices_) {}

Arena::~Arena() {
  const bool leaks_all = in_forked_child(); // the memory belongs to the parent
  for (const std::unique_ptr<Chain>& chain : chains_) {
    for (Chunks* const chunks : {&chain->chunks, &chain->spare}) {
      for (std::unique_ptr<Chunk>& chunk : *chunks) {
        if (leaks_all || chunk->in_use()) {
          static_cast<void>(chunk.release()); // leaked, which is safer than unmapping it
        }
      }
      chunks->clear();
    }
  }
  if (!leaks_all) {
    events_.destroy_all();
  }
}

bool Arena::in_forked_child() const noexcept {
  return forks_.in_child();
}

// --- allocation -----------------------------------------------------------------------------------------------

Arena::Chain* Arena::find(Stream stream) noexcept {
  if (last_ != nullptr && last_->stream == stream) {
    return last_;
  }
  for (const std::unique_ptr<Chain>& chain : chains_) { // a linear search: a program uses few streams
    if (chain->stream == stream) {
      return last_ = chain.get();
    }
  }
  return nullptr;
}

void Arena::count(Span& span, std::size_t bytes) noexcept {
  ++span.allocations;
  span.bytes += static_cast<std::int64_t>(bytes);
  ++figures_.allocations;
  figures_.requested_bytes += static_cast<std::int64_t>(bytes);
  if (figures_.requested_bytes > figures_.peak_requested_bytes) {
    figures_.peak_requested_bytes = figures_.requested_bytes;
  }
}

Allocation Arena::allocate(std::size_t bytes, Location home, Stream stream) {
  if (home != options_.home) {
    throw InvalidArgument("home " + to_string(home) + "; this arena has memory of " + to_string(options_.home) +
                          " only");
  }
  const std::size_t rounded = round_up(bytes, kAllocationAlignment); // 0 on overflow
  if (rounded != 0 && !in_forked_child()) {
    const std::lock_guard lock(bump_);
    if (Chain* const chain = find(stream); chain != nullptr && rounded <= chain->room) {
      void* const ptr = chain->top;
      chain->top += rounded;
      chain->room -= rounded;
      count(*chain->span, bytes);
      return {ptr, bytes, chain->span};
    }
  }
  return allocate_slowly(bytes, rounded, stream);
}

// --- free -----------------------------------------------------------------------------------------------------

void Arena::free(const Allocation& allocation) noexcept {
  if (allocation.handle == nullptr || in_forked_child()) {
    return;
  }
  Span& span = *static_cast<Span*>(allocation.handle);
  std::unique_ptr<Chunk> last; // destroyed after the lock is released
  const std::lock_guard lock(bump_);
  if (span.allocations == 0) {
    std::fprintf(stderr, "torch_uvm: an allocation of an arena was freed that is not allocated (freed twice?)\n");
    std::abort();
  }
  --span.allocations;
  span.bytes -= static_cast<std::int64_t>(allocation.bytes);
  --figures_.allocations;
  figures_.requested_bytes -= static_cast<std::int64_t>(allocation.bytes);
  if (span.allocations == 0 && span.chunk.retired && !span.chunk.in_use()) {
    last.reset(&span.chunk);
  }
}

void Arena::record_stream(const Allocation& allocation, Stream stream) {
  if (stream.device >= devices_ || stream.device < Stream::host().device) {
    throw InvalidArgument("a stream of device " + std::to_string(stream.device) + "; there are " +
                          std::to_string(devices_) + " devices");
  }
  if (allocation.handle == nullptr || stream.is_host() || in_forked_child()) {
    return;
  }
  Span& span = *static_cast<Span*>(allocation.handle);
  if (span.chunk.stream == stream) {
    return;
  }
  std::vector<Stream> larger; // allocated and freed without the lock
  while (!record(span, stream, larger)) {
    larger.reserve(2 * larger.capacity() + 2);
  }
}

/// Records `stream` in the span, using the capacity of `larger` if needed. \return false if more capacity is needed
bool Arena::record(Span& span, Stream stream, std::vector<Stream>& larger) noexcept {
  const std::lock_guard lock(bump_);
  std::vector<Stream>& others = span.others;
  if (std::ranges::find(others, stream) != others.end()) {
    return true;
  }
  if (others.size() == others.capacity()) {
    if (larger.capacity() <= others.size()) {
      return false;
    }
    larger.assign(others.begin(), others.end());
    larger.swap(others);
  }
  others.push_back(stream);
  return true;
}

std::size_t Arena::release() {
  if (in_forked_child()) {
    return 0;
  }
  Chunks unused; // destroyed after the lock is released
  const std::lock_guard lock(mutex_);
  std::size_t bytes = 0;
  for (const std::unique_ptr<Chain>& chain : chains_) {
    close(*chain);
    unused.reserve(unused.size() + chain->chunks.size() + chain->spare.size());
    std::size_t given_up = 0;
    for (Chunks* const chunks : {&chain->chunks, &chain->spare}) {
      const auto begin = std::ranges::stable_partition(*chunks, [&](const auto& chunk) {
                           const std::lock_guard bump(bump_);
                           return chunk->in_use();
                         }).begin();
      for (auto chunk = begin; chunk != chunks->end(); ++chunk) {
        given_up += (*chunk)->memory.bytes;
        unused.push_back(std::move(*chunk));
      }
      chunks->erase(begin, chunks->end());
    }
    if (chain->chunks.empty() && given_up != 0) {
      chain->next = std::max(options_.initial, given_up); // the size that was needed
    }
    bytes += given_up;
  }
  return bytes;
}

// --- statistics -----------------------------------------------------------------------------------------------

AllocatorFigures Arena::figures() const {
  const std::lock_guard lock(bump_);
  return figures_;
}

std::string Arena::description() const {
  return "arena(" + upstream_->description() + ")";
}

} // namespace torch_uvm
