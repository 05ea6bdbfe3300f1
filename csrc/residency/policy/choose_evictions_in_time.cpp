#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "residency/policy/schedule.h"

namespace torch_uvm::scheduling {

namespace {

/// Consecutive operators, cyclically.
struct Range {
  std::uint32_t first = 0;
  std::uint32_t count = 0;

  bool contains(std::uint32_t op, std::uint32_t size) const {
    return (op < first ? op + size : op) - first < count;
  }
};

/// When one direction of the link is idle, in ms of each operator's duration, at the program's pace.
class Link {
 public:
  explicit Link(const Iteration& iteration) {
    for (const Iteration::Op& op : iteration.ops) {
      idle_.push_back(static_cast<double>(std::max(op.ms, op.host_ms)));
    }
  }
  /// How many of the operators pass until a transfer has ended that begins with the first, or, if it is to end with the
  /// last one, from its begin on.
  std::uint32_t count(Range operators, double ms, bool from_end) const {
    std::uint32_t passed = 0;
    for (; ms > 0 && passed < operators.count; ++passed) {
      ms -= idle_[at(operators, passed, from_end)];
    }
    return passed;
  }
  /// The same transfer is made.
  void take(Range operators, double ms, bool from_end) {
    for (std::uint32_t passed = 0; ms > 0 && passed < operators.count; ++passed) {
      double& idle = idle_[at(operators, passed, from_end)];
      const double taken = std::min(idle, ms);
      idle -= taken;
      ms -= taken;
    }
  }

 private:
  std::size_t at(Range operators, std::uint32_t passed, bool from_end) const {
    return (operators.first + (from_end ? operators.count - 1 - passed : passed)) % idle_.size();
  }
  std::vector<double> idle_;
};

/// From one use of a value to its next one, with other operators between them; or from its last use until it is freed,
/// such as gradients until `zero_grad`.
struct Gap {
  std::uint32_t use = 0;
  std::uint32_t value = 0;
  double transferred = 0; ///< bytes, both ways, and what the link could carry while the host starts the transfers
  double out_ms = 0, into_ms = 0; ///< of its transfers
};

class ByTime {
 public:
  ByTime(Schedule& schedule, const PolicyOptions& options, std::size_t capacity, GapRule rule)
      : schedule_(schedule),
        iteration_(schedule.iteration),
        options_(options),
        capacity_(static_cast<double>(capacity)),
        rule_(rule),
        size_(iteration_.size()),
        out_(iteration_),
        into_(iteration_),
        gap_of_(iteration_.uses.size(), kNone) {
    schedule_.evicted_after.assign(iteration_.uses.size(), false);
    schedule_.in_place.assign(iteration_.uses.size(), false);
    for (const std::size_t bytes : base_usage(schedule_)) {
      usage_.push_back(static_cast<double>(bytes));
    }
    for (std::uint32_t use = 0; use < iteration_.uses.size(); ++use) {
      add_gap(use);
    }
  }

  void run() {
    std::vector<bool> given_up(size_, false);
    excess_ms_.resize(2 * std::size_t{size_} + 1);
    for (;;) {
      std::uint32_t worst = 0;
      double most = 0;
      for (std::uint32_t op = 0; op < size_; ++op) {
        if (!given_up[op] && usage_[op] - capacity_ > most) {
          most = usage_[op] - capacity_;
          worst = op;
        }
      }
      if (most <= 0) {
        return;
      }
      if (rule_ == GapRule::kMostExcess) {
        add_up_excess(given_up);
      }
      if (!choose(worst, hidden_) && !choose(worst, between_) && !use_in_place(worst)) {
        given_up[worst] = true;
      }
    }
  }

 private:
  void add_gap(std::uint32_t use) {
    const Use& it = iteration_.uses[use];
    const Value& value = iteration_.values[it.value];
    const bool returns = it.next != kNone;
    if (it.distance == kNone || it.distance < (returns ? 2 : 1) || value.pinned || value.bytes == 0) {
      return;
    }
    const std::vector<std::uint32_t>& uses = iteration_.uses_of[it.value];
    const bool is_written = std::ranges::any_of(uses, [&](std::uint32_t each) { return iteration_.uses[each].writes; });
    const auto bytes = static_cast<double>(value.bytes);
    Gap gap;
    gap.use = use;
    gap.value = it.value;
    const double each = bytes + options_.rates.host_ms * options_.rates.into;
    gap.transferred = (is_written ? each : 0) + (returns ? each : 0);
    gap.out_ms = is_written ? bytes / options_.rates.out : 0;
    gap.into_ms = returns ? bytes / options_.rates.into : 0;
    gap_of_[use] = static_cast<std::uint32_t>(gaps_.size());
    gaps_.push_back(gap);
    between_.push_back({(it.op + 1) % size_, static_cast<std::uint32_t>(it.distance) - (returns ? 1 : 0)});
    hidden_.push_back(hidden_of(gap_of_[use]));
  }

