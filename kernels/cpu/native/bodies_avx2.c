// The bodies of attention, elementwise, reshard and sampling for AVX2 with FMA; reached only where use_avx2() says so.
#pragma GCC target("avx2,fma")
#define PATH(name) name##_avx2
#include "attention_body.h"
#include "elementwise_body.h"
#include "reshard_body.h"

// Sampling draws the same ids on every instruction set: no multiplication is fused with an addition.
#pragma GCC optimize("fp-contract=off")
#include "sampling_body.h"
