// Layouts of an iteration's allocations: live ranges never overlap, and the total is close to the lower bound.
#include "allocator/plan/plan_layout.h"

#include <algorithm>
#include <random>
#include <string>

#include "harness.h"
#include "runtime/bytes.h"
#include "training_steps.h"

using namespace torch_uvm;

namespace {

struct Checked : PlanLayout {
  std::size_t peak_live_bytes = 0; ///< of the requests; a lower bound for any layout
};

/// Verifies a layout by comparing all pairs; the layout algorithm does not do that.
Checked lay_out_right(const std::vector<PlanRequest>& requests) {
  const PlanLayout layout = lay_out(requests);
  CHECK_EQ(layout.offsets.size(), requests.size());
  std::size_t peak = 0;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const PlanRequest& a = requests[i];
    const std::size_t offset = layout.offsets[i];
    CHECK_EQ(offset % 512, std::size_t{0});
    CHECK(offset + a.bytes <= layout.bytes);
    std::size_t live = 0; // bytes at the begin of `a`; live bytes peak at an allocation
    for (std::size_t j = 0; j < requests.size(); ++j) {
      const PlanRequest& b = requests[j];
      live += b.begin <= a.begin && a.begin < b.end ? b.bytes : 0;
      const bool live_at_once = a.begin < b.end && b.begin < a.end;
      const bool share_bytes = offset < layout.offsets[j] + b.bytes && layout.offsets[j] < offset + a.bytes;
      CHECK(i == j || !share_bytes || !live_at_once);
    }
    peak = std::max(peak, live);
  }
  return {layout, peak};
}

std::vector<PlanRequest> random_requests(std::uint64_t seed, std::size_t count, std::uint32_t longest,
                                         std::size_t largest) {
  std::mt19937_64 random(seed);
  std::vector<PlanRequest> requests;
  for (std::size_t i = 0; i < count; ++i) {
    const auto begin = static_cast<std::uint32_t>(random() % (2 * count));
    const auto end = random() % 16 == 0 ? kNoEnd : begin + 1 + static_cast<std::uint32_t>(random() % longest);
    requests.push_back({1 + random() % (largest >> random() % 12), begin, end, Stream::default_of(0)});
  }
  return requests;
}

} // namespace

TEST(layouts_by_hand) {
  CHECK_EQ(lay_out({}).bytes, std::size_t{0});
  CHECK_EQ(lay_out_right({{1024, 0, 1, {}}, {1024, 2, 3, {}}, {512, 4, 5, {}}}).bytes, std::size_t{1024}); // in turn
  CHECK_EQ(lay_out_right({{1024, 0, 5, {}}, {1024, 1, 4, {}}, {512, 2, 3, {}}}).bytes, std::size_t{2560}); // at once
  CHECK_EQ(lay_out_right({{1024, 0, 2, {}}, {1024, 2, 3, {}}}).bytes, std::size_t{1024}); // ends when the next begins
  CHECK_EQ(lay_out_right({{1024, 0, 1, {}}, {1024, 2, kNoEnd, {}}, {1024, 3, 4, {}}}).bytes, std::size_t{2048});
  // An algorithm without knowledge of the future puts the third request into the hole that the last one needs.
  const Checked layout = lay_out_right(
      {{2 * MiB, 0, 3, {}}, {1 * MiB, 1, 9, {}}, {1 * MiB, 4, 8, {}}, {1 * MiB, 2, 5, {}}, {2 * MiB, 6, 9, {}}});
  CHECK_EQ(layout.bytes, layout.peak_live_bytes);
}

TEST(training_steps_need_hardly_more_than_their_peak) {
  const auto expect_close = [](const char* name, const std::vector<PlanRequest>& requests) {
    const Checked layout = lay_out_right(requests);
    const double ratio = static_cast<double>(layout.bytes) / static_cast<double>(layout.peak_live_bytes);
    if (ratio > 1.02) {
      harness::fail(__FILE__, __LINE__, std::string(name) + ": " + std::to_string(ratio) + " of the peak");
    }
  };
  for (const std::size_t layers : {2, 3, 6, 12, 24, 48, 96}) {
    expect_close("transformer", steps::transformer(layers));
    expect_close("convolutional", steps::convolutional(layers));
    expect_close("ragged", steps::ragged(layers));
  }
}

TEST(random_requests_are_laid_out_right) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    const auto requests = random_requests(seed, 1 + seed * 5, 10 + static_cast<std::uint32_t>(seed % 7) * 40, 8 * MiB);
    CHECK(lay_out_right(requests).offsets == lay_out(requests).offsets);
  }
}

HARNESS_MAIN()
