// The option table: accepted values, refused values, and the messages.
#include "config/options.h"

#include "harness.h"
#include "runtime/bytes.h"
#include "runtime/error.h"

using namespace torch_uvm;

namespace {

std::string refusal(std::string_view text) {
  try {
    parse_options(text);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

bool has(const std::string& text, std::string_view part) {
  return text.find(part) != text.npos;
}

std::string value_of(const Options& options, std::string_view key) {
  for (const OptionInfo& option : describe_options(options)) {
    if (option.key == key) {
      return option.value;
    }
  }
  return "?";
}

} // namespace

TEST(an_empty_text_means_the_defaults) {
  for (const char* text : {"", "  "}) {
    const Options options = parse_options(text);
    CHECK(!options.limit);
    CHECK(!options.budget);
    CHECK(!options.host_limit);
    CHECK(!options.staging);
    CHECK_EQ(options.relocation_min, kDefaultRelocationMin);
    CHECK(options.allocator.populate);
    CHECK_EQ(*options.allocator.segment_min_bytes, kSegmentMin);
    CHECK_EQ(options.allocator.segment_max_bytes, kSegmentMax);
    CHECK(!options.zero_on_alloc);
    CHECK_EQ(options.emulated.devices, 1);
    CHECK_EQ(options.emulated.memory, 256 * MiB);
  }
}

TEST(every_option_is_parsed) {
  const Options options = parse_options(
      "limit:4GiB,budget:80%,host_limit:8GiB,staging:8MiB,relocation_min:4KiB, populate : off "
      ",emulated_devices:2,emulated_memory:1GiB,emulated_profile:h200,"
      "emulated_schedule_seed:18446744073709551615,segment_min:64MiB,segment_max:1GiB,zero_on_alloc:1");
  CHECK_EQ(*options.limit, 4 * GiB);
  CHECK_EQ(options.budget->percent, 80.0);
  CHECK_EQ(*options.host_limit, 8 * GiB);
  CHECK(!options.automatic_host_limit);
  CHECK_EQ(*options.staging, 8 * MiB);
  CHECK_EQ(options.relocation_min, std::size_t{4096});
  CHECK(!options.allocator.populate);
  CHECK_EQ(*options.allocator.segment_min_bytes, 64 * MiB);
  CHECK_EQ(options.allocator.segment_max_bytes, 1 * GiB);
  CHECK(options.zero_on_alloc);
  CHECK_EQ(options.emulated.devices, 2);
  CHECK_EQ(options.emulated.memory, 1 * GiB);
  CHECK_EQ(options.emulated.profile, "h200");
  CHECK_EQ(*options.emulated.schedule_seed, ~std::uint64_t{0});
}

TEST(none_unsets_a_value) {
  Options options = parse_options("limit:1GiB,emulated_schedule_seed:3");
  for (const char* key : {"limit", "emulated_schedule_seed", "segment_min"}) {
    set_option(options, key, "None");
    CHECK_EQ(value_of(options, key), "none");
  }
}

TEST(the_host_limit_is_automatic_unless_it_is_given) {
  CHECK_EQ(value_of(Options{}, "host_limit"), "auto");
  Options options = parse_options("host_limit:none");
  CHECK(!options.automatic_host_limit && !options.host_limit);
  CHECK_EQ(value_of(options, "host_limit"), "none");
  set_option(options, "host_limit", "2GiB");
  set_option(options, "host_limit", "Auto");
  CHECK(options.automatic_host_limit && !options.host_limit);
}

TEST(booleans_have_six_spellings) {
  for (const char* text : {"true", "1", "on", "ON"}) {
    CHECK(parse_options(std::string("populate:") + text).allocator.populate);
  }
  for (const char* text : {"false", "0", "off", "False"}) {
    CHECK(!parse_options(std::string("populate:") + text).allocator.populate);
  }
  const std::string message = refusal("populate:maybe");
  CHECK(has(message, "populate") && has(message, "maybe") && has(message, "true, false, 1, 0, on, off"));
}

TEST(an_unknown_key_is_refused_with_all_options) {
  CHECK(has(refusal("limt:4GiB"), "\"limt\""));
  CHECK(has(refusal("limt:4GiB"),
            "limit, budget, host_limit, staging, relocation_min, optimizer, populate, segment_min"));
}

TEST(malformed_texts_are_refused) {
  CHECK(has(refusal("limit:1GiB,limit:2GiB"), "limit is given twice"));
  CHECK(has(refusal("limit"), "\"limit\" has no colon"));
  CHECK(has(refusal("limit:1GiB,"), "an empty part"));
  CHECK(has(refusal(",limit:1GiB"), "an empty part"));
  CHECK(has(refusal("limit:1GiB,,populate:on"), "an empty part"));
  CHECK(has(refusal(":1GiB"), "unknown option \"\""));
  CHECK(has(refusal("limit:"), "option limit: \"\" is not accepted"));
  CHECK(has(refusal("limit:1GiB:2GiB"), "1GiB:2GiB"));
}

TEST(values_out_of_range_are_refused) {
  for (const char* text : {"limit:-1",
                           "limit:4 elephants",
                           "limit:1.5",
                           "budget:lots",
                           "budget:0",
                           "budget:101%",
                           "host_limit:half",
                           "relocation_min:0",
                           "relocation_min:none",
                           "staging:none",
                           "staging:some",
                           "segment_min:1MiB",
                           "segment_max:none",
                           "zero_on_alloc:2",
                           "emulated_devices:0",
                           "emulated_devices:65",
                           "emulated_devices:2.5",
                           "emulated_devices:-1",
                           "emulated_devices:",
                           "emulated_memory:1",
                           "emulated_memory:none",
                           "emulated_profile:abacus",
                           "emulated_schedule_seed:-1",
                           "emulated_schedule_seed:x",
                           "emulated_schedule_seed:18446744073709551616"}) {
    const std::string message = refusal(text);
    const std::string_view pair(text);
    CHECK(has(message, pair.substr(0, pair.find(':'))));
    CHECK(has(message, pair.substr(pair.find(':') + 1)));
    CHECK(has(message, "it takes"));
  }
  CHECK(has(refusal("emulated_profile:abacus"), "h200"));
}

TEST(a_refused_value_changes_nothing) {
  Options options = parse_options("emulated_devices:3,segment_min:64MiB,emulated_schedule_seed:9");
  CHECK_THROWS(InvalidArgument, set_option(options, "emulated_devices", "900"));
  CHECK_THROWS(InvalidArgument, set_option(options, "segment_min", "1KiB"));
  CHECK_THROWS(InvalidArgument, set_option(options, "emulated_schedule_seed", "nine"));
  CHECK_EQ(options.emulated.devices, 3);
  CHECK_EQ(*options.allocator.segment_min_bytes, 64 * MiB);
  CHECK_EQ(*options.emulated.schedule_seed, std::uint64_t{9});
}

TEST(the_dump_can_be_parsed) {
  const Options options =
      parse_options("limit:1536MiB,populate:0,emulated_memory:3000001,emulated_devices:4,emulated_schedule_seed:5");
  std::string text;
  for (const OptionInfo& option : describe_options(options)) {
    CHECK(!option.accepted.empty() && !option.description.empty() && !option.default_value.empty());
    text += (text.empty() ? "" : ",") + option.key + ":" + option.value;
  }
  const Options again = parse_options(text);
  for (const OptionInfo& option : describe_options(options)) {
    CHECK_EQ(value_of(again, option.key), option.value);
  }
  CHECK_EQ(value_of(again, "limit"), "1536MiB");
  CHECK_EQ(value_of(again, "emulated_memory"), "3000001");
}

HARNESS_MAIN()
