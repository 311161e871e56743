// Warp-wide operations: the last lane to arrive runs the operation for all 32.
#pragma once
#include <vector>

#include "fibers.h"

namespace emu {
enum class WarpOp { None, SyncWarp, Elect, Shuffle, LoadMatrix, StoreMatrix, Mma, Wgmma, WgmmaArrive, WgmmaCommit,
                    WgmmaWait, TmemAllocate, TmemDeallocate, TmemLoad, TmemStore, SetRegisters };
const char* warp_op_name(WarpOp op);

struct WarpCall {
  int arrived = 0;
  WarpOp op = WarpOp::None;
  long argument = 0;
  void* lanes[32];
};
extern std::vector<WarpCall> warp_calls;
void reset_warps();
void check_warps_at_exit();

// `mine` is this lane's data, `argument` must agree over the warp. `run` gets the call and the warp's first thread.
template <class Run>
void warp_collective(WarpOp op, long argument, void* mine, Site site, Run run) {
  const int warp = warp_of(current->thread), first = warp * 32;
  WarpCall& call = warp_calls[warp];
  if (call.arrived == 0) {
    call.op = op;
    call.argument = argument;
  } else if (call.op != op) {
    report(Severity::Error, "divergence", site, 0, "lanes of warp %d meet in %s and %s", warp, warp_op_name(call.op),
           warp_op_name(op));
    abandon_launch();
  } else if (call.argument != argument) {
    report(Severity::Error, "divergence", site, 0, "lanes of warp %d give %s different arguments", warp, warp_op_name(op));
  }
  call.lanes[current->thread - first] = mine;
  if (++call.arrived < 32) {
    block_on("the rest of warp %d in %s", warp, warp_op_name(op));
    return;
  }
  const WarpCall complete = call;
  call.arrived = 0;
  progress++;
  run(complete, first);
  for (int lane = 0; lane < 32; lane++)
    if (first + lane != current->thread) wake(first + lane);
}
}  // namespace emu
