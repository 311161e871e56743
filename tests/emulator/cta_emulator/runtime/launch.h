#pragma once
#include "../device/abi.h"

namespace emu {
struct LaunchShape {
  unsigned grid[3], block[3];
  unsigned dynamic_shared_bytes;
};
bool launch(const EmuKernel& kernel, void** arguments, const LaunchShape& shape);  // false: it did not finish
}  // namespace emu
