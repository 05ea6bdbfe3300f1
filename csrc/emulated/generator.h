// Random number generators of the emulated accelerator. Each wraps a CPU generator, so that with the same seed a kernel
// draws the same numbers as on the CPU.
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

/// The device's default generator. Leaked, because it is used at exit.
const at::Generator& default_generator(int device);
at::Generator make_generator(int device);

/// The CPU generator inside `generator`. The device's index does not matter, as with CUDA.
/// \throws c10::Error for a generator of another device type
at::Generator unwrap(const at::Generator& generator);

/// For kernels that draw random numbers without taking a generator. In its scope, the process's default CPU generator
/// continues the sequence of `device`'s default generator. The destructor restores both.
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
