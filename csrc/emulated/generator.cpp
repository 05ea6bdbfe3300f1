#include "emulated/generator.h"

#include <c10/util/Exception.h>

#include <array>
#include <mutex>

#include "emulated/backend.h"

namespace torch_uvm::emulated {
namespace {

struct EmuGenerator final : c10::GeneratorImpl {
  EmuGenerator(int device, at::Generator inner)
      : c10::GeneratorImpl(c10::Device(kDeviceType, static_cast<c10::DeviceIndex>(device)),
                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(std::move(inner)) {}

  void set_current_seed(std::uint64_t seed) override {
    inner.set_current_seed(seed);
  }
  // The CPU's generator has no offset, but pickling reads one from the generators of all other devices.
  void set_offset(std::uint64_t offset) override {
    TORCH_CHECK_VALUE(offset == 0, "offset ", offset, " for a generator of ", device(), "; accepted: 0");
  }
  std::uint64_t get_offset() const override {
    return 0;
  }
  std::uint64_t current_seed() const override {
    return inner.current_seed();
  }
  std::uint64_t seed() override {
    return inner.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  EmuGenerator* clone_impl() const override {
    return new EmuGenerator(device().index(), inner.clone());
  }

  at::Generator inner;
};

at::CPUGeneratorImpl& cpu_impl(const at::Generator& generator) {
  return *static_cast<at::CPUGeneratorImpl*>(generator.unsafeGetGeneratorImpl());
}

} // namespace

at::Generator make_generator(int device) {
  return at::make_generator<EmuGenerator>(device, at::make_generator<at::CPUGeneratorImpl>());
}

const at::Generator& default_generator(int device) {
  static auto* generators = new std::array<at::Generator, kMaxDevices>(); // leaked: used at exit
  static std::array<std::once_flag, kMaxDevices> made;
  std::call_once(made[static_cast<std::size_t>(device)],
                 [&] { (*generators)[static_cast<std::size_t>(device)] = make_generator(device); });
  return (*generators)[static_cast<std::size_t>(device)];
}

at::Generator unwrap(const at::Generator& generator) {
  TORCH_CHECK(generator.device().type() == kDeviceType, "Expected a 'emu' device type for generator but found '",
              generator.device().type(), "'");
  return static_cast<EmuGenerator*>(generator.unsafeGetGeneratorImpl())->inner;
}

BorrowedDefaultGenerator::BorrowedDefaultGenerator(int device) : lender_(unwrap(default_generator(device))) {
  at::Generator borrower = at::detail::getDefaultCPUGenerator();
  std::scoped_lock lock(lender_.mutex(), borrower.mutex());
  saved_ = cpu_impl(borrower).engine();
  cpu_impl(borrower).set_engine(cpu_impl(lender_).engine());
}

BorrowedDefaultGenerator::~BorrowedDefaultGenerator() {
  at::Generator borrower = at::detail::getDefaultCPUGenerator();
  std::scoped_lock lock(lender_.mutex(), borrower.mutex());
  cpu_impl(lender_).set_engine(cpu_impl(borrower).engine());
  cpu_impl(borrower).set_engine(saved_);
}

} // namespace torch_uvm::emulated
