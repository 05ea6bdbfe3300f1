// Fuzzer of user input: the option table, byte counts, budgets. An accepted value must be printed as a value that is
// accepted and has the same meaning. Everything else must throw InvalidArgument and change nothing.
#include "config/budget_request.h"
#include "config/options.h"
#include "fuzz_input.h"
#include "runtime/bytes.h"
#include "runtime/error.h"

using namespace torch_uvm;

namespace {

std::string dump(const Options& options) {
  std::string text;
  for (const OptionInfo& option : describe_options(options)) {
    text += (text.empty() ? "" : ",") + option.key + ":" + option.value;
  }
  return text;
}

void read_table(std::string_view text) {
  try {
    const std::string shown = dump(parse_options(text));
    FUZZ_CHECK(dump(parse_options(shown)) == shown);
  } catch (const InvalidArgument& error) {
    FUZZ_CHECK(*error.what() != '\0');
  }
}

/// Sets the options one after the other in one table; the text is split like the table's.
void set_one_by_one(std::string_view text) {
  Options options;
  while (!text.empty()) {
    const std::string_view part = text.substr(0, text.find(','));
    text.remove_prefix(std::min(part.size() + 1, text.size()));
    const std::size_t colon = std::min(part.find(':'), part.size());
    const std::string before = dump(options);
    try {
      set_option(options, part.substr(0, colon), part.substr(std::min(colon + 1, part.size())));
    } catch (const InvalidArgument&) {
      FUZZ_CHECK(dump(options) == before);
    }
  }
}

void read_bytes(std::string_view text) {
  try {
    const std::size_t bytes = parse_bytes(text);
    FUZZ_CHECK(parse_bytes(exact_bytes(bytes)) == bytes);
    FUZZ_CHECK(!format_bytes(bytes).empty());
  } catch (const InvalidArgument&) {
  }
}

void read_budget(std::string_view text) {
  constexpr std::size_t kTotal = 140 * GiB;
  try {
    const BudgetRequest request = parse_budget(text);
    FUZZ_CHECK(parse_budget(show_budget(request)) == request);
    const auto budget = resolve_budget(request, MemoryInfo{kTotal / 2, kTotal});
    FUZZ_CHECK(!budget || budget->bytes <= kTotal);
  } catch (const InvalidArgument&) {
  }
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Input input(data, size);
  switch (input.below(4)) {
    case 0:
      read_table(input.rest());
      break;
    case 1:
      set_one_by_one(input.rest());
      break;
    case 2:
      read_bytes(input.rest());
      break;
    default:
      read_budget(input.rest());
  }
  return 0;
}
