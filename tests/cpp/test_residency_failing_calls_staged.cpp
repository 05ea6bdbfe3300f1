// test_residency_failing_calls again, with copies that go through staging.
#define STAGED
#include "test_residency_failing_calls.cpp"
