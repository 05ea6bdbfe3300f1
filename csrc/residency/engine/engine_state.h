// What the parts of the residency engine share. Each part uses those below it:
//
//   Engine            what the tensor layer and the allocator call: operators, budgets, pins, captures, idle devices
//   Room              finds memory: chooses what is evicted, and moves blocks within the device
//   Copies            moves a storage's bytes between device and host, and its pointer
//   EngineState       the records, the state of each device, and small functions on both
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "allocator/events.h"
#include "allocator/segment_source.h"
#include "residency/engine/device_state.h"
#include "residency/engine/residency_statistics.h"
#include "residency/engine/storage_adapter.h"
#include "residency/engine/transfers.h"
#include "residency/policy/id_map.h"
#include "residency/trace/access_recorder.h"
#include "residency/trace/operator_timer.h"

namespace torch_uvm {

/// Number of operators for which a storage counts as unmovable after an attempt to move it failed.
inline constexpr std::uint64_t kUnmovableFor = 64;

/// Guarded by the engine's mutex.
struct EngineState {
  EngineState(ManagedRuntime& runtime, CachingManagedAllocator& memory, StorageAdapter& storages);

  static double now_us();
  Device& of(int device) {
    return devices[static_cast<std::size_t>(device)];
  }
  /// Whether operators of the device are watched.
  bool watches(int device) const;
  Record* find(StorageId id) const;
  /// Bytes of its block on the device, or of the one that it would get.
  std::size_t bytes_taken(const Record& record) const;
  /// The policy that knows it, or may be told of it.
  Policy& policy_of(const Record& record) const {
    return devices[static_cast<std::size_t>(record.device)].loops[record.loop].policy;
  }
  /// Tells the policy of the loop that uses it, and the recorder, once.
  void announce(Record& record, std::size_t loop);
  /// The same where no loop uses it as its own.
  void announce(Record& record) {
    announce(record, record.announced ? record.loop : of(record.device).loops.unknown());
  }

  // Whether an address may change.

  /// Whether the operator being begun holds the record and has not read its address yet.
  bool is_unread(const Record& record) const;
  bool address_may_change(const Record& record, Mover mover) const {
    return record.address_may_change(mover, is_unread(record) ? 1 : 0, operators);
  }
  /// Marks the storage unmovable for `kUnmovableFor` operators. Storages that share its bytes may be freed in the
  /// meantime.
  void mark_unmovable(Record& record) {
    record.unmovable_until = operators + kUnmovableFor;
    found_unmovable = true;
  }
  bool is_unmovable(const Record& record) const {
    return operators < record.unmovable_until;
  }

  // Events and streams.

  void wait(Stream stream, Event event);
  bool reached(Event& event) noexcept;
  void recycle_event(int device, Event& event) noexcept;
  void recycle_block_ready(Record& record) noexcept;
  /// Fires when the latest write-back has read the device copy. With staging the host copy is complete only later.
  static Event& was_read(Record& record) {
    return record.block_ready ? record.block_ready : record.host_ready;
  }
  /// Whether the latest write-back has finished reading the device copy.
  bool is_read(Record& record);
  OperatorTimer* timer_of(int device) {
    return device >= 0 && !of(device).loops.empty() ? of(device).loops.current().timer.get() : nullptr;
  }
  /// A scope in which the engine queues work of its own on an operator's stream.
  class Untimed {
   public:
    Untimed(EngineState& state, Stream stream)
        : recording_(state.operator_timer.get(), stream), scheduling_(state.timer_of(stream.device), stream) {}

   private:
    OperatorTimer::Pause recording_;
    OperatorTimer::Pause scheduling_;
  };

  /// A scope in which the host works for the engine and not for the program. Scopes nest.
  class OwnTime {
   public:
    OwnTime(EngineState& state, int device);
    ~OwnTime();
    OwnTime(const OwnTime&) = delete;
    OwnTime& operator=(const OwnTime&) = delete;

   private:
    EngineState& state_;
    const int device_;
    const double began_; ///< 0: nothing is timed
  };

  // An operator's workspace: its peak of allocated bytes beyond operands and results, without the engine's fetches and
  // evictions while it runs.

  std::size_t allocated_bytes(int device) const;
  /// Peak allocated bytes since the last call. Takes no lock if nothing was allocated since, which is the common case.
  std::int64_t take_allocated_peak(int device);
  /// \param first_new the next storage to be recorded
  void begin_workspace(int device, StorageId first_new);
  /// The engine itself has allocated that many bytes, or freed them (or created a storage elsewhere) if negative.
  void note_workspace(int device, std::int64_t bytes);
  std::size_t end_workspace(int device);

  // Fetches ahead.

  /// The prefetched storage was used, or its fetch abandoned: it no longer counts as fetched ahead.
  void no_longer_ahead(const Record& record) noexcept;
  /// Notes an eviction that was not scheduled, to fetch the storage again before its next use in the schedule.
  void fetch_again(const Record& record);

  ManagedRuntime& runtime;
  CachingManagedAllocator& memory;
  StorageAdapter& storages;
  std::vector<Device> devices;
  PinnedSegmentSource* host_source = nullptr;
  std::unique_ptr<CachingManagedAllocator> host_memory; ///< pinned
  EventPool events;
  Transfers transfers;
  ResidencyStatistics statistics;
  std::unique_ptr<AccessRecorder> recorder;
  std::unique_ptr<OperatorTimer> operator_timer; ///< while there is a recorder
  IdMap<Record*> records; ///< by storage id
  std::uint64_t operators = 0; ///< begun so far
  std::int64_t failures = 0;
  int own_scopes = 0; ///< of `OwnTime`
  bool found_unmovable = false; ///< a storage turned out to be unmovable since the flag was last cleared
  bool host_refused = false; ///< the latest write-back found no pinned memory
  const std::vector<Record*>* beginning = nullptr; ///< operands that Engine::begin is placing
  std::vector<void*> locked; ///< storages whose references are dropped after the mutex is released
};

} // namespace torch_uvm
