// Inputs and outputs of a policy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace torch_uvm {

using StorageId = std::uint64_t; ///< never reused
using OperatorKey = std::uint64_t; ///< the operator's name, hashed by the caller

/// A storage may occur more than once in an operator. It is written if any of its accesses writes.
struct Access {
  StorageId storage = 0;
  bool writes = false;
};

/// Bytes per millisecond, the highest that an H200 has shown, and what transfers cost besides.
struct LinkRates {
  double into = 55.4e6, out = 55.4e6; ///< of each direction of the link while the other one is idle
  double in_place = 51.2e6; ///< of kernels that use host memory in place
  double both = 100.7e6; ///< of both directions together
  double host_ms = 0.15; ///< what a transfer takes the host: 0.12 to 0.2 with Whisper, T5 and a mixture of experts
  double slowed = 0.15; ///< what kernels lose per time of copies beside them; by plans of a 7 B model 0.15 to 0.18
};

struct PolicyOptions {
  std::size_t budget = 0; ///< device bytes for storages
  std::size_t reserve = 0; ///< part of the budget that schedules leave free
  bool in_place = true; ///< whether operators may use host copies in place
  bool timed = false; ///< whether the caller reports durations (`Policy::ran`)
  LinkRates rates;
};

/// Valid until the next call of `begin` or `end`.
struct Decision {
  /// Prefetch these in order, each as soon as there is room. They queue behind those of earlier decisions. The caller
  /// keeps the queue and skips storages that were freed, are resident or were retired since.
  std::vector<StorageId> fetch;
  /// Start to write these back now. Each device copy may be evicted once its write-back is done, or at once if it is
  /// clean.
  std::vector<StorageId> retire;
  /// Start to write these back now, and keep their device copies until they are retired.
  std::vector<StorageId> write_back;
  /// At `begin`: sizes of the results that outlive the operator. From the schedule, or without one from an earlier
  /// operator of the same name and operand sizes. Empty: none, or unknown.
  std::vector<std::size_t> births;
  /// At `begin`: the temporary bytes that the operator needs at once, from the same source. 0: none, or unknown.
  std::size_t workspace = 0;
  /// At `begin`, if no schedule matches and the operator's name is new: the largest result so far of any operator that
  /// matched no schedule. Otherwise 0.
  std::size_t guess = 0;
  /// The schedule has changed or was lost: drop the fetches of earlier decisions that have not started.
  bool forget = false;
  /// At `begin`: report the durations of operators from here on.
  bool wants_durations = false;

  /// Of all but `wants_durations`. Keeps the lists' memory.
  void clear() {
    fetch.clear();
    retire.clear();
    write_back.clear();
    births.clear();
    workspace = guess = 0;
    forget = false;
  }
};

} // namespace torch_uvm