  Range hidden_of(std::uint32_t gap) const {
    const Range between = between_[gap];
    const std::uint32_t out = out_.count(between, gaps_[gap].out_ms, /*from_end=*/false);
    const std::uint32_t into = into_.count(between, gaps_[gap].into_ms, /*from_end=*/true);
    return {(between.first + out) % size_, between.count - std::min(between.count, out + into)};
  }

  void add_up_excess(const std::vector<bool>& given_up) {
    for (std::size_t at = 0; at < 2 * std::size_t{size_}; ++at) {
      const std::size_t op = at < size_ ? at : at - size_;
      const double excess = given_up[op] ? 0 : std::max(0.0, usage_[op] - capacity_);
      excess_ms_[at + 1] = excess_ms_[at] + excess * static_cast<double>(iteration_.ops[op].ms);
    }
  }

  void add_usage(Range range, double bytes) {
    for (std::uint32_t at = 0; at < range.count; ++at) {
      usage_[(range.first + at) % size_] += bytes;
    }
  }

  /// Evicts in the gap that relieves the operator and that the rule ranks first.
  bool choose(std::uint32_t op, const std::vector<Range>& relieved) {
    std::uint32_t best = first_of(op, relieved);
    while (best != kNone && &relieved == &hidden_ && hidden_of(best).count != hidden_[best].count) {
      hidden_[best] = hidden_of(best); // the chosen gaps' transfers delay it by now
      best = first_of(op, relieved);
    }
    if (best == kNone) {
      return false;
    }
    const Gap& gap = gaps_[best];
    Range range = relieved[best];
    if (can_stay(gap)) {
      schedule_.in_place[iteration_.uses[gap.use].next] = true;
      range = between_[best];
    } else {
      out_.take(between_[best], gap.out_ms, /*from_end=*/false);
      into_.take(between_[best], gap.into_ms, /*from_end=*/true);
    }
    evict(best, range);
    return true;
  }

  std::uint32_t first_of(std::uint32_t op, const std::vector<Range>& relieved) {
    std::uint32_t best = kNone;
    double best_score = 0;
    for (std::uint32_t gap = 0; gap < relieved.size(); ++gap) { // most of the time is spent here
      if (!relieved[gap].contains(op, size_)) {
        continue;
      }
      const double score = score_of(gaps_[gap], relieved[gap]);
      if (best == kNone || score > best_score) {
        best = gap;
        best_score = score;
      }
    }
    return best;
  }

  double score_of(const Gap& gap, Range range) const {
    const auto bytes = static_cast<double>(iteration_.values[gap.value].bytes);
    switch (rule_) {
      case GapRule::kMostExcess:
        return (excess_ms_[range.first + range.count] - excess_ms_[range.first]) * bytes / gap.transferred;
      case GapRule::kFewest:
        // As many bytes as are used on the host while the host starts two transfers.
        return can_stay(gap) ? 2 * options_.rates.host_ms * options_.rates.in_place : bytes;
      case GapRule::kStay:
        return can_stay(gap) ? std::numeric_limits<double>::infinity() : bytes;
    }
    return 0;
  }

  /// Whether the value may be used where it is on the host, and by one operator only.
  bool can_stay(const Gap& gap) const {
    const bool asked = rule_ == GapRule::kFewest || rule_ == GapRule::kStay;
    return asked && options_.in_place && iteration_.uses[gap.use].next == gap.use &&
           iteration_.ops[iteration_.uses[gap.use].op].in_place_ok;
  }

  /// \param relieved has the value's room from now on
  void evict(std::uint32_t gap, Range relieved) {
    if (between_[gap].count != 0) {
      add_usage(relieved, -static_cast<double>(iteration_.values[gaps_[gap].value].bytes));
      schedule_.evicted_after[gaps_[gap].use] = true;
      between_[gap] = hidden_[gap] = {}; // it relieves no other
    }
  }

