// Printing and parsing of byte counts.
#include <limits>
#include <string>
#include <utility>

#include "harness.h"
#include "runtime/bytes.h"
#include "runtime/error.h"

using namespace torch_uvm;

TEST(bytes_are_printed_with_two_decimals_from_kib_on) {
  CHECK_EQ(format_bytes(0), "0 B");
  CHECK_EQ(format_bytes(512), "512 B");
  CHECK_EQ(format_bytes(1023), "1023 B");
  CHECK_EQ(format_bytes(KiB), "1.00 KiB");
  CHECK_EQ(format_bytes(1536), "1.50 KiB");
  CHECK_EQ(format_bytes(3 * GiB / 2), "1.50 GiB");
  CHECK_EQ(format_bytes(MiB - 1), "1.00 MiB"); // not 1024.00 KiB
  CHECK_EQ(format_bytes(std::numeric_limits<std::size_t>::max()), "16.00 EiB");
}

TEST(every_unit_is_parsed) {
  CHECK_EQ(parse_bytes("4096"), 4096U);
  CHECK_EQ(parse_bytes("0"), 0U);
  CHECK_EQ(parse_bytes("7B"), 7U);
  CHECK_EQ(parse_bytes("64KiB"), 64 * KiB);
  CHECK_EQ(parse_bytes(" 512 MiB "), 512 * MiB);
  CHECK_EQ(parse_bytes("4gib"), 4 * GiB);
  CHECK_EQ(parse_bytes("2TiB"), 2048 * GiB);
  CHECK_EQ(parse_bytes("1KB"), 1000U);
  CHECK_EQ(parse_bytes("3mb"), 3000000U);
  CHECK_EQ(parse_bytes("2GB"), 2000000000U);
  CHECK_EQ(parse_bytes("1TB"), 1000000000000U);
  CHECK_EQ(parse_bytes("007"), 7U);
}

TEST(fractions_of_a_unit_are_rounded_to_bytes) {
  CHECK_EQ(parse_bytes("1.5GiB"), 3 * GiB / 2);
  CHECK_EQ(parse_bytes("0.5KiB"), 512U);
  CHECK_EQ(parse_bytes("1.000B"), 1U);
  CHECK_EQ(parse_bytes("0.001KB"), 1U);
  CHECK_EQ(parse_bytes("1.1GB"), 1100000000U);
  CHECK_EQ(parse_bytes("32.1TB"), 32100000000000U);
  CHECK_THROWS(InvalidArgument, parse_bytes("0.5B"));
  CHECK_THROWS(InvalidArgument, parse_bytes("4096.0000001"));
  CHECK_EQ(parse_bytes("1.3KiB"), 1331U);
  CHECK_EQ(parse_bytes("22.17GiB"), 23804856238U);
}

TEST(the_largest_size_is_accepted_and_one_more_is_not) {
  CHECK_EQ(parse_bytes("18446744073709551615"), std::numeric_limits<std::size_t>::max());
  CHECK_THROWS(InvalidArgument, parse_bytes("18446744073709551616"));
  CHECK_THROWS(InvalidArgument, parse_bytes("16777216TiB"));
  CHECK_THROWS(InvalidArgument, parse_bytes("99999999999999999999999999999999999999999999"));
  CHECK_THROWS(InvalidArgument, parse_bytes(std::string(5000, '9')));
}

TEST(invalid_byte_counts_are_refused_with_their_text) {
  for (const std::string text : {"", "  ", "-1", "-4GiB", "GiB", "4G", "4 Gi B", "1.5.5KiB", "1e9", "0x10", ".5GiB",
                                 "1.GiB", "4GiB4", "none", "+4", "4,096", "1 000"}) {
    try {
      parse_bytes(text);
      harness::fail(__FILE__, __LINE__, "'" + text + "' was read");
    } catch (const InvalidArgument& error) {
      CHECK(std::string(error.what()).find("'" + text + "'") != std::string::npos);
      CHECK(std::string(error.what()).find("GiB") != std::string::npos);
    }
  }
}

TEST(an_abbreviated_unit_is_spelled_out) {
  for (const auto& [text, meant] : {std::pair("20G", "20GiB"), std::pair("1.5 mi", "1.5MiB"), std::pair("4k", "4KiB"),
                                    std::pair(" 2 Ti ", "2TiB")}) {
    std::string said;
    try {
      parse_bytes(text);
    } catch (const InvalidArgument& error) {
      said = error.what();
    }
    CHECK(said.find(std::string("did you mean ") + meant + "?") != said.npos);
  }
  try {
    parse_bytes("4Q");
    harness::fail(__FILE__, __LINE__, "it was read");
  } catch (const InvalidArgument& error) {
    CHECK(std::string(error.what()).find("did you mean") == std::string::npos);
  }
}

HARNESS_MAIN()
