// Fills a layer's weights from its files: every destination byte exactly once, source pages dropped as they are used.
#pragma once

#include "io/layer_files.h"

namespace sluice::io {

// With `poison` every destination is filled with 0xFF bytes (NaN in every dtype) first, so that a test can see whether
// any is left; without it the pages are fresh.
Result<LoadedLayer> load_layer(const LayerFiles& files, const LoadOptions& options, bool poison = false);

}  // namespace sluice::io
