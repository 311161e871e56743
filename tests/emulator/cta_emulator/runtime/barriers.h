// mbarriers and named barriers.
#pragma once
#include "clocks.h"
#include "report.h"

namespace emu {
void reset_barriers();
void check_barriers_at_exit();
void describe_barriers();  // state of every mbarrier, below the last finding

unsigned mbarrier_offset(const void* barrier, Site site);  // checks that it was initialised
// For the copy engine and the tensor cores: the initialisation must have been made visible to them.
void check_mbarrier_for_async(unsigned offset, Site site);
void complete_bytes(unsigned offset, unsigned bytes, int slot_agent, Tick tick);
void arrive_async(unsigned offset, const Clock& known);
void arrive_after_copies(unsigned offset, bool increment, const ThreadClock& clock);
bool touches_mbarrier(unsigned offset, unsigned bytes);  // a live one, in shared memory
}  // namespace emu
