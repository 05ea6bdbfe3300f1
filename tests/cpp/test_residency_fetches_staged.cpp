// test_residency_fetches with copies through staging.
#define STAGED
#include "test_residency_fetches.cpp"
