// The residency policy: decides which storages to keep on a device, to prefetch and to evict.
//
// The policy receives events in order: storages are created and freed, outermost operators begin and end. It recognises
// steps that repeat, makes a schedule for one iteration, and returns at each operator which transfers to start. It
// touches no memory and uses no runtime, threads or clock. There is one policy per device; the caller serialises calls.
//
// Decisions are advice: the caller may carry them out late or ignore them. It skips fetches of storages that are
// resident and retirements of those that are on the host. Decisions affect only time, never results.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "residency/policy/decision.h"

namespace torch_uvm {

namespace scheduling {
struct Schedule;
}

class Policy {
 public:
  struct Counters {
    std::uint64_t plan_hits = 0; ///< operators that matched the schedule
    std::uint64_t plan_misses = 0; ///< operators that did not match, or for which there was no schedule
    std::uint64_t schedules_made = 0;
    std::uint64_t resynchronised = 0; ///< how often the position in a schedule was found again after a mismatch
    bool following = false; ///< the latest operator matched the schedule
  };

  explicit Policy(PolicyOptions options = {});
  ~Policy();
  Policy(const Policy&) = delete;
  Policy& operator=(const Policy&) = delete;

  /// Schedules made for other options are recomputed when they are next followed.
  void set_options(const PolicyOptions& options);

  /// A storage that no operator created (a parameter, an input) was seen for the first time, or was resized.
  /// \param bytes that it takes on the device, here as in `end`: of its block, which may be larger than the storage
  void created(StorageId storage, std::size_t bytes);
  void freed(StorageId storage);
  /// Pins a storage (exports, `keep_resident`) or unpins it. The next schedule counts the bytes of pinned storages as
  /// always resident, and neither retires nor fetches them. Does not nest: the caller counts the pins.
  void pin(StorageId storage, bool pinned);
  /// The storage's bytes are on the host, or on the device (as at first). Of values that are as good to evict, the next
  /// schedule evicts those on the host.
  void moved(StorageId storage, bool to_host);

  /// An outermost operator is about to run. Storages without a `created` count as having no bytes.
  /// \param in_place_ok the operator reads or writes each byte about once (optimizers, embeddings)
  /// \return the sizes of its results. Fetches are returned by `end`, when its operands may be moved again
  const Decision& begin(OperatorKey key, std::span<const Access> accesses, bool in_place_ok);
  /// The operator has ended: its kernels are queued. If several threads run operators at once, this refers to the one
  /// that began last.
  /// \param births new storages that outlive the operator, in order of creation, with their bytes
  /// \param workspace peak of temporary bytes while it ran
  const Decision& end(std::span<const std::pair<StorageId, std::size_t>> births, std::size_t workspace);

  /// Operators ran on the device, without waits for transfers. They are numbered from 1, in order of `begin`. Durations
  /// may be reported late, and in any order. Reports after others have begun to mismatch are ignored.
  /// \param ms the duration of all of them together; beyond kLongGroupMs, several are wanted again one by one
  /// \param in_place they used operands on the host, at the link's rate
  /// \param host_ms what the program took to queue them; 0: it was ahead of the device, or that is not known
  void ran(std::uint64_t first, std::uint64_t last, double ms, bool in_place = false, double host_ms = 0);

  /// A step ends here: the user said so, or an optimizer has run. Repeated steps are recognised without it; alternating
  /// steps need it.
  void mark_step();

  /// Number of operators from the latest one to the storage's next scheduled use. Infinity if none is known.
  double next_use(StorageId storage) const;
  /// The same if the schedule has the next use on the device. Infinity if it is on the host or none is known.
  double next_use_on_device(StorageId storage) const;
  /// Whether the latest operator should use the storage on the host if it is not resident, rather than fetch it.
  bool use_in_place(StorageId storage) const;

  Counters counters() const;
  /// Whether the latest operator matched a schedule that is final: durations are known. True if the caller reports no
  /// durations.
  bool is_settled() const;
  /// Milliseconds that an operator takes in the mean, as the schedule of the latest operator predicts; 0: not known.
  double predicted_ms_per_operator() const;
  /// Number of operators that have begun.
  std::uint64_t operators() const;
  /// Number of operators in the current schedule; 0 if the latest operator did not match one.
  std::uint64_t step_length() const;
  /// The current schedule, and the place of the latest operator in it. nullptr if that did not match one. Valid until
  /// the next call.
  std::pair<const scheduling::Schedule*, std::uint32_t> schedule() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

} // namespace torch_uvm
