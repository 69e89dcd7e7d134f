// Scratch of one call, taken from Ctx::workspace.
#pragma once

#include <fmt/format.h>

#include <memory>
#include <span>
#include <string_view>

#include "sluice/core.h"

namespace sluice::cpu {

inline constexpr std::int64_t kScratchAlignBytes = 64;

// What to book for `bytes` of scratch: a caller's workspace may start at any address.
constexpr std::int64_t scratch_to_book(std::int64_t bytes) { return bytes == 0 ? 0 : bytes + kScratchAlignBytes - 1; }

// The aligned start of `bytes` of scratch.
inline Result<std::byte*> take_scratch(std::string_view stage, std::span<std::byte> workspace, std::int64_t bytes) {
  void* start = workspace.data();
  std::size_t space = workspace.size();
  if (bytes == 0) return static_cast<std::byte*>(start);
  if (start == nullptr || std::align(kScratchAlignBytes, static_cast<std::size_t>(bytes), start, space) == nullptr) {
    return Status(StatusCode::kWorkspaceTooSmall, fmt::format("{}: the workspace has {} bytes, {} are needed", stage,
                                                              workspace.size(), scratch_to_book(bytes)));
  }
  return static_cast<std::byte*>(start);
}

}  // namespace sluice::cpu
