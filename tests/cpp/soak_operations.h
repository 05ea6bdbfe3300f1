// The operations of a soak test. Each one is self-contained, so that any part of a sequence can be played.
#pragma once

#include <array>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "runtime/bytes.h"

namespace soak {

using namespace torch_uvm;

constexpr int kDevices = 2;
constexpr int kStreamsPerDevice = 3;
constexpr unsigned kSlots = 48; ///< slots of each thread; a slot holds one allocation
constexpr unsigned kShared = 48; ///< slots that all threads share

// clang-format off
// X(name, weight): an operation on the allocation in a slot; does nothing where it is not applicable
#define SOAK_OPERATIONS(X) \
  X(allocate, 300)      /* frees the slot's previous allocation first */ \
  X(try_allocate, 30) \
  X(free, 270)          /* work on the allocation may be queued */ \
  X(free_after, 20)     /* after an event of the caller */ \
  X(write, 100)         /* on the stream of its last use */ \
  X(verify, 40)         /* checks for writes by other owners */ \
  X(record_stream, 50)  /* the recorded stream writes to it */ \
  X(set_home, 25) \
  X(hand_over, 20) \
  X(share, 120)         /* swaps the slot with a shared one, which other threads use or free */ \
  X(plug, 15)           /* a copy that keeps a stream busy */ \
  X(wait, 8)            /* synchronises a stream */ \
  X(look, 6)            /* statistics, find, snapshot */ \
  X(special, 8)         /* operations of this allocator only: relocation, a reset, an iteration */ \
  X(limit, 1)           /* the runtime's limit, or a device's cap */ \
  X(options, 1) \
  X(empty_cache, 1)
// clang-format on

enum class Kind : std::uint8_t {
#define SOAK_DECLARE(name, weight) k_##name,
  SOAK_OPERATIONS(SOAK_DECLARE)
#undef SOAK_DECLARE
};

struct Operation {
  Kind kind;
  std::uint8_t thread; ///< the slot's thread
  std::uint8_t slot;
  std::uint8_t other; ///< a shared slot
  std::uint32_t choice; ///< selects a home, a stream or a variant
  std::uint64_t bytes;
};

inline std::string to_string(const Operation& operation) {
  constexpr std::array kNames{
#define SOAK_NAME(name, weight) #name,
      SOAK_OPERATIONS(SOAK_NAME)
#undef SOAK_NAME
  };
  return "thread " + std::to_string(operation.thread) + ": " + kNames[static_cast<std::size_t>(operation.kind)] +
         " slot " + std::to_string(operation.slot) + ", shared " + std::to_string(operation.other) + ", choice " +
         std::to_string(operation.choice) + ", bytes " + std::to_string(operation.bytes);
}

/// Generates the operations of one thread from a seed.
class Generator {
 public:
  Generator(std::uint64_t seed, std::uint8_t thread) : random_(seed * 0x9e3779b97f4a7c15U + thread), thread_(thread) {}

  Operation next() {
    static const std::vector<Kind> table = weighted();
    const std::uint64_t roll = random_();
    Operation operation{};
    operation.kind = table[roll % table.size()];
    operation.thread = thread_;
    operation.slot = static_cast<std::uint8_t>((roll >> 16) % kSlots);
    operation.other = static_cast<std::uint8_t>((roll >> 24) % kShared);
    operation.choice = static_cast<std::uint32_t>(roll >> 32);
    operation.bytes = size();
    return operation;
  }

 private:
  static std::vector<Kind> weighted() {
    std::vector<Kind> table;
#define SOAK_WEIGH(name, weight) table.insert(table.end(), weight, Kind::k_##name);
    SOAK_OPERATIONS(SOAK_WEIGH)
#undef SOAK_WEIGH
    return table;
  }
  std::uint64_t size() {
    const std::uint64_t roll = random_();
    const std::uint64_t draw = roll >> 8;
    switch (roll % 32) {
      case 0:
        return 1 + draw % (40 * MiB);
      case 1:
      case 2:
        return 1 + draw % (10 * MiB);
      case 3:
      case 4:
      case 5:
      case 6:
        return 1 + draw % (2 * MiB);
      case 7:
      case 8:
        return 512 * (1 + draw % 8); // sizes that recur
      default:
        return 1 + draw % (64 * KiB);
    }
  }

  std::mt19937_64 random_;
  const std::uint8_t thread_;
};

} // namespace soak
