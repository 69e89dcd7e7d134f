// The gate's cases of tests/gate on the CUDA rows.
#define SLUICE_TEST_ON_GPU
#define GateCases GateCasesCuda
#include "../gate/gate_cases_test.cpp"
