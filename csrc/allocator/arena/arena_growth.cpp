// Slow path of an arena's allocation: the current block has no room, or its chain is closed.
#include <algorithm>
#include <iterator>

#include "allocator/arena/arena_chunk.h"
#include "allocator/size_classes.h"
#include "runtime/error.h"

namespace torch_uvm {

Allocation Arena::allocate_slowly(std::size_t bytes, std::size_t rounded, Stream stream) {
  if (stream.device >= devices_ || stream.device < Stream::host().device) {
    throw InvalidArgument("a stream of device " + std::to_string(stream.device) + "; there are " +
                          std::to_string(devices_) + " devices");
  }
  if (bytes == 0) {
    return {};
  }
  if (in_forked_child()) {
    throw RuntimeFailure("an arena's memory is not available in a forked child process: it belongs to the parent");
  }
  if (bytes > kLargestRequest) {
    throw OutOfMemory(OutOfMemory::Cause::kHost, bytes,
                      format_bytes(bytes) + " asked for from " + description() + "; no machine has that much");
  }
  std::unique_ptr<Chunk> made; // destroyed after the lock is released
  std::unique_lock lock(mutex_);
  Chain& chain = chain_of(stream);
  if (Chunk* const room = find_room(chain, rounded)) {
    return take(chain, *room, bytes, rounded);
  }
  const std::size_t wanted = std::max(chain.next, rounded);
  open(chain); // other threads may still make smaller requests from it
  lock.unlock();
  made = make_chunk(wanted, rounded, stream);
  lock.lock();
  chain.next = grown(made->memory.bytes);
  if (Chunk* const room = find_room(chain, rounded)) { // another thread made room meanwhile
    chain.spare.push_back(std::move(made));
    return take(chain, *room, bytes, rounded);
  }
  chain.chunks.reserve(chain.chunks.size() + 1);
  return take(chain, add(chain, std::move(made), rounded), bytes, rounded);
}

std::unique_ptr<Arena::Chunk> Arena::make_chunk(std::size_t bytes, std::size_t least, Stream stream) {
  while (bytes > least) {
    try {
      return std::make_unique<Chunk>(*this, bytes, stream);
    } catch (const OutOfMemory&) {
      bytes = std::max(least, round_up(bytes / 4, kAllocationAlignment));
    }
  }
  return std::make_unique<Chunk>(*this, least, stream);
}

std::size_t Arena::grown(std::size_t bytes) const noexcept {
  const double next = static_cast<double>(bytes) * options_.growth;
  return next < static_cast<double>(kLargestRequest)
             ? std::max(options_.initial, round_up(static_cast<std::size_t>(next), kAllocationAlignment))
             : kLargestRequest;
}

Arena::Chain& Arena::chain_of(Stream stream) {
  {
    const std::lock_guard lock(bump_);
    if (Chain* const chain = find(stream)) {
      return *chain;
    }
  }
  auto chain = std::make_unique<Chain>(stream, options_.initial);
  std::vector<std::unique_ptr<Chain>> chains; // allocated outside the spin lock
  chains.reserve(chains_.size() + 1);
  const std::lock_guard lock(bump_);
  std::ranges::move(chains_, std::back_inserter(chains));
  chains.push_back(std::move(chain));
  chains_.swap(chains);
  return *chains_.back();
}

/// Closes the chain. \return a block with room, possibly a spare one, or nullptr
Arena::Chunk* Arena::find_room(Chain& chain, std::size_t rounded) {
  close(chain);
  if (!chain.chunks.empty() && chain.chunks.back()->room() >= rounded) {
    return chain.chunks.back().get();
  }
  const auto spare =
      std::ranges::find_if(chain.spare, [=](const auto& chunk) { return chunk->memory.bytes >= rounded; });
  if (spare == chain.spare.end()) {
    return nullptr;
  }
  chain.chunks.reserve(chain.chunks.size() + 1);
  std::unique_ptr<Chunk> chunk = std::move(*spare);
  chain.spare.erase(spare);
  return &add(chain, std::move(chunk), rounded);
}

/// Adds a block for a request. Later requests are bumped from it, unless the previous block has more room left.
Arena::Chunk& Arena::add(Chain& chain, std::unique_ptr<Chunk> chunk, std::size_t rounded) {
  const bool bumped = chain.chunks.empty() || chunk->room() - rounded >= chain.chunks.back()->room();
  return **chain.chunks.insert(bumped ? chain.chunks.end() : std::prev(chain.chunks.end()), std::move(chunk));
}

/// Allocates from a block with room in a closed chain, and opens the chain.
Allocation Arena::take(Chain& chain, Chunk& from, std::size_t bytes, std::size_t rounded) {
  Span& span = span_in(from);
  span_in(*chain.chunks.back());
  void* const ptr = static_cast<char*>(from.memory.ptr) + from.top;
  from.top += rounded;
  {
    const std::lock_guard lock(bump_);
    count(span, bytes);
  }
  open(chain);
  return {ptr, bytes, &span};
}

Arena::Span& Arena::span_in(Chunk& chunk) {
  if (chunk.spans.empty() || chunk.spans.back()->depth != marks_.size()) {
    chunk.spans.push_back(std::make_unique<Span>(chunk, chunk.top, marks_.size()));
  }
  return *chunk.spans.back();
}

void Arena::close(Chain& chain) noexcept {
  const std::lock_guard lock(bump_);
  if (chain.span != nullptr) {
    chain.span->chunk.top = chain.span->chunk.memory.bytes - chain.room;
    chain.span = nullptr;
    chain.room = 0;
  }
}

void Arena::open(Chain& chain) {
  if (chain.chunks.empty()) {
    return;
  }
  Chunk& chunk = *chain.chunks.back();
  Span& span = span_in(chunk);
  const std::lock_guard lock(bump_);
  chain.span = &span;
  chain.top = static_cast<char*>(chunk.memory.ptr) + chunk.top;
  chain.room = chunk.room();
}

} // namespace torch_uvm
