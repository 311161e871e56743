// Registers that wgmma still owns, for the memory hooks.
#pragma once
#include "report.h"

namespace emu {
extern int wgmma_in_flight;  // operations issued and not waited for, over all warps
void check_registers_in_flight(const void* p, unsigned bytes, bool write, Site site);
void reset_wgmma();
void check_wgmma_at_exit();
}  // namespace emu
