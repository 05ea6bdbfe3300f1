// Plays an access trace through the residency engine and the caching allocator, in modelled time and without memory.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "access_trace.h"
#include "allocator/caching/caching_managed_allocator.h"
#include "operator_durations.h"
#include "paced_runtime.h"
#include "residency/engine/engine.h"
#include "runtime/emulated/cost_profile.h"

namespace play {

struct Settings {
  std::size_t budget = 0;
  std::optional<std::size_t> staging; ///< bytes of a slot; nullopt: the engine's default for an H200
  Arithmetic arithmetic;
  double scale = 1; ///< factor on the duration of every operator
  double copy_us = 0; ///< host time of one copy between device and host
  std::optional<double> host_us; ///< host time of one operator; nullopt: 30, or 0 if the trace's durations include it
  std::size_t ahead = 64; ///< operators by which the host may run ahead of the device
  bool find_races = false; ///< whether every access is checked (race_detector.h)
  std::size_t streams = 1; ///< of the program, which run operators in turn; each waits for the one before
};

struct Figures {
  std::int64_t fetched = 0, written_back = 0, in_place = 0, moved = 0; ///< bytes
  std::int64_t transfers = 0; ///< fetches and write-backs
  std::int64_t over_budget = 0; ///< number of operators
  std::int64_t hits = 0, misses = 0;
  std::size_t peak = 0; ///< peak of reserved bytes
  double compute_ms = 0; ///< total duration of the operators if all their operands were on the device
  double ms = 0; ///< from the beginning of the step until the host has waited for its end
};

class Player {
 public:
  Player(const Trace& trace, const Settings& settings) : trace_(trace), settings_(settings) {
    for (std::size_t more = 1; more < settings.streams; ++more) {
      streams_.push_back(runtime_.create_stream(0, 0));
    }
    runtime_.copy_us = settings.copy_us;
    engine_.set_staging(settings.staging);
    engine_.set_budget(0, settings.budget);
    for (const Made& found : trace.found) {
      found_[found.id] = found.bytes;
      Op op;
      op.name = "made before";
      op.births.push_back(found);
      run(op, 0);
    }
    take_figures();
  }
  ~Player() {
    while (!storages_.empty()) {
      die(storages_.begin()->first);
    }
    memory_.set_pressure_callback(nullptr);
    runtime_.destroy_event(turned_);
  }
  Player(const Player&) = delete;
  Player& operator=(const Player&) = delete;

  /// Plays every step except the last one, then repeats the second-to-last step `again` times.
  /// \return the figures of each step
  std::vector<Figures> play(int again) {
    const Loop loop = repeated_step(trace_);
    std::vector<Figures> figures;
    std::size_t at = 0;
    for (; at != loop.end; at = trace_.ends[figures.size() - 1]) {
      figures.push_back(run(at, trace_.ends[figures.size()]));
    }
    repeat(again, figures);
    return figures;
  }

  /// Repeats the second-to-last step, after `play`.
  /// \param figures receives those of each step
  void repeat(int times, std::vector<Figures>& figures) {
    const Loop loop = repeated_step(trace_);
    for (int step = 0; step < times; ++step) {
      inherit(loop);
      figures.push_back(run(loop.begin, loop.end));
    }
  }

  Engine& engine() {
    return engine_;
  }
  const RaceDetector& races() const {
    return races_;
  }

 private:
  struct Storage {
    std::size_t bytes = 0;
    Block* block = nullptr; ///< nullptr: on the host
    void* on_host = nullptr; ///< the address there
    Stream stream; ///< that it was allocated on
    RaceDetector::Version version = 0; ///< of its contents
    Record* record = nullptr;
  };

