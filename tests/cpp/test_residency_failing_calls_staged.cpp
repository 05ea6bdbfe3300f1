// test_residency_failing_calls with copies through staging.
#define STAGED
#include "test_residency_failing_calls.cpp"
