// What to keep on a device, what to fetch ahead and what to write back behind: the residency engine's brain.
//
// It is told what happens, in order: storages appear and die, outermost operators begin and end. It recognises steps
// that repeat, plans one lap of them, and says at each operator what to start. It touches no memory, calls no
// runtime, knows no thread and no clock. One policy for each device; the caller serialises all calls.
//
// What it says is advice. The caller may be late with it, or leave it: what is resident already is not fetched, what
// is on the host already is not retired. Nothing here decides a result, only the time it takes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "residency/policy/decision.h"

namespace torch_uvm {

class Policy {
 public:
  struct Counters {
    std::uint64_t plan_hits = 0; ///< operators that did what the plan had foreseen
    std::uint64_t plan_misses = 0; ///< operators that did not, or for which there was no plan
    std::uint64_t plans_made = 0;
    std::uint64_t resynchronised = 0; ///< times that a known plan was found again after a miss
    bool following = false; ///< a plan foresaw the latest operator
  };

  explicit Policy(PolicyOptions options = {});
  ~Policy();
  Policy(const Policy&) = delete;
  Policy& operator=(const Policy&) = delete;

  /// Plans made for another budget are made anew as they come up.
  void set_options(const PolicyOptions& options);

  /// First sight of a storage that no operator gave birth to (a parameter, an input), or that was resized.
  void created(StorageId storage, std::size_t bytes);
  void died(StorageId storage);
  /// Held on the device for now, whatever the plan says (exports, `keep_resident`): the next plan counts its bytes
  /// as taken throughout, and neither retires nor fetches it. Does not nest: the caller counts.
  void hold(StorageId storage, bool held);

  /// An outermost operator is about to run. What was not `created` is taken for a storage of no bytes.
  /// \param in_place_ok it reads or writes each byte about once (optimizers, embeddings)
  /// \return sizes of its results; fetches come from `end`, when its operands may be touched
  const Decision& begin(OperatorKey key, std::span<const Access> accesses, bool in_place_ok);
  /// The operator has ended (its kernels are queued). Where several threads run operators at once, it is the latest
  /// that began.
  /// \param births new storages that outlive it, in order of appearance, with their bytes
  /// \param workspace bytes above what is live that it needed while it ran
  const Decision& end(std::span<const std::pair<StorageId, std::size_t>> births, std::size_t workspace);

  /// A step ends here: asked for by the user, or an optimizer has run. Only a hint: steps are recognised without it.
  void mark_step();

  /// Operators from the latest begun one until this storage's next use as the plan has it; infinity: none is known.
  double next_use(StorageId storage) const;
  /// The same of a use that the plan has on the device; infinity: the next one is on the host, or none is known.
  double next_use_on_device(StorageId storage) const;
  /// Of the operator that has begun last: better used on the host, where it is not resident, than fetched.
  bool use_in_place(StorageId storage) const;

  Counters counters() const;
  /// Operators of the plan that is followed; 0: none is.
  std::uint64_t step_length() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

} // namespace torch_uvm
