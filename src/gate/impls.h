// The functions behind the rows of the gate's tables.
#pragma once

#include "sluice/stage/gate.h"

namespace sluice::gate {

Status logits_cpu(const LogitsArgs& args, const Ctx& ctx);
std::string describe_logits_cpu(const LogitsArgs& args, const Machine& machine);
Status logits_reference(const LogitsArgs& args, const Ctx& ctx);
Status select_cpu(const SelectArgs& args, const Ctx& ctx);
Status select_reference(const SelectArgs& args, const Ctx& ctx);

}  // namespace sluice::gate
