#include "runtime/bytes.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
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

std::string_view trim(std::string_view text) {
  constexpr std::string_view kSpaces = " \t\r\n\v\f";
  const std::size_t first = text.find_first_not_of(kSpaces);
  return first == text.npos ? std::string_view() : text.substr(first, text.find_last_not_of(kSpaces) - first + 1);
}

std::size_t parse_bytes(std::string_view text) {
  std::string_view rest = trim(text);
  if (rest.empty() || std::isdigit(static_cast<unsigned char>(rest.front())) == 0) {
    refuse(text, rest.empty()          ? "it is empty"
                 : rest.front() == '-' ? "it is negative"
                                       : "it does not begin with a digit");
  }
  long double count = 0; // has at least the 64 bits of a size
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), count, std::chars_format::fixed);
  const std::string_view figure = rest.substr(0, static_cast<std::size_t>(end - rest.data()));
  if (figure.back() == '.') {
    refuse(text, "there is no digit after the point");
  }
  rest = trim(rest.substr(figure.size()));
  std::string name;
  for (const char c : rest) {
    name.push_back(static_cast<char>(std::tolower(static_cast<unsigned char>(c))));
  }
  const auto unit = std::ranges::find(kUnits, name, &Unit::name);
  if (unit == kUnits.end()) {
    const std::string meant = spelled_out(figure, name);
    refuse(text, "the unit is not known" + (meant.empty() ? "" : "; did you mean " + meant + "?"));
  }
  count *= static_cast<long double>(unit->bytes);
  if (error != std::errc() || !(count <= static_cast<long double>(std::numeric_limits<std::size_t>::max()))) {
    refuse(text, "it is too large");
  }
  if (unit->bytes == 1 && count != std::round(count)) { // of a larger unit it is rounded: 22.17GiB is meant roughly
    refuse(text, "it has a fraction of a byte");
  }
  return static_cast<std::size_t>(std::round(count));
}

} // namespace torch_uvm
