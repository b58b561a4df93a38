// The bodies of attention, elementwise and sampling for the baseline machine.
#define PATH(name) name##_portable
#include "attention_body.h"
#include "elementwise_body.h"
