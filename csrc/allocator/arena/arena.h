// An arena: bump allocation from upstream blocks, released all at once. For allocations that live as long as an
// iteration or a part of it.
//
// - Each stream has its own blocks, so bump order is stream order, and no event is needed.
// - The first block has `initial` bytes. A further one has as many as the stream's blocks together, or as the request
//   if that is more.
// - A scope (push, pop) has its own blocks, which the next scope of the same depth reuses. A scope like the last one
//   then makes no upstream call.
// - Freeing an allocation only decrements a counter. Allocations that are live at the end of their scope stay valid.
//   They keep their whole block, which the last free returns to the upstream.
// - A block that other streams used (record_stream) is not reused: the upstream, which knows of them, gets it back and
//   orders its next use.
//
// The mutex is a leaf: the upstream is called without it, since it may call a memory-pressure callback that frees
// allocations of this arena. A forked child does not own the memory: freeing does nothing and allocating throws.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "allocator/allocator.h"
#include "runtime/bytes.h"
#include "runtime/forks.h"

namespace torch_uvm {

struct ArenaOptions {
  Location home; ///< of all allocations
  std::size_t initial = 64 * MiB; ///< size of each stream's first block; at least 1
};

/// Allocations that were still live at a reset or pop.
struct Outlived {
  std::int64_t allocations = 0;
  std::int64_t bytes = 0; ///< as requested

  bool operator==(const Outlived&) const = default;
};

class Arena final : public Allocator {
 public:
  /// \throws InvalidArgument if upstream is null, the home does not exist, or initial is 0
  Arena(ManagedRuntime& runtime, std::shared_ptr<Allocator> upstream, const ArenaOptions& options);
  ~Arena() override;

  Allocation allocate(std::size_t bytes, Location home, Stream stream) override;
  void free(const Allocation& allocation) noexcept override;
  void record_stream(const Allocation& allocation, Stream stream) override;
  /// Frees the blocks without live allocations; needs no reset.
  std::size_t release() override;
  bool serves(Location home) const override {
    return home == options_.home;
  }
  AllocatorFigures figures() const override;
  std::string description() const override {
    return "arena(" + upstream_->description() + ")";
  }

  /// Opens a scope within the open ones.
  void push();
  /// Ends the innermost scope and reclaims its memory. \throws InvalidArgument if none is open
  Outlived pop();
  /// Reclaims all memory, for the next iteration. Open scopes stay open.
  Outlived reset();

 private:
  struct Block;
  using Blocks = std::vector<std::shared_ptr<Block>>;
  using Scope = std::map<Stream, Blocks>;

  // Require the mutex:
  Allocation take(const std::shared_ptr<Block>& block, std::size_t bytes, std::size_t rounded);
  static void reclaim(Scope& scope, Blocks& dropped, Outlived& outlived);

  const std::shared_ptr<Allocator> upstream_;
  const ArenaOptions options_;
  const ForkWatch forks_;

  mutable std::mutex mutex_; // guards the rest
  AllocatorFigures figures_;
  std::size_t open_ = 0; ///< scopes
  std::vector<Scope> scopes_; ///< by depth; the first is outside of all scopes
};

} // namespace torch_uvm
