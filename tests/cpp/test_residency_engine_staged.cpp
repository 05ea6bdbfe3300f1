// test_residency_engine with copies through staging.
#define STAGED
#include "test_residency_engine.cpp"
