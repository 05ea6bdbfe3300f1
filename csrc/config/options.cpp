#include "config/options.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <limits>
#include <utility>

#include "allocator/size_classes.h"
#include "runtime/bytes.h"
#include "runtime/emulated/cost_profile.h"

namespace torch_uvm {

namespace {

constexpr std::string_view kNone = "none";
constexpr std::string_view kAuto = "auto";

std::string lower(std::string_view text) {
  std::string result(text);
  std::ranges::transform(result, result.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return result;
}

// Parsers of a single value. They throw InvalidArgument or return false if the text is not acceptable.

bool read_bool(std::string_view text, bool& value) {
  const std::string word = lower(text);
  if (word == "true" || word == "1" || word == "on") {
    value = true;
    return true;
  }
  if (word == "false" || word == "0" || word == "off") {
    value = false;
    return true;
  }
  return false;
}

template <typename Number>
bool read_number(std::string_view text, Number& value) {
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) {
    return false;
  }
  value = number;
  return true;
}

bool read_bytes_or(std::string_view word, std::string_view text, std::optional<std::size_t>& value) {
  value = lower(text) == word ? std::nullopt : std::optional(parse_bytes(text));
  return true;
}

std::string show(const std::optional<std::size_t>& bytes) {
  return bytes ? exact_bytes(*bytes) : std::string(kNone);
}

std::string profile_names() {
  std::string names;
  for (const std::string& name : CostProfile::names()) {
    names += (names.empty() ? "" : ", ") + name;
  }
  return names;
}

struct Row {
  std::string_view key;
  std::string (*accepted)();
  std::string_view description;
  std::string (*get)(const Options&);
  bool (*set)(Options&, std::string_view); ///< returns false or throws InvalidArgument if not acceptable
};

// clang-format off
constexpr std::array kTable{
    Row{"limit",
        [] { return std::string("bytes such as 4GiB, or none"); },
        "the most managed memory, over all homes; none: what the host has available",
        [](const Options& o) { return show(o.limit); },
        [](Options& o, std::string_view text) { return read_bytes_or(kNone, text, o.limit); }},
    Row{"budget",
        [] { return std::string(kBudgetForms); },
        "device-resident managed memory of each device; auto: its free memory, none: the driver decides",
        [](const Options& o) { return show_budget(o.budget.value_or(BudgetRequest())); },
        [](Options& o, std::string_view text) {
          o.budget = parse_budget(text);
          o.device_budgets.clear();
          return true;
        }},
    Row{"host_limit",
        [] { return std::string("bytes such as 64GiB, auto, or none"); },
        "the most pinned host memory for evicted storages; auto: what the host has available, less a sixteenth of its "
        "memory and at least 2 GiB, but at most half of it; none: all of it",
        [](const Options& o) { return o.automatic_host_limit ? std::string(kAuto) : show(o.host_limit); },
        [](Options& o, std::string_view text) {
          o.automatic_host_limit = lower(text) == kAuto;
          o.host_limit = std::nullopt;
          return o.automatic_host_limit || read_bytes_or(kNone, text, o.host_limit);
        }},
    Row{"staging",
        [] { return std::string("bytes such as 8MiB, or auto"); },
        "plain device memory in each of the four slots that copies to and from the host go through; 0: they are direct",
        [](const Options& o) { return o.staging ? exact_bytes(*o.staging) : std::string(kAuto); },
        [](Options& o, std::string_view text) { return read_bytes_or(kAuto, text, o.staging); }},
    Row{"relocation_min",
        [] { return std::string("bytes such as 256KiB, at least 1"); },
        "storages of fewer bytes stay on their device, whatever its budget",
        [](const Options& o) { return exact_bytes(o.relocation_min); },
        [](Options& o, std::string_view text) {
          o.relocation_min = parse_bytes(text);
          return o.relocation_min > 0;
        }},
    Row{"optimizer",
        [] { return std::string("in_place, deferred, auto"); },
        "when an optimizer's step updates large parameters that have a budget: at once, each at its next use, or what "
        "turns out to be faster",
        [](const Options& o) { return o.optimizer; },
        [](Options& o, std::string_view text) {
          o.optimizer = lower(text);
          return o.optimizer == "in_place" || o.optimizer == "deferred" || o.optimizer == "auto";
        }},
    Row{"populate",
        [] { return std::string("true, false, 1, 0, on, off"); },
        "prefetch a fresh segment to its device",
        [](const Options& o) { return std::string(o.allocator.populate ? "true" : "false"); },
        [](Options& o, std::string_view text) { return read_bool(text, o.allocator.populate); }},
    Row{"segment_min",
        [] { return "bytes of at least " + exact_bytes(kLargeGranularity) + ", or none"; },
        "minimum size of a segment that requests above 1 MiB share; none: requests from 10 MiB on have their own",
        [](const Options& o) { return show(o.allocator.segment_min_bytes); },
        [](Options& o, std::string_view text) {
          return read_bytes_or(kNone, text, o.allocator.segment_min_bytes) &&
                 o.allocator.segment_min_bytes.value_or(kLargeGranularity) >= kLargeGranularity;
        }},
    Row{"segment_max",
        [] { return std::string("bytes such as 128MiB"); },
        "maximum of such a segment, which grows to an eighth of the reserved bytes; larger requests have their own",
        [](const Options& o) { return exact_bytes(o.allocator.segment_max_bytes); },
        [](Options& o, std::string_view text) {
          o.allocator.segment_max_bytes = parse_bytes(text);
          return true;
        }},
    Row{"zero_on_alloc",
        [] { return std::string("true, false, 1, 0, on, off"); },
        "zero the managed memory of every new tensor, so that it does not contain the data of a freed one",
        [](const Options& o) { return std::string(o.zero_on_alloc ? "true" : "false"); },
        [](Options& o, std::string_view text) { return read_bool(text, o.zero_on_alloc); }},
    Row{"emulated_devices",
        [] { return "1 to " + std::to_string(EmulatedConfig::kMaxDevices); },
        "devices of the emulated accelerator",
        [](const Options& o) { return std::to_string(o.emulated.devices); },
        [](Options& o, std::string_view text) {
          return read_number(text, o.emulated.devices) && o.emulated.devices >= 1 &&
                 o.emulated.devices <= EmulatedConfig::kMaxDevices;
        }},
    Row{"emulated_memory",
        [] { return "bytes of at least " + exact_bytes(EmulatedConfig::kMinMemory); },
        "memory of each emulated device",
        [](const Options& o) { return exact_bytes(o.emulated.memory); },
        [](Options& o, std::string_view text) {
          o.emulated.memory = parse_bytes(text);
          return o.emulated.memory >= EmulatedConfig::kMinMemory;
        }},
    Row{"emulated_profile",
        [] { return profile_names(); },
        "costs that the emulated device's clock uses",
        [](const Options& o) { return o.emulated.profile; },
        [](Options& o, std::string_view text) {
          o.emulated.profile = CostProfile::named(text).name;
          return true;
        }},
    Row{"emulated_schedule_seed",
        [] { return "0 to " + std::to_string(std::numeric_limits<std::uint64_t>::max()) + ", or none"; },
        "delay emulated queued work by chance, with this seed",
        [](const Options& o) {
          return o.emulated.schedule_seed ? std::to_string(*o.emulated.schedule_seed) : std::string(kNone);
        },
        [](Options& o, std::string_view text) {
          if (lower(text) == kNone) {
            o.emulated.schedule_seed = std::nullopt;
            return true;
          }
          return read_number(text, o.emulated.schedule_seed.emplace());
        }},
};
// clang-format on

const Row& find_row(std::string_view key) {
  const auto found = std::ranges::find(kTable, key, &Row::key);
  if (found != kTable.end()) {
    return *found;
  }
  std::string message = "unknown option \"" + std::string(key) + "\"; the options are ";
  for (const Row& row : kTable) {
    message += (&row == kTable.data() ? "" : ", ") + std::string(row.key);
  }
  throw InvalidArgument(message);
}

} // namespace

void set_option(Options& options, std::string_view key, std::string_view value) {
  const Row& row = find_row(key);
  Options changed = options;
  std::string why;
  bool accepted = false;
  try {
    accepted = row.set(changed, value);
  } catch (const InvalidArgument& error) {
    why = std::string(" (") + error.what() + ")";
  }
  if (!accepted) {
    throw InvalidArgument("option " + std::string(key) + ": \"" + std::string(value) + "\" is not accepted; it takes " +
                          row.accepted() + why);
  }
  options = std::move(changed);
}

Options parse_options(std::string_view text) {
  Options options;
  if (trim(text).empty()) {
    return options;
  }
  std::vector<std::string_view> given;
  for (std::size_t start = 0; start <= text.size();) {
    const std::size_t end = std::min(text.find(',', start), text.size());
    const std::string_view part = trim(text.substr(start, end - start));
    start = end + 1;
    const std::size_t colon = part.find(':');
    if (part.empty() || colon == part.npos) {
      throw InvalidArgument((part.empty() ? "an empty part" : "\"" + std::string(part) + "\" has no colon") +
                            std::string(" in the options \"") + std::string(text) +
                            "\"; they are written key:value,key:value");
    }
    const std::string_view key = trim(part.substr(0, colon));
    set_option(options, key, trim(part.substr(colon + 1)));
    if (std::ranges::find(given, key) != given.end()) {
      throw InvalidArgument("option " + std::string(key) + " is given twice in \"" + std::string(text) + "\"");
    }
    given.push_back(key);
  }
  return options;
}

std::vector<OptionInfo> describe_options(const Options& options) {
  const Options defaults;
  std::vector<OptionInfo> rows;
  for (const Row& row : kTable) {
    rows.push_back(OptionInfo{std::string(row.key), row.accepted(), std::string(row.description), row.get(defaults),
                              row.get(options)});
  }
  return rows;
}

} // namespace torch_uvm
