#include "config/budget_request.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cstdio>

#include "runtime/bytes.h"
#include "runtime/error.h"

namespace torch_uvm {

namespace {

bool is_word(std::string_view text, std::string_view word) {
  return std::ranges::equal(text, word, {}, [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
}

/// The number that the whole text is, in fixed notation; 0 if it is none.
double number_in(std::string_view text) {
  double number = 0.0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number, std::chars_format::fixed);
  return error == std::errc() && end == text.data() + text.size() ? number : 0.0;
}

/// Converts a fraction between 0 and 1 to a percentage ("0.8" to "80%"). Returns "" for anything else.
std::string as_share(std::string_view text) {
  const double share = number_in(text);
  if (!(share > 0.0 && share < 1.0)) {
    return {};
  }
  std::array<char, 32> percent{};
  std::snprintf(percent.data(), percent.size(), "%g%%", 100 * share);
  return percent.data();
}

/// Memory reserved for libraries and PyTorch's native allocator: 1/20 of the total, at least 512 MiB, but at most 1/16
/// of the total.
std::size_t reserve_of(std::size_t total) {
  return std::min(std::max(total / 20, 512 * MiB), total / 16);
}

} // namespace

BudgetRequest parse_budget(std::string_view text) {
  const std::string_view word = trim(text);
  if (is_word(word, "auto")) {
    return {BudgetRequest::Kind::kAuto};
  }
  if (is_word(word, "none")) {
    return {BudgetRequest::Kind::kNone};
  }
  if (word.ends_with('%')) {
    const double percent = number_in(trim(word.substr(0, word.size() - 1)));
    if (!(percent > 0.0 && percent <= 100.0)) {
      throw InvalidArgument("\"" + std::string(text) + "\" is no share from more than 0% to 100%");
    }
    return {BudgetRequest::Kind::kShare, 0, percent};
  }
  if (const std::string share = as_share(word); !share.empty()) {
    throw InvalidArgument("\"" + std::string(text) + "\" is a fraction of a byte; did you mean " + share + "?");
  }
  const std::size_t bytes = parse_bytes(word);
  if (bytes == 0) {
    throw InvalidArgument("a budget of 0 bytes leaves nothing to work with; none is for no budget");
  }
  return {BudgetRequest::Kind::kBytes, bytes};
}

std::string show_budget(const BudgetRequest& request) {
  switch (request.kind) {
    case BudgetRequest::Kind::kAuto:
      return "auto";
    case BudgetRequest::Kind::kNone:
      return "none";
    case BudgetRequest::Kind::kBytes:
      return exact_bytes(request.bytes);
    case BudgetRequest::Kind::kShare:
      break;
  }
  std::array<char, 512> text{}; // enough for the longest double in fixed notation
  const auto [end, error] =
      std::to_chars(text.data(), text.data() + text.size(), request.percent, std::chars_format::fixed);
  return std::string(text.data(), end) + "%";
}

std::optional<Budget> resolve_budget(const BudgetRequest& request, MemoryInfo memory) {
  const std::size_t automatic = memory.free - std::min(reserve_of(memory.total), memory.free / 2);
  std::size_t bytes = automatic;
  if (request.kind == BudgetRequest::Kind::kNone) {
    return std::nullopt;
  }
  if (request.kind == BudgetRequest::Kind::kBytes) {
    bytes = std::min(request.bytes, memory.free);
  } else if (request.kind == BudgetRequest::Kind::kShare) {
    const auto share = static_cast<std::size_t>(static_cast<double>(memory.total) * (request.percent / 100.0));
    bytes = std::min(share, memory.free);
  }
  return Budget{bytes, std::max(bytes, automatic)};
}

} // namespace torch_uvm
