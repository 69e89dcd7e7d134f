// Reaches every stage's table, so that everything the tables name, GPU code too, must be in the library and link.
#include <sluice/sluice.h>
#include <sluice/stage/combine.h>
#include <sluice/stage/gate.h>
#include <sluice/stage/grouped_gemm.h>
#include <sluice/stage/pack.h>
#include <sluice/stage/route.h>
#include <sluice/stage/swiglu_quant.h>

int main() {
  const bool complete = !sluice::gate::logits_impls().empty() && !sluice::gate::select_impls().empty() &&
                        !sluice::route::impls().empty() && !sluice::pack::impls().empty() &&
                        !sluice::grouped_gemm::impls().empty() && !sluice::swiglu_quant::impls().empty() &&
                        !sluice::combine::impls().empty();
  return complete && !sluice::Checkpoint::open("no/such/folder") ? 0 : 1;
}
