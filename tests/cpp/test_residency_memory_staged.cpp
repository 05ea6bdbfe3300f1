// What test_residency_memory says, of copies that go through staging.
#define STAGED
#include "test_residency_memory.cpp"