  class Adapter final : public StorageAdapter {
   public:
    bool lock_if_sole_owner(const Record&, std::vector<void*>&) override {
      return true;
    }
    bool take_sole_ownership(const Record&, std::vector<void*>&) override {
      return false;
    }
    void release(void*) noexcept override {}
    bool is_expired(const Record&) const override {
      return false;
    }
    void point_at_host(Record& record, void* ptr) noexcept override {
      static_cast<Storage*>(record.storage)->block = nullptr;
      static_cast<Storage*>(record.storage)->on_host = ptr;
    }
    void point_at_device(Record& record, Block* block) noexcept override {
      static_cast<Storage*>(record.storage)->block = block;
    }
    void watch_for_writes(Record&, std::vector<void*>&) override {}
    void wake() noexcept override {}
    std::optional<int> unwatched_kernels() const noexcept override {
      return 0;
    }
    void forget(Record&) noexcept override {}
  };

  /// The stream of the next operator. It waits for the operator before.
  void turn_to_next_stream() {
    const Stream before = stream();
    turn_ = (turn_ + 1) % streams_.size();
    order(before, stream());
  }
  void order(Stream earlier, Stream later) {
    if (earlier != later) {
      runtime_.record_event(turned_, earlier);
      runtime_.wait_event(later, turned_);
    }
  }
  Stream stream() const {
    return streams_[turn_];
  }

  Storage& make(const Made& made) {
    auto storage = std::make_unique<Storage>();
    storage->bytes = made.bytes;
    storage->block = memory_.allocate(made.bytes, Location::device(0), stream());
    storage->stream = stream();
    engine_.note_allocation(0);
    return *(storages_[made.id] = std::move(storage));
  }

  void die(Id id) {
    const auto found = storages_.find(id);
    if (found == storages_.end()) {
      return; // created before the played steps
    }
    const std::unique_ptr<Storage> storage = std::move(found->second);
    storages_.erase(found);
    order(stream(), storage->stream); // as record_stream's documentation asks for
    Block* const block = storage->block;
    if (storage->record != nullptr) {
      engine_.destroyed(storage->record);
    }
    memory_.free(block);
    if (storage->record != nullptr && block != nullptr) {
      engine_.freed();
    }
  }

  Record* record_of(Storage& storage) {
    if (storage.record == nullptr && storage.block != nullptr) {
      storage.record = engine_.adopt(storage.block, 0, &storage);
    }
    return storage.record;
  }

  /// \param ms its duration if all its operands are on the device
  void run(const Op& op, double ms) {
    ms *= settings_.scale;
    turn_to_next_stream();
    runtime_.pass_on_host(settings_.host_us.value_or(trace_.groups.empty() ? 30 : 0) / 1e3);
    for (const Made& found : op.found) {
      record_of(make(found)); // a storage without a record cannot be evicted for the next one
    }
    compute_ms_ += ms;
    double read = 0, written = 0; // bytes over the link, by the operator itself
    Engine::Frame frame;
    frame.key = std::hash<std::string>{}(op.name);
    if (!op.uses.empty()) {
      const Engine::Lock lock(engine_);
      std::vector<Engine::Operand> operands;
      for (const Use& use : op.uses) {
        operands.push_back({record_of(*storages_.at(use.id)), use.writes});
      }
      engine_.begin(frame, {frame.key, op.name.c_str(), op.in_place_ok, false, false}, operands, {stream()});
      for (const Use& use : op.uses) {
        const Storage& used = *storages_.at(use.id);
        const double across = used.block == nullptr ? static_cast<double>(used.bytes) : 0;
        read += across;
        written += use.writes && !std::ranges::count(op.deaths, use.id) ? across : 0;
      }
    }
    std::vector<Storage*> born;
    for (const Made& made : op.births) {
      born.push_back(&make(made));
    }
    if (op.workspace != 0) {
      memory_.free(memory_.allocate(op.workspace, Location::device(0), stream()));
    }
    if (settings_.find_races) {
      access(op, born);
    }
    queued_.push_back(runtime_.run(stream(), ms, read, written));
    if (queued_.size() > settings_.ahead) {
      runtime_.host_waits_until(queued_.front());
      queued_.pop_front();
    }
    {
      const Engine::Lock lock(engine_);
      for (Storage* const storage : born) {
        if (Record* const record = record_of(*storage)) {
          engine_.created(frame, record, {stream()});
        }
      }
      engine_.end(frame);
    }
    for (const Id id : op.deaths) {
      die(id);
    }
    for (unsigned mark = 0; mark < op.marks; ++mark) {
      engine_.mark_step({});
    }
  }

