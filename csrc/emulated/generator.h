// Random number generators of the emulated accelerator. Each wraps a CPU generator, so that with the same seed a kernel
// draws the same numbers as on the CPU.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>

namespace torch_uvm::emulated {

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
