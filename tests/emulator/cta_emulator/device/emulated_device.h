// Replaces the device templates that emitted source includes. Signatures only: what they do is in ../runtime.
// A name that is missing here fails to compile, and the front end reports it as an intrinsic the emulator lacks.
#pragma once
#include "copies.h"
#include "tensor_cores.h"
#include "warps.h"
