// Layouts of an iteration's allocations: live ranges never overlap, and the total is close to the lower bound.
#include <algorithm>
#include <random>
#include <string>

#include "allocator/plan/plan_layout.h"
#include "harness.h"
#include "runtime/bytes.h"
#include "runtime/error.h"
#include "training_steps.h"

using namespace torch_uvm;

namespace {

constexpr Stream kA = Stream::default_of(0);
const Stream kB{0, reinterpret_cast<void*>(std::uintptr_t{8})};

/// Verifies a layout by comparing all pairs; the layout algorithm does not do that.
void expect_right(const std::vector<PlanRequest>& requests, const PlanLayout& layout) {
  CHECK_EQ(layout.offsets.size(), requests.size());
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const PlanRequest& a = requests[i];
    const std::size_t offset = layout.offsets[i];
    if (a.bytes == 0) {
      continue;
    }
    CHECK_EQ(offset % (a.bytes >= MiB ? 512 : 256), std::size_t{0});
    const auto region = std::ranges::find(layout.regions, a.stream, &PlanRegion::stream);
    CHECK(region != layout.regions.end());
    CHECK(offset >= region->offset && offset + a.bytes <= region->offset + region->bytes);
    for (std::size_t j = 0; j < i; ++j) {
      const PlanRequest& b = requests[j];
      const bool live_at_once = a.begin < b.end && b.begin < a.end;
      const bool share_bytes =
          b.bytes > 0 && offset < layout.offsets[j] + b.bytes && layout.offsets[j] < offset + a.bytes;
      CHECK(!share_bytes || (!live_at_once && a.stream == b.stream));
    }
  }
  std::size_t bytes = 0;
  for (const PlanRegion& region : layout.regions) {
    CHECK_EQ(region.offset, bytes);
    bytes += region.bytes;
  }
  CHECK_EQ(layout.bytes, bytes);
  std::size_t peak = 0;
  for (const PlanRequest& at : requests) { // live bytes peak at an allocation
    std::size_t live = 0;
    for (const PlanRequest& request : requests) {
      live += request.begin <= at.begin && at.begin < request.end ? request.bytes : 0;
    }
    peak = std::max(peak, live);
  }
  CHECK_EQ(layout.peak_live_bytes, peak);
  CHECK(layout.bytes >= peak);
}

PlanLayout lay_out_right(const std::vector<PlanRequest>& requests) {
  const PlanLayout layout = lay_out(requests);
  expect_right(requests, layout);
  return layout;
}

void expect_close(const char* name, const std::vector<PlanRequest>& requests, double most) {
  const PlanLayout layout = lay_out_right(requests);
  const double ratio = static_cast<double>(layout.bytes) / static_cast<double>(layout.peak_live_bytes);
  if (ratio > most) {
    harness::fail(__FILE__, __LINE__,
                  std::string(name) + ": " + std::to_string(ratio) + " of the peak; at most " + std::to_string(most));
  }
}

std::vector<PlanRequest> random_requests(std::uint64_t seed, std::size_t count, std::uint32_t longest,
                                         std::size_t largest) {
  std::mt19937_64 random(seed);
  std::vector<PlanRequest> requests;
  for (std::size_t i = 0; i < count; ++i) {
    const auto begin = static_cast<std::uint32_t>(random() % (2 * count));
    const auto end = random() % 16 == 0 ? kNoEnd : begin + 1 + static_cast<std::uint32_t>(random() % longest);
    const std::size_t bytes = random() % 32 == 0 ? 0 : 1 + random() % (largest >> random() % 12);
    requests.push_back({bytes, begin, end, random() % 4 == 0 ? kB : kA});
  }
  return requests;
}

} // namespace

TEST(no_requests_need_no_bytes) {
  const PlanLayout layout = lay_out({});
  CHECK_EQ(layout.bytes, std::size_t{0});
  CHECK(layout.offsets.empty() && layout.regions.empty());
  CHECK_EQ(lay_out_right({{0, 0, 1, kA}}).bytes, std::size_t{0});
}

TEST(consecutive_requests_share_their_bytes) {
  const PlanLayout layout = lay_out_right({{1024, 0, 1, kA}, {1024, 2, 3, kA}, {512, 4, 5, kA}});
  CHECK_EQ(layout.bytes, std::size_t{1024});
}

TEST(simultaneous_requests_do_not_overlap) {
  const PlanLayout layout = lay_out_right({{1024, 0, 5, kA}, {1024, 1, 4, kA}, {512, 2, 3, kA}});
  CHECK_EQ(layout.bytes, std::size_t{2560});
}

TEST(a_request_may_reuse_bytes_of_one_that_ends_at_its_begin) {
  CHECK_EQ(lay_out_right({{1024, 0, 2, kA}, {1024, 2, 3, kA}}).bytes, std::size_t{1024});
}

