#include "emulated/generator.h"

#include <c10/util/Exception.h>

#include <array>
#include <mutex>

#include "emulated/backend.h"

namespace torch_uvm::emulated {

EmuGenerator::EmuGenerator(int device, at::Generator inner)
    : c10::GeneratorImpl(c10::Device(kDeviceType, static_cast<c10::DeviceIndex>(device)),
                         c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
      inner_(std::move(inner)) {}

void EmuGenerator::set_current_seed(std::uint64_t seed) {
  inner_.set_current_seed(seed);
}
// The CPU's generator has no offset, but pickling reads one from the generators of all other devices.
void EmuGenerator::set_offset(std::uint64_t offset) {
  TORCH_CHECK_VALUE(offset == 0, "offset ", offset, " for a generator of ", device(), "; accepted: 0");
}
std::uint64_t EmuGenerator::get_offset() const {
  return 0;
}
std::uint64_t EmuGenerator::current_seed() const {
  return inner_.current_seed();
}
std::uint64_t EmuGenerator::seed() {
  return inner_.seed();
}
void EmuGenerator::set_state(const c10::TensorImpl& state) {
  inner_.unsafeGetGeneratorImpl()->set_state(state);
}
c10::intrusive_ptr<c10::TensorImpl> EmuGenerator::get_state() const {
  return inner_.unsafeGetGeneratorImpl()->get_state();
}
c10::DeviceType EmuGenerator::device_type() {
  return kDeviceType;
}
EmuGenerator* EmuGenerator::clone_impl() const {
  return new EmuGenerator(device().index(), inner_.clone());
}

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
  return static_cast<EmuGenerator*>(generator.unsafeGetGeneratorImpl())->inner();
}

namespace {

at::CPUGeneratorImpl& cpu_impl(const at::Generator& generator) {
  return *static_cast<at::CPUGeneratorImpl*>(generator.unsafeGetGeneratorImpl());
}

} // namespace

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
