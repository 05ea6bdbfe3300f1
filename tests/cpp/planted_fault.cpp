// A fault for the fuzzers' driver to find: one input in some millions ends the program, and a little more of the way to
// it is new code each time.
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
