// A planted fault for the test of the fuzz driver: about one input in some million crashes the program, and each step
// towards it reaches new code.
#include "fuzz_input.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Input input(data, size);
  if (input.byte() == 'f') {
    if (input.byte() == 'a') {
      if (input.byte() == 'u') {
        FUZZ_CHECK(input.byte() != 'l');
      }
    }
  }
  return 0;
}
