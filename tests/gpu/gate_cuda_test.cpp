// The selection's tests of tests/gate on the CUDA rows.
#define SLUICE_TEST_ON_GPU
#define GateSelect GateSelectCuda
#include "../gate/gate_test.cpp"
