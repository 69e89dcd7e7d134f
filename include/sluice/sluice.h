// Everything a C++ user needs.
#pragma once

#include "sluice/checkpoint.h"
#include "sluice/config.h"
#include "sluice/core.h"
#include "sluice/device.h"
#include "sluice/layer.h"
#include "sluice/plan.h"
#include "sluice/quantize.h"
#include "sluice/shard.h"
#include "sluice/stage/combine.h"
#include "sluice/stage/gate.h"
#include "sluice/stage/grouped_gemm.h"
#include "sluice/stage/pack.h"
#include "sluice/stage/route.h"
#include "sluice/stage/swiglu_quant.h"
#include "sluice/transport.h"
#include "sluice/weights.h"
