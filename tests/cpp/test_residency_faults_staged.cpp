// What test_residency_faults says, of copies that go through staging.
#define STAGED
#include "test_residency_faults.cpp"