TEST(a_request_without_an_end_keeps_its_bytes) {
  const PlanLayout layout = lay_out_right({{1024, 0, 1, kA}, {1024, 2, kNoEnd, kA}, {1024, 3, 4, kA}});
  CHECK_EQ(layout.bytes, std::size_t{2048}); // before it begins, other requests use its bytes
}

TEST(streams_share_no_bytes) {
  const PlanLayout layout =
      lay_out_right({{1024, 0, 1, kA}, {1024, 2, 3, kB}, {1024, 4, 5, Stream::host()}, {1024, 6, 7, kA}});
  CHECK_EQ(layout.bytes, std::size_t{3072});
  CHECK_EQ(layout.regions.size(), std::size_t{3});
  CHECK(layout.regions[1].stream == kB);
  CHECK_EQ(layout.peak_live_bytes, std::size_t{1024});
}

TEST(the_layout_leaves_a_hole_for_a_later_request) {
  // An algorithm without knowledge of the future puts the third request into the hole that the last one needs.
  const PlanLayout layout = lay_out_right(
      {{2 * MiB, 0, 3, kA}, {1 * MiB, 1, 9, kA}, {1 * MiB, 4, 8, kA}, {1 * MiB, 2, 5, kA}, {2 * MiB, 6, 9, kA}});
  CHECK_EQ(layout.bytes, layout.peak_live_bytes);
}

TEST(a_stack_needs_no_more_than_its_peak) {
  steps::Step step;
  std::vector<std::size_t> held;
  std::mt19937_64 random(3);
  for (int i = 0; i < 300; ++i) {
    held.push_back(step.allocate(512 * (1 + random() % 9000)));
    step.passing(512 * (1 + random() % 3000));
  }
  for (; !held.empty(); held.pop_back()) {
    step.passing(512 * (1 + random() % 3000));
    step.free(held.back());
  }
  const PlanLayout layout = lay_out_right(step.requests);
  CHECK(static_cast<double>(layout.bytes) <= 1.002 * static_cast<double>(layout.peak_live_bytes));
}

TEST(training_steps_need_hardly_more_than_their_peak) {
  for (const std::size_t layers : {2, 3, 6, 12, 24, 48, 96}) {
    expect_close("transformer", steps::transformer(layers), 1.02);
    expect_close("convolutional", steps::convolutional(layers), 1.02);
    expect_close("ragged", steps::ragged(layers), 1.02);
  }
}

TEST(random_requests_are_laid_out_right) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    lay_out_right(random_requests(seed, 1 + seed * 5, 10 + static_cast<std::uint32_t>(seed % 7) * 40, 8 * MiB));
  }
}

TEST(small_requests_that_are_placed_apart_are_laid_out_right) {
  for (std::uint64_t seed = 0; seed < 4; ++seed) { // enough requests to be placed apart
    lay_out_right(random_requests(seed, 2500, seed % 2 == 0 ? 20 : 900, 64 * MiB));
  }
}

TEST(a_hundred_thousand_requests_are_laid_out_right) {
  // Too many for the comparison of all pairs, so the sweep places the rest. The check marks each unit of 256 bytes.
  std::mt19937_64 random(4);
  std::vector<PlanRequest> requests;
  constexpr std::uint32_t kCount = 100'000;
  for (std::uint32_t i = 0; i < kCount; ++i) {
    requests.push_back(
        {256 * (1 + random() % 64), 2 * i, 2 * i + 1 + 2 * static_cast<std::uint32_t>(random() % 100), kA});
  }
  const PlanLayout layout = lay_out(requests);
  std::vector<std::uint32_t> used_until(layout.bytes / 256);
  for (std::uint32_t i = 0; i < kCount; ++i) {
    for (std::size_t at = layout.offsets[i] / 256; at < (layout.offsets[i] + requests[i].bytes) / 256; ++at) {
      CHECK(used_until[at] <= requests[i].begin);
      used_until[at] = requests[i].end;
    }
  }
  CHECK(static_cast<double>(layout.bytes) <= 1.2 * static_cast<double>(layout.peak_live_bytes));
}

TEST(the_same_requests_get_the_same_layout) {
  const std::vector<PlanRequest> requests = random_requests(7, 800, 300, 4 * MiB);
  CHECK(lay_out(requests).offsets == lay_out(requests).offsets);
}

TEST(invalid_requests_are_refused) {
  CHECK_THROWS(InvalidArgument, lay_out({{1, 3, 3, kA}}));
  CHECK_THROWS(InvalidArgument, lay_out({{1, 3, 2, kA}}));
  CHECK_THROWS(InvalidArgument, lay_out({{~std::size_t{0} / 2, 0, 1, kA}}));
}

HARNESS_MAIN()
