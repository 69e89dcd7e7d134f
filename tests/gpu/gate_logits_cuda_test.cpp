// The router GEMM's tests of tests/gate on the CUDA rows.
#define SLUICE_TEST_ON_GPU
#define GateLogits GateLogitsCuda
#include "../gate/gate_logits_test.cpp"
