#include "residency/engine/link_probe.h"

#include <algorithm>
#include <cstddef>

#include "runtime/bytes.h"

namespace torch_uvm {

namespace {

constexpr std::size_t kPieceBytes = 16 * MiB; // smaller copies are slower than the link
constexpr int kPieces = 8; // of a probe: an H200 takes 89 GB/s of two both ways, 99 of eight
constexpr int kProbes = 3; // the first one warms up
/// Optimizers that update host memory reach this part of the rate of a copy to the device, each way (an H200: 41 of
/// 55.4 GB/s).
constexpr double kInPlaceShare = 0.74;

/// Memory and events to measure a link with. \throws what the runtime does
class LinkProbe {
 public:
  LinkProbe(ManagedRuntime& runtime, Stream into, Stream out) : runtime_(runtime), into_(into), out_(out) {}
  ~LinkProbe() {
    for (const Event event : {begin_, end_, out_end_}) {
      if (event) {
        runtime_.destroy_event(event);
      }
    }
    if (device_ != nullptr) {
      runtime_.free_device(device_);
    }
    if (pinned_ != nullptr) {
      runtime_.free_pinned(pinned_);
    }
  }
  LinkProbe(const LinkProbe&) = delete;
  LinkProbe& operator=(const LinkProbe&) = delete;

  LinkRates measure() {
    pinned_ = static_cast<std::byte*>(runtime_.allocate_pinned(2 * kPieceBytes));
    device_ = static_cast<std::byte*>(runtime_.allocate_device(2 * kPieceBytes, into_.device));
    begin_ = runtime_.create_event(into_.device, /*timing=*/true);
    end_ = runtime_.create_event(into_.device, /*timing=*/true);
    out_end_ = runtime_.create_event(into_.device, /*timing=*/false);
    const double into = rate(true, false), out = rate(false, true), both = rate(true, true);
    return into > 0 && out > 0 && both > 0 ? LinkRates{into, out, kInPlaceShare * into, both} : LinkRates{};
  }

 private:
  /// Bytes per millisecond of the fastest copies, which begin and end together. 0: the runtime does not time them.
  double rate(bool in, bool out) {
    const auto copy = [&](bool inwards) {
      if (inwards && in) {
        runtime_.copy_async(device_, pinned_, kPieceBytes, into_);
      } else if (!inwards && out) {
        runtime_.copy_async(pinned_ + kPieceBytes, device_ + kPieceBytes, kPieceBytes, out_);
      }
    };
    double best_ms = 0;
    for (int probe = 0; probe < kProbes; ++probe) {
      runtime_.record_event(begin_, into_);
      runtime_.wait_event(out_, begin_);
      for (int piece = 0; piece < kPieces; ++piece) {
        const bool first = piece % 2 == 0; // neither direction is always the first one
        copy(first);
        copy(!first);
      }
      runtime_.record_event(out_end_, out_);
      runtime_.wait_event(into_, out_end_);
      runtime_.record_event(end_, into_);
      runtime_.synchronize_event(end_);
      const double ms = runtime_.elapsed_ms(begin_, end_);
      best_ms = probe == 0 ? ms : std::min(best_ms, ms);
    }
    return best_ms > 0 ? static_cast<double>(kPieceBytes) * kPieces * (int{in} + int{out}) / best_ms : 0;
  }

  ManagedRuntime& runtime_;
  const Stream into_, out_;
  std::byte* pinned_ = nullptr;
  std::byte* device_ = nullptr;
  Event begin_, end_, out_end_;
};

} // namespace

LinkRates measure_link(ManagedRuntime& runtime, Stream into, Stream out) noexcept {
  try {
    return LinkProbe(runtime, into, out).measure();
  } catch (...) {
    return {}; // an error of the runtime shows at the next call that needs it
  }
}

} // namespace torch_uvm
