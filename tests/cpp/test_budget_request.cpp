// The forms of a requested budget, and the resulting bytes on a device.
#include "config/budget_request.h"

#include <string>
#include <utility>

#include "harness.h"
#include "runtime/bytes.h"
#include "runtime/error.h"

using namespace torch_uvm;

namespace {

using Kind = BudgetRequest::Kind;

std::size_t bytes_of(std::string_view text, MemoryInfo memory) {
  return resolve_budget(parse_budget(text), memory).value().bytes;
}

} // namespace

TEST(every_form_is_parsed) {
  CHECK(parse_budget("auto").kind == Kind::kAuto);
  CHECK(parse_budget(" AUTO ").kind == Kind::kAuto);
  CHECK(parse_budget("None").kind == Kind::kNone);
  CHECK(parse_budget("4096") == (BudgetRequest{Kind::kBytes, 4096}));
  CHECK(parse_budget("1.5 GiB") == (BudgetRequest{Kind::kBytes, 1536 * MiB}));
  CHECK(parse_budget("80%") == (BudgetRequest{Kind::kShare, 0, 80.0}));
  CHECK(parse_budget(" 12.5 % ") == (BudgetRequest{Kind::kShare, 0, 12.5}));
  CHECK(parse_budget("100%") == (BudgetRequest{Kind::kShare, 0, 100.0}));
}

TEST(invalid_budgets_are_refused) {
  for (const char* text :
       {"",  " ",    "lots", "auto!", "-1",   "0",    "0GiB",  "0%",        "-5%", "100.1%",
        "%", "1e1%", "nan%", "inf%",  "8 0%", "80%%", "4GiB%", "80% of it", "0.5", "99999999999999999999"}) {
    CHECK_THROWS(InvalidArgument, parse_budget(text));
  }
}

TEST(a_fraction_is_a_share_of_the_device) {
  for (const auto& [text, meant] : {std::pair("0.8", "80%"), std::pair(" 0.125 ", "12.5%"), std::pair("0.5", "50%")}) {
    std::string said;
    try {
      parse_budget(text);
    } catch (const InvalidArgument& error) {
      said = error.what();
    }
    CHECK(said.find(std::string("did you mean ") + meant + "?") != said.npos);
  }
  CHECK(parse_budget("0.5KiB") == (BudgetRequest{Kind::kBytes, 512}));
}

TEST(printed_budgets_can_be_parsed) {
  for (const char* text : {"auto", "none", "20GiB", "1536MiB", "4097", "80%", "12.5%", "0.001%"}) {
    CHECK_EQ(show_budget(parse_budget(text)), text);
  }
}

TEST(explicit_budgets_are_at_most_the_free_memory) {
  const MemoryInfo memory{.free = 10 * GiB, .total = 16 * GiB};
  CHECK_EQ(bytes_of("4GiB", memory), 4 * GiB);
  CHECK_EQ(bytes_of("12GiB", memory), 10 * GiB);
  CHECK_EQ(bytes_of("25%", memory), 4 * GiB);
  CHECK_EQ(bytes_of("100%", memory), 10 * GiB);
  CHECK_EQ(resolve_budget(parse_budget("4GiB"), memory)->ceiling, bytes_of("auto", memory));
  CHECK_EQ(resolve_budget(BudgetRequest(), memory)->ceiling, bytes_of("auto", memory));
  CHECK(!resolve_budget(parse_budget("none"), memory));
}

TEST(auto_leaves_a_reserve) {
  CHECK_EQ(bytes_of("auto", {100 * GiB, 100 * GiB}), 95 * GiB); // reserve: a twentieth
  CHECK_EQ(bytes_of("auto", {8 * GiB, 8 * GiB}), 8 * GiB - 512 * MiB); // reserve: at least 512 MiB
  CHECK_EQ(bytes_of("auto", {256 * MiB, 256 * MiB}), 240 * MiB); // reserve on a small device: a sixteenth
  CHECK_EQ(bytes_of("auto", {6 * GiB, 100 * GiB}), 3 * GiB); // the reserve takes at most half of the free memory
}

HARNESS_MAIN()
