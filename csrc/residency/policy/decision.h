// What a policy is told, and what it answers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace torch_uvm {

using StorageId = std::uint64_t; ///< never reused
using OperatorKey = std::uint64_t; ///< the operator's name, hashed by the caller

/// A storage may come more than once in an operator; it is written if any of them writes.
struct Access {
  StorageId storage = 0;
  bool writes = false;
};

struct PolicyOptions {
  std::size_t budget = 0; ///< bytes that storages may have on the device
  std::size_t reserve = 0; ///< of these, what the plan leaves free
  bool in_place = true; ///< whether operators may use what is on the host there
};

/// Valid until the next call of `begin` or `end`.
struct Decision {
  /// Fetch these, in this order, each as soon as there is room. They come after those of earlier
  /// decisions: the caller keeps the queue, and takes out what has died, what is resident and what was retired since.
  std::vector<StorageId> fetch;
  /// Start to write these back now: their device copies may be given up as soon as that is done. What is clean
  /// is written by nobody and may be given up at once.
  std::vector<StorageId> retire;
  /// At `begin`: sizes of the operator's results that outlive it, as the plan has them, or without a plan as an earlier
  /// operator of that name with operands of the same sizes made them. Empty: none, or unknown.
  std::vector<std::size_t> births;
  /// At `begin` of an operator whose name is new: the largest result of any operator so far. 0: the name is known.
  std::size_t guess = 0;
  /// The plan has changed, or was lost: forget the fetches of earlier decisions that have not been started.
  bool forget = false;
};

} // namespace torch_uvm
