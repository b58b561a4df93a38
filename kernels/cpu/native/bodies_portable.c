// The bodies of attention, elementwise, reshard and sampling for the baseline machine.
#define PATH(name) name##_portable
#include "attention_body.h"
#include "elementwise_body.h"
#include "reshard_body.h"

// Sampling draws the same ids on every instruction set: no multiplication is fused with an addition.
#pragma GCC optimize("fp-contract=off")
#include "sampling_body.h"
