// test_residency_fetches again, with copies that go through staging.
#define STAGED
#include "test_residency_fetches.cpp"
