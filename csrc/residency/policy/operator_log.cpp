#include "residency/policy/operator_log.h"

#include <algorithm>

#include "residency/policy/id_map.h"

namespace torch_uvm::scheduling {

namespace {

constexpr std::uint64_t kBase = 0x9e3779b97f4a7c15ULL; // of the rolling hash; odd, so no power of it is 0
constexpr std::uint64_t kShortestEvidence = 16; ///< minimum number of operators that must repeat
constexpr std::size_t kLargestSeen = 1 << 18;
constexpr std::size_t kNearlyEqual = 32; ///< sizes repeat if they differ by at most 1/32

std::uint64_t power(std::uint64_t base, std::uint64_t exponent) {
  std::uint64_t result = 1;
  for (; exponent != 0; exponent >>= 1, base *= base) {
    if (exponent & 1) {
      result *= base;
    }
  }
  return result;
}

} // namespace

OperatorLog::OperatorLog() : seen_(1 << 10) {
  operators_.push({}); // number 0 stands for everything before the first operator
}

void OperatorLog::begin(OperatorKey key, std::span<const Operand> operands, bool in_place_ok) {
  const std::uint64_t number = operators_.end();
  std::uint64_t signature = mix_bits(key + operands.size());
  since_operand_ = 0;
  const std::uint64_t first_access = accesses_.end();
  for (const Operand& operand : operands) {
    const std::uint64_t distance = operand.last_use == 0 ? 0 : number - operand.last_use;
    signature = mix_bits(signature ^ (2 * distance + (operand.access.writes ? 1 : 0)));
    since_operand_ = std::max(since_operand_, distance);
    accesses_.push(operand.access);
  }
  const LoggedOperator& before = operators_[number - 1];
  operators_.push(
      {key, before.order * kBase + signature, first_access, creations_.end(), frees_.end(), 0, in_place_ok});

  if (seen_.size() < kLargestSeen && number - operators_.first() > seen_.size()) {
    std::vector<Seen> larger(2 * seen_.size());
    for (const Seen& seen : seen_) {
      larger[seen.signature & (larger.size() - 1)] = seen;
    }
    seen_.swap(larger);
  }
  Seen& seen = seen_[signature & (seen_.size() - 1)];
  since_same_ = seen.signature == signature && seen.number != 0 ? number - seen.number : 0;
  seen = {signature, number};
  forget_the_oldest();
}

void OperatorLog::forget_the_oldest() {
  const auto too_many = [this] {
    const std::uint64_t kept = operators_.end() - operators_.first();
    return kept > 2 * kLongestStep + 1 || (kept > 2 && accesses_.end() - accesses_.first() > kMaxAccesses);
  };
  while (too_many()) {
    const std::uint64_t first = operators_.first() + 1;
    operators_.drop_before(first);
    accesses_.drop_before(operators_[first].accesses);
    creations_.drop_before(operators_[first].creations);
    frees_.drop_before(operators_[first].frees);
  }
}

bool OperatorLog::equal_iterations(std::uint64_t operators, std::uint64_t span) const {
  const std::uint64_t end = latest();
  if (operators == 0 || end < operators_.first() + operators + span) {
    return false;
  }
  const std::uint64_t factor = power(kBase, span);
  const auto hash = [&](std::uint64_t last) { return operators_[last].order - operators_[last - span].order * factor; };
  return hash(end) == hash(end - operators);
}

bool OperatorLog::may_repeat(std::uint64_t operators) const {
  if (operators == refused_ && latest() < refused_until_) {
    return false;
  }
  return operators <= kLongestStep && equal_iterations(operators, std::max(operators, kShortestEvidence));
}

std::uint64_t OperatorLog::candidate() const {
  if (may_repeat(since_same_)) {
    return since_same_;
  }
  return since_operand_ != since_same_ && may_repeat(since_operand_) ? since_operand_ : 0;
}

bool OperatorLog::sizes_repeat(std::uint64_t operators) const {
  std::size_t all = 0, differ = 0;
  for (std::uint64_t number = latest() - operators + 1; number <= latest(); ++number) {
    std::uint64_t other = operators_[number - operators].accesses;
    accesses_of(number, [&](const LoggedAccess& access) {
      const std::size_t before = accesses_[other++].bytes;
      all += access.bytes;
      differ += std::max(access.bytes, before) - std::min(access.bytes, before);
    });
  }
  return differ <= all / kNearlyEqual;
}

bool OperatorLog::repeats(std::uint64_t operators, const std::function<bool(StorageId)>& is_alive) {
  // Tolerate differences in 1/32 of the operators: some storages that are no parameters outlive a step (running
  // averages).
  std::uint64_t different = 0;
  for (std::uint64_t back = 0; back < operators; ++back) {
    const std::uint64_t number = latest() - back;
    std::uint64_t other = operators_[number - operators].accesses;
    bool differs = false;
    accesses_of(number, [&](const LoggedAccess& access) {
      const LoggedAccess& counterpart = accesses_[other++];
      // Storages may differ if they are the step's own temporaries, created less than a step ago. A storage that was
      // found rather than created is a parameter seen for the first time or an input batch. It is a batch if its
      // counterpart was freed. A recurrent state is older, and was created a step after its counterpart, now freed.
      const auto is_own = [&] {
        return number - access.created_at <= operators
                   ? !(access.found && is_alive(counterpart.storage))
                   : access.created_at == counterpart.created_at + operators && !is_alive(counterpart.storage);
      };
      differs |= access.storage != counterpart.storage && !is_own();
    });
    if (differs && 32 * ++different > operators) {
      refused_ = operators;
      refused_until_ = number + 2 * operators;
      return false;
    }
  }
  return true;
}

} // namespace torch_uvm::scheduling
