// test_residency_memory with copies through staging.
#define STAGED
#include "test_residency_memory.cpp"
