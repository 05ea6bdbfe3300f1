#include "residency/policy/lap.h"

#include <algorithm>

namespace torch_uvm::planning {

namespace {

/// Number of operators from one to another, forwards. From an operator to itself it is a whole iteration.
std::uint32_t distance(std::uint32_t from, std::uint32_t to, std::uint32_t size) {
  return to > from ? to - from : to + size - from;
}

class LapMaker {
 public:
  LapMaker(const OperatorLog& log, std::uint64_t operators, bool repeated)
      : log_(log),
        first_(log.latest() - operators + 1),
        size_(static_cast<std::uint32_t>(operators)),
        repeated_(repeated) {}

  Lap make() {
    name_births();
    for (std::uint32_t op = 0; op < size_; ++op) {
      add_operator(op);
    }
    lap_.event_begin.push_back(static_cast<std::uint32_t>(lap_.events.size()));
    connect();
    return std::move(lap_);
  }

 private:
  std::uint32_t add_part(const Part& part) {
    lap_.parts.push_back(part);
    return static_cast<std::uint32_t>(lap_.parts.size() - 1);
  }

  /// Makes a value for each storage created in this iteration. The storage created at the same place in the previous
  /// iteration maps to the same value.
  void name_births() {
    std::vector<std::uint32_t> here;
    for (std::uint32_t op = 0; op < size_; ++op) {
      here.clear();
      log_.births_of(first_ + op, [&](const LoggedBirth& birth) {
        here.push_back(add_part({birth.bytes, kNoStorage, op, kNone, birth.storage, false}));
        temporaries_[birth.storage] = here.back();
        births_.push(here.back());
      });
      births_.close_list();
      if (!repeated_) {
        continue;
      }
      std::size_t place = 0;
      log_.births_of(first_ + op - size_, [&](const LoggedBirth& birth) {
        if (place < here.size()) {
          temporaries_[birth.storage] = here[place];
        }
        ++place;
      });
    }
  }

  void add_operator(std::uint32_t op) {
    const LoggedOperator& logged = log_[first_ + op];
    lap_.event_begin.push_back(static_cast<std::uint32_t>(lap_.events.size()));
    std::uint32_t operands = 0;
    log_.accesses_of(first_ + op, [&](const LoggedAccess& access) {
      lap_.events.push_back({part_of(access), op, kNone, kNone, false, access.writes});
      ++operands;
    });
    for (const std::uint32_t part : births_[op]) {
      lap_.events.push_back({part, op, kNone, kNone, true, true});
    }
    lap_.ops.push_back({logged.key, logged.workspace, operands, logged.in_place_ok});
    log_.deaths_of(first_ + op, [&](StorageId storage) {
      const std::uint32_t* part = temporaries_.find(storage);
      if (part != nullptr && lap_.parts[*part].death == kNone) {
        lap_.parts[*part].death = op;
        lap_.deaths.push(*part);
      }
    });
    lap_.deaths.close_list();
  }

  std::uint32_t part_of(const LoggedAccess& access) {
    if (const std::uint32_t* part = temporaries_.find(access.storage)) {
      return *part;
    }
    if (const std::uint32_t* part = lap_.part_of.find(access.storage)) {
      return *part;
    }
    return lap_.part_of[access.storage] = add_part({access.bytes, access.storage, kNone, kNone, access.storage, false});
  }

  void connect() {
    lap_.events_of.resize(lap_.parts.size());
    for (std::uint32_t event = 0; event < lap_.events.size(); ++event) {
      lap_.events_of[lap_.events[event].part].push_back(event);
    }
    for (std::uint32_t part = 0; part < lap_.parts.size(); ++part) {
      std::vector<std::uint32_t>& events = lap_.events_of[part];
      const Part& it = lap_.parts[part];
      const bool persistent = it.birth == kNone;
      if (!persistent) { // uses before its creation belong to the next iteration
        const auto birth =
            std::find_if(events.begin(), events.end(), [&](std::uint32_t event) { return lap_.events[event].birth; });
        std::rotate(events.begin(), birth, events.end());
      }
      for (std::size_t at = 0; at < events.size(); ++at) {
        Event& event = lap_.events[events[at]];
        if (at + 1 < events.size() || persistent) {
          event.next = events[(at + 1) % events.size()];
          event.distance = distance(event.op, lap_.events[event.next].op, size_);
        } else if (it.death != kNone) {
          event.distance = it.death == event.op ? 0 : distance(event.op, it.death, size_);
        }
      }
    }
  }

  const OperatorLog& log_;
  std::uint64_t first_;
  std::uint32_t size_;
  bool repeated_;
  Lap lap_;
  Lists births_;
  FlatMap<std::uint32_t> temporaries_;
};

} // namespace

Lap make_lap(const OperatorLog& log, std::uint64_t operators, bool repeated) {
  return LapMaker(log, operators, repeated).make();
}

} // namespace torch_uvm::planning
