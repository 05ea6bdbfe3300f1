// What test_residency_engine says, of copies that go through staging.
#define STAGED
#include "test_residency_engine.cpp"