  /// Tells the race detector what the operator reads and writes.
  void access(const Op& op, const std::vector<Storage*>& born) {
    races_.begin_kernel(stream());
    const auto address = [&](const Storage& storage) {
      return storage.block == nullptr ? storage.on_host : memory_.data(storage.block);
    };
    for (const Use& use : op.uses) {
      const Storage& used = *storages_.at(use.id);
      if (used.version != 0) {
        races_.kernel_reads(address(used), used.bytes, stream(), used.version, op.name);
      }
    }
    for (const Use& use : op.uses) {
      if (Storage& used = *storages_.at(use.id); use.writes) {
        used.version = races_.kernel_writes(address(used), used.bytes, stream());
      }
    }
    for (Storage* const storage : born) {
      storage->version = races_.kernel_writes(address(*storage), storage->bytes, stream());
    }
  }

  Figures run(std::size_t begin, std::size_t end) {
    const double from = runtime_.host_ms();
    memory_.reset_peak_statistics(Location::device(0));
    for (std::size_t at = begin; at < end; ++at) {
      run(trace_.ops[at], durations_[at]);
    }
    runtime_.synchronize_stream(stream()); // as a program does when it reads the loss
    Figures figures = take_figures();
    figures.ms = runtime_.host_ms() - from;
    return figures;
  }

  void inherit(const Loop& loop) {
    for (const auto& [earlier, id] : loop.heirs) {
      if (!storages_.contains(earlier) && storages_.contains(id)) {
        storages_[earlier] = std::move(storages_.at(id));
        storages_.erase(id);
      }
    }
    for (std::size_t at = loop.begin; at < loop.end; ++at) {
      for (const std::vector<Made>* const all : {&trace_.ops[at].found, &trace_.ops[at].births}) {
        for (const Made& made : *all) {
          die(made.id); // no later storage takes its place
        }
      }
    }
    for (std::size_t at = loop.begin; at < loop.end; ++at) {
      for (const Id id : trace_.ops[at].deaths) {
        if (const auto found = found_.find(id); found != found_.end() && !storages_.contains(id)) {
          make({id, found->second}); // existed before the trace and has been replaced since
        }
      }
    }
  }

  Figures take_figures() {
    const ResidencyStatistics now = engine_.statistics();
    engine_.reset_statistics();
    Figures figures;
    figures.fetched = now.fetched.bytes;
    figures.written_back = now.written_back.bytes;
    figures.in_place = now.used_in_place.bytes;
    figures.moved = now.moved.bytes;
    figures.transfers = now.fetched.count + now.written_back.count;
    figures.over_budget = now.over_budget;
    figures.hits = now.plan_hits;
    figures.misses = now.plan_misses;
    figures.peak = static_cast<std::size_t>(memory_.statistics(Location::device(0)).reserved_bytes[0].peak);
    figures.compute_ms = std::exchange(compute_ms_, 0);
    return figures;
  }

  const Trace& trace_;
  const Settings settings_;
  RaceDetector races_;
  PacedRuntime runtime_{CostProfile::named("h200"), /*staged=*/true, settings_.find_races ? &races_ : nullptr};
  const std::vector<double> durations_ = durations_ms(trace_, runtime_.costs(), settings_.arithmetic); ///< by operator
  CachingManagedAllocator memory_{runtime_, std::make_unique<bench::AddressesOnly>()};
  Adapter adapter_;
  const std::unique_ptr<Engine> owned_engine_ = std::make_unique<Engine>(runtime_, memory_, adapter_);
  Engine& engine_ = *owned_engine_;
  std::unordered_map<Id, std::unique_ptr<Storage>> storages_;
  std::unordered_map<Id, std::size_t> found_; ///< sizes of the storages that existed before the first operator
  std::vector<Stream> streams_{Stream::default_of(0)};
  std::size_t turn_ = 0;
  const Event turned_ = runtime_.create_event(0, false);
  std::deque<double> queued_; ///< end times of the latest operators
  double compute_ms_ = 0;
};

} // namespace play