  /// Leaves an operand of the operator on the host, before and after it: one with the fewest uses.
  bool use_in_place(std::uint32_t op) {
    if (!options_.in_place || !iteration_.ops[op].in_place_ok) {
      return false;
    }
    std::uint32_t best = kNone;
    std::pair<std::size_t, std::int64_t> best_rank;
    for (std::uint32_t use = iteration_.use_begin[op]; use < iteration_.use_begin[op + 1]; ++use) {
      const Use& it = iteration_.uses[use];
      const Value& value = iteration_.values[it.value];
      if (it.is_creation || schedule_.in_place[use] || value.pinned || value.bytes == 0 || before(use) == kNone) {
        continue;
      }
      const std::pair rank(iteration_.uses_of[it.value].size(), -static_cast<std::int64_t>(value.bytes));
      if (best == kNone || rank < best_rank) {
        best = use;
        best_rank = rank;
      }
    }
    if (best == kNone) {
      return false;
    }
    schedule_.in_place[best] = true;
    const Use& it = iteration_.uses[best];
    for (const std::uint32_t use : {before(best), best}) {
      schedule_.evicted_after[use] = use == best ? it.next != kNone : true;
      if (gap_of_[use] != kNone) {
        evict(gap_of_[use], between_[gap_of_[use]]);
      }
    }
    add_usage({op, 1}, -static_cast<double>(iteration_.values[it.value].bytes));
    return true;
  }

  /// The value's use before this one; kNone: there is none.
  std::uint32_t before(std::uint32_t use) const {
    const std::uint32_t value = iteration_.uses[use].value;
    const std::vector<std::uint32_t>& uses = iteration_.uses_of[value];
    const auto at = std::ranges::find(uses, use);
    if (at != uses.begin()) {
      return *std::prev(at);
    }
    return iteration_.values[value].created_at == kNone ? uses.back() : kNone;
  }

  Schedule& schedule_;
  const Iteration& iteration_;
  const PolicyOptions& options_;
  const double capacity_;
  const GapRule rule_;
  const std::uint32_t size_;
  Link out_;
  Link into_;
  std::vector<double> usage_; ///< by operator; bytes that leave count until their transfer can be done
  std::vector<double> excess_ms_; ///< prefix sums of bytes above the capacity times ms, over two iterations
  std::vector<Gap> gaps_;
  std::vector<Range> between_; ///< by gap: the operators that have the value's room if it is evicted; none: it is
  std::vector<Range> hidden_; ///< those of them that neither transfer delays, beside the transfers of the chosen gaps
  std::vector<std::uint32_t> gap_of_; ///< by use
};

} // namespace

void choose_evictions_in_time(Schedule& schedule, const PolicyOptions& options, std::size_t capacity, GapRule rule) {
  ByTime(schedule, options, capacity, rule).run();
}

std::vector<std::uint32_t> latest_fetches(const Schedule& schedule, const LinkRates& rates) {
  const Iteration& iteration = schedule.iteration;
  const std::uint32_t size = iteration.size();
  // When operators begin if all their operands are on the device. The period before the iteration counts, too: operator
  // `op` of the iteration has the number size + op.
  std::vector<double> begins(2 * std::size_t{size} + 1);
  for (std::size_t number = 0; number + 1 < begins.size(); ++number) {
    begins[number + 1] = begins[number] + static_cast<double>(iteration.ops[number % size].ms);
  }
  std::vector<std::pair<std::uint32_t, std::uint32_t>> returning; // the operator that needs a value, and the use before
  for (std::uint32_t use = 0; use < iteration.uses.size(); ++use) {
    const std::uint32_t next = iteration.uses[use].next;
    if (schedule.evicted_after[use] && next != kNone && !schedule.in_place[next]) {
      returning.emplace_back(iteration.uses[next].op, use);
    }
  }
  std::ranges::sort(returning, std::greater<>());
  std::vector<std::uint32_t> ahead(iteration.uses.size(), 0);
  double link_free = std::numeric_limits<double>::infinity();
  for (const auto& [op, use] : returning) {
    const std::uint64_t need = std::uint64_t{size} + op;
    const double bytes = static_cast<double>(iteration.values[iteration.uses[use].value].bytes);
    link_free = std::min(begins[need], link_free) - bytes / rates.into;
    const auto running = std::ranges::upper_bound(begins, std::max(link_free, 0.0)); // after the first, which is 0
    const auto ended = static_cast<std::uint64_t>(running - begins.begin()) - 1;
    ahead[use] = static_cast<std::uint32_t>(std::min<std::uint64_t>(need - std::min(need, ended), size - 1));
  }
  return ahead;
}

} // namespace torch_uvm::scheduling
