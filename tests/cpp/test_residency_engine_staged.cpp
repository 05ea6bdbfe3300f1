// test_residency_engine again, with copies that go through staging.
#define STAGED
#include "test_residency_engine.cpp"
