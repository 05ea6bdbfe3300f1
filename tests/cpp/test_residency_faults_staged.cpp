// test_residency_faults with copies through staging.
#define STAGED
#include "test_residency_faults.cpp"
