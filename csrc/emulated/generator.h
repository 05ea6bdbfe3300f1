// Random numbers on the emulated accelerator: the CPU's generator under another label, so that the
// same seed draws the same numbers in the same kernels.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>

namespace torch_uvm::emulated {

struct EmuGenerator final : c10::GeneratorImpl {
  explicit EmuGenerator(int device, at::Generator inner);

  void set_current_seed(std::uint64_t seed) override;
  void set_offset(std::uint64_t offset) override;
  std::uint64_t get_offset() const override;
  std::uint64_t current_seed() const override;
  std::uint64_t seed() override;
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;
  static c10::DeviceType device_type();

  const at::Generator& inner() const {
    return inner_;
  }

 private:
  EmuGenerator* clone_impl() const override;
  at::Generator inner_;
};

/// The device's default generator; leaked.
const at::Generator& default_generator(int device);
at::Generator make_generator(int device);

/// The CPU generator that a kernel is given for `generator`. As with CUDA, its device's index does not matter.
/// \throws c10::Error for a generator of another type of device
at::Generator unwrap(const at::Generator& generator);

/// While it lives, the process's default CPU generator continues the sequence of `device`'s, and at the
/// end each has its own again: for kernels that draw without taking a generator.
class BorrowedDefaultGenerator {
 public:
  explicit BorrowedDefaultGenerator(int device);
  ~BorrowedDefaultGenerator();
  BorrowedDefaultGenerator(const BorrowedDefaultGenerator&) = delete;
  BorrowedDefaultGenerator& operator=(const BorrowedDefaultGenerator&) = delete;

 private:
  at::Generator lender_;
  at::mt19937 saved_;
};

} // namespace torch_uvm::emulated
