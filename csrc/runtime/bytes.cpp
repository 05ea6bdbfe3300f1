#include "runtime/bytes.h"

#include <array>
#include <cctype>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <utility>

#include "runtime/error.h"

namespace torch_uvm {
namespace {

struct Unit {
  std::string_view name; // lower case
  std::uint64_t bytes;
};

constexpr std::uint64_t kKilo = 1000;

constexpr std::array<Unit, 10> kUnits{{
    {"", 1},
    {"b", 1},
    {"kib", KiB},
    {"mib", MiB},
    {"gib", GiB},
    {"tib", GiB * KiB},
    {"kb", kKilo},
    {"mb", kKilo * kKilo},
    {"gb", kKilo * kKilo * kKilo},
    {"tb", kKilo * kKilo * kKilo * kKilo},
}};

// A size_t has at most 20 decimal digits. A fraction of a TiB that is a whole number of bytes has at most 40 decimal
// places; more than 20 might not fit 128 bits, so they are refused, not rounded.
constexpr std::size_t kMaxDigits = 20;

bool is_space(char c) {
  return std::isspace(static_cast<unsigned char>(c)) != 0;
}

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

[[noreturn]] void refuse(std::string_view text, const std::string& why) {
  throw InvalidArgument("'" + std::string(text) + "' is not a number of bytes: " + why +
                        "; accepted are figures such as 4096, 64KiB, '512 MiB', 1.5GiB or 2GB "
                        "(units B, KiB, MiB, GiB, TiB, KB, MB, GB, TB), from 0 to " +
                        std::to_string(std::numeric_limits<std::size_t>::max()));
}

/// The suggestion "20GiB" for "20G" and "20Gi"; empty if the unit is not such an abbreviation.
std::string spelled_out(std::string_view figure, const std::string& name) {
  const bool abbreviated = (name.size() == 1 || (name.size() == 2 && name[1] == 'i')) &&
                           std::string_view("kmgt").find(name[0]) != std::string_view::npos;
  return abbreviated ? std::string(figure) + static_cast<char>(std::toupper(static_cast<unsigned char>(name[0]))) + "iB"
                     : std::string();
}

} // namespace

std::string format_bytes(std::size_t bytes) {
  static constexpr std::array<const char*, 7> kNames{"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  // What two decimals would show as 1024.00 belongs to the next unit.
  constexpr double kShownAsNextUnit = 1023.995;
  if (bytes < KiB) {
    return std::to_string(bytes) + " B";
  }
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= kShownAsNextUnit && unit + 1 < kNames.size()) {
    value /= static_cast<double>(KiB);
    ++unit;
  }
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.2f %s", value, kNames[unit]);
  return text.data();
}

std::string exact_bytes(std::size_t bytes) {
  for (const auto& [unit, name] : {std::pair(GiB, "GiB"), std::pair(MiB, "MiB"), std::pair(KiB, "KiB")}) {
    if (bytes != 0 && bytes % unit == 0) {
      return std::to_string(bytes / unit) + name;
    }
  }
  return std::to_string(bytes);
}

std::size_t parse_bytes(std::string_view text) {
  __extension__ using Wide = unsigned __int128;

  std::string_view rest = text;
  while (!rest.empty() && is_space(rest.front())) {
    rest.remove_prefix(1);
  }
  while (!rest.empty() && is_space(rest.back())) {
    rest.remove_suffix(1);
  }
  if (rest.empty()) {
    refuse(text, "it is empty");
  }
  if (rest.front() == '-') {
    refuse(text, "it is negative");
  }

  const auto take_digits = [&rest] {
    std::size_t count = 0;
    while (count < rest.size() && is_digit(rest[count])) {
      ++count;
    }
    const std::string_view digits = rest.substr(0, count);
    rest.remove_prefix(count);
    return digits;
  };
  const char* const begin = rest.data();
  std::string_view whole = take_digits();
  std::string_view fraction;
  if (whole.empty()) {
    refuse(text, "it does not begin with a digit");
  }
  if (!rest.empty() && rest.front() == '.') {
    rest.remove_prefix(1);
    fraction = take_digits();
    if (fraction.empty()) {
      refuse(text, "there is no digit after the point");
    }
  }
  const std::string_view figure(begin, static_cast<std::size_t>(rest.data() - begin));
  while (!rest.empty() && is_space(rest.front())) {
    rest.remove_prefix(1);
  }
  std::string name;
  for (const char c : rest) {
    name.push_back(static_cast<char>(std::tolower(static_cast<unsigned char>(c))));
  }
  const Unit* unit = nullptr;
  for (const Unit& candidate : kUnits) {
    if (candidate.name == name) {
      unit = &candidate;
    }
  }
  if (unit == nullptr) {
    const std::string meant = spelled_out(figure, name);
    refuse(text, "the unit is not known" + (meant.empty() ? "" : "; did you mean " + meant + "?"));
  }

  while (!whole.empty() && whole.front() == '0') {
    whole.remove_prefix(1);
  }
  while (!fraction.empty() && fraction.back() == '0') {
    fraction.remove_suffix(1);
  }
  if (whole.size() > kMaxDigits) {
    refuse(text, "it is too large");
  }
  if (fraction.size() > kMaxDigits) {
    refuse(text, "it has too many decimals");
  }
  // 20 digits and a unit below 2^41 stay below 2^108.
  Wide total = 0;
  for (const char c : whole) {
    total = total * 10 + static_cast<unsigned>(c - '0');
  }
  total *= unit->bytes;
  Wide numerator = 0;
  Wide denominator = 1;
  for (const char c : fraction) {
    numerator = numerator * 10 + static_cast<unsigned>(c - '0');
    denominator *= 10;
  }
  numerator *= unit->bytes;
  if (numerator % denominator != 0) {
    refuse(text, "it has a fraction of a byte");
  }
  total += numerator / denominator;
  if (total > std::numeric_limits<std::size_t>::max()) {
    refuse(text, "it is too large");
  }
  return static_cast<std::size_t>(total);
}

} // namespace torch_uvm
